"""The scale, and the policy that moves it.

A scaler begins with a `Plan`: a policy and its state, without tensors.  The first loss
turns it into one of three:

| class | the policy runs on | chosen when |
|---|---|---|
| `HostScale` | Python floats | the host knows the outcome of every step |
| `DeviceScale` | tensors | only the device knows the outcome |
| `KernelScale` | torch's own kernel and its two tensors | the same, for torch's rule |

A `HostScale` becomes one of the others, once, at the first step whose outcome the host
does not read.  On a CPU torch's rule has a `KernelScale` from the start: its tensors
can be read for free.  Nothing else in the package asks where a number is.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import torch

from buoy._backends import torch as backend
from buoy._core.bounds import bounds_of, foreseen, initial, moved
from buoy._core.errors import PolicyError, ScaleCollapsedError
from buoy._core.formats import FLOAT32_MAX
from buoy._core.ops import PLAIN, single
from buoy._core.policies.policy import Bounds, Policy
from buoy._core.policies.torch_rule import TorchRule, TorchRuleState
from buoy._core.state import Seen, map_state
from buoy._core.step import CLIP_EPSILON, as_wanted, clip_factor, schedule
from buoy.torch.loss_check import LOSS, loss_finite

__all__ = [
    "CLIPPED",
    "SMALLEST",
    "DeviceScale",
    "Evidence",
    "HostScale",
    "KernelScale",
    "Measured",
    "Number",
    "Plan",
    "Scale",
]

SMALLEST = 2.0**-127  # below it 1 / scale, in float32, is inf
CLIPPED = "clipped"  # in `Evidence.measured`: gradients were clipped while scaled

Number = float | torch.Tensor  # of the host, or on a device
Measured = dict[str, Number]  # by the names in `Policy.wants`; also `LOSS`, `CLIPPED`


class Evidence(NamedTuple):
    """The findings of an iteration, for the policy."""

    found: torch.Tensor  # float32 []: more than 0 if anything was not finite
    finite: bool | None = None  # the same; None: the host has not read it
    measured: Mapping[str, Number] = MappingProxyType({})

    def on_host(self) -> Seen | None:
        """Return it as plain numbers; None if the host lacks any of them."""
        if self.finite is None:
            return None
        numbers = {name: backend.known(x) for name, x in self.measured.items()}
        if None in numbers.values():
            return None
        return self._seen(self.finite, numbers, PLAIN.log2)

    def on_device(self) -> Seen:
        """Return it as tensors."""
        home = self.found.device
        numbers = {name: backend.scalar(x, home) for name, x in self.measured.items()}
        return self._seen(self.found.reshape(()) == 0, numbers, torch.log2)

    @staticmethod
    def _seen(finite: Any, numbers: dict[str, Any], log2: Any) -> Seen:
        numbers.pop(CLIPPED, None)
        told = loss_finite(numbers.pop(LOSS, None))
        return Seen(finite=finite, loss_finite=told, **as_wanted(numbers, log2))


@dataclass(slots=True)
class Plan:
    """A policy and the state to start from; there are no tensors yet."""

    policy: Policy
    bounds: Bounds
    state: Any  # of the policy
    turn: int = 0  # updates so far
    clipping: Number = 0.0  # as in `Scale`

    tensor: ClassVar[None] = None
    tracker: ClassVar[None] = None

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """Return the plan to start a policy as it is."""
        return cls(policy, bounds_of(policy), initial(policy))

    def place(
        self, device: torch.device, scale: float, clean_steps: int, *, reads: bool
    ) -> "Scale":
        """Create the tensors, and return the scale that has them.

        `scale` and `clean_steps` are torch's: libraries may have set them meanwhile.
        `reads`: the host reads the outcome of steps.
        """
        with torch.inference_mode(mode=False):  # inference tensors are read-only
            if not reads:
                return self.place_in_graph(device, scale, clean_steps)
            self._start(scale, clean_steps)
            host = HostScale(self, device, clean_steps)
            if host.may_read and isinstance(self.policy, TorchRule):
                return KernelScale(self, device, clean_steps)
            return host

    def place_in_graph(
        self, device: torch.device, scale: float, clean_steps: int
    ) -> "KernelScale | DeviceScale":
        """Create the tensors in a compiled graph, which never reads them."""
        self._start(scale, clean_steps)
        if isinstance(self.policy, TorchRule):
            return KernelScale(self, device, clean_steps)
        return DeviceScale(self, device, clean_steps)

    def _start(self, scale: float, clean_steps: int) -> None:
        if scale != self.state.scale:
            self.state = started_near(self.policy, scale)
        if isinstance(self.state, TorchRuleState):
            self.state = replace(self.state, clean_steps=clean_steps)

    def configure(self, policy: Policy) -> None:
        """Replace the policy by one with other settings."""
        self.policy = policy
        self.bounds = bounds_of(policy)

    def restore(self, state: Any, turn: int) -> None:
        """Start from a saved state of plain numbers."""
        self.state = state
        self.turn = turn

    def plain_state(self) -> Any:
        """Return the state as plain numbers."""
        return self.state

    def turns(self) -> int:
        """Return the number of updates so far."""
        return self.turn


class Scale(ABC):
    """The scale that losses are multiplied by, and the policy that moves it.

    `follow` is called at the start of every public method of a scaler.  Until the next
    one, `inverse` and `may_overflow` are those of the scale as it is.
    """

    state: Any  # of the policy
    inverse: torch.Tensor  # float32 []: 1 / scale
    may_overflow = True  # dividing by the scale may overflow: it may be below 1

    def __init__(self, plan: Plan, device: torch.device, clean_steps: int) -> None:
        value = min(plan.state.scale, FLOAT32_MAX)
        # Others may write into both, as into those of `torch.amp.GradScaler`.
        self.tensor = torch.full((), value, dtype=torch.float32, device=device)
        self.tracker = torch.full((), clean_steps, dtype=torch.int32, device=device)
        # Updates by compiled graphs, which must not depend on the value of `turn`.
        self.compiled_updates = torch.zeros((), dtype=torch.int32, device=device)
        self.device = self.tensor.device
        self.may_read = backend.in_host_memory(self.tensor)
        self.turn = plan.turn  # updates so far
        # Above 0: gradients are clipped while they are scaled.
        self.clipping = plan.clipping
        self.has_foreseen = False  # the policy has seen this iteration's loss
        self._version = -1  # of the tensor, when `follow` looked last
        self._value: float | None = None  # the same; None: the host does not know it
        self._copy: torch.Tensor | None = None
        self.policy = plan.policy
        self.bounds = plan.bounds
        self.wants = plan.policy.wants

    def configure(self, policy: Policy) -> None:
        """Replace the policy by one with other settings."""
        self.policy = policy
        self.bounds = bounds_of(policy)
        self.wants = policy.wants

    @property
    def follows_size(self) -> bool:
        """Whether the policy follows the gradients' size; it must not, if clipped."""
        return "amax_log2" in self.wants and not self.bounds.peer

    # -- reading -----------------------------------------------------------------------

    def follow(self) -> None:
        """Continue from the tensor, into which others may have written."""
        self.may_read = backend.in_host_memory(self.tensor)
        written = self.tensor._version != self._version
        # Collectives and `.data` write without a new version.
        if written or (self.may_read and self.tensor.item() != self._value):
            self.count_from(self.turns())
            self._adopt()
            self._note_tensor()

    def _note_tensor(self) -> None:
        """Compute what depends on the tensor."""
        self._version = self.tensor._version
        self._copy = None
        if self.may_read:
            value = self.tensor.item()
            if value == self._value:
                return  # written, but the same
            self._value = value
        self.inverse = backend.reciprocal(self.tensor)
        self.may_overflow = self._value is None or not self._value >= 1.0

    def replace_tensor(self, tensor: torch.Tensor) -> None:
        """Use another tensor for the scale."""
        self.tensor = tensor
        self._version = -1

    def note(self) -> Number:
        """Return the scale's value, or a copy that later updates do not change."""
        if self.may_read:
            return self.tensor.item()
        if self._copy is None:
            self._copy = self.tensor.clone()
        return self._copy

    def due(self, *, clips: bool) -> tuple[str, ...]:
        """Return what the policy wants to have measured in this iteration.

        `clips`: the gradients are clipped by a norm of order 1 or more.
        """
        if not self.wants:
            return ()
        wanted = schedule(self.wants, clips=clips)
        return tuple(name for name, one in wanted.items() if one.due(self.turn))

    def shrink(
        self, norm: torch.Tensor, max_norm: float | torch.Tensor
    ) -> torch.Tensor:
        """Return the factor that clips gradients of this norm.  float32 []."""
        if not self.may_read or isinstance(max_norm, torch.Tensor):
            factor: torch.Tensor = clip_factor(norm, max_norm, backend.ops())
            return factor
        return torch.full_like(norm, clip_factor_on_host(norm.item(), max_norm))

    def turns(self) -> int:
        """Return the number of updates, those of compiled graphs included."""
        compiled = self.compiled_updates
        return self.turn + (int(compiled.item()) if compiled._version else 0)

    def count_from(self, turn: int) -> None:
        """Set the number of updates."""
        self.turn = turn
        if self.compiled_updates._version:
            self.compiled_updates = torch.zeros_like(self.compiled_updates)

    def lowest(self) -> float:
        """Return the lowest scale that the policy sets."""
        return self.bounds.low

    # -- moving ------------------------------------------------------------------------

    def foresee(self, loss: torch.Tensor) -> "Scale":
        """Show an iteration's first loss to the policy; return the scale to use."""
        self.has_foreseen = True
        return self._foresee(loss.detach().reshape(()).float())

    def move(self, evidence: Evidence | None) -> "Scale":
        """End an iteration: move the scale by the evidence; return the scale to use."""
        self.turn += 1
        self.has_foreseen = False
        if evidence is None:
            return self
        self.clipping = evidence.measured.get(CLIPPED, 0.0)
        return self._move(evidence)

    def set(self, value: Number) -> "Scale":
        """Start the policy again at this scale; one that cannot be used is ignored.

        Returns the scale to use from now on.
        """
        number = backend.known(value)
        if number is None:
            given = backend.scalar(value, self.device)
            usable = (given >= SMALLEST) & (given <= FLOAT32_MAX)
            other = self.on_device()
            other.set_unread(torch.where(usable, given, self.tensor))
            return other
        if SMALLEST <= number <= FLOAT32_MAX:
            self._set(number)
        return self

    def override(self, value: float) -> None:
        """Set the scale within an iteration; keep the rest of the policy's state."""
        value = min(max(value, self.bounds.low), self.bounds.high)
        self.restore(replace(self.plain_state(), scale=value), self.turns())

    def restore(self, state: Any, turn: int) -> None:
        """Continue from a saved state of plain numbers."""
        self.count_from(turn)
        self.has_foreseen = False
        self._restore(state)

    @abstractmethod
    def on_device(self) -> "KernelScale | DeviceScale":
        """Return the scale for steps whose outcome only the device knows."""

    @abstractmethod
    def plain_state(self) -> Any:
        """Return the policy's state as plain numbers; this may wait."""

    @abstractmethod
    def _adopt(self) -> None:
        """Continue from a tensor that others have written."""

    @abstractmethod
    def _foresee(self, loss: torch.Tensor) -> "Scale": ...

    @abstractmethod
    def _move(self, evidence: Evidence) -> "Scale": ...

    def _set(self, scale: float) -> None:
        """Start again at a scale that the host knows."""
        self._restore(started_near(self.policy, scale))

    @abstractmethod
    def _restore(self, state: Any) -> None: ...


class KernelScale(Scale):
    """Torch's rule, by torch's kernel: its two tensors are the state."""

    def __init__(self, plan: Plan, device: torch.device, clean_steps: int) -> None:
        super().__init__(plan, device, clean_steps)
        self._note_tensor()

    def plain_state(self) -> TorchRuleState:
        """Read the two tensors."""
        return TorchRuleState(self.tensor.item(), int(self.tracker.item()))

    def apply(self, evidence: Evidence) -> None:
        """Update both tensors without a host read, also in a compiled graph."""
        rule: Any = self.policy
        torch._amp_update_scale_(
            self.tensor,
            self.tracker,
            evidence.found,
            rule.growth_factor,
            rule.backoff_factor,
            rule.growth_interval,
        )
        low, high, _ = self.bounds
        reads = self.may_read and not torch.compiler.is_compiling()
        if not (reads and low <= self.tensor.item() <= high):
            self.tensor.clamp_(low, high)

    def apply_loss(self, loss: torch.Tensor) -> None:
        """Nothing to do: torch's rule does not look at the loss."""

    def on_device(self) -> "KernelScale":
        """Return itself: torch's kernel runs everywhere."""
        return self

    def _adopt(self) -> None:
        """Nothing to do: the tensors are the state."""

    def _foresee(self, loss: torch.Tensor) -> Self:
        del loss
        return self

    def _move(self, evidence: Evidence) -> Self:
        self.apply(evidence)
        self._note_tensor()
        return self

    def _set(self, scale: float) -> None:
        """Set the scale alone, as torch does: the growth tracker counts on."""
        self.tensor.fill_(min(max(scale, self.bounds.low), self.bounds.high))
        self._note_tensor()

    def set_unread(self, scale: torch.Tensor) -> None:
        """Start again at a scale that only the device knows."""
        self.tensor.copy_(scale.clamp(self.bounds.low, self.bounds.high))
        self._note_tensor()

    def _restore(self, state: TorchRuleState) -> None:
        self.tensor.fill_(state.scale)
        self.tracker.fill_(state.clean_steps)
        self._note_tensor()


class HostScale(Scale):
    """A policy on Python floats: the host knows every number."""

    def __init__(self, plan: Plan, device: torch.device, clean_steps: int) -> None:
        super().__init__(plan, device, clean_steps)
        self.state = plan.state
        self._unusable = False  # others wrote a scale that nothing can be divided by
        self._note_tensor()

    def note(self) -> float:
        """Return the scale."""
        return rounded(self.state.scale)

    def _note_tensor(self) -> None:
        super()._note_tensor()
        if not self.may_read:
            self.may_overflow = self._unusable or not self.state.scale >= 1.0

    def plain_state(self) -> Any:
        """Return the state."""
        return self.state

    def on_device(self) -> "KernelScale | DeviceScale":
        """Return the same scale for steps whose outcome only the device knows."""
        plan = Plan(self.policy, self.bounds, self.state, self.turn, self.clipping)
        is_torchs = isinstance(self.policy, TorchRule)
        kind = KernelScale if is_torchs else DeviceScale
        other = kind(plan, self.device, 0)
        other.tensor = self.tensor
        other.tracker = self.tracker
        other.compiled_updates = self.compiled_updates
        other.has_foreseen = self.has_foreseen
        other.may_read = self.may_read
        other.inverse = self.inverse
        return other

    def _adopt(self) -> None:
        value = self.tensor.item()
        if value == rounded(self.state.scale):
            return
        # One that cannot be used stays: the gradients are found not to be finite.
        self._unusable = not SMALLEST <= value <= FLOAT32_MAX
        if not self._unusable:
            self._set(value)

    def _foresee(self, loss: torch.Tensor) -> Scale:
        number = backend.known(loss)
        clipping = backend.known(self.clipping)
        if number is None or clipping is None:
            return self.on_device().foresee(loss)
        bounds = self._bounds(clipping)
        self._store(foreseen(self.policy, self.state, number, ops=PLAIN, bounds=bounds))
        return self

    def _move(self, evidence: Evidence) -> Scale:
        seen = evidence.on_host()
        clipping = backend.known(self.clipping)
        if seen is None or clipping is None:
            return self.on_device()._move(evidence)
        bounds = self._bounds(clipping)
        try:
            state = moved(self.policy, self.state, seen, ops=PLAIN, bounds=bounds)
        except ScaleCollapsedError as error:
            self._store(self.state if error.state is None else error.state)
            raise
        self._store(state)
        return self

    def _bounds(self, clipping: float) -> Bounds:
        """Return the bounds; a scale that follows clipped gradients does not rise."""
        if clipping <= 0.0 or not self.follows_size:
            return self.bounds
        low = self.bounds.low
        high = self.bounds.high
        return self.bounds._replace(high=min(max(self.state.scale, low), high))

    def _store(self, state: Any) -> None:
        """Store a state, and write its scale to the tensor if it has changed."""
        before = rounded(self.state.scale)
        self.state = state
        after = rounded(state.scale)
        if isinstance(state, TorchRuleState):
            self.tracker.fill_(state.clean_steps)
        if after != before:
            self.tensor.fill_(after)
            self._note_tensor()

    def _set(self, scale: float) -> None:
        if isinstance(self.state, TorchRuleState):  # its growth tracker counts on
            low, high, _ = self.bounds
            self._restore(replace(self.state, scale=min(max(scale, low), high)))
        else:
            super()._set(scale)

    def _restore(self, state: Any) -> None:
        self.state = state
        self.tensor.fill_(rounded(state.scale))
        if isinstance(state, TorchRuleState):
            self.tracker.fill_(state.clean_steps)
        self._note_tensor()


class DeviceScale(Scale):
    """A policy on tensors, which stay where they are: only the device knows them."""

    def __init__(self, plan: Plan, device: torch.device, clean_steps: int) -> None:
        super().__init__(plan, device, clean_steps)
        self.state = self._lifted(plan.state)

    def plain_state(self) -> Any:
        """Read the state."""
        self._take_over()
        return map_state(lambda number: number.item(), self.state)

    def on_device(self) -> "DeviceScale":
        """Return itself."""
        return self

    def apply(self, evidence: Evidence) -> None:
        """Move the scale without a host read, also in a compiled graph."""
        self._take_over()
        self._store(
            moved(
                self.policy,
                self.state,
                evidence.on_device(),
                ops=backend.ops(),
                bounds=self._bounds(),
            )
        )

    def apply_loss(self, loss: torch.Tensor) -> None:
        """Show the policy a loss without a host read, also in a compiled graph."""
        self._take_over()
        self._store(
            foreseen(
                self.policy,
                self.state,
                loss.to(self.device, non_blocking=True),
                ops=backend.ops(),
                bounds=self._bounds(),
            )
        )

    def _adopt(self) -> None:
        self._take_over()

    def _take_over(self) -> None:
        """Continue from the tensor, but keep an unrounded value that rounds to it."""
        own = self.state.scale
        tensor = self.tensor
        scale = torch.where(own.float() == tensor, own, tensor.to(own.dtype))
        self.state = replace(self.state, scale=scale)

    def _foresee(self, loss: torch.Tensor) -> Self:
        self.apply_loss(loss)
        self.follow()
        return self

    def _move(self, evidence: Evidence) -> Self:
        self.apply(evidence)
        self.follow()
        return self

    def _bounds(self) -> Bounds:
        """Return the bounds; a scale that follows clipped gradients does not rise."""
        if not self.follows_size or backend.known(self.clipping) == 0.0:
            return self.bounds
        low = self.bounds.low
        high = self.bounds.high
        clips = backend.scalar(self.clipping, self.device) > 0
        top: Any = torch.where(clips, self.state.scale.clamp(low, high), high)
        return self.bounds._replace(high=top)

    def _store(self, state: Any) -> None:
        """Store a state of tensors, in the precision that the policy declares."""
        self.state = map_state(lambda new, old: new.to(old.dtype), state, self.state)
        self.tensor.copy_(self.state.scale)

    def _lifted(self, state: Any) -> Any:
        precision = self.policy.precision
        return map_state(lambda x: backend.lift(x, precision, self.device), state)

    def set_unread(self, scale: torch.Tensor) -> None:
        """Start again at a scale that only the device knows."""
        start = backend.ops().cast(
            scale.clamp(self.bounds.low, self.bounds.high), self.policy.precision
        )
        self.state = self._lifted(initial(self.policy, start))
        self.tensor.copy_(self.state.scale)
        self.follow()

    def _restore(self, state: Any) -> None:
        self.state = self._lifted(state)
        self.tensor.copy_(self.state.scale)
        self.follow()


def clip_factor_on_host(norm: float, max_norm: float) -> float:
    """Return `clip_factor` of plain numbers, bit for bit as torch's kernels compute it.

    Every number is rounded to float32; torch divides a number by a tensor as number x
    reciprocal.

    Example:
        >>> clip_factor_on_host(4.0, 1.0), clip_factor_on_host(0.5, 1.0)
        (0.24999994039535522, 1.0)
    """
    reciprocal = single(1.0 / single(norm + single(CLIP_EPSILON)))
    return min(1.0, single(single(max_norm) * reciprocal))  # 1 if it is NaN


def rounded(scale: float) -> float:
    """Return a scale as float32 holds it; some policies keep a wider number."""
    return single(min(scale, FLOAT32_MAX))


def started_near(policy: Policy, scale: float) -> Any:
    """Return the policy's initial state at this scale, or as close as it can start."""
    low, high, _ = bounds_of(policy)
    scale = min(max(scale, low), high)
    for start in (scale, 2.0 ** math.floor(math.log2(scale))):
        try:
            return initial(policy, start)
        except PolicyError:  # some start at powers of two only
            continue
    return policy.init()
