"""PyTorch: a `GradScaler` that one changes an import line for.

from buoy.torch import GradScaler            # was: from torch.amp import GradScaler
"""

from buoy._core.errors import MissingBackendError
from buoy._core.spikes import SpikeGuard

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    message = (
        "`buoy.torch` needs PyTorch, which is not installed. Install it with "
        "`pip install buoy[torch]`."
    )
    raise MissingBackendError(message) from error

from buoy.torch.errors import (
    AbsentRankError,
    AccumulateError,
    ApexError,
    BeforeScaleError,
    BuoyWarning,
    ClosureError,
    DeviceModeError,
    DtypeDriftError,
    EmptyStateError,
    FactorError,
    Fp16GradientsError,
    GradientsChangedError,
    GroupError,
    GuardError,
    LocalScalesError,
    LossTypeError,
    MasterWeightsError,
    MidIterationError,
    MixedScalesError,
    NewScaleError,
    NoGradientsError,
    NonfiniteNormError,
    NothingRecordedError,
    OptimizerInBackwardError,
    OptionError,
    RankMismatchError,
    RunError,
    StepTwiceError,
    StuckError,
    UnknownModuleError,
    UnknownOptimizerError,
    UnscaleAfterStepError,
    UnscaleTwiceError,
)
from buoy.torch.keep import KeptFp32, keep_fp32
from buoy.torch.local import LocalScales, local_scales
from buoy.torch.masters import MasterWeights
from buoy.torch.scaler import GradScaler
from buoy.torch.step import LastStep
from buoy.torch.watch import Stuck, StuckWarning

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
    "GradScaler",
    "GradientsChangedError",
    "GroupError",
    "GuardError",
    "KeptFp32",
    "LastStep",
    "LocalScales",
    "LocalScalesError",
    "LossTypeError",
    "MasterWeights",
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
    "SpikeGuard",
    "StepTwiceError",
    "Stuck",
    "StuckError",
    "StuckWarning",
    "UnknownModuleError",
    "UnknownOptimizerError",
    "UnscaleAfterStepError",
    "UnscaleTwiceError",
    "keep_fp32",
    "local_scales",
]
