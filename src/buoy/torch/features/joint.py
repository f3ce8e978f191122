"""Several losses or optimizers in one iteration.

`backward` adds up the gradients of several scale groups.  `Joint` implements
`skip="joint"`: all optimizers of an iteration step, or none.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import OptState

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import gather, parameters_of, take_survey
from buoy._backends.torch.snapshot import OptimizerSnapshot
from buoy._core.errors import DeviceModeError, OptionError
from buoy.torch.features.groups import Origins, wrong_scale
from buoy.torch.hooks import Extension, is_foreign
from buoy.torch.iteration import Flags, Freshness, Work, combined
from buoy.torch.optimizers import unscales

__all__ = ["Joint", "backward"]


# -- several losses, one set of gradients ----------------------------------------------


def backward(
    scaler: Any,
    losses: Mapping[str, torch.Tensor],
    optimizers: tuple[Any, ...],
    *,
    retain_graph: bool,
) -> None:
    """Add up the unscaled gradients of the losses of several scale groups.

    Each scale group's policy sees the gradients of its own loss.  Whether the step is
    applied depends on the sum, including previous gradients in `.grad`.

    Example:
        >>> import buoy.torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> scaler = buoy.torch.GradScaler("cpu")
        >>> losses = {"policy": weight.sum(), "value": (weight**2).sum()}
        >>> scaler.backward(losses, optimizer)
        >>> weight.grad
        tensor([3., 3.])
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """
    if not losses or not optimizers:
        raise OptionError(
            "`scaler.backward` takes losses by scale group and the optimizers that "
            "step: `scaler.backward({'policy': loss_p, 'value': loss_v}, optimizer)`."
        )
    if not scaler.is_enabled():
        total: Any = sum(losses.values())
        total.backward(retain_graph=retain_graph)
        return
    members = [scaler.group(name) for name in losses]
    if scaler._loss_scale.tensor is None:
        scaler._lazy_init_scale_growth_tracker(next(iter(losses.values())).device)
    origins = scaler._hooks.find("groups").origins
    works = [scaler._work(optimizer, "backward") for optimizer in optimizers]
    for work in works:
        _refuse_scaled(scaler, work, origins)
    before = {param: param.grad for one in optimizers for param in parameters_of(one)}
    sums = dict(before)
    try:
        for member, loss in zip(members, losses.values(), strict=True):
            for param in sums:
                param.grad = None
            keep = retain_graph or member is not members[-1]
            member.scale(loss).backward(retain_graph=keep)
            for work in works:
                _unscale_part(member, work)
            _add(sums)
    except BaseException:
        sums = before
        raise
    finally:
        for param, grad in sums.items():
            param.grad = grad
    origins.forget(sums)
    scaler._iteration.losses.extend(map(backend.value_or_copy, losses.values()))
    for work in works:
        _check_sum(scaler, work)


def _refuse_scaled(scaler: Any, work: Work, origins: Origins) -> None:
    """Raise if `.grad` has gradients that another call has unscaled or will."""
    scaler._surveyor.settle(work)
    if work.combined:
        return
    held = origins.still_in(scaler._surveyor.gather(work, allow_fp16=True).params)
    if held or work.multiplier is not None or work["stage"] is OptState.UNSCALED:
        raise wrong_scale("backward", "", held or [""])


def _unscale_part(member: Any, total: Work) -> None:
    """Check and unscale one scale group's gradients; combine the flags."""
    work = member._work(total.optimizer, "backward")
    home, earlier = member._loss_scale.now().device, work["found_inf_per_device"]
    member._unscale(work, member._loss_scale.now())
    member._surveyor.settle(work)
    found: Flags = work["found_inf_per_device"]
    learnt = found if work.policy_flags is None else work.policy_flags
    work["found_inf_per_device"] = _either(home, earlier, learnt)
    # The next part is other gradients; the sum of all has a `Freshness` of its own.
    work.combined, work.policy_flags, work.freshness = True, None, None
    total["found_inf_per_device"] = _either(home, total["found_inf_per_device"], found)


@torch.no_grad()
def _add(sums: dict[torch.Tensor, torch.Tensor | None]) -> None:
    for param, held in sums.items():
        if param.grad is not None:
            sums[param] = param.grad if held is None else held + param.grad


@torch.no_grad()
def _check_sum(scaler: Any, work: Work) -> None:
    """Check the sum, and detect gradients that are computed after this."""
    gathered = work.gathered = gather(work.optimizer)
    one = torch.ones_like(scaler._loss_scale.now().inverse)
    own = {one.device: take_survey(gathered, one, safe=True).found}
    found = _either(one.device, own, work["found_inf_per_device"])
    work["stage"], work.combined = OptState.UNSCALED, True
    work.policy_flags = {}  # the parent's policy sees nothing of the scale groups
    scaler._surveyor.agree(work, found if gathered.grads else {})
    work.freshness = Freshness(work.optimizer, gathered)
    work.freshness.expect_backward()


def _either(home: torch.device, *flags: Flags) -> Flags:
    """Return the maximum of several flags; empty if there are none."""
    found = [flag for one in flags if (flag := combined(one, home)) is not None]
    return {home: torch.stack(found).max()} if found else {}


# -- all step, or none -----------------------------------------------------------------


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
