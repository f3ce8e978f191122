"""One optimizer's gradients between two updates, and what was done with them."""

import math
import weakref
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import (
    Flags,
    Gathered,
    first_gradient,
)
from buoy._backends.torch.inspection import AMAX, Survey
from buoy._core.step import MEASUREMENTS
from buoy.torch.freshness import FirstGradient, Freshness
from buoy.torch.outcome import LastStep
from buoy.torch.scale import Evidence, Measured, Number

__all__ = ["Pending", "combined", "evidence_of", "merged"]


@dataclass(eq=False)
class Pending(MutableMapping[str, Any]):
    """An optimizer's gradients: inspected, unscaled and clipped, applied or skipped.

    As a mapping it has torch's two keys, `stage` and `found_inf_per_device`, which
    other libraries read and write.
    """

    optimizer: Any = None
    stage: OptState = OptState.READY
    flags: Flags = field(default_factory=dict)  # torch's `found_inf_per_device`
    agreed: bool = False  # `flags` and `measured` are those of all ranks

    # What is known about the gradients
    gathered: Gathered | None = None  # that were inspected
    survey: Survey | None = None
    wanted: tuple[str, ...] = ()  # what the policy wants to have measured
    measured: Measured = field(default_factory=dict)  # of the scaled gradients
    norm: torch.Tensor | None = None  # float32 []: unscaled, before clipping
    order: float = 2.0  # of that norm
    clipped_norm: torch.Tensor | None = None
    clipped_order: float = 2.0
    freshness: Freshness | None = None  # notices gradients that come later
    first: FirstGradient | None = None  # once unscaled: notices edits
    stale: bool = False  # the gradients of an earlier skip were never cleared

    # What is to be done with them
    factor: torch.Tensor | None = None  # unscales and clips; not applied yet
    veto: torch.Tensor | None = None  # float32 []: above 0 skips finite gradients, too
    spike: torch.Tensor | None = None  # float32 []: 1 if the spike guard has acted
    differs: torch.Tensor | None = None  # float32 []: above 0 if ranks differ
    mismatch: Callable[[], Exception] | None = None  # makes the error, if they do

    # What was done
    handed_over: bool = False  # the optimizer unscales
    finite: bool | None = None  # of the gradients; None: the host has not read it
    applied: bool | None = None  # of the step; None: the host has not read it
    outcome: LastStep | None = None  # once it has stepped or was skipped

    # -- torch's two keys --------------------------------------------------------------

    def __getitem__(self, key: str) -> Any:
        return getattr(self, _TORCHS[key])

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self, _TORCHS[key], value)

    def __delitem__(self, key: str) -> None:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(_TORCHS)

    def __len__(self) -> int:
        return len(_TORCHS)

    # -- what is known -----------------------------------------------------------------

    @property
    def amax(self) -> Number | None:
        """The largest magnitude of the scaled gradients; None if not measured."""
        return self.measured.get(AMAX)

    def flag(self, home: torch.device) -> torch.Tensor | None:
        """Return the flag that the step uses; None if there are no gradients."""
        found = combined(self.flags, home)
        if found is None or self.veto is None:
            return found
        return torch.maximum(found, self.veto.to(home, non_blocking=True))

    def fail_where(self, flag: torch.Tensor) -> None:
        """Skip the step where `flag` is above 0, as if it had overflowed."""
        found = combined(self.flags, flag.device)
        if found is not None:
            self.flags = {flag.device: torch.maximum(found, flag)}

    def skip_where(self, flag: torch.Tensor) -> None:
        """Skip the step where `flag` is above 0; the policy does not see it."""
        if self.veto is not None:
            flag = torch.maximum(self.veto, flag.to(self.veto.device))
        self.veto = flag

    def evidence(self, home: torch.device) -> Evidence | None:
        """Return what the policy learns from; None if there are no gradients."""
        found = combined(self.flags, home)
        if found is None:
            return None
        finite = self.finite
        if finite is None and self.veto is None and self.applied is not None:
            finite = self.applied
        elif finite is None:
            number = backend.known(found)
            finite = None if number is None else number <= 0.0  # NaN: not finite
        told = {
            name: number
            for name, number in self.measured.items()
            # What else was measured, e.g. for a trace, must not change the scale.
            if name in self.wanted or name not in MEASUREMENTS
        }
        return Evidence(found, finite, told)

    # -- changes -----------------------------------------------------------------------

    def forget(self) -> None:
        """Forget the findings: the optimizer evaluates its closure again."""
        fresh = Pending(self.optimizer)
        for each in fields(self):
            setattr(self, each.name, getattr(fresh, each.name))

    def note_first(self) -> None:
        """Note one gradient and its version: the user may edit `.grad` from now on."""
        grad = first_gradient(self.optimizer)
        self.first = None if grad is None else (weakref.ref(grad), grad._version)


_TORCHS = {"stage": "stage", "found_inf_per_device": "flags"}


def combined(flags: Flags, home: torch.device) -> torch.Tensor | None:
    """Combine the flags of several devices on one; None if there are none.

    Not their sum: torch's fused kernels skip only where the flag is exactly 1.
    """
    alone = flags.get(home) if len(flags) == 1 else None
    if alone is not None:
        return alone.reshape(()) if alone.dim() else alone  # others use a shape of [1]
    found = [flag.to(home, non_blocking=True).reshape(()) for flag in flags.values()]
    if not found:
        return None
    return found[0] if len(found) == 1 else torch.stack(found).max()


def evidence_of(pendings: Sequence[Pending], home: torch.device) -> Evidence | None:
    """Combine the findings of several optimizers; None if there are none."""
    every = [one.evidence(home) for one in pendings]
    found = [one for one in every if one is not None]
    if len(found) <= 1:
        return found[0] if found else None
    known = [one.finite for one in found]
    return Evidence(
        torch.stack([one.found for one in found]).max(),
        None if None in known else all(known),
        merged([one.measured for one in found], home),
    )


def merged(found: Sequence[Mapping[str, Number]], home: torch.device) -> Measured:
    """Combine several measurements of gradients: the largest of each."""
    whole: Measured = {}
    for name in dict.fromkeys(name for one in found for name in one):
        whole[name] = _largest([one[name] for one in found if name in one], home)
    if not all(AMAX in one for one in found):
        whole.pop(AMAX, None)  # that of some optimizers alone
    return whole


def _largest(numbers: Sequence[Number], home: torch.device) -> Number:
    """Return the largest number, on the host if it has them all; NaN wins."""
    known = [backend.known(number) for number in numbers]
    values = [value for value in known if value is not None]
    if len(values) == len(numbers):
        return math.nan if any(map(math.isnan, values)) else max(values)
    return torch.stack([backend.scalar(number, home) for number in numbers]).max()
