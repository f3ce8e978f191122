"""Make what the gradients showed the same on every rank, with one MAX all-reduce.

Every rank sends one small vector as soon as it has looked at its own gradients, and
waits for the answer where the decision is needed.  What must be equal everywhere is
sent together with its negative: the maximum of both tells whether it is.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from buoy._backends import torch as backend
from buoy._core.ops import single
from buoy.torch import aloud, apply, survey, words, words_ranks
from buoy.torch.errors import BuoyWarning
from buoy.torch.rule import Classic

if TYPE_CHECKING:
    from buoy.torch.contract import Contract

__all__ = [
    "NUMBERS",
    "disagreed",
    "foresee",
    "heal",
    "launch",
    "orderly",
    "settle",
]

# What is sent, in this order; then the last three once more, negated.
FOUND, AMAX, UNDERFLOW, LARGEST, GRADS, LOSSES, PLAN, SCALE, TURN, TRACKER = range(10)
NUMBERS = 13
_SAME = slice(SCALE, TRACKER + 1)
_NEGATED = slice(TRACKER + 1, NUMBERS)
_TURNS = 2**24  # float32 counts no further

Flags = dict[torch.device, torch.Tensor]


def launch(
    scaler: "Contract",
    record: dict[str, Any],
    found: Flags,
    largest: torch.Tensor | None = None,
) -> Flags:
    """Send off what this rank found; the flag becomes everybody's once settled."""
    vector = _vector(scaler, record, found, largest)
    scaler._ranks.note("agree")
    record["pending"] = scaler._ranks.ask("agree", vector, dist.ReduceOp.MAX)
    return {vector.device: vector[FOUND]}


def _vector(
    scaler: "Contract",
    record: dict[str, Any],
    found: Flags,
    largest: torch.Tensor | None,
) -> torch.Tensor:
    scale, tracker = scaler._check_scale_growth_tracker("step")
    home = scale.device
    flag = apply.combined(found, home)
    zero = torch.zeros((), dtype=torch.float32, device=home)
    one = torch.ones_like(zero)
    numbers = torch.stack(
        [
            zero if flag is None else flag.clamp(max=1.0).reshape(()),
            orderly(record.get("amax", zero)),
            record.get("underflow", zero),
            zero if largest is None else orderly(largest.to(home).float()),
            zero if flag is None else one,
            zero if scaler._assumed else one,
            record.get("plan", zero),
            scale.reshape(()),
            torch.full_like(zero, scaler._turn % _TURNS),
            tracker.float().reshape(()),
        ]
    )
    return torch.cat([numbers, numbers[_SAME].neg()])


def orderly(number: torch.Tensor) -> torch.Tensor:
    """Replace NaN, which no maximum is defined over, by inf."""
    return torch.nan_to_num(number, nan=torch.inf, posinf=torch.inf)


def settle(scaler: "Contract", record: dict[str, Any]) -> None:
    """Wait for the answer, and put it where this rank's own findings were."""
    vector = record.pop("pending").wait()
    if scaler._rule.wants:
        record["amax"] = vector[AMAX]
        if "underflow" in scaler._rule.wants and scaler._counts_underflow():
            record["underflow"] = vector[UNDERFLOW]
    record["largest"] = vector[LARGEST]
    if "plan" in record:
        record["plan"] = vector[PLAN]
    found = vector[FOUND]
    if backend.in_host_memory(vector) or scaler._heals:
        values = backend.values(vector)
        if any(a != -b for a, b in zip(values[_SAME], values[_NEGATED], strict=True)):
            disagreed(scaler, record)
            found = torch.ones_like(found)
        if not values[GRADS]:
            record["found_inf_per_device"] = {}
            return
        if not values[LOSSES]:
            raise words.before_scale("step", "_scale")
    else:
        # Nobody asks the device: ranks that differ skip, and hear of it later.
        gap = (vector[_SAME] + vector[_NEGATED]).sum()
        record["gap"] = gap
        scaler._gap = gap if scaler._gap is None else torch.maximum(scaler._gap, gap)
        found = (found + gap > 0).float()
    record["found_inf_per_device"] = {found.device: found}


def disagreed(scaler: "Contract", record: dict[str, Any]) -> None:
    """Say which ranks differ; raise, or prepare to go on from the smallest scale.

    All ranks get here together: they have read the same answer.
    """
    scale, tracker = scaler._check_scale_growth_tracker("step")
    own = [scale.item(), float(scaler._turn), tracker.item()]
    wide = torch.tensor(own, dtype=torch.float64, device="cpu")
    table = scaler._ranks.gather(wide).tolist()
    error = words_ranks.rank_mismatch(scaler._ranks.members(), table)
    if not scaler._heals:
        raise error
    aloud.warn(
        f"{error} Healed: this step is skipped, and all go on from the smallest scale.",
        BuoyWarning,
    )
    scales, turns, _ = zip(*table, strict=True)
    scaler._healing = (min(scales), int(max(turns)))
    record["norm"] = torch.full_like(scale, torch.inf)


def heal(scaler: "Contract", scale: float, turn: int) -> None:
    """Start afresh from the smallest scale, on every rank."""
    scaler._healing = None
    scaler._set_scale(scale)
    scaler._turn = turn
    _, tracker = scaler._check_scale_growth_tracker("update")
    tracker.zero_()
    if isinstance(scaler._rule, Classic):
        scaler._rule.learn(scaler, single(scale), 0)


def foresee(scaler: "Contract", loss: torch.Tensor | None) -> torch.Tensor | None:
    """Take the largest |loss| of all ranks; one without a loss takes part as well.

    Once per iteration, on the first loss.  Not inside a pipeline's schedule, nor in
    `Join`: there the ranks that have no loss are waiting for the gradients of those
    that have.
    """
    if scaler._piped or scaler._uneven or not getattr(scaler._rule, "fresh", False):
        return None
    home = scaler._home()
    if loss is None:
        own = torch.full((), -1.0, dtype=torch.float32, device=home)
    else:
        own = orderly(loss.detach().float().abs().to(home, non_blocking=True))
    agreed = scaler._ranks.largest("loss", own)
    seen = survey.seen_by_host(agreed)
    return None if seen is not None and seen < 0 else agreed.abs()
