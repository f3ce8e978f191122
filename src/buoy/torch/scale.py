"""One scale: its tensor, the value if the host has it, and the rule that moves it.

Torch's own rule runs on plain numbers if the host has them (the tensors are then
filled), else by torch's kernel on the device.  A `PolicyRunner` runs others.
"""

import math
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch

from buoy._backends import torch as backend
from buoy._core.codec import encode
from buoy._core.errors import OptionError
from buoy._core.formats import FLOAT32_MAX
from buoy._core.ops import single
from buoy._core.policies.policy import MIN_SCALE, Policy
from buoy._core.policies.presets.peer import PeerBackoff
from buoy._core.policies.presets.quirks import Quirks
from buoy._core.step import MEASUREMENTS
from buoy.torch.policy_runner import SMALLEST, Evidence, PolicyRunner

__all__ = ["Now", "Scale"]

_NEVER = 2**31 - 1


class Now(NamedTuple):
    """The current scale; rebuilt only when it has changed."""

    tensor: torch.Tensor  # float32 []: losses are multiplied by it
    device: torch.device
    value: float | None  # None: only the device has it
    inverse: torch.Tensor  # float32 []: 1 / scale
    safe: bool  # at least 1: dividing by it cannot overflow
    copy: float | torch.Tensor  # the value, or a copy that later updates do not change


class Scale:
    """The scale of one scaler; independent of optimizers and gradients.

    `runner` is the policy with its state; None for torch's rule, whose numbers are
    attributes here.
    """

    def __init__(
        self,
        policy: Policy | None,
        init_scale: float,
        factors: tuple[float, float, int],
        bounds: tuple[float | None, float | None] = (None, None),
    ) -> None:
        self.init_scale = init_scale
        self.growth_factor, self.backoff_factor, self.growth_interval = factors
        self.bounds_given = policy is None and bounds != (None, None)
        self.low = MIN_SCALE if bounds[0] is None else bounds[0]
        self.high = FLOAT32_MAX if bounds[1] is None else bounds[1]
        self.runner = None if policy is None else PolicyRunner(policy)
        self.wants: frozenset[str] = frozenset() if policy is None else policy.wants
        if self.runner is not None:
            self.low, self.high = self.runner.bounds[:2]
            self.init_scale = float(self.runner.state.scale)
        self.measures = not self.wants.isdisjoint(MEASUREMENTS)  # of the gradients
        self.tensor: torch.Tensor | None = None  # float32 []
        self.tracker: torch.Tensor | None = None  # int32 []: torch's growth tracker
        self.turn = 0  # updates so far
        # int32 []: updates by compiled graphs, which must not depend on `turn`'s value
        self.compiled_updates: torch.Tensor | None = None
        self.foreseen = False  # the policy has seen this iteration's loss
        self.fp16_loss = False  # there was an FP16 loss
        # Whether gradients are clipped while they are scaled: here, on any rank.
        self.clipped = False
        self.clipped_anywhere: torch.Tensor | None = None  # float32 []
        self._now: Now | None = None
        self._view: backend.HostView | None = None  # collectives keep `_version`
        self._clean: backend.HostCount | None = None  # the tracker's value
        self.widen_bounds(init_scale)

    def place(self, device: torch.device, init_scale: float, count: int) -> None:
        """Create the tensors on first use."""
        with torch.inference_mode(mode=False):  # inference tensors are read-only
            self.make_tensors(device, init_scale, count)
        tensor: Any = self.tensor
        runner, value = self.runner, single(init_scale)
        if runner is not None and value != runner.scale and not runner.on_device:
            runner.start(init_scale)
            tensor.fill_(runner.scale)
        self._note(value)

    def make_tensors(self, device: torch.device, init_scale: float, count: int) -> None:
        """Create only the tensors: all that a compiled graph needs."""
        self.tensor = torch.full((), init_scale, dtype=torch.float32, device=device)
        self.tracker = torch.full((), count, dtype=torch.int32, device=device)
        self.compiled_updates = torch.zeros((), dtype=torch.int32, device=device)

    # -- reading -----------------------------------------------------------------------

    def now(self) -> Now:
        """Return the current scale; detects writes by others into the tensor."""
        now, tensor, view = self._now, self.tensor, self._view
        if (
            now is not None
            and now.tensor is tensor
            and tensor._version == self._version
            and self._seen is self.tracker
            and (view is None or view.value == now.value)
        ):
            return now
        return self._follow()

    def is_safe(self, inverse: torch.Tensor) -> bool:
        """Return whether multiplying by `inverse` is known not to overflow."""
        now = self._now
        return now is not None and now.safe and now.inverse is inverse

    def _follow(self) -> Now:
        """Continue from a scale that others have written into the tensor."""
        tensor: Any = self.tensor
        compiled = self._compiled_turns()
        if compiled:
            self.count_from(self.turn + compiled)
        if compiled and self.runner is not None and self.runner.on_device:
            return self._note(None)
        if not backend.in_host_memory(tensor):
            if self.runner is not None and not self.runner.on_device:
                self.runner.start_on_device(tensor)
            return self._note(None)
        value = backend.read_host_memory(tensor)
        if self.runner is not None and value != self.runner.scale:
            if not SMALLEST <= value <= FLOAT32_MAX:
                return self._note(None)  # this step is skipped
            self.runner.start(value)
            tensor.fill_(self.runner.scale)
        return self._note(value)

    def _note(self, value: float | None) -> Now:
        """Cache the values of the tensors; `value` None: only the device has both."""
        tensor: Any = self.tensor
        tracker: Any = self.tracker
        if self.runner is not None and value is not None:
            own = self.runner.scale
            value = own if isinstance(own, float) else None
        self._view = None if value is None else backend.host_view(tensor)
        self._clean, self._seen = backend.host_count(tracker), tracker
        self._version = tensor._version
        safe = value is not None and value >= 1.0
        copy = tensor.detach().clone() if value is None else value
        inverse = backend.reciprocal(tensor)
        self._now = Now(tensor, tensor.device, value, inverse, safe, copy)
        return self._now

    def count_from(self, turn: int) -> None:
        """Set the number of updates, including those of compiled graphs."""
        self.turn = turn
        if self.compiled_updates is not None and self.compiled_updates._version:
            self.compiled_updates = torch.zeros_like(self.compiled_updates)

    def _compiled_turns(self) -> int:
        """Return the number of updates by compiled graphs; reads if there were any."""
        counter = self.compiled_updates
        return int(counter.item()) if counter is not None and counter._version else 0

    @property
    def policy(self) -> Policy:
        """The rule as a policy object."""
        if self.runner is not None:
            return self.runner.policy
        interval = self.growth_interval
        return PeerBackoff(
            init_scale=self.init_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=interval if interval >= 1 else _NEVER,
            min_scale=self.low,
            max_scale=self.high,
            quirks=Quirks(
                arithmetic="wide", at_max="clamp" if self.high < FLOAT32_MAX else "keep"
            ),
        )

    @property
    def clean_steps(self) -> int | None:
        """The policy's count of finite steps; None for torch's rule: see `tracker`."""
        if self.runner is None:
            return None
        count = getattr(self.runner.state, "clean_steps", 0)
        return int(count.item() if isinstance(count, torch.Tensor) else count)

    @property
    def heeds_clipping(self) -> bool:
        """Whether the policy follows the size of gradients, clipped ones included."""
        return self.runner is not None and self.runner.follows_size

    def is_held(self) -> bool:
        """Return whether the scale does not rise.  Reads on the host."""
        agreed = self.clipped_anywhere
        return self.clipped or (agreed is not None and backend.read_one(agreed) > 0)

    # -- moving ------------------------------------------------------------------------

    def foresee(self, loss: torch.Tensor) -> None:
        """Pass this iteration's first loss to the policy before it is scaled."""
        self.foreseen = True
        if self.runner is not None:
            now = self.now()
            held = self._held()
            if self.runner.on_device:
                self.runner.follow(now.tensor)
            self.runner.foresee(loss, now.device, half=self.fp16_loss, held=held)
            self._write()

    def move(self, evidence: Evidence | None, now: Now) -> Now:
        """Update the scale from the evidence, if any; return the new one."""
        self.turn += 1
        self.foreseen = False
        if evidence is None:
            return self.now()
        if self.runner is not None:
            if self.runner.on_device:
                self.runner.follow(now.tensor)
            try:
                self.runner.update(evidence, held=self._held())
            finally:
                self._write()
        elif evidence.finite is None or now.value is None or self._clean is None:
            self.move_on_device(evidence)
            self._note(None)
        else:
            self._move_on_host(now.value, self._clean, finite=evidence.finite)
        return self._now or now

    def _held(self) -> bool | torch.Tensor:
        """Return whether the scale must not rise; a tensor if only the device knows."""
        agreed = self.clipped_anywhere
        if agreed is None or not self.heeds_clipping:
            return self.clipped
        seen = backend.host_value(agreed)
        return agreed if seen is None else seen > 0

    def move_on_device(self, evidence: Evidence) -> None:
        """Update the scale without a host read, also inside a compiled graph."""
        tensor: Any = self.tensor
        tracker: Any = self.tracker
        if self.runner is not None:
            self.runner.lift(tensor.device)
            self.runner.follow(tensor)
            self.runner.update(evidence, held=self.clipped)
            tensor.copy_(self.runner.scale)
            return
        factors = self.growth_factor, self.backoff_factor, self.growth_interval
        torch._amp_update_scale_(tensor, tracker, evidence.found, *factors)
        tensor.clamp_(self.low, self.high)

    def _move_on_host(
        self, before: float, clean: backend.HostCount, *, finite: bool
    ) -> None:
        """Apply torch's rule on plain numbers, and write them to the tensors."""
        after, count = before, clean.value + 1
        if not finite:
            after, count = single(before * self.backoff_factor), 0
        elif count == self.growth_interval:
            grown, count = single(before * self.growth_factor), 0
            after = grown if math.isfinite(grown) else before
        clean.value = count
        if not (after == before and self.low <= before <= self.high):
            tensor: Any = self.tensor
            after = single(min(max(after, self.low), self.high))
            tensor.fill_(after)
            self._note(after)

    def _write(self) -> None:
        """Write the policy's scale to the tensor."""
        tensor, now, runner = self.tensor, self._now, self.runner
        if tensor is None or runner is None:
            return
        scale = runner.scale
        if isinstance(scale, torch.Tensor):
            tensor.copy_(scale)
            self._note(None)
        elif now is None or scale != now.value:
            tensor.fill_(scale)
            self._note(scale)

    # -- setting -----------------------------------------------------------------------

    def widen_bounds(self, value: float) -> None:
        """Widen default bounds to include a scale that was set by hand."""
        if not self.bounds_given:
            self.low, self.high = min(self.low, value), max(self.high, value)

    def set(self, value: float | torch.Tensor) -> None:
        """Continue from this scale; an unusable tensor changes nothing."""
        now, runner = self.now(), self.runner
        if runner is not None and runner.bounds.low == runner.bounds.high:
            raise OptionError(
                f"The policy {type(runner.policy).__name__} has no scale of its own to "
                "set, so `update(new_scale)` would change nothing. Choose another "
                "policy, or leave `new_scale` out."
            )
        if isinstance(value, torch.Tensor):
            given = value.reshape(()).to(now.tensor.dtype)
            usable = (given >= SMALLEST) & (given <= FLOAT32_MAX)
            given = torch.where(usable, given, now.tensor)
            if runner is None:
                now.tensor.copy_(given.clamp(self.low, self.high))
                return
            if not backend.in_host_memory(given) or runner.on_device:
                runner.start_on_device(given)
                self._write()
                return
            value = backend.read([given])[0]
        if runner is not None:
            runner.start(float(value))
            self._write()
        else:
            self.widen_bounds(float(value))
            now.tensor.fill_(float(value))
            self._note(None if now.value is None else single(value))

    def override(self, value: float) -> None:
        """Set the scale within an iteration; keep the rest of the policy's state."""
        if self.runner is None:
            self.set(min(max(value, self.low), self.high))
        elif self.tensor is not None:
            self.runner.replace_scale(value)
            self._write()

    def restore(self, state: Any) -> None:
        """Restore a policy from a saved state of plain numbers."""
        if self.runner is None:
            return
        self.runner.state, self.foreseen = state, False
        self._now = None
        self._write()

    def load(self, scale: float, count: int) -> None:
        """Restore torch's rule from a saved scale and count."""
        self.widen_bounds(scale)
        tracker: Any = self.tracker
        if self.tensor is not None:
            self.tensor.fill_(scale)
            tracker.fill_(count)
            self._note(single(scale))

    def configure(self, name: str, value: Any) -> None:
        """Change one of torch's three numbers, here and in the policy."""
        if self.runner is not None:
            policy: Any = self.runner.policy
            if name not in {field.name for field in fields(policy)}:
                raise OptionError(
                    f"The policy {type(policy).__name__} has no `{name}`, so setting "
                    "it would change nothing. Use `policy=None` for torch's rule, or "
                    "'backoff', which has all three."
                )
            self.runner.policy = replace(policy, **{name: value})
        setattr(self, name, value)

    def state_dict(self) -> dict[str, Any]:
        """Return the state beyond torch's five entries; empty for torch's rule."""
        runner = self.runner
        if runner is None:
            return {}
        kept = {"policy": encode(runner.policy), "state": encode(runner.state)}
        return {**kept, "turn": self.turn + self._compiled_turns()}
