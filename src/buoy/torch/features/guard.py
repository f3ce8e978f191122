"""Restore a model's buffers, such as batch statistics, if its step is skipped."""

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from buoy._backends.torch.gradients import parameters_of
from buoy._backends.torch.snapshot import BufferSnapshot
from buoy._core.errors import OptionError
from buoy.torch.hooks import Extension, Scaler

__all__ = ["guard", "guarded", "undo_buffers"]


def guard(scaler: Scaler, models: tuple[Any, ...]) -> None:
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
            root = scaler._family[0]
            root.attach(_Guarded(model, root))


def undo_buffers(scaler: Scaler, optimizer: Any) -> None:
    """Restore the guarded models of an optimizer whose step has raised an error."""
    held = set(parameters_of(optimizer))
    for one in guarded(scaler):
        if not held.isdisjoint(one.model.parameters()):
            one.copies.restore()
            one.drop()


def guarded(scaler: Scaler) -> "list[_Guarded]":
    """Return the guarded models of a scaler, or of a scale group's scaler."""
    extensions = scaler._family[0]._hooks.extensions
    return [one for one in extensions if isinstance(one, _Guarded)]


class _Guarded(Extension):
    """One model, and copies of its buffers from before the iteration."""

    def __init__(self, model: torch.nn.Module, scaler: Scaler) -> None:
        self.model = model
        self._scaler = weakref.ref(scaler)
        self.copies = BufferSnapshot()
        for module in model.modules():
            if module is model or module._buffers:  # it may be called by itself
                module.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward)
        model.register_load_state_dict_post_hook(self.drop)  # type: ignore[no-untyped-call]
        self._used = False  # a backward pass began in the graph of this iteration

    def drop(self, *_: Any) -> None:
        """Drop the copies: the next forward pass makes new ones."""
        self._used = False
        self.copies.clear()

    def _after_forward(self, called: Any, args: Any, output: Any) -> None:  # noqa: ARG002
        """Notice the backward pass of this forward pass."""
        if torch.compiler.is_dynamo_compiling() or not self.copies:
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
            self.copies.copy(*modules)

    def _abandoned(self) -> bool:
        """Return whether gradients were cleared that no optimizer has used."""
        root = self._scaler()
        if root is None or not self._used:
            return False
        if any(one._per_optimizer_states for one in root._family):
            return False
        return all(param.grad is None for param in self.model.parameters())

    def before_update(self, scaler: Scaler) -> None:
        """Restore the buffers if the model's step was skipped."""
        outcomes = [
            pending.outcome
            for one in scaler._family
            for pending in one._per_optimizer_states.values()
            if pending.outcome is not None
        ]
        own = set(self.model.parameters())
        mine = [o for o in outcomes if not own.isdisjoint(parameters_of(o.optimizer))]
        for outcome in mine or outcomes:
            if outcome.applied_if_known is False:
                self.copies.restore()
            elif outcome.applied_if_known is None and outcome.found is not None:
                self.copies.restore_where(outcome.found > 0)  # only the device knows
        self.drop()
