"""Gradient accumulation in which one bad micro-batch costs one micro-batch.

Each micro-batch's gradients are checked and unscaled alone, then added to a sum that
is kept apart: memory for one more set of gradients, from the second micro-batch on.
What overflowed is not added, and the sum is stretched as if the good ones had been all.
"""

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch.amp.grad_scaler import OptState

from buoy._backends import torch as backend
from buoy.torch import apply, survey, words
from buoy.torch import words_beyond as said
from buoy.torch.again import Again
from buoy.torch.gather import parameters_of
from buoy.torch.guard import Guarding

__all__ = ["Accumulating", "Window"]

_R = TypeVar("_R")


class Window:
    """The micro-batches between two steps; made by `scaler.accumulate`."""

    def __init__(
        self, scaler: "Accumulating", most: int, optimizers: tuple[Any, ...]
    ) -> None:
        self._scaler, self._most, self._optimizers = scaler, most, optimizers
        held = [param for one in optimizers for param in parameters_of(one)]
        self._params = list({id(param): param for param in held}.values())
        self._sums: dict[int, torch.Tensor] = {}
        self._seen = 0
        self._missed: float | torch.Tensor = 0.0  # dropped, on the device if need be
        self._by_hand = False  # `run` takes gradients in itself

    @property
    def dropped(self) -> int:
        """How many micro-batches did not count.  Waits for the device."""
        return int(self._missed)

    def __enter__(self) -> Self:
        if self._scaler._enabled:
            if self._scaler._window is not None:
                raise said.window_in_window()
            if self._scaler._per_optimizer_states:
                raise said.window_mid_iteration()
            self._scaler._window = self
            self._clear()
            self._tell_guards(inside=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._scaler._enabled:
            return
        self._scaler._window = None
        self._tell_guards(inside=False)
        if kind is not None:
            self._clear()
            self._scaler._per_optimizer_states.clear()
            return
        self._take()
        self._finish()

    def run(self, micro_fn: Callable[[], _R], **options: Any) -> _R:
        """Run one micro-batch, and again at a lower scale if it overflows.

        `micro_fn` computes, scales and runs the loss backward.  Options are those of
        `GradScaler.run`.  Asks the device once.
        """
        if not self._scaler._enabled:
            return micro_fn()
        again = Again(self._scaler, **options)
        while True:
            self._by_hand = True
            try:
                result = micro_fn()
            finally:
                self._by_hand = False
            bad = self._look()
            if not (bad and again.allowed(self._scaler)):
                self._add(bad=bad)
                return result
            self._clear()
            again.restore([self._scaler])

    def follow(self, loss: torch.Tensor) -> None:
        """Take in this loss's gradients as soon as its backward pass has ended.

        Not later: the next forward pass must find guarded buffers put back.  Callbacks
        of the backward pass run in the order of their making, and those by which ranks
        share gradients come late: so the first only makes the second.
        """
        if loss.requires_grad and not self._by_hand:
            loss.register_hook(lambda _: _at_the_end(lambda: _at_the_end(self._take)))  # type: ignore[no-untyped-call]

    def _tell_guards(self, *, inside: bool) -> None:
        for guard in self._scaler._root_guards():
            guard.in_window = inside

    def begin(self) -> None:
        """Count the losses before they are scaled."""
        model = self._scaler._names.model
        if not getattr(model, "require_backward_grad_sync", True):
            raise said.window_no_sync()
        if self._seen >= self._most:
            raise said.window_full(self._most)

    def _clear(self) -> None:
        for param in self._params:
            param.grad = None

    @torch.no_grad()
    def _take(self) -> None:
        if any(param.grad is not None for param in self._params):
            flag = self._unscaled()
            seen = survey.seen_by_host(flag)
            self._add(bad=flag if seen is None else bool(seen))

    def _look(self) -> bool:
        if all(param.grad is None for param in self._params):
            raise words.no_gradients([said.NO_MICRO])
        return bool(backend.read([self._unscaled()])[0])

    def _unscaled(self) -> torch.Tensor:
        """Check and unscale the gradients of one micro-batch.  float32 []."""
        scaler = self._scaler
        scale, _ = scaler._check_scale_growth_tracker("accumulate")
        flags = []
        for optimizer in self._optimizers:
            record = scaler._per_optimizer_states[id(optimizer)]
            before = record.get("amax")
            found = scaler._unscale_grads_(
                optimizer, backend.reciprocal(scale), torch.zeros_like(scale), False
            )
            scaler._agree(record, found)
            scaler._settle(record)
            if before is not None and "amax" in record:
                record["amax"] = torch.maximum(before, record["amax"])
            flags.append(record["found_inf_per_device"])
        return apply.total([one for one in flags if one], scale.device)

    @torch.no_grad()
    def _add(self, *, bad: bool | torch.Tensor) -> None:
        """Add a micro-batch to the sum unless it is bad, and end it."""
        self._seen += 1
        if isinstance(bad, torch.Tensor):
            self._missed = self._missed + (bad > 0).float()
        else:
            self._missed = self._missed + float(bad)
        for param in self._params:
            if param.grad is not None and bad is not True:
                self._add_one(param, bad)
            param.grad = None
        for guard in self._scaler._root_guards():
            guard.drop(bad)

    def _add_one(self, param: torch.Tensor, bad: bool | torch.Tensor) -> None:
        grad: Any = param.grad
        if isinstance(bad, torch.Tensor):
            # A product with 0 would keep NaN.
            flag = (bad > 0).to(grad.device, non_blocking=True)
            values = grad._values() if grad.is_sparse else grad
            values.copy_(torch.where(flag, torch.zeros_like(values), values))
        held = self._sums.get(id(param))
        self._sums[id(param)] = grad if held is None else held + grad

    @torch.no_grad()
    def _finish(self) -> None:
        """Leave the sum where an optimizer looks for it."""
        good = self._seen - self._missed
        for param in self._params:
            param.grad = self._sums.pop(id(param), None)
            if param.grad is not None:
                self._stretch(param.grad, good)
        home = self._scaler._home()
        none = torch.as_tensor(good, device=home) < 0.5
        some = torch.as_tensor(self._missed, device=home) > 0.5
        for optimizer in self._optimizers:
            if not self._has_something(optimizer):
                self._scaler._per_optimizer_states.pop(id(optimizer), None)
                continue
            record = self._scaler._per_optimizer_states[id(optimizer)]
            record["found_inf_per_device"] = {home: none.float()}
            record["own"] = {home: some.float()}
            record["stage"] = OptState.UNSCALED
            record["groups"] = optimizer.param_groups

    def _has_something(self, optimizer: Any) -> bool:
        """Say whether there is something to step, or to skip.

        Where every micro-batch was dropped no gradients are left: zeros stand in.
        """
        held = parameters_of(optimizer)
        if any(param.grad is not None for param in held):
            return True
        if isinstance(self._missed, torch.Tensor) or self._missed < self._seen:
            return False
        for param in held:
            if param.requires_grad and self._seen:
                param.grad = torch.zeros_like(param)
        return self._seen > 0

    def _stretch(self, grad: torch.Tensor, good: float | torch.Tensor) -> None:
        if isinstance(good, torch.Tensor):
            grad.mul_((self._seen / good.clamp(min=1.0)).to(grad.device))
        elif 0 < good < self._seen:
            grad.mul_(self._seen / good)


def _at_the_end(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class Accumulating(Guarding):
    """Open windows."""

    _window: Window | None

    def accumulate(self, n: int, *optimizers: Any) -> Window:
        """Check each of up to `n` micro-batches alone; drop only what overflows.

        Inside, write the loop as ever: divide the loss by `n` if you want the mean,
        scale it, run it backward.  Every loss that is scaled is a micro-batch.  On
        leaving, `.grad` holds the unscaled sum over the good ones, stretched by
        (all / good); then clip, step and update.  The step is skipped only if none was
        good; the scale falls at `update` if any was bad, and does not move before.

        Example:
            >>> import buoy.torch
            >>> weight = torch.nn.Parameter(torch.zeros(1))
            >>> optimizer = torch.optim.SGD([weight], lr=1.0)
            >>> scaler = buoy.torch.GradScaler("cpu")
            >>> with scaler.accumulate(2, optimizer) as window:
            ...     for x in (3.0, float("inf")):
            ...         scaler.scale((weight * x).sum() / 2).backward()
            >>> window.dropped, weight.grad.item()
            (1, 3.0)
            >>> scaler.step(optimizer)
            >>> scaler.update()
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise said.window_size(n)
        if not optimizers and self._enabled:
            optimizers = tuple(self._known_optimizers())
        if not optimizers and self._enabled:
            raise said.window_without_optimizer()
        return Window(self, n, optimizers)

    def _known_optimizers(self) -> Iterable[Any]:
        """Give the optimizers that this scaler has stepped before."""
        found = (reference() for reference in self._guide._met.values())
        return [optimizer for optimizer in found if optimizer is not None]

    def _root_guards(self) -> Any:
        root: Any = self._root()
        return root._guards
