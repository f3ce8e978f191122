"""Saved policies and states come back as they were, and bad ones are refused."""

import json
import math
from dataclasses import dataclass, make_dataclass
from typing import Any

import pytest

import buoy
from buoy._core.policies.presets import PRESETS, Quirks
from tests.golden import load


@pytest.mark.parametrize("name", buoy.policies())
def test_every_policy_and_state_survives_json(name):
    """Encoding to JSON text and back is the identity, mid-run too."""
    policy = buoy.policy(name)
    state = policy.init()
    for finite in (True, False, True):
        state = policy.update(state, buoy.Seen(finite=finite, amax_log2=3.0))

    for value in (policy, state):
        assert value == buoy.decode(json.loads(json.dumps(buoy.encode(value))))


def test_non_finite_numbers_survive_json():
    """inf and NaN, which JSON lacks, are kept as words."""
    policy = buoy.policy("fsdp", init_scale=3e38, growth_interval=1)
    state = policy.update(policy.init(), buoy.Seen(finite=True))
    saved = json.loads(json.dumps(buoy.encode(state), allow_nan=False))

    assert math.inf == state.scale
    assert state == buoy.decode(saved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"buoy": 99}, "version 99"),
        ({"buoy": None}, "version None"),
        ({"buoy": True}, "version True"),
        ({"kind": "Exec"}, "Unknown kind 'Exec'"),
        ({"colour": 1}, "unknown \\['colour'\\]"),
        ({"growth_factor": 0.5}, "growth_factor"),
        ({"init_scale": "os.system"}, "`init_scale` must be a number"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(change, words):
    """Another version, class, field or value is an error, never a guess."""
    saved = buoy.encode(buoy.Backoff()) | change

    with pytest.raises(buoy.StateVersionError, match=words):
        buoy.decode(saved)


def test_missing_fields_and_foreign_values_are_refused():
    """A state without its scale, and what is no dict at all, are refused."""
    with pytest.raises(buoy.StateVersionError, match="missing \\['budget', 'cl"):
        buoy.decode({"buoy": 1, "kind": "BackoffState", "scale": 1.0})
    state = buoy.encode(buoy.Backoff().init())
    for scale in (None, "nan", [1.0], True):
        with pytest.raises(buoy.StateVersionError, match="`scale` must be a number"):
            buoy.decode(state | {"scale": scale})
    with pytest.raises(buoy.StateVersionError, match="quirks"):
        buoy.decode(buoy.encode(buoy.Backoff()) | {"quirks": None})
    for foreign in (None, 3, [], {}, {"scale": 1.0}):
        with pytest.raises(buoy.StateVersionError, match="not a policy or state"):
            buoy.decode(foreign)
    with pytest.raises(buoy.StateVersionError, match="Only policies and states"):
        buoy.encode(3.0)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_saved_before_they_had_a_class_of_their_own_are_read(preset):
    """Such a file calls the class `Backoff`; it is read as the preset."""
    policy = buoy.policy(preset)
    saved = buoy.encode(policy)
    if saved["kind"] == "PeerBackoff":
        saved["kind"] = "Backoff"

    assert policy == buoy.decode(json.loads(json.dumps(saved)))


def test_the_plain_rule_saved_with_fields_of_the_presets_is_read():
    """Fields that `Backoff` had and did not use are dropped; others are refused."""
    policy = buoy.Backoff(growth_interval=7)
    unused = {"growth_step": None, "quirks": buoy.encode(Quirks())}
    del unused["quirks"]["buoy"]
    saved = buoy.encode(policy) | unused

    assert policy == buoy.decode(json.loads(json.dumps(saved)))
    with pytest.raises(buoy.StateVersionError, match="unknown \\['colour'\\]"):
        buoy.decode(saved | {"colour": 1})


@pytest.mark.parametrize("source", ["torch", "apex", "megatron"])
def test_saved_states_of_peers_are_read_as_the_replay_ends(source):
    """What the real scaler saved at the end equals our state after the same events."""
    checked = 0
    for trace in load()[source]:
        scale = float((trace.checkpoint or {}).get("scale", 1.0))
        known = trace.checkpoint and trace.collapsed_at is None
        if not known or not 0 < scale < math.inf or "loss_scale" in trace.params:
            continue
        policy = trace.policy()
        state = policy.init()
        for event in trace.seen:
            state = policy.update(state, buoy.Seen(finite=event == "1"))
        given = {} if source == "torch" else trace.params
        found = buoy.import_state(trace.checkpoint, **given)

        assert source == found.source
        assert (state.scale, state.clean_steps) == (
            found.state.scale,
            found.state.clean_steps,
        )
        if source != "torch":
            assert state.budget == found.state.budget
        checked += 1

    assert checked > 50


def test_apex_scalers_are_picked_by_loss():
    """`amp.state_dict()` holds one scaler per loss."""
    saved = {
        "loss_scaler0": {"loss_scale": 8.0, "unskipped": 3},
        "loss_scaler1": {"loss_scale": 4.0, "unskipped": 5},
    }

    assert 8.0 == buoy.import_state(saved).state.scale
    assert 5 == buoy.import_state(saved, loss_id=1).state.clean_steps


class DynamicLossScaler:
    """The attributes of DeepSpeed's scaler, which its checkpoints pickle."""

    def __init__(self, **attributes):
        self.__dict__ |= attributes


@pytest.mark.parametrize("clean", [0, 1, 2, 3, 4, 7])
def test_deepspeeds_scaler_goes_on_where_it_was(clean):
    """Its two iteration counters become our one, at every phase."""
    policy = buoy.policy("deepspeed", scale_window=3, delayed_shift=2)
    state = policy.init()
    for event in "0" + "1" * clean:
        state = policy.update(state, buoy.Seen(finite=event == "1"))
    scaler = DynamicLossScaler(
        cur_scale=state.scale,
        cur_iter=clean + 1,
        last_overflow_iter=0,
        scale_factor=2.0,
        scale_window=3,
        min_scale=1,
        delayed_shift=2,
        cur_hysteresis=state.budget,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=True,
        dtype=None,
    )

    assert state == buoy.import_state(scaler).state


def test_a_keras_state_is_read():
    """Its two numbers are enough; configuration comes as the peer's parameters."""
    saved = {"step_counter": 4, "dynamic_scale": 64.0}
    keras = buoy.import_state(saved, dynamic_growth_steps=10)

    assert ("keras", 64.0, 4) == (
        keras.source,
        keras.state.scale,
        keras.state.clean_steps,
    )
    assert 10 == keras.policy.growth_interval


def test_torch_states_go_on_as_torch_does():
    """Odd factors are multiplied as torch's kernel multiplies them."""
    saved = {
        "scale": 1000.0999755859375,
        "growth_factor": 1.1,
        "backoff_factor": 0.7,
        "growth_interval": 1,
        "_growth_tracker": 0,
    }
    found = buoy.import_state(saved)
    peer = buoy.policy(
        "torch", init_scale=1000.1, growth_factor=1.1, backoff_factor=0.7,
        growth_interval=1,
    )  # fmt: skip
    ours, theirs = found.state, peer.init()
    for finite in [True, True, False, True, False, True] * 5:
        ours = found.policy.update(ours, buoy.Seen(finite=finite))
        theirs = peer.update(theirs, buoy.Seen(finite=finite))

        assert theirs.scale == ours.scale


@pytest.mark.parametrize("change", [{"scale": "abc"}, {"_growth_tracker": None}])
def test_saved_nonsense_is_refused_in_words(change):
    """A value that is no number is a state error that shows it."""
    saved = {
        "scale": 8.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
    }
    with pytest.raises(buoy.StateVersionError, match="cannot be read"):
        buoy.import_state(saved | change)
    with pytest.raises(buoy.StateVersionError, match="cannot be read"):
        buoy.import_state(saved, foo=3)


def test_collapsed_and_unknown_states_are_refused():
    """A scale of 0, a missing or unknown key and a foreign object are explained."""
    torch = {
        "scale": 0.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
    }
    with pytest.raises(buoy.StateVersionError, match="had fallen to 0"):
        buoy.import_state(torch)
    with pytest.raises(buoy.StateVersionError, match="which library saved this"):
        buoy.import_state(torch | {"new_in_torch_3": 1})
    with pytest.raises(buoy.StateVersionError, match="unknown \\['new_in_torch_3'\\]"):
        buoy.import_state(torch | {"new_in_torch_3": 1}, "torch")
    with pytest.raises(buoy.StateVersionError, match="Known: torch"):
        buoy.import_state(torch, "caffe")
    with pytest.raises(buoy.StateVersionError, match="must be a dict"):
        buoy.import_state(3)


@pytest.mark.parametrize("source", [None, "flax"])
def test_states_of_other_libraries_are_refused_with_what_to_do(source):
    """The sources that are read, and the page that has a line for the others."""
    flax = {"fin_steps": 7, "scale": 32.0}
    with pytest.raises(buoy.StateVersionError) as caught:
        buoy.import_state(flax, source)

    message = str(caught.value)
    assert "torch, apex, deepspeed, megatron, keras." in message
    assert "docs/migrate/index.md" in message


def test_presets_name_their_bugs():
    """A preset whose peer has a bug names it in its docstring."""
    documented = [
        name for name, row in PRESETS.items() if "Bug" in (row.build.__doc__ or "")
    ]

    assert len(documented) >= 15


@buoy.register
@dataclass(frozen=True)
class _Sizes:
    scale: float
    sizes: tuple[float, ...]
    last: Any


def test_tuples_and_numbers_of_numpy_survive_json():
    """A number comes back as Python's own, inf and NaN inside a tuple, too."""
    np = pytest.importorskip("numpy")
    state = _Sizes(2.0, (1.0, math.inf), np.float32(0.5))

    saved = json.loads(json.dumps(buoy.encode(state)))
    assert _Sizes(2.0, (1.0, math.inf), 0.5) == buoy.decode(saved)


def test_what_cannot_be_found_again_cannot_be_registered():
    """No dataclass, or one of a name that is taken."""
    with pytest.raises(buoy.StateVersionError, match="Only dataclasses"):
        buoy.register(int)
    other = make_dataclass("Backoff", ["scale"])
    with pytest.raises(buoy.StateVersionError, match="registered already, by buoy"):
        buoy.register(other)


def test_a_tensor_of_several_numbers_is_no_number():
    """Saved states hold one number where Buoy needs one."""
    np = pytest.importorskip("numpy")
    torch = {
        "scale": np.ones(2),
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
    }

    with pytest.raises(buoy.StateVersionError, match="`scale` .* must be one number"):
        buoy.import_state(torch)


DEEPSPEED = {
    "cur_scale": 256.0,
    "cur_iter": 12,
    "last_overflow_iter": 4,
    "scale_factor": 2.0,
    "scale_window": 1000,
}


def test_deepspeeds_fp16_optimizer_is_read_without_hysteresis():
    """Its state is a dict that counts none."""
    found = buoy.import_state(DEEPSPEED)

    assert 256.0 == found.state.scale
    assert found.state.budget is None
    with pytest.raises(buoy.StateVersionError, match="scale factor is 2, not 3.0"):
        buoy.import_state(DEEPSPEED | {"scale_factor": 3.0})
