"""What was seen of a program while it trained: plain numbers and names."""

from dataclasses import dataclass, field

from buoy.diagnose.shares import Share

__all__ = ["Facts", "OptimizerFacts", "ScalerFacts", "SchedulerFacts"]


@dataclass(slots=True)
class ScalerFacts:
    """One scaler that was switched on."""

    made_at: str = ""
    steps: int = 0
    skipped: int = 0
    skipped_row: int = 0  # at the end, in a row
    updates: int = 0
    updates_missing: int = 0  # second steps without an update between
    updates_doubled: int = 0  # updates with nothing between
    fresh: bool = True  # nothing was scaled or stepped since the last update
    update_at: str = ""
    step_at: str = ""
    scale: float = 0.0  # the last one
    floor: float = 0.0  # below which it cannot fall; 0 if it has none


@dataclass(slots=True)
class OptimizerFacts:
    """One optimizer."""

    kind: str = ""
    steps: int = 0  # through a scaler or not, applied or not
    direct: int = 0  # with scaled gradients, past the scaler
    direct_at: str = ""
    uncleared: int = 0  # with gradients of the step before still in them
    step_at: str = ""
    skipped_last: bool = False


@dataclass(slots=True)
class SchedulerFacts:
    """One scheduler of learning rates."""

    kind: str = ""
    calls: int = 0
    after_skips: int = 0
    skips: int = 0  # of its optimizer
    attempts: int = 0  # of its optimizer
    call_at: str = ""


@dataclass(slots=True)
class Facts:
    """Everything that the rules go by."""

    scalers: list[ScalerFacts] = field(default_factory=list)
    optimizers: list[OptimizerFacts] = field(default_factory=list)
    schedulers: list[SchedulerFacts] = field(default_factory=list)
    scaled_losses: dict[str, int] = field(default_factory=dict)  # by narrowest dtype
    plain_losses: dict[str, int] = field(default_factory=dict)
    autocast: set[str] = field(default_factory=set)  # dtypes
    backward_at: str = ""  # of an unscaled FP16 loss
    scaled_at: str = ""
    clipped_scaled: int = 0
    clipped_scale: float = 1.0  # the scale at the last such time
    clipped_at: str = ""
    nonfinite_losses: int = 0
    losses: int = 0
    nonfinite_at: str = ""
    nonfinite_module: str = ""
    unheld: list[str] = field(default_factory=list)  # names of parameters
    underflow: dict[str, Share] = field(default_factory=dict)  # of matrices
    steps: int = 0
