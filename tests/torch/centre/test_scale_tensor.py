"""The scale's tensor: written by others, set, bounded, saved; the rule follows it."""

import math

import pytest
import torch
from nets import OPTIMIZERS, loss_of, net, train

import buoy
from buoy import Seen
from buoy.torch import GradScaler

KINDS = ["sgd", "fused adamw"]


def started(kind="sgd", events=("ok", "ok"), **options):
    """Make a scaler that has stepped; give a function that goes on."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = GradScaler("cpu", **options)

    def go(*events):
        return [scale for scale, _ in train(scaler, model, optimizer, list(events))]

    go(*events)
    return scaler, go


def fill(tensor, value):
    """Write as torch's operators do: the tensor's version counts it."""
    tensor.fill_(value)


def fill_unseen(tensor, value):
    """Write as collectives do, which leave the version as it is."""
    tensor.data.fill_(value)


@pytest.mark.parametrize("write", [fill, fill_unseen])
@pytest.mark.parametrize("policy", [None, "backoff"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_others_write_is_followed(write, policy, kind):
    """By the next loss, its gradients and the rule; also after a move."""
    scaler, go = started(kind, policy=policy)
    write(scaler._scale, 64.0)
    assert go("ok", "inf", "ok") == [64.0, 32.0, 32.0]
    write(scaler._scale, 1024.0)
    assert go("inf", "ok") == [512.0, 512.0]
    assert scaler.last_step.applied
    assert scaler.last_step.scale == 512.0


class Powers(buoy.Backoff):
    """Starts at powers of two only."""

    def init(self, *, scale=None):
        if scale is not None and math.frexp(scale)[0] != 0.5:
            raise buoy.PolicyError(f"{scale} is no power of two")
        return super().init(scale=scale)


@pytest.mark.parametrize("policy", ["headroom", Powers()])
def test_a_policy_takes_the_nearest_that_it_can(policy):
    """It keeps powers of two; so does the tensor, then."""
    scaler, _ = started(policy=policy)
    scaler._scale.fill_(300.0)
    assert scaler.scale(torch.ones((), requires_grad=True)).item() == 256.0
    assert scaler.get_scale() == 256.0


@pytest.mark.parametrize("bad", [0.0, 2.0**-140, math.inf, math.nan])
@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_cannot_be_used_is_a_skip(bad, kind):
    """And the policy goes on from where it was."""
    scaler, go = started(kind, policy="backoff", events=["ok"])
    before = scaler.get_scale()
    scaler._scale.fill_(bad)
    assert go("ok") == [before / 2]
    assert scaler.last_step.skipped
    assert go("ok") == [before / 2]
    assert scaler.last_step.applied


@pytest.mark.parametrize("kind", KINDS)
def test_a_tracker_that_others_write_is_followed(kind):
    """The next finite step is the third, whoever counted."""
    scaler, go = started(kind, events=["ok"], init_scale=64.0, growth_interval=3)
    scaler._growth_tracker.fill_(2)
    assert go("ok", "ok", "ok", "ok") == [128.0, 128.0, 128.0, 256.0]


@pytest.mark.parametrize(
    ("policy", "first"), [("backoff", 300.0), ("headroom", 256.0), (Powers(), 256.0)]
)
@pytest.mark.parametrize("hidden", [False, True])
def test_a_first_scale_that_a_library_sets_is_taken_by_the_policy(
    policy, first, hidden, monkeypatch
):
    """As torch reads `_init_scale` only when the first loss is scaled."""
    if hidden:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    scaler = GradScaler("cpu", policy=policy)
    scaler._init_scale = 300.0
    assert scaler.scale(torch.ones((), requires_grad=True)).item() == first
    assert scaler.get_scale() == first


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [False, True])
def test_bounds_hold_wherever_the_scale_moves(kind, hidden, monkeypatch):
    """On the host, and by torch's kernel on the device."""
    if hidden:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    options = {"growth_interval": 1, "min_scale": 24.0, "max_scale": 100.0}
    scaler, go = started(kind, events=[], init_scale=64.0, **options)
    assert go("ok", "ok", "inf", "inf", "inf", "ok") == [100, 100, 50, 25, 24, 48]
    assert scaler.last_step.next_scale == 48.0


@pytest.mark.parametrize("value", [2.0**-30, 2.0**-100])
def test_a_scale_below_the_default_bounds_is_kept(value):
    """However it was set: the bounds that nobody gave make way."""
    scaler, go = started(init_scale=64.0)
    scaler.update(value)
    assert go("ok", "inf") == [value, value]
    state = scaler.state_dict()
    assert started(init_scale=value)[0].get_scale() == value
    for other, further in (started(init_scale=64.0), started(init_scale=value)):
        other.load_state_dict(state)
        assert further("ok", "inf", "ok") == [value, value, value]


@pytest.mark.parametrize(
    "options",
    [
        {"growth_interval": 1},
        {"growth_interval": 2, "max_scale": 100.0},
        {"growth_interval": 1, "init_scale": 2.0**126},
        {"growth_interval": 1, "init_scale": 2.0**126, "max_scale": 1.5 * 2.0**126},
        {"growth_interval": 0},
        {"growth_interval": 3, "growth_factor": 3.0, "backoff_factor": 0.3},
        {"growth_interval": 2, "min_scale": 20.0},
    ],
)
def test_torch_s_rule_as_a_policy_moves_as_it_does(options):
    """`scaler.policy` may be replayed: it gives the same scales."""
    options = {"init_scale": 64.0, **options}
    scaler, go = started(events=[], **options)
    policy = scaler.policy
    state, expected = policy.init(), []
    events = ["ok"] * 5 + ["inf"] * 2 + ["ok"] * 4
    for event in events:
        state = policy.update(state, Seen(finite=event == "ok"))
        expected.append(state.scale)
    large = options["init_scale"] > 2.0**100  # finite gradients would not be
    if large:
        scaler.scale(torch.ones((), requires_grad=True))
        for event, scale in zip(events, expected, strict=True):
            work = scaler._per_optimizer_states[0]
            found = torch.tensor(float(event != "ok"))
            work["found_inf_per_device"] = {torch.device("cpu"): found}
            scaler.update()
            assert scaler.get_scale() == scale
    else:
        assert go(*events) == expected


def test_a_policy_that_counts_nothing_has_counted_nothing():
    """Torch's own method asks for the count."""
    scaler, _ = started(policy="static")
    assert scaler._get_growth_tracker() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_s_state_is_saved_with_its_turn(kind):
    """Measurements are due at some turns, also after a restart."""
    scaler, go = started(kind, policy="backoff", events=["ok", "ok", "inf", "ok"])
    saved = scaler.state_dict()["buoy"]
    assert (saved["version"], saved["turn"]) == (1, 4)
    assert set(saved) == {"version", "policy", "state", "turn"}
    other, further = started(kind, policy="backoff")
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert go("ok", "inf") == further("ok", "inf")
    assert other.state_dict()["buoy"]["turn"] == 6


def test_a_loss_is_foreseen_again_after_loading():
    """What was scaled before belongs to another run."""
    scaler, _ = started(policy="loss_ahead", events=["ok"] * 20)
    state, before = scaler.state_dict(), scaler.get_scale()
    huge = torch.full((), 2.0**10, requires_grad=True)
    scaler.scale(huge)
    lowered = scaler.get_scale()
    scaler.load_state_dict(state)
    assert scaler.get_scale() == before > lowered
    scaler.scale(huge)
    assert scaler.get_scale() == lowered


@pytest.mark.parametrize("policy", [None, "backoff"])
def test_a_loaded_scale_replaces_one_that_others_wrote(policy):
    """Also if it is the one that the scaler knew before."""
    scaler, go = started(policy=policy)
    state, before = scaler.state_dict(), scaler.get_scale()
    scaler._scale.fill_(64.0)
    scaler.load_state_dict(state)
    assert go("ok", "inf") == [before, before / 2]


def test_nothing_of_a_policy_is_known_before_the_first_loss():
    """The scale is the policy's, and the tensor does not exist yet."""
    scaler = GradScaler("cpu", policy=buoy.Backoff(init_scale=8.0))
    assert scaler.get_scale() == 8.0
    assert scaler._scale is None
    assert loss_of(net(), 0).item() * 8.0 == scaler.scale(loss_of(net(), 0)).item()


class Moves(torch.overrides.TorchFunctionMode):
    """Note the devices that tensors are moved to."""

    def __init__(self):
        super().__init__()
        self.devices = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to:
            self.devices.append(kwargs["device"].type)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("device", "moves"), [("cpu", []), ("meta", ["meta"])])
def test_the_scale_is_moved_to_a_loss_on_another_device_only(device, moves):
    """A move costs as much as the rest of `scale`."""
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones((), requires_grad=True))
    with Moves() as seen:
        scaled = scaler.scale(torch.ones((), device=device, requires_grad=True))
    assert (scaled.device.type, seen.devices) == (device, moves)
