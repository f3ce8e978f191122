"""Damaged checkpoints of other scalers: an error that names field and value."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import buoy
from buoy._core.policies.importers import SOURCES, import_state

TORCH = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 7,
}
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(10**400, 10**401),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scale", None),
        ("scale", 10**400),
        ("scale", [1.0]),
        ("growth_interval", math.inf),
        ("growth_interval", "2000"),
        ("growth_factor", math.nan),
        ("_growth_tracker", -1),
        ("_growth_tracker", math.inf),
    ],
)
def test_a_damaged_field_is_named_with_its_value(field: str, value: Any) -> None:
    """At once, and not when the step comes at which the number matters."""
    with pytest.raises(buoy.StateVersionError) as caught:
        import_state({**TORCH, field: value})
    assert f"`{field}`" in str(caught.value)
    assert f"{value!r:.40}" in str(caught.value)


def test_a_state_that_contains_itself_is_refused() -> None:
    """Not by Python's limit of recursion."""
    saved: dict[str, Any] = {}
    saved["loss_scaler"] = saved
    with pytest.raises(buoy.StateVersionError, match="contain itself"):
        import_state(saved)


@settings(max_examples=300)
@given(data=st.data())
def test_whatever_a_checkpoint_holds_no_foreign_error_escapes(data: Any) -> None:
    """Every source, any of its fields replaced by anything."""
    row = SOURCES[data.draw(st.sampled_from(sorted(SOURCES)))]
    fields = sorted(row.needs | row.knows)
    numbers = st.one_of(JUNK, st.sampled_from([0, 1, 2, 1000, 0.5, 65536.0]))
    saved = {name: data.draw(numbers) for name in fields}
    try:
        found = import_state(saved)
    except buoy.BuoyError:
        return
    assert 0.0 < found.state.scale < math.inf
