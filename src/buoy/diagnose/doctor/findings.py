"""What is wrong, in words, from what was seen: one pure rule per mistake."""

from collections.abc import Callable
from dataclasses import dataclass

from buoy._core.watch import PATIENCE, count_stuck
from buoy.diagnose.doctor.facts import Facts, ScalerFacts

__all__ = ["RULES", "Finding", "findings"]

UNDERFLOW = 0.25  # share of a matrix's gradient values that is worth a word
_SOME = 5  # steps after which a scheduler's rhythm shows
_SHOWN = 5  # parameters that are named


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake: what, where, why it matters, what to do.

    Example:
        >>> print(Finding("x", "No step is taken.", "t.py:3", "No learning.", "Step."))
        No step is taken. (t.py:3)
        No learning.
        -> Step.
    """

    code: str
    what: str
    where: str
    why: str
    remedy: str

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"{self.what}{where}\n{self.why}\n-> {self.remedy}"


def findings(facts: Facts) -> list[Finding]:
    """List everything that is wrong, worst first."""
    found = [finding for rule in RULES if (finding := rule(facts)) is not None]
    codes = {finding.code for finding in found}
    return [f for f in found if not _BECAUSE.get(f.code, set()) & codes]


# A consequence of a worse finding is not reported again.
_BECAUSE = {
    "forward_nonfinite": {"direct_step"},
    "floor": {"forward_nonfinite"},
    "underflow": {"floor", "forward_nonfinite"},
    "no_fp16": {"bf16_scaled"},
}


def _forward_nonfinite(facts: Facts) -> Finding | None:
    if not facts.nonfinite_losses:
        return None
    module = facts.nonfinite_module
    named = f" The first module whose output is not finite is `{module}`."
    return Finding(
        "forward_nonfinite",
        f"{facts.nonfinite_losses} of {facts.losses} losses were inf or NaN before "
        "they were scaled.",
        facts.nonfinite_at,
        "No scale can help: every such step is skipped and lowers the "
        "scale." + (named if module else ""),
        "Check inputs and labels, logarithms and divisions by 0, and keep what "
        "overflows in FP32. `buoy.diagnose.first_nonfinite(model, step_fn)` shows by "
        "how much.",
    )


def _direct_step(facts: Facts) -> Finding | None:
    for optimizer in facts.optimizers:
        if optimizer.direct:
            return Finding(
                "direct_step",
                f"`{optimizer.kind}.step()` is called without the scaler, "
                f"{optimizer.direct} times.",
                optimizer.direct_at,
                "It applies unchecked gradients, multiplied by the scale unless "
                "they were unscaled: inf and NaN go straight into the weights.",
                "Call `scaler.step(optimizer)` instead of `optimizer.step()`.",
            )
    return None


def _never_cleared(facts: Facts) -> Finding | None:
    for optimizer in facts.optimizers:
        nearly_all = 0.9 * (optimizer.steps - 1)
        if optimizer.uncleared >= max(2, nearly_all):
            return Finding(
                "never_cleared",
                f"The gradients of `{optimizer.kind}` are never cleared between steps.",
                optimizer.step_at,
                "Every step applies the sum of all gradients so far; after one "
                "overflow every later step is skipped.",
                "Call `optimizer.zero_grad()` once per step, also after a skip.",
            )
    return None


def _clipped_scaled(facts: Facts) -> Finding | None:
    if not facts.clipped_scaled:
        return None
    return Finding(
        "clipped_scaled",
        "Gradients are clipped while they are still multiplied by the scale, "
        f"{facts.clipped_scaled} times.",
        facts.clipped_at,
        f"The threshold is applied to gradients that are {facts.clipped_scale:g} times "
        "too large: steps shrink by up to that factor.",
        "Call `scaler.unscale_(optimizer)` before clipping, or use Buoy's "
        "`scaler.clip_grad_norm_(optimizer, max_norm)`.",
    )


def _fp16_unscaled(facts: Facts) -> Finding | None:
    if facts.plain_losses.get("float16", 0) < 2 or not facts.steps:
        return None
    return Finding(
        "fp16_unscaled",
        f"{facts.plain_losses['float16']} losses were computed in FP16 and not scaled.",
        facts.backward_at,
        "Gradients below 6e-8 become 0 in the backward pass, and parts of the model "
        "silently stop learning.",
        "Use a scaler (`buoy.torch.GradScaler`), enabled, around backward and step; "
        "or torch.bfloat16, which needs none.",
    )


def _update_missing(facts: Facts) -> Finding | None:
    for scaler in facts.scalers:
        if scaler.updates_missing:
            return Finding(
                "update_missing",
                "`scaler.update()` is missing between two steps.",
                scaler.step_at,
                "The scale never moves: after an overflow every step is skipped, and "
                "the second step is an error.",
                "Call `scaler.update()` once per iteration, after all optimizers have "
                "stepped.",
            )
    return None


def _update_doubled(facts: Facts) -> Finding | None:
    for scaler in facts.scalers:
        if scaler.updates_doubled:
            return Finding(
                "update_doubled",
                "`scaler.update()` is called twice in one iteration.",
                scaler.update_at,
                "The second call has no new gradients: it is an error, or moves the "
                "scale twice.",
                "Call `scaler.update()` once per iteration, after all optimizers have "
                "stepped.",
            )
    return None


def _recreated(facts: Facts) -> Finding | None:
    used = [scaler for scaler in facts.scalers if scaler.steps]
    if len(used) < 3 or any(scaler.updates > 1 for scaler in used):
        return None
    return Finding(
        "recreated",
        f"A new scaler is created for every step: {len(used)} so far.",
        used[-1].made_at,
        "Each starts at its initial scale again and ignores earlier overflows, so "
        "every step may overflow.",
        "Create one scaler before the loop, and save its `state_dict()` with the "
        "model.",
    )


def _unheld(facts: Facts) -> Finding | None:
    if not facts.unheld or not facts.steps:
        return None
    shown = ", ".join(f"`{name}`" for name in facts.unheld[:_SHOWN])
    more = len(facts.unheld) - _SHOWN
    if more > 0:
        shown += f" and {more} more"
    return Finding(
        "unheld",
        f"{len(facts.unheld)} parameters get gradients and are in no optimizer: "
        f"{shown}.",
        "",
        "They are never trained and never cleared: their gradients take time and "
        "memory, and grow.",
        "Pass them to an optimizer, or freeze them with `requires_grad_(False)`. If "
        "the model was moved or wrapped after the optimizer was built, build the "
        "optimizer last.",
    )


def _stuck(scaler: ScalerFacts) -> bool:
    """Return whether the run ends in skips: its second half, if it is a short one."""
    patience = min(PATIENCE, max(scaler.steps // 2, _SOME))
    return count_stuck(scaler.skipped_row, 0, 0, patience) is not None


def _floor(facts: Facts) -> Finding | None:
    for scaler in facts.scalers:
        bottom = max(scaler.floor, 1.0)
        if _stuck(scaler) and scaler.scale <= bottom:
            return Finding(
                "floor",
                f"The scale has fallen to {scaler.scale:g}; the last "
                f"{scaler.skipped_row} steps were skipped.",
                scaler.step_at,
                "At this scale nothing overflows because of scaling: gradients are inf "
                "or NaN for another reason, and nothing is learned.",
                "Find the cause (`buoy.diagnose.first_nonfinite(model, step_fn)` names "
                "the module); if weights are NaN, go back to a checkpoint.",
            )
    return None


def _underflow(facts: Facts) -> Finding | None:
    bad = {n: s.zero for n, s in facts.underflow.items() if s.zero >= UNDERFLOW}
    if 2 * len(bad) < len(facts.underflow):
        # All zeros amid others that are fine: an expert that got nothing to do.
        bad = {name: zero for name, zero in bad.items() if zero < 1.0}
    if not bad:
        return None
    ranked = sorted(bad, key=lambda name: -bad[name])
    shown = ", ".join(f"`{name}` ({bad[name]:.0%})" for name in ranked[:_SHOWN])
    return Finding(
        "underflow",
        f"Gradients underflow to 0 in {len(bad)} parameters: {shown}.",
        "",
        "Gradients that are too small for FP16 at this scale are lost, and these "
        "layers learn only from the others.",
        'Use a larger scale: a higher `init_scale`, or `policy="headroom"`, which '
        "finds it. `scaler.measure_underflow(step_fn)` measures exactly what is lost.",
    )


def _scheduler(facts: Facts) -> Finding | None:
    for scheduler in facts.schedulers:
        nearly_all = 0.8 * scheduler.attempts - 1
        each_step = scheduler.attempts >= _SOME and scheduler.calls >= nearly_all
        if scheduler.after_skips and each_step:
            return Finding(
                "scheduler_on_skips",
                f"`{scheduler.kind}` advances although the step was skipped: "
                f"{scheduler.after_skips} of {scheduler.skips} times.",
                scheduler.call_at,
                "The learning rate runs ahead of training; warm-up may be over before "
                "the first update.",
                "With Buoy: `scaler.gate(scheduler)`, or `if "
                "scaler.last_step.applied`. Otherwise compare `scaler.get_scale()` "
                "before and after `update()`.",
            )
    return None


def _bf16_scaled(facts: Facts) -> Finding | None:
    if not facts.scaled_losses.get("bfloat16") or "float16" in facts.scaled_losses:
        return None
    return Finding(
        "bf16_scaled",
        "The loss is computed in BF16 and scaled.",
        facts.scaled_at,
        "BF16 has the range of FP32, so nothing underflows; scaling costs time and "
        "skips steps without need.",
        "Leave the scaler out: `GradScaler(enabled=False)`.",
    )


def _no_fp16(facts: Facts) -> Finding | None:
    if not facts.scaled_losses.get("float32") or "float16" in facts.scaled_losses:
        return None
    if "float16" in facts.autocast:
        return None
    return Finding(
        "no_fp16",
        "The loss is scaled, but nothing is computed in FP16.",
        facts.scaled_at,
        "Scaling protects nothing here. Probably `torch.autocast` is missing, or is "
        "for another device than the model's.",
        "Run the forward pass under `torch.autocast(device, torch.float16)`, or leave "
        "the scaler out: `GradScaler(enabled=False)`.",
    )


RULES: tuple[Callable[[Facts], Finding | None], ...] = (
    _direct_step,
    _forward_nonfinite,
    _clipped_scaled,
    _never_cleared,
    _fp16_unscaled,
    _update_missing,
    _update_doubled,
    _recreated,
    _floor,
    _unheld,
    _underflow,
    _scheduler,
    _bf16_scaled,
    _no_fp16,
)
