"""Local scales: a network that no one scale fits trains like in FP32."""

import copy
import json
import random

import pytest
import torch
from nets import OPTIMIZERS, net
from no_host_reads import no_host_reads
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks import local_scales as steep
from buoy.torch import GradScaler, OptionError, local_scales


@pytest.fixture(scope="module")
def wanted():
    """The loss that FP32 reaches."""
    loss, applied = steep.in_fp32()
    assert steep.STEPS == applied
    return loss


@pytest.mark.slow
def test_no_one_scale_trains_it(wanted):
    """Every power of two from 2^-24 to 2^40 ends far from FP32."""
    for exponent in range(-24, 41):
        loss, applied = steep.with_one_scale(exponent, hopeless=10)

        assert loss > 1.2 * wanted, (exponent, applied)


@pytest.mark.parametrize("policy", [None, "headroom"])
def test_no_policy_trains_it_either(policy, wanted):
    """A scale that moves finds no better place.

    Headroom keeps below the overflow, where all gradients are zero: it is stuck.
    """
    scaler = GradScaler("cpu", policy=policy, on_stuck=lambda stuck: None)
    loss, _ = steep.train(scaler)

    assert loss > 1.2 * wanted


@pytest.mark.parametrize("policy", [None, "headroom", "static"])
def test_local_scales_do(policy, wanted):
    """Within 2 % of FP32, whatever moves the global scale."""
    options = {"init_scale": 2.0**10} if policy == "static" else {}
    loss, applied = steep.train(GradScaler("cpu", policy=policy, **options), local=True)

    assert abs(loss / wanted - 1) < 0.02
    assert steep.STEPS == applied


def test_they_take_away_the_gain_and_nothing_else():
    """FP16 with a gain of 8 and local scales is FP16 without the gain, bit for bit."""
    steep_one, _ = steep.train(GradScaler("cpu"), local=True)
    flat, _ = steep.train(GradScaler("cpu"), gain=1.0)

    assert flat == steep_one


@pytest.mark.slow
def test_they_lift_gradients_that_fade(wanted):
    """The other way round: an eighth per block."""
    loss, _ = steep.train(GradScaler("cpu"), local=True, gain=0.125)
    without, _ = steep.train(GradScaler("cpu"), gain=0.125)

    assert abs(loss / wanted - 1) < 0.02 < abs(without / wanted - 1)


def test_two_steps_find_the_factors():
    """Skips at the start are few, and factors follow the slope."""
    model = steep.Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    scaler = GradScaler("cpu")
    local = local_scales(model, "blocks", scaler=scaler)
    x, y = steep.data()
    applied = []
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
        scaler.step(optimizer)
        applied.append(scaler.last_step.applied)
        scaler.update()

    assert applied.count(False) <= 3
    assert 14 == len(local.factors) == len(local.names)
    assert ("stem", "blocks.0") == local.names[:2]
    assert 2.0**30 < local.factors[12] / local.factors[1] < 2.0**40


# -- exactness ------------------------------------------------------------------------


class Inner(nn.Module):
    """A block that takes a keyword and gives two tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, *, shift=None):
        out = torch.tanh(self.linear(x))
        return (out if shift is None else out + shift), out * 2.0


class Tangled(nn.Module):
    """Skips over blocks, uses outputs twice, writes in place, calls a block again."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.token = nn.Parameter(torch.randn(6))
        self.stem = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Inner() for _ in range(4))
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        start = self.stem(x) + self.token
        one, side = self.blocks[0](start)
        two, _ = self.blocks[1](one, shift=side)
        two = two.relu_()  # in place, between two blocks
        three, late = self.blocks[2](two)
        three, _ = self.blocks[2](three, shift=one)  # the same block again
        four, _ = checkpoint(self.blocks[3], three, use_reentrant=False)
        five, _ = checkpoint(self.blocks[3], four, use_reentrant=True)
        return self.head(torch.cat([five + start, side * late], 1))


def gradients(model, scale=1.0):
    torch.manual_seed(5)
    x = torch.randn(8, 4)
    model.zero_grad()
    (model(x).square().mean() * scale).backward()
    return {name: param.grad.clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_what_they_were(seed):
    """Whatever the factors and however blocks are wired: bit for bit."""
    model = Tangled()
    plain = gradients(model)
    local = local_scales(model, "blocks")
    state = local.state_dict()
    draw = random.Random(seed)
    state["exponents"] = [float(draw.randint(-20, 20)) for _ in local.names]
    local.load_state_dict(state)
    before = local.factors

    found = gradients(model)

    assert before == tuple(2.0**x for x in state["exponents"])
    assert local.factors != before  # and they follow
    for name, grad in found.items():
        assert torch.equal(plain[name], grad), name
    local.remove()
    assert torch.equal(plain["stem.weight"], gradients(model)["stem.weight"])


def test_clipping_sees_true_norms():
    """The norm is that of the plain gradients."""
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    x = torch.randn(5, 6)
    model(x).square().mean().backward()
    wanted = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.zero_grad()
    scaler = GradScaler("cpu")
    local = local_scales(model, nn.Linear, scaler=scaler)
    state = local.state_dict()
    local.load_state_dict({**state, "exponents": [9.0, -7.0]})
    scaler.scale(model(x).square().mean()).backward()

    assert wanted == scaler.clip_grad_norm_(optimizer, 0.5)


# -- state ----------------------------------------------------------------------------


def run(scaler, model, optimizer, steps):
    x, y = steep.data()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss = nn.functional.mse_loss(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stop", [0, 1, 2, 5])
@pytest.mark.parametrize("early", [False, True])
def test_resuming_is_exact(stop, early):
    """Factors are in the scaler's state; blocks may be chosen before or after."""
    model = steep.Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu")
    local = local_scales(model, "blocks", scaler=scaler)
    run(scaler, model, optimizer, stop)
    twin = steep.Net()
    twin.load_state_dict(model.state_dict())
    other = torch.optim.Adam(twin.parameters(), lr=1e-3)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    saved = json.loads(json.dumps(scaler.state_dict()))
    resumed = GradScaler("cpu")
    if early:
        again = local_scales(twin, "blocks", scaler=resumed)
    resumed.load_state_dict(saved)
    if not early:
        again = local_scales(twin, "blocks", scaler=resumed)

    assert run(scaler, model, optimizer, 5) == run(resumed, twin, other, 5)
    assert scaler.state_dict() == resumed.state_dict()
    assert local.factors == again.factors
    torch.amp.GradScaler("cpu").load_state_dict(saved)


def test_they_wait_for_nobody():
    """Levels, guesses and factors stay on the device."""
    model = steep.Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    scaler = GradScaler("cpu")
    local = local_scales(model, "blocks", scaler=scaler)
    x, y = steep.data()
    with no_host_reads(hidden=True):
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                out = model(x)
            scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
            scaler.step(optimizer)
            scaler.update()

    assert local.factors[1] < 2.0**-20


# -- mistakes -------------------------------------------------------------------------


def tied():
    model = Tangled()
    model.blocks[1].linear.weight = model.blocks[0].linear.weight
    return model, "blocks"


def tied_outside():
    model = Tangled()
    model.other = nn.Linear(6, 6)
    model.other.weight = model.blocks[0].linear.weight
    return model, "blocks"


def nested():
    model = Tangled()
    return model, [model.blocks[0], model.blocks[0].linear]


def half():
    return Tangled().half(), "blocks"


MISTAKES = {
    tied: "Untie them",
    tied_outside: "Untie them",
    nested: "pass blocks that are not nested",
    half: "torch.autocast",
    lambda: (Tangled(), "layers"): "name of the ModuleList",
    lambda: (Tangled(), nn.Conv2d): "or their class",
    lambda: (Tangled(), 3): "order of the forward pass",
    lambda: (Tangled(), [nn.Linear(6, 6)]): "model as it is now",
    lambda: ([1], "blocks"): "torch.nn.Module",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told(mistake):
    """Each with its cure."""
    with pytest.raises(OptionError, match=MISTAKES[mistake]):
        local_scales(*mistake())


def test_a_block_that_writes_into_its_input_is_refused():
    """Its gradient outside would be that of the old values."""
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    )
    local_scales(model, [model[0], model[1]])
    with pytest.raises(OptionError, match="inplace=False"):
        model(torch.ones(2, 4))


def test_a_state_of_other_blocks_is_refused():
    """It would be taken for these."""
    local = local_scales(Tangled(), "blocks")
    other = local_scales(net(), nn.Linear)
    with pytest.raises(OptionError, match="same blocks"):
        other.load_state_dict(local.state_dict())
