"""Layouts in which torch's own scalers fail, reproduced; Buoy's agrees in each.

Should a newer torch pass one of these, the first half of its test will say so.
"""

import math

import pytest
import tasks
from layouts import LAYOUTS, OTHERS, Event

pytestmark = pytest.mark.slow  # starts processes

# layout, optimizer, torch's scaler, where the overflow is, what torch does
FAILURES = {
    "a parameter outside DDP": ("ddp and more", "sgd", "stock", Event(1, 0, 0), "part"),
    "fused under FSDP1": ("fsdp1 flat", "fused", "sharded", Event(1, 0, 0), "part"),
    "FSDP2 with plain parameters": (
        "fsdp2 mixed", "sgd", "stock", Event(1, 0, 0), "RuntimeError",
    ),
    "tensor parallel with a plain norm": (
        "tp mixed", "sgd", "stock", Event(1, 3, 0), "RuntimeError",
    ),
    "tensor parallel, first gradient replicated": (
        "tp bare", "sgd", "stock", Event(1, 2, 0), "part",
    ),
    "two dimensions": ("fsdp2 x tp", "sgd", "stock", Event(1, 2, 0), "part"),
    "two meshes": ("experts", "sgd", "stock", Event(3, 0, 0), "part"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_of_torchs_is_none_of_ours(name, crew_of):
    """Torch's ranks part or raise; ours do the same on every rank."""
    layout, kind, which, event, outcome = FAILURES[name]
    event = event._replace(value=math.inf)
    crew = crew_of({**LAYOUTS, **OTHERS}[layout].size)

    theirs = crew.outcomes(tasks.with_scaler, layout, kind, which, event, False, 1)
    if outcome == "part":
        assert 1 < len(set(map(tuple, theirs)))
    else:
        assert {outcome} == {error.kind for error in theirs}

    ours = crew.run(tasks.with_scaler, layout, kind, "buoy", event, False)
    assert [[512.0, 512.0]] * len(ours) == ours


def test_the_first_stage_of_a_pipeline_needs_no_loss(crew_of):
    """Torch's scaler asserts there."""
    crew, event = crew_of(2), Event(0, 0, math.inf)

    theirs = crew.outcomes(tasks.with_scaler, "gpipe", "sgd", "stock", event, False, 1)
    assert "AssertionError" == theirs[0].kind

    ours = crew.run(tasks.with_scaler, "gpipe", "sgd", "buoy", event, False)
    assert [[512.0, 512.0]] * 2 == ours


def test_stages_do_not_drift_apart(crew_of):
    """Torch's scaler, made ready on every stage, unscales them by different scales."""
    crew, event = crew_of(2), Event(0, 0, math.inf)

    theirs = crew.run(tasks.with_scaler, "1f1b", "sgd", "stock", event, True)
    assert theirs[0] != theirs[1]

    ours = crew.run(tasks.with_scaler, "1f1b", "sgd", "buoy", event, True)
    assert [[512.0, 512.0]] * 2 == ours
