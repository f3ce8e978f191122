"""Learn late, without asking, what the device has computed.

Numbers are collected on the device and now and then copied to the host without waiting;
they are read once the copy is known to have arrived.
"""

import ctypes
from collections import deque
from typing import Any

import torch

__all__ = ["Letter", "Mailbox"]

Letter = tuple[list[float], Any]  # the numbers, and what was noted beside them


class Mailbox:
    """Post numbers, always as many; collect them when they have arrived.

    `every` so many letters are sent together.

    Example:
        >>> mail = Mailbox(every=2)
        >>> mail.post(torch.tensor([0.0, 8.0]), "first")
        >>> mail.collect()
        []
        >>> mail.post(torch.tensor([1.0, 4.0]), "second")
        >>> mail.collect()
        [([0.0, 8.0], 'first'), ([1.0, 4.0], 'second')]
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._kept: deque[tuple[torch.Tensor, Any]] = deque(maxlen=16 * every)
        self._sent: tuple[torch.Tensor, list[Any], torch.cuda.Event | None] | None
        self._sent = None

    @property
    def waiting(self) -> bool:
        """Whether something was posted that has not been collected."""
        return self._sent is not None or bool(self._kept)

    def post(self, numbers: torch.Tensor, note: Any = None) -> None:
        """Keep a vector; send it off with others when there are enough."""
        self._kept.append((numbers.float(), note))
        if self._sent is None and len(self._kept) >= self._every:
            self._send()

    def _send(self) -> None:
        batch = torch.cat([numbers for numbers, _ in self._kept])
        notes = [note for _, note in self._kept]
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

    def collect(self) -> list[Letter]:
        """Give what has arrived, oldest first."""
        if self._sent is None:
            return []
        host, notes, event = self._sent
        if event is not None and not event.query():  # type: ignore[no-untyped-call]
            return []
        self._sent = None
        count = host.numel()
        numbers = (ctypes.c_float * count).from_address(host.data_ptr())[:]
        width = count // len(notes)
        return [
            (numbers[i * width : (i + 1) * width], note) for i, note in enumerate(notes)
        ]

    def empty(self) -> list[Letter]:
        """Wait for everything that was ever posted, and give it."""
        letters: list[Letter] = []
        while self._sent is not None or self._kept:
            if self._sent is None:
                self._send()
            if self._sent is not None and self._sent[2] is not None:
                self._sent[2].synchronize()
            letters += self.collect()
        return letters
