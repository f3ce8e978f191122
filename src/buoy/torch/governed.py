"""The rule of any policy: on plain numbers, or on the device once nobody knows them.

The host's numbers are used while it knows what was found anyway; from the first step on
which it does not, everything stays on the device.
"""

import math
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from buoy._backends import torch as backend
from buoy._core.codec import decode, encode
from buoy._core.errors import PolicyError, ScaleCollapsedError
from buoy._core.ops import PLAIN, single
from buoy._core.policies.policy import Policy
from buoy._core.state import Seen, map_state
from buoy.torch import survey, words
from buoy.torch.begin import begun_on_device
from buoy.torch.rule import FLOAT32_MAX, MIN_SCALE, SMALLEST, Evidence

if TYPE_CHECKING:
    from buoy.torch.contract import Contract

__all__ = ["Governed"]


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

    @property
    def knows(self) -> bool:
        """Whether the state is of plain numbers."""
        return not self.on_device

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
        elif SMALLEST <= seen <= FLOAT32_MAX:
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
            held = scaler._scale  # holds what was taken of it
            if not backend.in_host_memory(held) and self._begin_on_device(held):
                return
            value = backend.read([held])[0]
        self.restore(scaler, self.begun_at(float(value)))

    def _bounds(self) -> tuple[float, float]:
        low = max(getattr(self.rule, "min_scale", 0.0), self.low, 2.0**-149)
        return low, min(getattr(self.rule, "max_scale", FLOAT32_MAX), FLOAT32_MAX)

    def _begin_on_device(self, held: torch.Tensor) -> bool:
        """Go on from a scale that nobody has read; say whether this policy can."""
        state = begun_on_device(self.rule, held, *self._bounds())
        if state is None:
            return False
        self.on_device = self.fresh = True
        self._keep(state)
        held.copy_(self.state.scale)
        return True

    def begun_at(self, value: float) -> Any:
        """Make the state of a policy that starts at this scale, or close to it."""
        low, high = self._bounds()
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
