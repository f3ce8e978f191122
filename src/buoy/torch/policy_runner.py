"""A policy and its state, on the host or on the device.

While the host knows the outcome of every step, the policy runs on Python numbers.  From
the first step whose outcome only the device has, its state stays on the device.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from buoy._backends import torch as backend
from buoy._core.bounds import bounds_of, foreseen, initial, moved
from buoy._core.errors import PolicyError, ScaleCollapsedError
from buoy._core.formats import FLOAT32_MAX
from buoy._core.ops import PLAIN, single
from buoy._core.policies.policy import Bounds, Policy
from buoy._core.state import Seen, map_state
from buoy._core.step import as_wanted
from buoy.torch.loss_check import LOSS, NO_LOSS, loss_finite

__all__ = ["FLOAT32_MAX", "SMALLEST", "Evidence", "PolicyRunner"]

SMALLEST = 2.0**-127  # below it 1 / scale, in float32, is inf
LARGEST_HALF = 2.0**15  # the largest power of two that FP16 holds
_NOTHING: dict[str, float | torch.Tensor] = {}


class Evidence(NamedTuple):
    """The findings of an iteration, on the device and, if available, on the host."""

    found: torch.Tensor  # float32 []: more than 0 if anything was not finite
    finite: bool | None = None  # None: not read on the host
    measured: dict[str, float | torch.Tensor] = _NOTHING  # by `Policy.wants`

    def on_host(self) -> Seen | None:
        """Return it as plain numbers; None if the host lacks any of them."""
        values: dict[str, float] = {}
        for name, x in self.measured.items():
            value = x if isinstance(x, float) else backend.host_value(x)
            if value is None:
                return None
            values[name] = value
        if self.finite is None:
            return None
        told = loss_finite(values.pop(LOSS, NO_LOSS))
        sizes = as_wanted(values, PLAIN.log2)
        return Seen(finite=self.finite, loss_finite=told, **sizes)

    def on_device(self) -> Seen:
        """Return it as tensors."""
        home = self.found.device
        sizes = {
            name: backend.scalar(x, home)
            for name, x in self.measured.items()
            if name != LOSS
        }
        finite = self.found.reshape(()) == 0
        told = loss_finite(self.measured.get(LOSS, NO_LOSS), home)
        return Seen(finite=finite, loss_finite=told, **as_wanted(sizes, torch.log2))


class PolicyRunner:
    """A policy and its state; keeps the scale within bounds."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.bounds = policy, bounds_of(policy)
        # A scale that follows the gradients' size must not follow clipped ones.
        self.follows_size = "amax_log2" in policy.wants and not self.bounds.peer
        self.state: Any = initial(policy)

    @property
    def on_device(self) -> bool:
        """Whether the state consists of tensors."""
        return isinstance(self.state.scale, torch.Tensor)

    @property
    def scale(self) -> float | torch.Tensor:
        """The scale as float32 holds it."""
        if self.on_device:
            return self.state.scale  # type: ignore[no-any-return]
        # Scalers that keep a Python float may leave float32's range.
        return single(min(self.state.scale, FLOAT32_MAX))

    def limits(self) -> tuple[float, float]:
        """Return the bounds of a scale that is set."""
        return self.bounds.low, self.bounds.high

    def foresee(
        self,
        loss: torch.Tensor,
        home: torch.device,
        *,
        half: bool,
        held: bool | torch.Tensor = False,
    ) -> None:
        """Pass a loss to the policy before it is scaled.

        `half`: losses are FP16.  The scale is then at most what FP16 holds, for this
        step; the presets do as their peers.  `held`: as in `update`.
        """
        policy, ops = self.policy, backend.ops()
        most = LARGEST_HALF if half and not self.bounds.peer else self.bounds.high
        if isinstance(held, torch.Tensor):
            self.lift(home)
        bounds = self._bounds_if(held, most)
        number = loss if loss.dtype is torch.float32 else loss.detach().float()
        seen = None if self.on_device else backend.host_value(number)
        if seen is not None:
            self.state = foreseen(policy, self.state, seen, ops=PLAIN, bounds=bounds)
            return
        self.lift(home)
        bounds = self._bounds_if(held, most)
        number = number.detach().reshape(()).to(home, non_blocking=True)
        self._keep(foreseen(policy, self.state, number, ops=ops, bounds=bounds))

    def update(self, evidence: Evidence, *, held: bool | torch.Tensor = False) -> None:
        """Update the state from the findings of a step.

        `held`: gradients were clipped while they were scaled.  If the policy follows
        their size, the scale does not rise.
        """
        known = not (self.on_device or isinstance(held, torch.Tensor))
        seen = evidence.on_host() if known else None
        policy, bounds = self.policy, self._bounds_if(held)
        if seen is None:
            self.lift(evidence.found.device)
            seen, ops = evidence.on_device(), backend.ops()
            bounds = self._bounds_if(held)
            self._keep(moved(policy, self.state, seen, ops=ops, bounds=bounds))
            return
        try:
            self.state = moved(policy, self.state, seen, ops=PLAIN, bounds=bounds)
        except ScaleCollapsedError as error:
            self.state = self.state if error.state is None else error.state
            raise

    def _bounds_if(
        self, held: bool | torch.Tensor, most: float = FLOAT32_MAX
    ) -> Bounds:
        """Return the bounds; if held, the highest scale is the present one."""
        low, high = self.bounds.low, min(self.bounds.high, most)
        if held is False or not self.follows_size:
            return self.bounds._replace(high=high)
        scale = self.state.scale
        if not self.on_device:
            return self.bounds._replace(high=min(max(scale, low), high))
        top: Any = scale.clamp(low, high)
        if isinstance(held, torch.Tensor):
            top = torch.where(held.to(top.device) > 0, top, high)
        return self.bounds._replace(high=top)

    def _keep(self, after: Any) -> None:
        """Store a state of tensors, in the precision that the policy declares."""
        precision, cast = self.policy.precision, backend.ops().cast
        self.state = map_state(
            lambda x: cast(x, precision) if x.is_floating_point() else x, after
        )

    def lift(self, device: torch.device) -> None:
        """Move a state of plain numbers to the device."""
        if not self.on_device:
            self.state = self._lifted(self.state, device)

    def _lifted(self, state: Any, device: torch.device) -> Any:
        precision = self.policy.precision
        return map_state(lambda x: backend.lift(x, precision, device), state)

    def follow(self, scale: torch.Tensor) -> None:
        """Continue from a scale on the device that others may have written."""
        own = self.state.scale
        # Keep the unrounded value if the tensor holds its rounding.
        taken = torch.where(own.float() == scale, own, scale.to(own.dtype))
        self.state = replace(self.state, scale=taken)

    def replace_scale(self, value: float) -> None:
        """Change the scale; keep the rest of the state."""
        low, high = self.limits()
        number: Any = min(max(value, low), high)
        if self.on_device:
            number = torch.full_like(self.state.scale, number)
        self.state = replace(self.state, scale=number)

    def start(self, value: float) -> None:
        """Restart the policy at this scale, or as close to it as it can."""
        self.state = self.started(value)

    def started(self, value: float) -> Any:
        """Return the policy's initial state at this scale."""
        low, high = self.limits()
        value = min(max(value, low), high)
        for start in (value, 2.0 ** math.floor(math.log2(value))):
            try:
                return self.policy.init(scale=start)
            except (TypeError, PolicyError):  # it cannot start there
                continue
        return self.policy.init()

    def start_on_device(self, scale: torch.Tensor) -> None:
        """Restart the policy at a scale that only the device has."""
        low, high = self.limits()
        start = backend.ops().cast(scale.clamp(low, high), self.policy.precision)
        try:
            state = self.policy.init(scale=start)
        except (TypeError, PolicyError):  # it needs a plain number
            state = self.started(backend.read([scale])[0])
        self.state = self._lifted(state, scale.device)
