"""All optimizers of an iteration step, or none: `skip="joint"`."""

from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import OptState

from buoy._backends import torch as backend
from buoy._backends.torch.snapshot import OptimizerSnapshot
from buoy._core.errors import DeviceModeError
from buoy.torch.hooks import Extension, is_foreign
from buoy.torch.iteration import Work, combined
from buoy.torch.optimizers import unscales

__all__ = ["Joint"]


class _Taken(NamedTuple):
    """A step of this iteration."""

    work: Work
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

    def before_step(self, scaler: Any, work: Work) -> None:
        """Skip after an earlier failure; copy the optimizer's weights and state."""
        if work["stage"] is OptState.READY:
            if is_foreign(scaler._unscale_grads_) or not unscales(work.optimizer):
                scaler._unscale(work, scaler._loss_scale.now(), in_step=True)
            elif work.multiplier is None and work.survey is None:
                scaler._check_inf_per_device(work.optimizer)
        scaler._surveyor.settle(work)
        self.adopt(scaler, work, OptimizerSnapshot(work.optimizer))

    def adopt(self, scaler: Any, work: Work, snapshot: OptimizerSnapshot) -> None:
        """Add a step; skip it if an earlier one failed."""
        home = scaler._loss_scale.now().device
        own = combined(work["found_inf_per_device"], home)
        if own is not None:
            if self.taken:
                work.veto(self.taken[-1].found, home)
            found: Any = combined(work["found_inf_per_device"], home)
            self.taken.append(_Taken(work, snapshot, own, found))

    def before_update(self, scaler: Any) -> None:
        """Undo all steps if one of them failed, or may have failed."""
        taken = [one for one in self.taken if one.work.outcome]
        self.taken.clear()
        known = [one.work.finite for one in taken]
        if len(taken) <= 1 or all(known):
            return
        found, guilty = taken[-1].found, taken[:0]
        asked = not all(unscales(one.work.optimizer) for one in taken)
        if False in known or (asked and scaler._options.sync != "never"):
            flags = backend.read([one.own for one in taken])
            guilty = [one for one, bad in zip(taken, flags, strict=True) if bad]
            if not guilty:
                return
        try:
            for one in reversed(taken):
                if not guilty:  # only the device has the outcome
                    one.snapshot.restore_where(found > 0)
                elif one.work.finite is not False:
                    one.snapshot.restore()
        except DeviceModeError:
            for one in reversed(taken):
                one.snapshot.restore()
            raise
        for one in taken:
            outcome: Any = one.work.outcome
            outcome.skip_with_others(found, applied=False if guilty else None)
            if guilty and one not in guilty:
                cause: Any = guilty[0].work.outcome
                outcome.judged(cause.verdict)
                outcome._offenders, outcome.partner = cause.offenders, True
