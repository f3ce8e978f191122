"""Undo the side effects of skipped steps, and drop single micro-batches.

`guard` restores a model's buffers, such as batch statistics, if its step is skipped.
`accumulate` checks and unscales the gradients of each micro-batch, then adds them to a
separate sum, which takes the memory of one more set of gradients.  Micro-batches that
overflow are not added, and the sum is multiplied by (all / good).
"""

import weakref
from typing import Any, Self

import torch
from torch.amp.grad_scaler import OptState
from torch.utils._pytree import tree_leaves

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import gather, multiply_, parameters_of
from buoy._backends.torch.snapshot import BufferSnapshot
from buoy._core.errors import CallOrderError, OptionError
from buoy.torch.features.groups import family
from buoy.torch.hooks import Extension
from buoy.torch.iteration import Freshness, Measured, Work, combined, merged

__all__ = ["Window", "accumulate", "guard", "guarded", "undo_buffers"]


# -- guarded buffers -------------------------------------------------------------------


def guard(scaler: Any, models: tuple[Any, ...]) -> None:
    """Restore the buffers of these models when their step is skipped.

    `update` restores running statistics, counters and all other buffers to their values
    before the iteration's first forward pass in training mode with gradients enabled.
    Validation passes do not count.  With several optimizers a model follows those that
    hold its parameters.  There is no host read; the cost is one copy of all buffers per
    iteration.

    Example:
        >>> import buoy.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> _ = model.append(torch.nn.BatchNorm1d(2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = buoy.torch.GradScaler("cpu")
        >>> scaler.guard(model)
        >>> loss = model(torch.randn(4, 2)).sum()
        >>> scaler.scale(loss * float("inf")).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> model[1].num_batches_tracked.item()
        0
    """
    for model in models:
        if not isinstance(model, torch.nn.Module):
            raise OptionError(
                f"`guard` takes modules, whose buffers it restores; got {model!r:.60}. "
                "For schedulers, averages and counters use `scaler.gate(...)`."
            )
    for model in models if scaler._enabled else ():
        if all(one.model is not model for one in guarded(scaler)):
            root = family(scaler)[0]
            root.attach(_Guarded(model, root))


def undo_buffers(scaler: Any, optimizer: Any) -> None:
    """Restore the guarded models of an optimizer whose step has raised an error."""
    held = set(parameters_of(optimizer))
    for one in guarded(scaler):
        if not held.isdisjoint(one.model.parameters()):
            one.copies[0].restore()
            one.drop()


def guarded(scaler: Any) -> "list[_Guarded]":
    """Return the guarded models of a scaler, or of a scale group's scaler."""
    extensions = family(scaler)[0]._hooks.extensions
    return [one for one in extensions if isinstance(one, _Guarded)]


class _Guarded(Extension):
    """One model, and copies of its buffers from before the iteration."""

    def __init__(self, model: torch.nn.Module, scaler: Any) -> None:
        self.model, self._scaler = model, weakref.ref(scaler)
        # One for the iteration; inside a window, one more for the micro-batch.
        self.copies = [BufferSnapshot()]
        for module in model.modules():
            if module is model or module._buffers:  # it may be called by itself
                module.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward)
        model.register_load_state_dict_post_hook(self.drop)  # type: ignore[no-untyped-call]
        self._used = False  # a backward pass began in the graph of this iteration

    def drop(self, *_: Any) -> None:
        """Drop the copies: the next forward pass makes new ones."""
        self._used = False
        for copies in self.copies:
            copies.clear()

    def _after_forward(self, called: Any, args: Any, output: Any) -> None:  # noqa: ARG002
        """Notice the backward pass of this forward pass."""
        if torch.compiler.is_dynamo_compiling() or not self.copies[0]:
            return

        def notice(_: torch.Tensor) -> None:
            self._used = True

        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(notice)  # type: ignore[no-untyped-call]

    def _before_forward(self, called: torch.nn.Module, args: Any) -> None:  # noqa: ARG002
        """Copy the buffers, once per iteration, before a forward pass of training."""
        training = called.training and not torch.compiler.is_dynamo_compiling()
        if training and torch.is_grad_enabled():
            if self._abandoned():
                self.drop()
            modules = list(called.modules()) if called is self.model else [called]
            for copies in self.copies:
                copies.copy(*modules)

    def _abandoned(self) -> bool:
        """Return whether gradients were cleared that no optimizer has used."""
        root = self._scaler()
        if root is None or not self._used or len(self.copies) > 1:
            return False  # in a window the gradients are kept elsewhere
        works = any(one._per_optimizer_states for one in family(root))
        return not works and all(p.grad is None for p in self.model.parameters())

    def before_update(self, scaler: Any) -> None:
        """Restore the buffers if the model's step was skipped."""
        if scaler._hooks.find("window") is not None:
            return  # the open window raises
        works = [w for s in family(scaler) for w in s._per_optimizer_states.values()]
        outcomes = [work.outcome for work in works if work.outcome is not None]
        own = set(self.model.parameters())
        mine = [o for o in outcomes if not own.isdisjoint(parameters_of(o.optimizer))]
        for outcome in mine or outcomes:
            _restore(self.copies[0], outcome.found, outcome._applied)
        self.drop()

    def end_micro_batch(self, found: torch.Tensor, finite: bool | None) -> None:
        """Restore the buffers if the micro-batch was dropped."""
        for copies in self.copies[1:]:
            _restore(copies, found, finite)
            copies.clear()


def _restore(copies: BufferSnapshot, found: Any, finite: bool | None) -> None:
    """Restore after a skip; `finite` None: only the device has the outcome."""
    if finite is False:
        copies.restore()
    elif finite is None:
        copies.restore_where(found > 0)


# -- windows of micro-batches ----------------------------------------------------------


def accumulate(scaler: Any, n: int, optimizers: tuple[Any, ...]) -> "Window":
    """Accumulate up to `n` micro-batches; drop only those that overflow.

    Call `window.backward(loss)` once per micro-batch; divide the loss by `n` for the
    mean.  After the `with` block `.grad` holds the unscaled sum of the good ones,
    multiplied by (all / good); then clip, step and update.  The step is skipped only if
    all were bad.  `update` lowers the scale if any was bad; within the window the scale
    does not change.  Without `optimizers`, those that have stepped before are used.

    Example:
        >>> import buoy.torch
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> scaler = buoy.torch.GradScaler("cpu")
        >>> with scaler.accumulate(2, optimizer) as window:
        ...     for x in (3.0, float("inf")):
        ...         window.backward((weight * x).sum() / 2)
        >>> window.dropped, weight.grad.item()
        (1, 3.0)
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """
    if type(n) is not int or n < 1:
        raise CallOrderError(f"A window needs at least 1 micro-batch, got {n!r}.")
    if not optimizers and scaler._enabled:
        optimizers = tuple(scaler._hooks.find("hints").optimizers())
        if not optimizers:
            raise CallOrderError(_NO_OPTIMIZER)
    return Window(scaler, n, optimizers)


class Window(Extension):
    """The micro-batches between two steps; created by `scaler.accumulate`."""

    key = "window"  # while it is open, `hooks.find("window")` returns it

    def __init__(self, scaler: Any, most: int, optimizers: tuple[Any, ...]) -> None:
        self._scaler, self._most, self._optimizers = scaler, most, optimizers
        # Also attached to a scale group's scaler, whose `update` must raise.
        self._places = {scaler, family(scaler)[0]}
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._measured: dict[int, list[Measured]] = {}  # by optimizer with gradients
        self._count, self._bad = 0, torch.zeros((), dtype=torch.float32, device="cpu")

    @property
    def dropped(self) -> int:
        """The number of micro-batches that were dropped.  Waits for the device."""
        return int(self._bad)

    def __enter__(self) -> Self:
        scaler = self._scaler
        if not scaler._enabled:
            return self
        if scaler._hooks.find("window") is not None or scaler._per_optimizer_states:
            raise CallOrderError(_TOO_EARLY)
        self._clear()
        for one in self._places:
            one._hooks.add(self)
        for model in guarded(scaler):
            model.copies.append(BufferSnapshot())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        scaler = self._scaler
        if not scaler._enabled:
            return
        for one in self._places:
            one._hooks.remove(self)
        for model in guarded(scaler):
            del model.copies[1:]
        if kind is None and not self._untaken():
            self._leave_sum()
            return
        self._clear()
        scaler._per_optimizer_states.clear()
        if kind is None:
            raise CallOrderError(_BY_HAND)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Run the backward pass of one micro-batch, and add its gradients to the sum.

        The loss is scaled; its gradients are checked, unscaled and added.  If one of
        them is not finite, all are dropped and guarded buffers are restored before the
        next forward pass.
        """
        scaler = self._scaler
        if not scaler._enabled:
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            return
        if scaler._hooks.find("window") is not self:
            raise CallOrderError(_CLOSED)
        if not getattr(scaler._names.model, "require_backward_grad_sync", True):
            raise CallOrderError(_NO_SYNC)
        if self._untaken():
            raise CallOrderError(_BY_HAND)
        if self._count >= self._most:
            raise CallOrderError(
                f"This window already has its {self._most} micro-batches: add up the "
                "losses of one micro-batch, or open a window per step."
            )
        scaler.scale(loss).backward(retain_graph=retain_graph)
        self._take_in()

    # -- calls that raise while it is open ---------------------------------------------

    def before_step(self, scaler: Any, work: Work) -> None:  # noqa: ARG002
        """Raise: no step inside a window."""
        raise CallOrderError(_OPEN)

    def before_look(self, scaler: Any, work: Work) -> None:  # noqa: ARG002
        """Raise for clipping and unscaling, except by the window itself."""
        if work["stage"] is OptState.READY:
            raise CallOrderError(_OPEN)

    def before_update(self, scaler: Any) -> None:  # noqa: ARG002
        """Raise: no update inside a window."""
        raise CallOrderError(_OPEN)

    # -- micro-batches -----------------------------------------------------------------

    def _params(self) -> list[torch.Tensor]:
        held = [param for one in self._optimizers for param in parameters_of(one)]
        return list(dict.fromkeys(held))

    def _clear(self) -> None:
        for param in self._params():
            param.grad = None

    def _untaken(self) -> bool:
        """Return whether there are gradients that `window.backward` did not compute."""
        return any(param.grad is not None for param in self._params())

    @torch.no_grad()
    def _take_in(self) -> None:
        """Add a micro-batch to the sum unless it is bad; clear `.grad`."""
        found = self._unscaled()
        seen = backend.host_value(found)
        self._count, self._bad = self._count + 1, self._bad + found
        for param in self._params():
            grad, param.grad = param.grad, None
            if grad is None or seen:
                continue
            if seen is None:  # a product with 0 would keep NaN
                values = grad._values() if grad.is_sparse else backend.local(grad)
                values.masked_fill_(found.to(values.device) > 0, 0.0)
            if param in self._sums:
                self._sums[param] = self._sums[param] + grad
            else:  # the next backward pass writes into the buckets of DDP
                self._sums[param] = grad.clone() if grad._is_view() else grad
        for model in guarded(self._scaler):
            model.end_micro_batch(found, None if seen is None else not seen)

    def _unscaled(self) -> torch.Tensor:
        """Check and unscale a micro-batch; return 1 if it is bad.  float32 []."""
        scaler = self._scaler
        flags = [torch.zeros_like(scaler._loss_scale.now().tensor)]
        for optimizer in self._optimizers:
            work = scaler._work(optimizer, "backward")
            work["stage"] = OptState.UNSCALED  # see `before_look`
            before, work.amax, work.measured = work.amax, None, {}
            scaler._unscale(work, scaler._loss_scale.now())
            scaler._surveyor.settle(work)
            work["stage"] = OptState.READY
            if before is not None and work.amax is not None:
                work.amax = torch.maximum(before, work.amax)
            flag = combined(work["found_inf_per_device"], flags[0].device)
            if flag is not None:
                flags.append(flag)
                self._measured.setdefault(id(optimizer), []).append(work.measured)
        return (torch.stack(flags).max() > 0).float()

    @torch.no_grad()
    def _leave_sum(self) -> None:
        """Put the sum into `.grad`, as unscaled gradients."""
        scaler, good = self._scaler, self._count - self._bad
        for param in self._params():
            param.grad = self._sums.pop(param, None)
        for optimizer in self._optimizers:
            if id(optimizer) not in self._measured:
                scaler._per_optimizer_states.pop(id(optimizer), None)
                continue
            gathered, home = gather(optimizer), good.device
            if backend.host_value(self._bad) != 0.0:
                multiply_(gathered, self._count / good.clamp(min=1.0))
            work = scaler._per_optimizer_states[id(optimizer)]
            work["stage"] = OptState.UNSCALED
            work.policy_flags = {home: (self._bad > 0).float()}
            work.measured = merged(self._measured[id(optimizer)], home)
            scaler._surveyor.agree(work, {home: (good == 0).float()})
            work.survey, work.gathered = None, gathered
            work.freshness = Freshness(optimizer, gathered)
            work.freshness.expect_backward()


_NO_OPTIMIZER = (
    "`accumulate` needs the optimizer whose gradients it keeps apart: this scaler has "
    "not stepped one yet. Write `scaler.accumulate(n, optimizer)`."
)
_TOO_EARLY = (
    "A window was opened while another one is open, or after `unscale_` or `step` and "
    "before `update`: it would clear gradients in use. Leave the other `with` block, "
    "or call `scaler.update()`, before the next window."
)
_CLOSED = (
    "`window.backward(loss)` was called outside its `with scaler.accumulate(...)` "
    "block, so the gradients would not be added up. Call it inside."
)
_NO_SYNC = (
    "`window.backward` was called inside `no_sync()`. A window keeps the gradients of "
    "each micro-batch apart, so they would never be averaged over ranks. Remove "
    "`no_sync()`, or do not use a window."
)
_BY_HAND = (
    "A window of micro-batches found gradients that it did not compute: they are not "
    "checked and not part of the sum. Write `window.backward(loss)` instead of "
    "`scaler.scale(loss).backward()`."
)
_OPEN = (
    "`step`, `update`, `unscale_` or clipping was called inside a window of "
    "micro-batches, before it has summed their gradients. Leave the `with "
    "scaler.accumulate(...)` block first."
)
