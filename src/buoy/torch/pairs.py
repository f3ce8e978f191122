"""One parameter and its FP32 master, and which of the two is right when they differ."""

import torch

from buoy.torch import words
from buoy.torch.rounding import HALVES, nearest

__all__ = ["Pair"]


class Pair:
    """A parameter and what stands in its place while its optimizer steps."""

    __slots__ = ("_equal", "keep", "master", "param", "seen")

    def __init__(self, param: torch.Tensor, *, keep: bool) -> None:
        self.param, self.keep = param, keep
        wide = param.detach().float() if keep else param.new_empty(0).float()
        self.master = torch.nn.Parameter(wide, requires_grad=param.requires_grad)
        # What the parameter was when both were last equal; None if that is not known.
        self.seen: tuple[int, int, torch.dtype] | None = self._now()
        self._equal = False  # the master is to be taken from the parameter, whole

    def _now(self) -> tuple[int, int, torch.dtype]:
        local = getattr(self.param, "_local_tensor", self.param)
        return self.param._version, local.data_ptr(), self.param.dtype

    def begin(self) -> torch.Tensor:
        """Make the master ready for a step: the newest values and the gradient."""
        if not self.keep:
            self.master.data = self.param.detach().float()
        elif self.seen != self._now():
            self.reconcile()
        grad = self.param.grad
        self.master.grad = None if grad is None else grad.to(self.master.dtype)
        return self.master

    def end(self) -> None:
        """Let go of what only the step needed."""
        if self.master.grad is None:
            self.param.grad = None  # cleared by the optimizer, in the midst of its step
        self.master.grad = None
        self.seen = self._now()
        if not self.keep:
            self.master.data = self.master.data.new_empty(0)

    @torch.no_grad()
    def reconcile(self) -> None:
        """Keep the master where it rounds to the parameter, else follow the latter.

        Somebody wrote to the parameter: a checkpoint was loaded, weights were clipped.
        """
        if not self.keep:
            return
        now, before = self.param.detach(), self.seen
        if self.master.device != now.device:
            self.master.data = self.master.data.to(now.device)
        rounded = nearest(self.master, before[2] if before else now.dtype)
        same = (rounded.to(now.dtype) == now) & (not self._equal)
        self.master.copy_(torch.where(same, self.master, now.float()))
        self.seen, self._equal = self._now(), False

    @torch.no_grad()
    def load(self, saved: torch.Tensor | None) -> None:
        """Take a saved master; the parameter, loaded before or after, has its say.

        None was saved if it was equal to its parameter, or there was none.
        """
        if saved is not None:
            self.master.copy_(saved)
        self.seen, self._equal = None, saved is None

    def widen(self) -> None:
        """Replace a half-precision gradient by the same in FP32."""
        grad = self.param.grad
        if grad is None or grad.dtype not in HALVES:
            return
        if not hasattr(self.param, "grad_dtype"):
            raise words.no_grad_dtype()
        # None: backward passes still make what DistributedDataParallel expects.
        self.param.grad_dtype = None
        self.param.grad = grad.float()

    def narrow(self) -> None:
        """Replace a zeroed FP32 gradient, to which no backward pass would add."""
        grad = self.param.grad
        if grad is not None and grad.dtype is not self.param.dtype:
            self.param.grad = torch.zeros_like(self.param)
