"""Transformers and TRL: `buoy.integrations.transformers.use(trainer, policy=...)`.

TRL's trainers (SFT, GRPO, DPO, ...) are Trainers.
"""

import math
from functools import wraps
from typing import Any

from buoy.integrations import accelerate
from buoy.integrations.common import metrics
from buoy.torch import GradScaler

__all__ = ["use"]


def use(trainer: Any, policy: Any = None, **options: Any) -> GradScaler | None:
    """Give a `Trainer` a scaler of Buoy; call it between its constructor and `train`.

    Skipped steps then do not advance the LR schedule, also with the default optimizer,
    which is fused.  The trainer's log gets `buoy/scale`, `buoy/skipped` and
    `buoy/norm`, and no `grad_norm` for a skipped step.  On a CPU, where a Trainer with
    `fp16=True` trains in FP32, this turns FP16 autocast on.

    Args:
        trainer: a `transformers.Trainer`, or a trainer of TRL.
        policy: a policy or its name; None for torch's rule.
        options: further arguments of `buoy.torch.GradScaler`.

    Returns:
        The scaler; None if the trainer does not train in FP16 (`fp16=True` in its
        arguments): nothing is changed then.
    """
    options.setdefault("model", trainer.model)
    scaler = accelerate.use(trainer.accelerator, policy, **options)
    if scaler is None:
        return None
    log = trainer.log

    @wraps(log)
    def with_metrics(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:  # of training; evaluations and summaries are logged, too
            norm = logs.get("grad_norm")
            if norm is not None and not math.isfinite(norm):
                del logs["grad_norm"]
            logs |= metrics(scaler)
        log(logs, *args, **kwargs)

    trainer.log = with_metrics
    return scaler
