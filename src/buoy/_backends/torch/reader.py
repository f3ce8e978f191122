"""Read numbers from a torch device without waiting for it.

Numbers are collected on the device and copied to the host in batches; a batch is read
once its copy is complete.
"""

from collections import deque
from itertools import islice
from typing import Any

import torch

__all__ = ["AsyncReader", "Read"]

Read = tuple[list[float], Any]  # the numbers, and the note that was given with them


class AsyncReader:
    """Post vectors; collect their values once they are copied to the host.

    `every` vectors are copied together.

    Example:
        >>> reader = AsyncReader(every=2)
        >>> reader.post(torch.tensor([0.0, 8.0]), "first")
        >>> reader.collect()
        []
        >>> reader.post(torch.tensor([1.0, 4.0]), "second")
        >>> reader.collect()
        [([0.0, 8.0], 'first'), ([1.0, 4.0], 'second')]
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._kept: deque[tuple[torch.Tensor, Any]] = deque(maxlen=16 * every)
        # The copy, length and note of each vector in it, and the event of the copy.
        self._sent: (
            tuple[torch.Tensor, list[tuple[int, Any]], torch.cuda.Event | None] | None
        ) = None

    def post(self, numbers: torch.Tensor, note: Any = None) -> None:
        """Add a vector; start a copy when there are enough."""
        self._kept.append((numbers.float(), note))
        if self._sent is None and len(self._kept) >= self._every:
            self._send()

    def _send(self) -> None:
        home = self._kept[0][0].device
        batch = torch.cat([one.to(home, non_blocking=True) for one, _ in self._kept])
        notes = [(numbers.numel(), note) for numbers, note in self._kept]
        self._kept.clear()
        host = torch.empty(
            batch.shape, dtype=torch.float32, device="cpu", pin_memory=batch.is_cuda
        )
        host.copy_(batch, non_blocking=True)
        event = None
        if batch.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._sent = (host, notes, event)

    def collect(self) -> list[Read]:
        """Return the vectors whose copy is complete, oldest first."""
        if self._sent is None:
            return []
        host, notes, event = self._sent
        if event is not None and not event.query():  # type: ignore[no-untyped-call]
            return []
        self._sent = None
        numbers = iter(host.tolist())
        return [(list(islice(numbers, length)), note) for length, note in notes]

    def drain(self) -> list[Read]:
        """Wait for all vectors that were posted, and return them."""
        found: list[Read] = []
        while self._sent is not None or self._kept:
            if self._sent is None:
                self._send()
            if self._sent is not None and self._sent[2] is not None:
                self._sent[2].synchronize()
            found += self.collect()
        return found
