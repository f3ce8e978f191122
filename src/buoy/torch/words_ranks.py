"""The longer messages about ranks: absent ones, and such as differ."""

from collections import Counter
from collections.abc import Sequence

from buoy.torch import questions
from buoy.torch.errors import AbsentRankError, RankMismatchError

__all__ = ["absent", "different_questions", "late_mismatch", "rank_mismatch"]


def absent(
    present: tuple[list[int], list[int]] | None, cause: BaseException
) -> AbsentRankError:
    """Name the ranks that did not come to agree."""
    here, missing = present or ([], [])
    if present is None:
        who = "Some rank did not come, perhaps the one that hosts the store: it is gone"
    elif missing:
        who = f"{_ranks(missing)} did not come; {_ranks(here)} did"
    else:
        who = "All ranks are there, but the connection between them failed"
    reason = str(cause).strip().splitlines()[0] if str(cause).strip() else repr(cause)
    return AbsentRankError(
        f"Ranks could not agree on this step. {who}. Nothing was applied and the scale "
        "was not moved. Either that rank has died (look at its log), or it takes "
        "fewer steps than the others: uneven inputs, a `step` under `if rank == 0`, an "
        "exception that only it caught. Every rank must call `scaler.step` equally "
        "often; one without data steps without gradients, or the scaler is named to "
        "`Join([model, scaler])`. If only some ranks train "
        "together, pass them as `process_group=`; a policy that looks at the loss "
        "needs `scaler.loss_fn` in a pipeline. torch.distributed said: "
        f"{reason}",
        tuple(missing),
    )


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}{more}"


def rank_mismatch(ranks: list[int], table: list[list[float]]) -> RankMismatchError:
    """Say which ranks differ from most others, and in what."""
    held = {
        rank: (scale, int(turn), int(count))
        for rank, (scale, turn, count) in zip(ranks, table, strict=True)
    }
    usual, _ = Counter(held.values()).most_common(1)[0]
    others = [rank for rank in sorted(held) if held[rank] != usual]
    shown = "; ".join(f"rank {rank} has {_held(held[rank])}" for rank in others[:8])
    more = f"; {len(others) - 8} more ranks differ" if len(others) > 8 else ""
    count = len(held) - len(others)
    return RankMismatchError(
        f"Ranks hold different scales: {shown}{more}; the other {count} of {len(held)} "
        f"have {_held(usual)}. Gradients would be divided by "
        "scales that they were not multiplied by; nothing was applied. Load the same "
        "checkpoint on every rank and call `update` equally often, or pass "
        "`on_mismatch='heal'` to go on from the smallest scale.",
        held,
    )


def different_questions(ranks: list[int], codes: list[float]) -> RankMismatchError:
    """Say which ranks do something else than the others, and what."""
    doing = dict(zip(ranks, map(questions.asked, codes), strict=True))
    kinds = dict.fromkeys(doing[rank] for rank in sorted(doing))
    shown = "; ".join(
        f"{_ranks([rank for rank in sorted(doing) if doing[rank] == kind])}: {kind}"
        for kind in kinds
    )
    return RankMismatchError(
        f"Ranks do different things in the same step: {shown}. Their numbers cannot be "
        "put together, so nothing was applied. Every rank must make the same calls in "
        "the same order: scalers with the same policy, `clip_grad_norm_` on all or on "
        "none, optimizers one after the other. In `Join` a rank without data repeats "
        "its own last iteration.",
    )


def late_mismatch(scale: float) -> RankMismatchError:
    """Say that ranks differed some steps ago, when nobody had asked the device."""
    return RankMismatchError(
        f"Ranks hold different scales or counters, this one a scale of {scale:g}. The "
        "steps since then were skipped on every rank; nothing was applied. Load the "
        "same checkpoint on every rank and call `update` equally often, or pass "
        "`on_mismatch='heal'` to go on from the smallest scale."
    )


def _held(values: tuple[float, int, int]) -> str:
    scale, turn, count = values
    return f"scale {scale:g} after {turn} updates ({count} clean steps)"
