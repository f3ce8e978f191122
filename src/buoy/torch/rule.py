"""How the scale moves: torch's kernel for torch's rule, the policy's own otherwise.

`Classic` is what `torch.amp.GradScaler` does, with a floor under it; it runs torch's
kernel, which the contract suite holds equal to `Backoff` step for step.  `Governed`
runs any policy: on plain numbers while the host knows what was found anyway, on the
device from the first step on which it does not.
"""

import math
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from buoy._backends import torch as backend
from buoy._core.backoff import Backoff
from buoy._core.codec import decode, encode
from buoy._core.errors import PolicyError, ScaleCollapsedError
from buoy._core.ops import PLAIN, single
from buoy._core.policy import Policy
from buoy._core.quirks import Quirks
from buoy._core.state import Seen, map_state
from buoy.torch import survey, words

if TYPE_CHECKING:
    from buoy.torch.contract import Contract

__all__ = ["FLOAT32_MAX", "MIN_SCALE", "Classic", "Evidence", "Governed"]

FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
MIN_SCALE = 2.0**-24
_NEVER = 2**31 - 1


class Evidence(NamedTuple):
    """What an iteration showed, on the device and as far as the host knows it."""

    found: torch.Tensor  # float32 []: more than 0 if anything was not finite
    finite: bool | None = None  # None: the host did not ask
    amax: torch.Tensor | None = None  # float32 []
    amax_read: float | None = None
    underflow: torch.Tensor | None = None  # float32 []
    underflow_read: float | None = None


class _Mark(NamedTuple):
    """A tensor as it was: itself, its version and, on a CPU, a look at its value."""

    tensor: torch.Tensor
    version: int
    window: backend.Window | None

    def holds(self, tensor: torch.Tensor, value: float) -> bool:
        """Say whether nobody replaced it or wrote to it: collectives do so silently."""
        return (
            self.tensor is tensor
            and self.version == tensor._version
            and (self.window is None or self.window.number.value == value)
        )


def _mark(tensor: torch.Tensor, before: _Mark | None = None) -> _Mark:
    """Take note of a tensor that was just written; a window is opened only once."""
    if before is not None and before.tensor is tensor:
        return _Mark(tensor, tensor._version, before.window)
    return _Mark(tensor, tensor._version, backend.window(tensor))


class _Known(NamedTuple):
    """What the host knows the scaler's tensors to hold."""

    scale: float
    clean: int
    mark: _Mark
    counter: torch.Tensor
    version: int  # of the counter


class Classic:
    """Grow after a quiet while, shrink on overflow, within bounds."""

    wants: frozenset[str] = frozenset()

    def __init__(self, low: float, high: float, *, fixed: bool) -> None:
        self.low, self.high = low, high
        self.fixed = fixed  # the bounds were given, not assumed
        self._known: _Known | None = None

    def known(self, scaler: "Contract") -> float | None:
        """Tell the scale, if the host knows it without asking.  Asked all the time."""
        kept = self._known
        if kept is None:
            return None
        value, _, (held, version, window), counter, counted = kept
        scale, tracker = scaler._scale, scaler._growth_tracker
        if (
            scale is held
            and tracker is counter
            and held._version == version
            and counter._version == counted
            and (window is None or window.number.value == value)
        ):
            return value
        self._known = None
        return None

    def learn(self, scaler: "Contract", scale: float, tracker: int) -> None:
        """Note the scale and the counter that the tensors now hold."""
        held, count = scaler._scale, scaler._growth_tracker
        if held is not None and count is not None:
            mark = _mark(held)
            self._known = _Known(scale, tracker, mark, count, count._version)

    def start(self, scaler: "Contract") -> None:
        """Note what the tensors were just made of."""
        count = scaler._init_growth_tracker
        self.learn(scaler, single(scaler._init_scale), count)

    def foresee(self, scaler: "Contract", loss: torch.Tensor) -> None:
        """Look away: this rule learns from overflows only."""

    def configure(self, name: str, value: Any) -> None:
        """Leave it to the scaler, whose settings this rule reads at every move."""

    def admit(self, value: float) -> None:
        """Stretch assumed bounds around a scale that was set by hand."""
        if not self.fixed:
            self.low = min(self.low, value) if value > 0 else self.low
            self.high = max(self.high, value)

    def assign(self, scaler: "Contract", value: float | torch.Tensor) -> None:
        """Go on from this scale, which the scaler's tensor holds already."""
        count = self._known.clean if self._known is not None else None
        self._known = None
        if isinstance(value, torch.Tensor):
            if scaler._scale is not None and not scaler._strict:
                scaler._scale.clamp_(self.low, self.high)
        else:
            self.admit(float(value))
            if count is not None:
                self.learn(scaler, single(float(value)), count)

    def move(self, scaler: "Contract", evidence: Evidence) -> None:
        """Take what was seen; leave the next scale in the scaler's tensors."""
        scale, tracker = scaler._scale, scaler._growth_tracker
        if scale is None or tracker is None:
            return
        if evidence.finite is not None and self.known(scaler) is not None:
            self._move_on_host(scaler, scale, tracker, finite=evidence.finite)
            return
        torch._amp_update_scale_(
            scale,
            tracker,
            evidence.found,
            scaler._growth_factor,
            scaler._backoff_factor,
            scaler._growth_interval,
        )
        scale.clamp_(self.low, self.high)

    def _move_on_host(
        self,
        scaler: "Contract",
        scale: torch.Tensor,
        tracker: torch.Tensor,
        *,
        finite: bool,
    ) -> None:
        """Do what the kernel does, on plain numbers: the tensors only follow."""
        known = self._known
        if known is None:
            return
        before, count = known.scale, known.clean
        count, after = (count + 1, before) if finite else (0, before)
        if not finite:
            after = single(before * scaler._backoff_factor)
        elif count == scaler._growth_interval:
            count, grown = 0, single(before * scaler._growth_factor)
            after = grown if math.isfinite(grown) else before
        if after != before:
            after = single(min(max(after, self.low), self.high))
            scale.fill_(after)
        tracker.fill_(count)
        mark = _mark(scale, known.mark)
        self._known = _Known(after, count, mark, tracker, tracker._version)

    def unbound(self) -> "Classic":
        """Make a copy that knows no tensors, for a pickle."""
        return Classic(self.low, self.high, fixed=self.fixed)

    def policy(self, scaler: "Contract") -> Policy:
        """Write the rule as a policy, for replay and for reading."""
        interval = scaler._growth_interval
        return Backoff(
            init_scale=scaler._init_scale,
            growth_factor=scaler._growth_factor,
            backoff_factor=scaler._backoff_factor,
            growth_interval=interval if interval >= 1 else _NEVER,
            min_scale=self.low if self.low > 0 else 2.0**-149,
            max_scale=self.high,
            quirks=Quirks(
                arithmetic="wide",
                at_min="clamp" if self.low > 0 else "none",
                at_max="clamp" if self.high < FLOAT32_MAX else "keep",
            ),
        )


def _floor_of(policy: Any) -> float:
    """Find the lowest scale that a policy may reach: its own, if it keeps one."""
    quirks = getattr(policy, "quirks", None)
    unbounded = quirks is not None and quirks.at_min == "none"
    own = MIN_SCALE if unbounded else getattr(policy, "min_scale", MIN_SCALE)
    return min(MIN_SCALE, own) or MIN_SCALE


class Governed:
    """Move the scale as a policy says."""

    def __init__(self, policy: Policy, *, strict: bool = False) -> None:
        self.rule = policy
        self.state: Any = policy.init()
        self.wants = policy.wants
        self.on_device = False
        self.fresh = True  # `foresee` has not yet seen this iteration's loss
        self.strict = strict
        self.low = 0.0 if strict else _floor_of(policy)
        self.high, self.fixed = FLOAT32_MAX, False
        self._mark: _Mark | None = None

    def known(self, scaler: "Contract") -> float | None:
        """Tell the scale, if the host knows it without asking."""
        if isinstance(self.state.scale, torch.Tensor):
            return None
        if scaler._scale is not None:
            self._follow(scaler, scaler._scale)
        return float(self.state.scale)

    def _follow(self, scaler: "Contract", held: torch.Tensor) -> None:
        """Go on from a scale that somebody else has written into the tensor."""
        own = single(min(self.state.scale, FLOAT32_MAX))
        if self._mark is not None and self._mark.holds(held, own):
            return
        if torch.compiler.is_compiling():
            return
        seen = backend.read([held])[0]
        if seen == own:
            self._mark = _mark(held)
        elif 0.0 < seen <= FLOAT32_MAX:
            self.restore(scaler, self.begun_at(seen))
        elif not self.strict:
            self._write(held)

    def start(self, scaler: "Contract") -> None:
        """Take over the scale that the tensor was just made of."""
        scale = self.state.scale
        known = None if isinstance(scale, torch.Tensor) else single(scale)
        if known != single(scaler._init_scale):
            self.assign(scaler, scaler._init_scale)
        elif scaler._scale is not None:
            self._mark = _mark(scaler._scale)

    def assign(self, scaler: "Contract", value: float | torch.Tensor) -> None:
        """Go on from this scale, set by hand."""
        if not hasattr(self.rule, "init_scale"):
            raise words.fixed_scale(type(self.rule).__name__)
        if isinstance(value, torch.Tensor) and scaler._scale is not None:
            value = backend.read([scaler._scale])[0]  # what was taken of it
        self.restore(scaler, self.begun_at(float(value)))

    def begun_at(self, value: float) -> Any:
        """Make the state of a policy that starts at this scale, or close to it."""
        low = max(getattr(self.rule, "min_scale", 0.0), self.low, 2.0**-149)
        high = min(getattr(self.rule, "max_scale", FLOAT32_MAX), FLOAT32_MAX)
        value = min(max(value, low), high)
        for start in (value, 2.0 ** math.floor(math.log2(value))):
            try:
                policy: Any = replace(self.rule, init_scale=start)  # type: ignore[type-var]
                return policy.init()
            except (TypeError, PolicyError):  # not a field of it, or out of its bounds
                continue
        return self.rule.init()

    def foresee(self, scaler: "Contract", loss: torch.Tensor) -> None:
        """Show the policy this iteration's first loss before it is scaled."""
        if not self.fresh or "loss" not in self.wants or scaler._scale is None:
            return
        self.fresh = False
        number = loss.detach().float()
        seen = None if self.on_device else survey.seen_by_host(number)
        if seen is not None:
            self.state = self.rule.foresee(self.state, seen, ops=PLAIN)
            self._write(scaler._scale)
            return
        self._lift(scaler._scale.device)
        number = number.to(scaler._scale.device, non_blocking=True)
        self._keep(self.rule.foresee(self.state, number, ops=backend.ops()))
        scaler._scale.copy_(self.state.scale)

    def move(self, scaler: "Contract", evidence: Evidence) -> None:
        """Take what was seen; leave the next scale in the scaler's tensor."""
        self.fresh = True
        if evidence.finite is None or self.on_device:
            self._move_on_device(scaler, evidence)
        else:
            self._move_on_host(scaler, evidence, finite=evidence.finite)

    def _move_on_host(
        self, scaler: "Contract", evidence: Evidence, *, finite: bool
    ) -> None:
        size = evidence.amax_read
        seen = Seen(
            finite=finite,
            amax_log2=None if size is None else PLAIN.log2(size),
            underflow=evidence.underflow_read,
        )
        self.known(scaler)
        before = self.state.scale
        try:
            self.state = self.rule.update(self.state, seen, ops=PLAIN)
        except ScaleCollapsedError as error:
            self.state = error.state if error.state is not None else self.state
            raise
        finally:
            if self.state.scale < self.low:
                self.state = replace(self.state, scale=self.low)
            if self.state.scale != before and scaler._scale is not None:
                self._write(scaler._scale)

    def _move_on_device(self, scaler: "Contract", evidence: Evidence) -> None:
        held = scaler._scale
        if held is None:
            return
        self._lift(held.device)
        own = self.state.scale
        # Somebody else may have written to the tensor; what is rounded there is kept.
        scale = torch.where(own.float() == held, own, held.to(own.dtype))
        self.state = replace(self.state, scale=scale)
        seen = Seen(
            finite=evidence.found == 0,
            amax_log2=None if evidence.amax is None else torch.log2(evidence.amax),
            underflow=evidence.underflow,
        )
        self._keep(self.rule.update(self.state, seen, ops=backend.ops()))
        held.copy_(self.state.scale)

    def _keep(self, state: Any) -> None:
        """Take a state over in the width that the policy declares, step after step."""
        precision, cast = self.rule.precision, backend.ops().cast
        kept = map_state(
            lambda x: cast(x, precision) if x.is_floating_point() else x, state
        )
        self.state = replace(kept, scale=kept.scale.clamp(self.low, FLOAT32_MAX))

    def restore(self, scaler: "Contract", state: Any) -> None:
        """Go on from a saved state, of plain numbers."""
        self.state = state
        self.fresh = True
        if scaler._scale is None:
            return
        self._write(scaler._scale)
        if self.on_device:
            self._lift(scaler._scale.device)

    def _write(self, scale: torch.Tensor) -> None:
        # Scalers that keep a Python float may leave float32's range.
        scale.fill_(min(self.state.scale, FLOAT32_MAX))
        self._mark = _mark(scale, self._mark)

    def unbound(self) -> "Governed":
        """Make a copy whose state is of plain numbers, for a pickle."""
        other = Governed(self.rule, strict=self.strict)
        other.state = decode(encode(self.state))
        return other

    def _lift(self, device: torch.device) -> None:
        self.on_device = True
        if isinstance(self.state.scale, torch.Tensor):
            return
        lifted = {
            field.name: backend.lift(value, self.rule.precision, device)
            for field in fields(self.state)
            if (value := getattr(self.state, field.name)) is not None
        }
        self.state = replace(self.state, **lifted)

    def configure(self, name: str, value: Any) -> None:
        """Change one of the policy's parameters."""
        if name not in {field.name for field in fields(self.rule)}:  # type: ignore[arg-type]
            raise words.no_setting(type(self.rule).__name__, name)
        self.rule = replace(self.rule, **{name: value})  # type: ignore[type-var]

    def admit(self, value: float) -> None:
        """Leave bounds to the policy, which applies them at its next move."""

    def policy(self, scaler: "Contract") -> Policy:
        """Give the policy."""
        del scaler
        return self.rule
