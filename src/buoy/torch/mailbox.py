"""Learn late, without asking, what became of steps that the device decided itself.

Flags are collected on the device and now and then copied to the host without waiting;
they are read once the copy is known to have arrived.
"""

import ctypes
from collections import deque

import torch

__all__ = ["Mailbox"]


class Mailbox:
    """Post a flag and a scale per step; collect them when they have arrived.

    Example:
        >>> mail = Mailbox(every=2)
        >>> mail.post(torch.tensor(0.0), torch.tensor(8.0))
        >>> mail.collect()
        []
        >>> mail.post(torch.tensor(1.0), torch.tensor(4.0))
        >>> mail.collect()
        [(False, 8.0), (True, 4.0)]
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._kept: deque[torch.Tensor] = deque(maxlen=16 * every)
        self._sent: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def post(self, found: torch.Tensor, scale: torch.Tensor) -> None:
        """Keep what a step showed; send it off with others when there are enough."""
        self._kept.append(torch.stack([found.float(), scale.float()]))
        if self._sent is None and len(self._kept) >= self._every:
            self._send()

    def _send(self) -> None:
        batch = torch.stack(list(self._kept)).flatten()
        self._kept.clear()
        host = torch.empty(batch.shape, dtype=torch.float32, pin_memory=batch.is_cuda)
        host.copy_(batch, non_blocking=True)
        event = None
        if batch.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._sent = (host, event)

    def collect(self) -> list[tuple[bool, float]]:
        """Give (skipped, next scale) of the steps that have arrived, oldest first."""
        if self._sent is None:
            return []
        host, event = self._sent
        if event is not None and not event.query():  # type: ignore[no-untyped-call]
            return []
        self._sent = None
        count = host.numel()
        numbers = (ctypes.c_float * count).from_address(host.data_ptr())[:]
        return [(numbers[i] > 0, numbers[i + 1]) for i in range(0, count, 2)]
