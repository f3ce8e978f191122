"""Transformers and TRL: `buoy.integrations.transformers.use(trainer, policy=...)`.

TRL's trainers (SFT, GRPO, DPO, ...) are Trainers.
"""

import math
from functools import wraps
from typing import Any, Literal

from buoy._core.errors import OptionError
from buoy._core.policies.policy import Policy
from buoy.integrations import accelerate
from buoy.integrations.common import metrics
from buoy.torch import GradScaler

__all__ = ["use"]


def use(
    trainer: Any,
    policy: str | Policy | None = None,
    *,
    count: Literal["applied", "attempted"] = "attempted",
    **options: Any,
) -> GradScaler | None:
    """Give a `Trainer` a scaler of Buoy; call it between its constructor and `train`.

    Skipped steps then do not advance the LR schedule, also with the default optimizer,
    which is fused.  The trainer's log gets `buoy/scale`, `buoy/skipped` and
    `buoy/norm`, and no `grad_norm` for a skipped step.  On a CPU, where a Trainer with
    `fp16=True` trains in FP32, this turns FP16 autocast on.

    Args:
        trainer: a `transformers.Trainer`, or a trainer of TRL.
        policy: a policy or its name; None for torch's rule.
        count: "attempted": `state.global_step` counts all steps, as in Transformers,
            and a resumed run sees each batch once; "applied": it counts applied steps,
            until `patience` steps in a row are skipped.
        options: further arguments of `buoy.torch.GradScaler`.

    Returns:
        The scaler; None if the trainer does not train in FP16 (`fp16=True` in its
        arguments): nothing is changed then.
    """
    if count not in ("applied", "attempted"):
        message = f"`count` must be 'applied' or 'attempted', got {count!r}."
        raise OptionError(message)
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
    if count == "applied":
        trainer.add_callback(_count_applied(trainer, scaler._options.patience))
    return scaler


def _count_applied(trainer: Any, patience: int) -> Any:
    """Return a callback that takes skipped steps out of `state.global_step`."""
    from transformers import TrainerCallback  # noqa: PLC0415 - of a Trainer's library

    class CountApplied(TrainerCallback):  # type: ignore[misc, unused-ignore]
        skipped = 0  # in a row

        def on_optimizer_step(
            self, _: object, state: Any, *__: object, **___: object
        ) -> None:
            failed = trainer.accelerator.optimizer_step_was_skipped
            self.skipped = self.skipped + 1 if failed else 0
            if 0 < self.skipped <= patience:
                state.global_step -= 1  # the Trainer adds 1 before `on_step_end`

        def on_step_end(
            self, _: object, __: object, control: Any, **___: object
        ) -> None:
            if 0 < self.skipped <= patience:  # this number was handled before
                control.should_log = False
                control.should_evaluate = False
                control.should_save = False

    return CountApplied()
