"""Non-finite values never reach the weights, and the scale never leaves its bounds."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from nets import OPTIMIZERS, loss_of, net, spoil, train

from buoy.torch import (
    GradScaler,
    OptionError,
    Stuck,
    StuckError,
    StuckWarning,
)

HIDDEN = pytest.mark.parametrize("visible", [True, False])


@pytest.fixture
def hide(monkeypatch):
    """Make the CPU behave like a device whose memory the host cannot see."""
    return lambda: monkeypatch.setattr(
        "buoy._backends.torch.in_host_memory", lambda tensor: False
    )


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@HIDDEN
def test_a_permanent_nan_never_damages_anything(kind, visible, hide, loop):
    """200 NaN losses: the scale stays above 0, the weights stay, then on."""
    if not visible:
        hide()
    alarms = []
    scaler, model, optimizer = loop(kind, on_stuck=alarms.append)
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(200):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step) * float("nan")).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**-24
    assert all(
        torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
    )
    assert len(alarms) == 1
    assert alarms[0].verdict == "forward_nonfinite"
    train(scaler, model, optimizer, ["ok", "ok"])
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not torch.equal(before[0], next(model.parameters()))


@pytest.mark.parametrize("kind", ["sgd", "fused sgd", "fused adamw"])
@pytest.mark.parametrize("way", ["step", "unscale", "clip"])
@HIDDEN
def test_overflow_made_by_unscaling_is_found(kind, way, visible, hide, loop):
    """A scale so small that 1/scale overflows a finite gradient skips the step."""
    if not visible:
        hide()
    for scale, grad in ((2.0**-20, 1e35), (1e-39, 1.0), (1e-39, 0.0)):
        scaler, weight, optimizer = loop(kind, torch.ones(3))
        scaler.scale(weight.sum()).backward()
        scaler._scale.fill_(scale)  # whoever did that: such a start is refused
        weight.grad.fill_(grad)
        if way == "unscale":
            scaler.unscale_(optimizer)
        elif way == "clip":
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert not scaler.last_step.applied
        assert torch.equal(weight.detach(), torch.ones(3))


@settings(max_examples=120, deadline=None)
@given(
    kind=st.sampled_from(sorted(OPTIMIZERS)),
    events=st.lists(st.sampled_from(["ok", "inf", "-inf", "nan"]), max_size=30),
    backoff=st.sampled_from([0.5, 0.01, 0.9]),
    interval=st.integers(1, 3),
    clip=st.booleans(),
)
def test_any_sequence_of_events_leaves_all_finite_and_within_bounds(
    kind, events, backoff, interval, clip
):
    """Weights, state and scale stay finite; each step has exactly one verdict."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = GradScaler(
        "cpu",
        init_scale=8.0,
        backoff_factor=backoff,
        growth_interval=interval,
        min_scale=2.0**-4,
        max_scale=64.0,
    )
    for step, event in enumerate(events):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        spoil(model, event)
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert 2.0**-4 <= scaler.get_scale() <= 64.0
        assert scaler.last_step.applied == (event == "ok")
        assert (scaler.last_step.verdict == "applied") == (event == "ok")
    for p in model.parameters():
        assert torch.isfinite(p).all()
        for value in optimizer.state[p].values():
            assert torch.isfinite(torch.as_tensor(value)).all()


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@HIDDEN
def test_a_run_with_overflows_ends_like_one_without_those_batches(
    kind, visible, hide, loop
):
    """A skipped step leaves no trace but in the scaler."""
    if not visible:
        hide()
    events = ["inf", "ok", "nan", "ok", "ok", "inf", "inf", "ok"]
    with_bad, without = net(), net()
    first = OPTIMIZERS[kind](with_bad.parameters())
    scaler, _, second = loop(kind, without, init_scale=64.0)
    plain = GradScaler("cpu", init_scale=64.0)
    for step, event in enumerate(events):
        train(scaler, with_bad, first, [event], start=step)
        if event == "ok":
            train(plain, without, second, [event], start=step)
    for p, q in zip(with_bad.parameters(), without.parameters(), strict=True):
        assert torch.equal(p, q)
        for name, value in second.state[q].items():
            assert torch.equal(first.state[p][name], value), name


@pytest.mark.parametrize("nesterov", [False, True])
def test_fused_sgd_survives_an_overflow_on_its_first_step(nesterov):
    """Momentum never comes from uninitialised memory; it equals the unfused run."""
    results = []
    for fused in (True, False):
        model = net()
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=0.05,
            momentum=0.9,
            nesterov=nesterov,
            weight_decay=0.01,
            fused=fused,
        )
        scaler = GradScaler("cpu", init_scale=64.0)
        train(scaler, model, optimizer, ["inf", "nan", "ok", "ok", "inf", "ok"])
        results.append(model)
    for p, q in zip(results[0].parameters(), results[1].parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_fused_sgd_with_dampening_is_refused():
    """Only the device would know whether its momentum has begun."""
    model = net()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, dampening=0.5, fused=True
    )
    scaler = GradScaler("cpu", init_scale=64.0)
    scaler.scale(loss_of(model, 0)).backward()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(OptionError, match="fused=False"):
        scaler.step(optimizer)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("fused", [True, False])
def test_fused_sgd_with_momentum_learns_through_a_natural_warm_up(fused, loop):
    """FP16 autocast, the default scale, and the overflows that this brings."""
    scaler, model, optimizer = loop("momentum", lr=0.01, fused=fused)
    source = torch.Generator().manual_seed(0)
    x = torch.randn(16, 6, generator=source) * 4
    y = torch.randn(16, 3, generator=source) * 40
    losses, skipped = [], 0
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = (model(x) - y).pow(2).sum(1).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.last_step.skipped
        losses.append(loss.item())
    assert skipped > 0
    assert losses[-1] < losses[0]
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize(
    "bounds",
    [
        {"min_scale": 0.0},
        {"min_scale": -1.0},
        {"max_scale": math.inf},
        {"min_scale": 4.0, "max_scale": 2.0},
        {"max_scale": 2.0},
        {"min_scale": 2.0**20},
    ],
)
def test_bounds_that_cannot_hold_are_refused(bounds):
    """Not positive, not finite, crossed, or with the start outside of them."""
    with pytest.raises(OptionError):
        GradScaler("cpu", **bounds)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e39])
def test_a_start_that_cannot_work_is_refused(value):
    """Torch takes them and then writes NaN into the weights."""
    with pytest.raises(OptionError, match="init_scale"):
        GradScaler("cpu", init_scale=value)


def test_stuck_fires_once_per_episode():
    """A second alarm comes only after training has recovered in between."""
    alarms: list[Stuck] = []
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", on_stuck=alarms.append, patience=5, model=model)
    train(scaler, model, optimizer, ["inf"] * 30)
    assert len(alarms) == 1
    assert "5 steps in a row" in str(alarms[0])
    assert "2.bias" in str(alarms[0])
    train(scaler, model, optimizer, ["ok"] * 25 + ["inf"] * 4)
    assert len(alarms) == 1
    train(scaler, model, optimizer, ["inf"])
    assert len(alarms) == 2


def test_stuck_also_means_a_large_share_of_skips(loop):
    """Two of three steps lost for long is no better than a row."""
    alarms: list[Stuck] = []
    scaler, model, optimizer = loop(lr=0.1, on_stuck=alarms.append, patience=6)
    train(scaler, model, optimizer, ["inf", "inf", "ok"] * 10)
    assert len(alarms) == 1
    assert "of the last 24 steps" in str(alarms[0])


def test_stuck_warns_by_default(loop):
    """One warning, with the verdict in words."""
    scaler, model, optimizer = loop(lr=0.1, patience=3)
    with pytest.warns(StuckWarning, match="scale_too_high") as caught:
        train(scaler, model, optimizer, ["inf"] * 10)
    assert len(caught) == 1


def test_stuck_raises_if_asked_and_can_be_survived(loop):
    """After catching the error the loop goes on where it was."""
    scaler, model, optimizer = loop(lr=0.1, patience=3, on_stuck="raise")
    with pytest.raises(StuckError, match="3 steps in a row") as caught:
        train(scaler, model, optimizer, ["inf"] * 10)
    assert isinstance(caught.value, ArithmeticError)
    assert caught.value.verdict == "scale_too_high"
    assert train(scaler, model, optimizer, ["ok"]) == [(8192.0, 1)]


@pytest.mark.parametrize(
    "options", [{"on_stuck": "shout"}, {"patience": 0}, {"sync": "x"}]
)
def test_bad_options_are_refused_by_name(options):
    """The message has the option, the value and what is accepted."""
    with pytest.raises(OptionError, match=next(iter(options))):
        GradScaler("cpu", **options)
