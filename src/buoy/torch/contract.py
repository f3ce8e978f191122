"""The part of a scaler that torch keeps private and other libraries call all the same.

Names, arguments and answers are those of `torch.amp.GradScaler`.  Three of them are the
seams on which the rest of Buoy builds: `_unscale_grads_` and `_check_inf_per_device`
survey the gradients, `_agree` makes what they found the same on every rank, and
`_maybe_opt_step` applies the update or does not.
"""

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import OptState

from buoy._backends import torch as backend
from buoy.torch import agree, apply, survey, words
from buoy.torch.errors import NewScaleError
from buoy.torch.gather import Gathered
from buoy.torch.governed import Governed
from buoy.torch.halves import Halves
from buoy.torch.misuse import Guide
from buoy.torch.names import Names
from buoy.torch.ranks import Ranks
from buoy.torch.rule import FLOAT32_MAX, SMALLEST, Classic
from buoy.torch.shares import Shares
from buoy.torch.watch import Watch

if TYPE_CHECKING:
    from buoy.torch.listen import Listener

__all__ = ["Contract", "TorchGradScaler"]

_UNDERFLOW_EVERY = 16  # counting small gradients costs a pass of its own


class Contract(TorchGradScaler):
    """Torch's private methods, done Buoy's way."""

    _rule: Classic | Governed
    _strict: bool
    _never_sync: bool
    _halves: Halves
    _guide: Guide
    _watch: Watch
    _names: Names
    _losses: deque[float | torch.Tensor]
    _scalings: int  # calls of `scale` since the last update
    _turn: int  # updates so far
    _inverted: tuple[int, float, torch.Tensor] | None  # whose, of what, and 1 / that
    _listeners: "list[Listener]"
    _ranks: Ranks
    _shares: Shares
    _heals: bool  # ranks that differ go on from the smallest scale
    _healing: tuple[float, int] | None  # that scale, and the turn, until the update
    _gap: torch.Tensor | None  # by how much ranks differ, where nobody asks the device
    _assumed: bool  # the scale was made without a loss: other ranks have that
    _piped: bool  # the loss is met inside a schedule, where ranks cannot be asked
    _uneven: bool = False  # some ranks may have no data left: inside `Join`

    def _check_scale_growth_tracker(
        self, funcname: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale, tracker = self._scale, self._growth_tracker
        if scale is None and self._ranks.groups():
            # A stage or a rank without a loss: what it needs to know is the scale.
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
            scale, tracker, self._assumed = self._scale, self._growth_tracker, True
        if scale is None:
            raise words.before_scale(funcname, "_scale")
        if tracker is None:
            raise words.before_scale(funcname, "_growth_tracker")
        return scale, tracker

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        with torch.inference_mode(mode=False):  # or it could never be moved
            super()._lazy_init_scale_growth_tracker(dev)
        scale, tracker = self._check_scale_growth_tracker("scale")
        self._scale, self._growth_tracker = map(backend.unwrapped, (scale, tracker))
        backend.self_test(torch.device(dev))
        self._rule.start(self)

    def _refuse_unscale(self, record: dict[str, Any], method: str) -> None:
        if record["stage"] is OptState.UNSCALED:
            raise words.unscale_twice()
        if record["stage"] is OptState.STEPPED:
            raise words.unscale_after_step(method)

    def _refuse_alias(self, optimizer: Any, record: dict[str, Any]) -> None:
        """Refuse a wrapper of an optimizer whose gradients are unscaled already."""
        groups = getattr(optimizer, "param_groups", None)
        for other in self._per_optimizer_states.values():
            if other is not record and other.get("groups") is groups is not None:
                raise words.unscaled_elsewhere()

    def _refuse_changed(self, record: dict[str, Any], method: str) -> None:
        """Refuse gradients that another backward pass has made since they were seen."""
        if "looked" not in record:
            return
        if record["stage"] is OptState.READY and "multiplier" not in record:
            return  # somebody has set it back, to look again
        if record["looked"].outdated():
            raise words.changed(method)

    def _expect_another(self) -> None:
        """Watch out for a backward pass between looking at gradients and stepping."""
        for record in self._per_optimizer_states.values():
            if "looked" in record:
                record["looked"].expect_another()

    def _agree(
        self,
        record: dict[str, Any],
        found: dict[torch.device, torch.Tensor],
        largest: torch.Tensor | None = None,
    ) -> None:
        """Make the flags the same on every rank; alone there is nobody to ask."""
        if self._ranks.groups():
            if "loss" in self._rule.wants:
                self._foresee(None)
            found = agree.launch(self, record, found, largest)
        record["found_inf_per_device"] = found

    def _foresee(self, loss: torch.Tensor | None) -> None:
        """Show the policy this iteration's loss: of all ranks the largest."""
        if self._ranks.groups():
            loss = agree.foresee(self, loss)
        if loss is not None:
            self._rule.foresee(self, loss)

    def _settle(self, record: dict[str, Any]) -> None:
        """Wait for what the other ranks found, if that has not been done."""
        if "pending" in record:
            agree.settle(self, record)

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self._settle(self._per_optimizer_states[id(optimizer)])
        return super()._found_inf_per_device(optimizer)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Check and multiply the gradients; return a flag per device (torch's way)."""
        with backend.NoGrad():
            gathered = self._halves.gather(optimizer, self._names, allow_fp16)
            if self._guide.watching:
                self._guide.before_look(optimizer)
                self._guide.before_unscale(self, optimizer, gathered)
            looked = self._rule.wants or self._listeners
            if looked and id(optimizer) in self._per_optimizer_states:
                record = self._per_optimizer_states[id(optimizer)]
                self._look(optimizer, record, gathered, inv_scale)
            found, inverse = {}, {}
            for device, _, _ in gathered.buckets:
                if device == found_inf.device:
                    found[device], inverse[device] = found_inf, inv_scale
                elif device not in found:
                    found[device] = found_inf.to(device, non_blocking=True, copy=True)
                    inverse[device] = inv_scale.to(device, non_blocking=True)
            survey.unscale(
                gathered.buckets, inverse, found, check_result=self._may_overflow()
            )
        return found

    def _inverse(self, scale: torch.Tensor) -> torch.Tensor:
        """Give 1 / scale, computed anew only where the scale may have moved."""
        known = self._rule.known(self)
        if known is None:
            return backend.reciprocal(scale)
        if self._inverted is None or self._inverted[:2] != (id(scale), known):
            self._inverted = (id(scale), known, backend.reciprocal(scale))
        return self._inverted[2]

    def _look(
        self,
        optimizer: Any,
        record: dict[str, Any],
        gathered: Gathered,
        inverse: torch.Tensor,
    ) -> torch.Tensor | None:
        """Measure what is wanted beyond whether all is finite; let others look too.

        Who measures has checked: returns the flag, if the policy wanted anything.
        """
        found = None
        if self._rule.wants and gathered.grads:
            found = self._measure(record, gathered, inverse).found
        for listener in self._listeners:
            listener.look(self, optimizer, record, gathered)
        return found

    def _measure(
        self, record: dict[str, Any], gathered: Gathered, inverse: torch.Tensor
    ) -> survey.Survey:
        """Measure what the policy wants to know."""
        seen = survey.largest(gathered, inverse.reshape(()))
        record["amax"] = seen.amax
        if "underflow" in self._rule.wants and self._counts_underflow():
            record["underflow"] = survey.underflow(gathered, inverse.device)
        return seen

    def _counts_underflow(self) -> bool:
        return self._turn % _UNDERFLOW_EVERY == 0

    def _may_overflow(self) -> bool:
        """Say whether dividing by the scale could itself overflow."""
        if self._strict:
            return False
        known = self._rule.known(self)
        return known is None or known < 1.0

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self._check_grads(optimizer)
        return self._found_inf_per_device(optimizer)

    def _unscales_otherwise(self) -> bool:
        """Say whether a subclass, or a patch, looks at gradients in its own way."""
        return _foreign(self._unscale_grads_) or _foreign(self.unscale_)

    def _check_grads(self, optimizer: torch.optim.Optimizer) -> None:
        """Check without writing; other ranks' findings are on their way."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        record = self._per_optimizer_states[id(optimizer)]
        if _foreign(self._unscale_grads_):  # then that is how gradients are checked
            one, zero = torch.ones_like(scale), torch.zeros_like(scale)
            self._agree(record, self._unscale_grads_(optimizer, one, zero, True))
            return
        with backend.NoGrad():
            gathered = self._halves.gather(optimizer, self._names)
            if self._guide.watching:
                self._guide.before_look(optimizer)
                self._guide.before_unscale(self, optimizer, gathered)
            inverse = self._inverse(scale)
            seen = None
            if self._rule.wants or self._listeners:
                seen = self._look(optimizer, record, gathered, inverse)
            if seen is None:
                checks = self._may_overflow()
                found = survey.check(gathered, inverse, check_result=checks)
            else:
                found = {seen.device: seen}
        self._agree(record, found)

    def _set_scale(self, new_scale: float | torch.Tensor) -> None:
        scale, _ = self._check_scale_growth_tracker("update")
        if isinstance(new_scale, torch.Tensor):
            if (
                new_scale.device.type != self._device
                or new_scale.numel() != 1
                or new_scale.requires_grad
            ):
                raise NewScaleError(_NEW_SCALE)
            given = new_scale.reshape(()).to(scale.dtype)
            usable = (given >= SMALLEST) & (given <= FLOAT32_MAX)
            scale.copy_(given if self._strict else torch.where(usable, given, scale))
        else:
            self._refuse_scale(new_scale)
            scale.fill_(float(new_scale))
        self._rule.assign(self, new_scale)

    def _refuse_scale(self, new_scale: Any) -> None:
        """Refuse a number that no gradient could be divided by."""
        number = isinstance(new_scale, (int, float))
        if self._strict and number:
            return
        if not (number and SMALLEST <= new_scale <= FLOAT32_MAX):
            message = (
                f"{_NEW_SCALE} Got {new_scale!r}; it must be a positive number, and "
                "so must be 1 divided by it, which is what gradients are multiplied by."
            )
            raise NewScaleError(message)
        rule = self._rule
        if rule.fixed and not rule.low <= new_scale <= rule.high:
            raise words.outside(new_scale, rule.low, rule.high)

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by after a quiet while."""
        self._set("growth_factor", new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by after an overflow."""
        self._set("backoff_factor", new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set how many clean steps make a quiet while."""
        self._set("growth_interval", new_interval)

    def _set(self, name: str, value: Any) -> None:
        """Change one of torch's three settings, in the policy too if it has it."""
        if self._enabled and not self._strict:
            if not (isinstance(value, (int, float)) and -math.inf < value < math.inf):
                raise words.setting(name, value)
            if value <= 0 and name != "growth_interval":
                raise words.setting(name, value)
            self._rule.configure(name, value)
        setattr(self, f"_{name}", value)

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        result: float | None = apply.settled(
            self, optimizer, optimizer_state, args, kwargs
        )
        return result

    def _home(self) -> torch.device:
        return self._check_scale_growth_tracker("step")[0].device

    def _hand_over(
        self, record: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Give what an optimizer divides by, and the flag for not stepping."""
        self._settle(record)
        scale: Any = self._get_scale_async()
        found = apply.combined(record["found_inf_per_device"], scale.device)
        multiplier = record.get("multiplier")
        return (scale if multiplier is None else multiplier.reciprocal()), found

    def _ask(self, record: dict[str, Any], found: torch.Tensor) -> bool:
        """Wait for the flag, and for whatever else is wanted, in one read."""
        told = not self._rule.wants and "gap" not in record
        if told and self._rule.knows and backend.in_host_memory(found):
            return not found.item()
        scale, tracker = self._check_scale_growth_tracker("step")
        wanted = [name for name in ("amax", "underflow") if name in record]
        numbers = [found, scale, tracker.float(), *(record[name] for name in wanted)]
        gap = [record["gap"]] if "gap" in record else []
        values = torch.stack([*numbers, *gap]).tolist()
        if gap and values.pop():
            agree.disagreed(self, record)
        if isinstance(self._rule, Classic):
            self._rule.learn(self, values[1], int(values[2]))
        for name, value in zip(wanted, values[3:], strict=True):
            record[f"{name}_read"] = value
        return not values[0]


def _foreign(method: Any) -> bool:
    return not str(getattr(method, "__module__", "")).startswith("buoy.")


_NEW_SCALE = (
    "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
    "torch.FloatTensor with requires_grad=False."
)
