"""Rounding without masters: unbiased, reproducible, and enough to train with."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from nets import batch, net

from benchmarks.rounding import final_loss
from buoy._backends.torch.rounding import nearest, stochastic
from buoy.torch import GradScaler, MasterWeights

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def neighbours(x, dtype):
    """Give the two numbers of a format that enclose another."""
    rounded = torch.tensor(x).to(dtype).double().item()
    toward = math.inf if rounded < x else -math.inf
    other = torch.nextafter(
        torch.tensor(rounded, dtype=dtype), torch.tensor(toward, dtype=dtype)
    )
    return sorted([rounded, rounded if rounded == x else other.double().item()])


@DTYPES
@settings(max_examples=150, deadline=None)
@given(x=st.floats(-60000, 60000, width=32), seed=st.integers(0, 9))
def test_chance_gives_one_of_the_two_neighbours(dtype, x, seed):
    """Down to the subnormals; and what the format holds stays as it is."""
    chance = torch.Generator().manual_seed(seed)
    low, high = neighbours(x, dtype)
    got = stochastic(torch.full((8,), x), dtype, chance).double()

    assert set(got.tolist()) <= {low, high}
    exact = torch.tensor([low, high], dtype=torch.float32)
    assert torch.equal(stochastic(exact, dtype, chance).float(), exact)


@DTYPES
@pytest.mark.parametrize(
    "x", [1.0001, -3.14159, 1023.7, 3.3e-5, 6.1e-8, 1e-9, -0.49999, 60001.0]
)
def test_chance_is_right_on_average(dtype, x):
    """The mean of 40000 is within five standard deviations of the number."""
    chance = torch.Generator().manual_seed(1)
    low, high = neighbours(x, dtype)
    got = stochastic(torch.full((40_000,), x), dtype, chance).double()
    odds = (torch.tensor(x).double().item() - low) / (high - low)
    deviation = (high - low) * math.sqrt(odds * (1 - odds) / 40_000)

    assert abs(got.mean().item() - torch.tensor(x).double().item()) <= 5 * deviation
    assert abs(nearest(torch.tensor(x), dtype).double().item() - x) > 0


@DTYPES
def test_neither_way_makes_an_inf_of_a_number_nor_hides_one(dtype):
    """Finite saturates; inf and NaN stay what they are."""
    limit = torch.finfo(dtype).max
    top = torch.tensor([3.4e38, -3.4e38])
    ends = torch.tensor([math.inf, -math.inf, math.nan])
    chance = torch.Generator().manual_seed(0)

    assert nearest(top, dtype).tolist() == [limit, -limit]
    assert stochastic(top, dtype, chance).tolist() == [limit, -limit]
    assert str(stochastic(ends, dtype, chance).tolist()) == "[inf, -inf, nan]"


def run(steps, *, stop=None, rounding="stochastic", events=(), fused=False):
    """Train a BF16 network; optionally stop, save, and go on from the file."""

    def fresh(seed):
        model = net(seed).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
        return model, optimizer, MasterWeights(optimizer, rounding=rounding)

    model, optimizer, _ = fresh(0)
    scaler = GradScaler("cpu", policy="static", init_scale=4.0)
    for step in range(steps):
        if step == stop:
            saved = model.state_dict(), optimizer.state_dict()
            model, optimizer, _ = fresh(3)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        torch.randn(step)  # whatever else draws from torch's own generator
        optimizer.zero_grad()
        x, _ = batch(step)
        loss = model(x.bfloat16()).float().square().mean()
        scaler.scale(loss.float()).backward()
        if step in events:
            model[0].weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore:The loss was computed in BF16")
def test_chance_is_the_same_on_every_replica_and_after_a_resume():
    """It depends on the seed and the count of steps alone."""
    torch.manual_seed(1)
    one = run(6)
    torch.manual_seed(2)

    assert torch.equal(one, run(6))
    assert torch.equal(one, run(6, stop=3))
    assert not torch.equal(one, run(6, rounding="nearest"))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.filterwarnings("ignore:The loss was computed in BF16")
def test_a_skipped_step_uses_up_no_chance(fused):
    """A run with an overflow ends like one that never saw it."""
    spoiled = run(5, events={2}, fused=fused)
    torch.manual_seed(0)
    model = net(0).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    MasterWeights(optimizer, rounding="stochastic")
    for step in (0, 1, 3, 4):
        optimizer.zero_grad()
        x, _ = batch(step)
        (4.0 * model(x.bfloat16()).float().square().mean()).backward()
        for param in model.parameters():
            param.grad /= 4.0
        optimizer.step()

    assert torch.equal(
        spoiled, torch.cat([p.detach().flatten() for p in model.parameters()])
    )


def test_no_masters_are_kept():
    """Between steps there is nothing in FP32 but the optimizer's state."""
    model = net().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    masters = MasterWeights(optimizer, rounding="stochastic")
    model(batch(0)[0].bfloat16()).sum().backward()
    optimizer.step()

    assert [] == masters.masters
    assert masters.of(model[0].weight) is None
    assert "master_param" not in optimizer.state_dict()["state"][0]
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.float32
    assert 0 == sum(pair.master.numel() for pair in masters._pairs.values())


@pytest.mark.slow
def test_chance_trains_where_the_nearest_stands_still():
    """As in FP32, and as with masters; `benchmarks/rounding.py` prints more."""
    ends = {way: final_loss(way, 600) for way in ("fp32", "nearest", "stochastic")}
    ends["masters"] = final_loss("masters", 600)

    assert abs(ends["stochastic"] - ends["fp32"]) < 0.05 * ends["fp32"]
    assert abs(ends["masters"] - ends["fp32"]) < 0.05 * ends["fp32"]
    assert ends["nearest"] > 5 * ends["fp32"]
