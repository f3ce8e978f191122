"""Stop anywhere, load, and the rest is bit-equal to the uninterrupted run."""

import contextlib
import io
import json
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from nets import OPTIMIZERS, net, train

import buoy
from buoy import StateVersionError
from buoy.torch import BuoyWarning, GradScaler

STEPS = 60
EVENTS = random.Random(3).choices(["ok", "inf", "nan"], [8, 1, 1], k=STEPS)
POLICIES = [
    None,
    "backoff",
    "megatron",
    "lognormal",
    "headroom",
    "static",
    buoy.Backoff(hysteresis=3, growth_interval=4, tolerance=0.2, init_scale=2.0**9),
]


def make(policy):
    """Make a scaler that moves often."""
    if policy is None:
        return GradScaler("cpu", growth_interval=3, init_scale=2.0**10)
    return GradScaler("cpu", policy=policy)


def through_file(scaler, model, optimizer):
    """Save all three and read them back as `torch.load` does by default."""
    file = io.BytesIO()
    everything = {
        "scaler": scaler.state_dict(),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(everything, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("kind", ["adamw", "fused adamw"])
def test_stopping_after_any_step_changes_nothing(policy, kind):
    """60 steps with overflows, stopped after every one of them."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = make(policy)
    saved = [through_file(scaler, model, optimizer)]
    whole = []
    for step, event in enumerate(EVENTS):
        whole += train(scaler, model, optimizer, [event], start=step)
        saved.append(through_file(scaler, model, optimizer))
    for stop in range(STEPS):
        other = net(7)
        loaded = OPTIMIZERS[kind](other.parameters())
        resumed = make(policy)
        if stop % 2:
            resumed.scale(torch.ones((), requires_grad=True))
        other.load_state_dict(saved[stop]["model"])
        loaded.load_state_dict(saved[stop]["optimizer"])
        resumed.load_state_dict(saved[stop]["scaler"])
        until = min(stop + 6, STEPS)
        rest = train(resumed, other, loaded, EVENTS[stop:until], start=stop)
        assert rest == whole[stop:until]
        assert resumed.state_dict() == saved[until]["scaler"]
        for name, value in other.state_dict().items():
            assert torch.equal(value, saved[until]["model"][name])


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_state_is_plain_json(policy):
    """Numbers, strings and lists only; it survives a trip through JSON."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = make(policy)
    train(scaler, model, optimizer, EVENTS[:9])
    state = scaler.state_dict()
    again = json.loads(json.dumps(state))
    assert again == state
    other = make(policy)
    other.load_state_dict(again)
    assert other.state_dict() == state


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_torchs_scaler_loads_ours_and_ours_torchs(policy):
    """A policy's state has torch's five entries, and the scale carries over."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = make(policy)
    train(scaler, model, optimizer, EVENTS[:9])
    stock = torch.amp.GradScaler("cpu")
    stock.load_state_dict(scaler.state_dict())
    assert stock.get_scale() == scaler.get_scale()
    stock.scale(torch.ones(()))
    stock._scale.fill_(64.0)
    for used in (False, True):
        other = make(policy)
        if used:
            other.scale(torch.ones((), requires_grad=True))
        with contextlib.ExitStack() as said:
            if policy is not None:
                said.enter_context(pytest.warns(BuoyWarning, match="only the scale"))
            other.load_state_dict(stock.state_dict())
        assert other.get_scale() == 64.0
        other.scale(torch.ones((), requires_grad=True))
        assert other._scale.item() == 64.0


def test_a_scale_that_was_written_before_is_replaced():
    """Even by the scale that the policy has had all along."""
    scaler = GradScaler("cpu", policy=buoy.Backoff(init_scale=64.0))
    scaler.scale(torch.ones((), requires_grad=True))
    saved = scaler.state_dict()
    scaler._scale.fill_(8.0)
    scaler.load_state_dict(saved)
    assert scaler.get_scale() == 64.0


def test_the_first_loss_after_loading_is_foreseen():
    """Also where the loss of an iteration that is given up was."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    policy = buoy.LossAhead("backoff")
    scaler = GradScaler("cpu", policy=policy)
    for _ in range(20):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    usual, saved = scaler.get_scale(), scaler.state_dict()
    for loaded in (scaler, GradScaler("cpu", policy=policy)):
        loaded.scale(weight.sum())
        loaded.load_state_dict(saved)
        loaded.scale(weight.sum() * 2.0**10)
        assert loaded.get_scale() == usual * 2.0**-10


def test_a_state_may_lack_what_its_policy_does_not_count():
    """No turn is the first turn; a policy without a count of clean steps has none."""
    state = GradScaler("cpu", policy="lognormal").state_dict()
    assert state["_growth_tracker"] == 0
    del state["buoy"]["turn"]
    scaler = GradScaler("cpu", policy="lognormal")
    scaler.load_state_dict(state)
    assert scaler.state_dict()["buoy"]["turn"] == 0


def test_a_scale_below_one_is_loaded():
    """It is within torch's bounds, so there is no warning."""
    scaler = GradScaler("cpu")
    scaler.load_state_dict(GradScaler("cpu", init_scale=0.25).state_dict())
    assert scaler.get_scale() == 0.25


def test_another_policys_state_gives_its_scale_and_says_so():
    """Changing the policy between runs is allowed, and not silent."""
    source = GradScaler("cpu", policy=buoy.Static(init_scale=32.0))
    target = GradScaler("cpu", policy="backoff")
    with pytest.warns(BuoyWarning, match="'Static', this .* 'Backoff': only the scale"):
        target.load_state_dict(source.state_dict())
    assert target.get_scale() == 32.0


def test_a_state_of_the_same_policy_with_other_options_says_so():
    """Its fields are others, so only the scale is of use."""
    source = GradScaler("cpu", policy=buoy.Backoff(init_scale=32.0, hysteresis=3))
    target = GradScaler("cpu", policy="backoff")
    with pytest.warns(BuoyWarning, match="'Backoff' with other options, this scaler"):
        target.load_state_dict(source.state_dict())
    assert target.get_scale() == 32.0


def test_another_releases_state_is_refused():
    """An unknown version is an error, never a guess."""
    source = GradScaler("cpu", policy="backoff")
    state = source.state_dict()
    state["buoy"]["version"] = 99
    with pytest.raises(StateVersionError, match="another release"):
        source.load_state_dict(state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("policy", [None, "backoff"])
def test_distributed_checkpoint_round_trip(policy, tmp_path):
    """A scaler is `Stateful`: torch's distributed checkpoint saves it as it is."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = make(policy)
    train(scaler, model, optimizer, ["ok", "inf", "ok"])
    dcp.save({"scaler": scaler}, checkpoint_id=tmp_path / "saved", no_dist=True)
    other = make(policy)
    dcp.load({"scaler": other}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert other.state_dict() == scaler.state_dict()
