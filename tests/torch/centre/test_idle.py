"""A run that learns nothing says so, although every step is applied."""

import logging

import pytest
import torch

import buoy
from buoy.torch import GradScaler

HIDDEN = pytest.mark.parametrize("visible", [True, False])


def train(scaler, factors, clip=None):
    """Step once per factor, of the gradients."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for factor in factors:
        optimizer.zero_grad()
        scaler.scale(weight.sum() * factor).backward()
        if clip is not None:
            scaler.clip_grad_norm_(optimizer, clip)
        scaler.step(optimizer)
        scaler.update()


@HIDDEN
def test_a_scale_at_its_floor_is_stuck(visible, monkeypatch, caplog):
    """NaN drives it down; FP16 gradients are zero there, and it rises slowly."""
    if not visible:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda _: False)
    caplog.set_level(logging.INFO)
    alarms = []
    scaler = GradScaler("cpu", on_stuck=alarms.append, patience=60)
    train(scaler, [float("nan")] * 45 + [1.0] * 100)
    _ = scaler.last_step.applied
    assert [stuck.zeros for stuck in alarms] == [60]
    assert "at the lowest scale, where FP16 gradients are 0" in str(alarms[0])
    assert any("fell to 2^-24" in record.getMessage() for record in caplog.records)
    assert not any("settled" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("policy", "clip"), [(None, 1.0), ("headroom", None), ("headroom", 1.0)]
)
def test_gradients_of_zero_are_stuck(policy, clip):
    """Whether the norm was measured, or only the largest gradient."""
    alarms = []
    scaler = GradScaler("cpu", policy=policy, on_stuck=alarms.append, patience=20)
    train(scaler, [1.0] * 30 + [0.0] * 19 + [1.0], clip)
    assert alarms == []
    train(scaler, [0.0] * 30, clip)
    assert [stuck.zeros for stuck in alarms] == [20]


@pytest.mark.parametrize(("policy", "clip"), [("headroom", None), (None, 1.0)])
def test_gradients_that_move_no_weight_are_stuck_at_the_highest_scale(policy, clip):
    """Their size counts without the scale, whichever measure of it there is."""
    alarms = []
    options = {"policy": policy, "init_scale": 2.0**64, "on_stuck": alarms.append}
    train(GradScaler("cpu", patience=20, **options), [2.0**-38] * 30, clip)
    assert alarms == []
    train(GradScaler("cpu", patience=20, **options), [2.0**-60] * 30, clip)
    assert [stuck.zeros for stuck in alarms] == [20]
    assert "a scale of 2^64 or more" in str(alarms[0])


@HIDDEN
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("managed", [True, False])
def test_zeros_are_found_under_torchs_rule(visible, fused, managed, monkeypatch):
    """Nothing else measures the gradients: few steps do, and after zeros all."""
    if not visible:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda _: False)
    alarms = []
    scaler = GradScaler("cpu", on_stuck=alarms.append, patience=20, managed=managed)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.0, fused=fused)
    for step in range(600):
        optimizer.zero_grad()
        # Zero at single steps among those that are looked at, and from step 480 on.
        zero = step in {15, 31, 63, 127, 255} or step >= 480
        scaler.scale(weight.sum() * float(not zero)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 511:
            assert alarms == []
    assert [stuck.zeros for stuck in alarms] == [20]


@pytest.mark.parametrize("start", [0, 20])
def test_zeros_from_the_start_are_found_early(start):
    alarms = []
    scaler = GradScaler("cpu", on_stuck=alarms.append, patience=20)
    train(scaler, [1.0] * start + [0.0] * 60)
    assert [stuck.zeros for stuck in alarms] == [20]


@pytest.mark.parametrize("clip", [True, False])
def test_zeros_of_one_optimizer_alone_are_not_stuck(clip):
    """The other one's gradients are not measured, or are not zero."""
    alarms = []
    scaler = GradScaler("cpu", on_stuck=alarms.append, patience=20)
    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    first, second = (torch.optim.SGD([weight], lr=0.0) for weight in weights)
    for _ in range(200):
        for weight in weights:
            weight.grad = None
        scaler.scale(weights[0].sum() * 0.0 + weights[1].sum()).backward()
        if clip:
            scaler.clip_grad_norm_(first, 1.0)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    assert alarms == []


def test_steps_of_unknown_size_are_not_stuck():
    """Torch's rule without clipping measures few of them."""
    alarms = []
    scaler = GradScaler("cpu", on_stuck=alarms.append, patience=20)
    train(scaler, [1.0] * 30)
    assert alarms == []


class Measuring(buoy.Backoff):
    """Wants the largest gradient, and uses it for nothing."""

    wants = frozenset({"amax_log2"})


def test_sizes_count_at_the_scale_that_gradients_were_multiplied_by():
    """Not at the next one, which has just reached 2^64."""
    alarms = []
    policy = Measuring(init_scale=2.0**63, growth_interval=1)
    scaler = GradScaler("cpu", policy=policy, patience=1, on_stuck=alarms.append)
    train(scaler, [1.5 * 2.0**-40])
    assert scaler.get_scale() == 2.0**64
    assert alarms == []
