"""A damaged state is refused by name and value, and nothing of it is loaded."""

import copy
import math
import re
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import buoy
from buoy.torch import BuoyWarning, GradScaler

POLICIES = ["backoff", "headroom", "lognormal", "megatron", "static"]
FIELDS = ["scale", "growth_factor", "backoff_factor", "growth_interval"]


def plain():
    return GradScaler("cpu", init_scale=1024.0)


def spiky():
    return GradScaler("cpu", spike_guard="skip")


def grouped():
    scaler = GradScaler("cpu", policy="backoff")
    scaler.group("critic", policy="headroom")
    scaler.group("actor")
    return scaler


def of_policy(name):
    return lambda: GradScaler("cpu", policy=name)


MAKERS = [plain, spiky, grouped, *map(of_policy, POLICIES)]


def step(scaler):
    """Train one step, which uses every number of a state."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def used(make, steps=3):
    """Make a scaler that has trained."""
    scaler = make()
    for _ in range(steps):
        step(scaler)
    return scaler


def refused(scaler, state, match=None):
    """Load; nothing may have changed once it raised."""
    before = scaler.state_dict()
    with pytest.raises(buoy.BuoyError, match=match) as caught:
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before
    step(scaler)
    return str(caught.value)


@pytest.mark.parametrize("make", MAKERS)
def test_what_was_loaded_is_saved_again(make):
    """At once, so that a refused state can be undone."""
    saved, scaler = used(make).state_dict(), used(make, 1)
    scaler.load_state_dict(saved)
    assert scaler.state_dict() == saved


@pytest.mark.parametrize("state", [None, 1, "state", [], [("scale", 1.0)], (), {}])
@pytest.mark.parametrize("make", [plain, spiky, of_policy("headroom")])
def test_what_is_no_state_at_all_is_refused(make, state):
    """None, a number, a list: the message says what was passed."""
    message = refused(used(make), state)
    assert type(state).__name__ in message or "empty" in message


@pytest.mark.parametrize(
    "state", [{"model": 1}, {"scale": 2.0}, {"buoy": {"version": 1}}]
)
def test_the_state_of_something_else_is_refused(state):
    """The message names the first entry that is missing."""
    message = refused(used(plain), state)
    assert "missing" in message
    assert "'growth_factor'" in message or "'scale'" in message


@pytest.mark.parametrize(
    "own", [{}, None, 1, [], "x", {"version": 2}, {"version": None}]
)
def test_an_entry_of_another_release_is_refused(own):
    """Also an empty one: what is not understood is not left out."""
    refused(used(plain), {**plain().state_dict(), "buoy": own}, "another release")


@pytest.mark.parametrize("field", [*FIELDS, "_growth_tracker"])
@pytest.mark.parametrize(
    "value",
    [None, "2", "x", [], [1.0], {}, 10**400, 1j, torch.ones(2)],
    ids=lambda x: f"{x!r:.9}",
)
def test_a_number_that_is_none_is_named_with_its_value(field, value):
    """Each of torch's five entries, replaced by what is no number."""
    message = refused(used(plain), {**plain().state_dict(), field: value})
    assert f"'{field}'" in message
    assert f"{value!r:.20}" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("growth_factor", -2.0),
        ("growth_factor", 0.0),
        ("backoff_factor", -0.5),
        ("backoff_factor", math.nan),
        ("growth_factor", math.inf),
        ("growth_interval", 1.5),
        ("growth_interval", math.nan),
        ("growth_interval", math.inf),
        ("_growth_tracker", -1),
        ("_growth_tracker", 0.5),
        ("_growth_tracker", 2**40),
        ("_growth_tracker", True),
    ],
)
def test_a_number_that_cannot_be_is_named_with_its_value(field, value):
    """At once, and not steps later."""
    message = refused(used(plain), {**plain().state_dict(), field: value})
    assert f"'{field}'" in message
    assert repr(value) in message


@pytest.mark.parametrize("turn", [-1, 2**31 - 1, 1.0, True, "1", None])
def test_a_turn_that_is_no_count_is_named_with_its_value(turn):
    """Measurements are due at certain turns."""
    scaler = used(of_policy("headroom"))
    state = scaler.state_dict()
    state["buoy"]["turn"] = turn
    assert f"'turn' is {turn!r}" in refused(scaler, state)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 0.0, 1e300])
def test_a_scale_that_cannot_be_used_is_replaced_and_said(scale):
    """Torch saves a scale of 0 or inf itself, after a run that went wrong."""
    scaler = used(plain)
    with pytest.warns(BuoyWarning, match=re.escape(f"scale of {scale:g}")):
        scaler.load_state_dict({**plain().state_dict(), "scale": scale})
    assert 0.0 < scaler.get_scale() < math.inf
    step(scaler)


@pytest.mark.parametrize("saved", [None, *POLICIES])
@pytest.mark.parametrize("follows", [None, *POLICIES])
def test_the_state_of_another_policy_is_said_in_every_direction(saved, follows):
    """The scale is taken over, and the rest is not."""
    state = GradScaler("cpu", policy=saved).state_dict()
    state["scale"] = 512.0
    if "buoy" in state:
        state["buoy"]["state"]["scale"] = 512.0
    scaler = GradScaler("cpu", policy=follows)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler.load_state_dict(state)
    said = [str(one.message) for one in caught]
    assert any("only the scale" in one for one in said) == (saved != follows)
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("make", [spiky, grouped])
@pytest.mark.parametrize(
    "state", [1, "x", [1], [[1.0]], {"critic": 1}, {"names": 3}, True]
)
def test_a_damaged_state_of_a_feature_is_refused_whole(make, state):
    """Neither the scale nor another feature takes anything of it."""
    scaler, saved = used(make), used(make, 5).state_dict()
    saved["scale"] = 2.0
    own = saved["buoy"]
    parts = own.get("parts", own)
    key = next(name for name in parts if name in ("spikes", "groups"))
    parts[key] = state
    message = refused(scaler, saved, "nothing was loaded")
    assert f"'{key}'" in message


def test_no_group_is_loaded_if_one_is_damaged():
    """Whichever comes first."""
    for name in ("critic", "actor"):
        scaler, saved = used(grouped), used(grouped, 5).state_dict()
        for one in ("critic", "actor"):
            saved["buoy"]["groups"][one]["scale"] = 2.0
        saved["buoy"]["groups"][name]["growth_factor"] = "x"
        message = refused(scaler, saved)
        assert f"{name!r}" in message
        assert "'growth_factor' is 'x'" in message


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.just(10**400),
    st.floats(),
    st.sampled_from(["", "nan", "inf", "x"]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["kind", "x", "buoy"]), st.integers(), max_size=2),
)


def places(state, path=()):
    """List the paths to everything inside a state."""
    found = [path] if path else []
    if isinstance(state, dict | list):
        for key in state if isinstance(state, dict) else range(len(state)):
            found += places(state[key], (*path, key))
    return found


def damaged(state, path, value, *, delete):
    """Replace or delete what is at the end of a path."""
    state = copy.deepcopy(state)
    inside = state
    for key in path[:-1]:
        inside = inside[key]
    if delete:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return state


SAVED = [(make, used(make).state_dict()) for make in MAKERS]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_whatever_was_damaged_no_foreign_error_escapes(data):
    """Any entry of any scaler's state, replaced by anything or deleted."""
    make, state = data.draw(st.sampled_from(SAVED), label="scaler")
    other = data.draw(st.sampled_from([make, make, *MAKERS]), label="loads")
    path = data.draw(st.sampled_from(places(state)), label="entry")
    junk, delete = data.draw(JUNK), data.draw(st.booleans(), label="delete")
    state = damaged(state, path, junk, delete=delete)
    scaler = used(other, 1)
    before = scaler.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BuoyWarning)
        try:
            scaler.load_state_dict(state)
        except buoy.BuoyError:
            assert scaler.state_dict() == before
        assert 0.0 < scaler.get_scale() < math.inf
        for _ in range(2):
            step(scaler)
        assert 0.0 < scaler.get_scale() < math.inf
