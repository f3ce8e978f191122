"""All optimizers of an iteration step, or none: `skip="joint"`."""

from typing import NamedTuple

import torch
from torch.amp.grad_scaler import OptState

from buoy._backends import torch as backend
from buoy._backends.torch.snapshot import OptimizerSnapshot
from buoy._core.errors import DeviceModeError
from buoy.torch import step
from buoy.torch.hooks import Extension, Scaler
from buoy.torch.optimizers import unscales
from buoy.torch.pending import Pending

__all__ = ["Joint"]


class _Taken(NamedTuple):
    """A step of this iteration."""

    pending: Pending
    snapshot: OptimizerSnapshot  # from before the step
    own: torch.Tensor  # whether its own gradients require a skip
    found: torch.Tensor  # or those of a step before it


class Joint(Extension):
    """The steps of one iteration, of a scaler and its scale groups: `skip="joint"`.

    Each optimizer steps at once, after its weights and state were copied.  Steps after
    a failed one are skipped; `update` restores those before it.  Each policy sees only
    its own gradients.

    Example:
        >>> import buoy.torch
        >>> one, two = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
        >>> optimizers = [torch.optim.SGD([weight], lr=0.5) for weight in (one, two)]
        >>> scaler = buoy.torch.GradScaler("cpu", skip="joint")
        >>> scaler.scale(one.sum() + two.sum()).backward()
        >>> two.grad.fill_(float("inf"))
        tensor([inf])
        >>> for optimizer in optimizers:
        ...     _ = scaler.step(optimizer)
        >>> scaler.update()
        >>> one.item(), two.item(), scaler.last_step_of(optimizers[0]).partner
        (1.0, 1.0, True)
    """

    key = "joint"

    def __init__(self) -> None:
        self.taken: list[_Taken] = []

    def before_step(self, scaler: Scaler, pending: Pending) -> None:
        """Skip after an earlier failure; copy the optimizer's weights and state."""
        optimizer = pending.optimizer
        if pending.stage is OptState.READY:
            hands_over = unscales(optimizer)
            if not hands_over or scaler._is_overridden("_unscale_grads_"):
                scaler.unscale_(optimizer)
            elif pending.factor is None and pending.survey is None:
                scaler._check_inf_per_device(optimizer)
        step.agree(scaler, pending)
        self.adopt(scaler, pending, OptimizerSnapshot(optimizer))

    def adopt(
        self, scaler: Scaler, pending: Pending, snapshot: OptimizerSnapshot
    ) -> None:
        """Add a step; skip it if an earlier one failed."""
        home = scaler._placed("step").device
        own = pending.flag(home)
        if own is None:
            return
        found = own
        if self.taken:
            earlier = self.taken[-1].found.to(home)
            pending.skip_where(earlier)
            found = torch.maximum(own, earlier)
        self.taken.append(_Taken(pending, snapshot, own, found))

    def before_update(self, scaler: Scaler) -> None:
        """Undo all steps if one of them failed, or may have failed."""
        taken = [one for one in self.taken if one.pending.outcome is not None]
        self.taken.clear()
        known = [one.pending.applied for one in taken]
        if len(taken) <= 1 or all(known):
            return
        guilty: list[_Taken] = []
        asked = not all(unscales(one.pending.optimizer) for one in taken)
        if False in known or (asked and scaler._options.sync != "never"):
            flags = backend.read([one.own for one in taken])
            guilty = [one for one, bad in zip(taken, flags, strict=True) if bad]
            if not guilty:
                return
        found = taken[-1].found
        try:
            for one in reversed(taken):
                if not guilty:  # only the device has the outcome
                    one.snapshot.restore_where(found > 0)
                elif one.pending.applied is not False:
                    one.snapshot.restore()
        except DeviceModeError:
            for one in reversed(taken):
                one.snapshot.restore()
            raise
        for one in taken:
            cause = None if not guilty or one in guilty else guilty[0].pending.outcome
            if one.pending.outcome is not None:
                one.pending.outcome.skip_with_others(found, cause, known=bool(guilty))
