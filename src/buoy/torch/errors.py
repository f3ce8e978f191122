"""What the PyTorch front end raises and warns of.

Each class is also the builtin that `torch.amp.GradScaler` raises in the same place, and
each message starts with torch's own words where torch has any, so that code written
for the one catches the errors of the other.
"""

from buoy._core.errors import (
    BuoyError,
    BuoyWarning,
    CallOrderError,
    OptionError,
    PolicyError,
    StateVersionError,
    StuckError,
)

__all__ = [
    "AbsentRankError",
    "AccumulateError",
    "ApexError",
    "BeforeScaleError",
    "BuoyWarning",
    "ClosureError",
    "DeviceModeError",
    "DtypeDriftError",
    "EmptyStateError",
    "FactorError",
    "Fp16GradientsError",
    "GradientsChangedError",
    "GroupError",
    "GuardError",
    "LocalScalesError",
    "LossTypeError",
    "MasterWeightsError",
    "MidIterationError",
    "MixedScalesError",
    "NewScaleError",
    "NoGradientsError",
    "NonfiniteNormError",
    "NothingRecordedError",
    "OptimizerInBackwardError",
    "OptionError",
    "RankMismatchError",
    "RunError",
    "StepTwiceError",
    "StuckError",
    "UnknownModuleError",
    "UnknownOptimizerError",
    "UnscaleAfterStepError",
    "UnscaleTwiceError",
]


class BeforeScaleError(CallOrderError, AssertionError):
    """A method that needs a scale was called before any loss was scaled."""


class NoGradientsError(CallOrderError, AssertionError):
    """An optimizer was to step, and none of its parameters has a gradient."""


class NothingRecordedError(CallOrderError, AssertionError):
    """`update` was called with no step or unscale before it."""


class StepTwiceError(CallOrderError):
    """One optimizer stepped twice without an `update` between."""


class UnscaleTwiceError(CallOrderError):
    """One optimizer's gradients were to be divided by the scale twice."""


class GradientsChangedError(CallOrderError):
    """Gradients changed between the look at them and what was to be done with them."""


class UnscaleAfterStepError(CallOrderError):
    """Gradients were to be unscaled or clipped after their step."""


class MidIterationError(CallOrderError, AssertionError):
    """A scaler was pickled or copied between a step and its update."""


class ClosureError(CallOrderError):
    """A closure does what would make its gradients or its loss wrong."""


class OptimizerInBackwardError(CallOrderError):
    """An optimizer steps inside the backward pass, before anything is checked."""


class Fp16GradientsError(BuoyError, ValueError):
    """Parameters are FP16, so their gradients cannot be unscaled without loss."""


class DtypeDriftError(Fp16GradientsError):
    """Parameters that were FP32 have been cast to half precision meanwhile."""


class MasterWeightsError(BuoyError, RuntimeError):
    """Master weights cannot be kept for this optimizer as it is."""


class ApexError(CallOrderError, ValueError):
    """apex.amp's functions were used in a way that apex refuses, or Buoy must."""


class UnknownModuleError(BuoyError, LookupError):
    """A model has no module of that name."""


class LossTypeError(BuoyError, ValueError):
    """What was to be scaled is not a tensor, nor made of tensors."""


class NewScaleError(BuoyError, AssertionError, ValueError):
    """A scale set by hand cannot be used."""


class UnknownOptimizerError(BuoyError, TypeError, AttributeError):
    """What was passed as an optimizer is none."""


class NonfiniteNormError(BuoyError, RuntimeError):
    """The norm to clip by is inf or NaN, and that was to be an error."""


class EmptyStateError(StateVersionError, RuntimeError):
    """A state to be loaded is empty."""


class FactorError(PolicyError, AssertionError):
    """A factor that moves the scale would not move it, or the wrong way."""


class DeviceModeError(BuoyError, RuntimeError):
    """An optimizer cannot be skipped without asking the device."""


class AbsentRankError(BuoyError, RuntimeError):
    """Ranks did not come to agree on a step; `absent` names them, if that is known."""

    def __init__(self, message: str, absent: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.absent = absent


class RankMismatchError(BuoyError, RuntimeError):
    """Ranks hold different scales or counters; `held` gives each rank's."""

    def __init__(
        self, message: str, held: dict[int, tuple[float, int, int]] | None = None
    ) -> None:
        super().__init__(message)
        self.held = held or {}


class GroupError(BuoyError, ValueError):
    """A scale group was asked for, or used, in a way that it cannot serve."""


class MixedScalesError(CallOrderError):
    """Gradients of one scale group were to be unscaled by the scale of another."""


class GuardError(BuoyError, TypeError):
    """What was to be guarded has no buffers: it is no module."""


class RunError(CallOrderError, ValueError):
    """`run` could not step, or could not put back what a re-run needs."""


class AccumulateError(CallOrderError, ValueError):
    """A window of micro-batches was opened or used wrongly."""


class LocalScalesError(BuoyError, ValueError):
    """Blocks were chosen whose gradients cannot be rescaled exactly."""
