"""`run`: the same batch again at a lower scale, instead of losing it."""

import contextlib
import math
import random

import numpy as np
import pytest
import torch
from nets import OPTIMIZERS, batch, loss_of, net
from torch import nn

from buoy import Verdict
from buoy._backends import torch as backend
from buoy.torch import BuoyWarning, CallOrderError, GradScaler, OptionError

STEPS = 40


def noisy_net():
    """Make a network with dropout and batch statistics."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3)
    )


def loss_in_half(model, number):
    """Let the gradient pass through FP16 where it leaves the loss."""
    x, y = batch(number)
    out = model(x).half().float()
    return (out - y).square().mean()


def train_plain(model, optimizer):
    torch.manual_seed(5)
    seen = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = loss_in_half(model, number)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def steps_of(optimizer):
    return {int(state["step"]) for state in optimizer.state.values()}


@pytest.mark.parametrize("kind", ["adamw", "fused adamw"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("policy", [None, "backoff", "headroom"])
def test_nothing_is_lost(kind, whole, policy):
    """As many updates as FP32, same order, same dropout, same statistics."""
    model, twin = noisy_net(), noisy_net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    other = OPTIMIZERS[kind](twin.parameters())
    wanted = train_plain(twin, other)
    scaler = GradScaler("cpu", policy=policy)
    scaler.guard(model)
    attempts, losses = [], []
    torch.manual_seed(5)
    for number in range(STEPS):
        if number % 5 == 2:  # inject: a scale at which FP16 overflows
            scaler.update(2.0**24)

        def step(number=number):
            attempts.append(number)
            if whole:
                optimizer.zero_grad()
            loss = loss_in_half(model, number)
            scaler.scale(loss).backward()
            if whole:
                scaler.step(optimizer)
                scaler.update()
            return loss.item()

        losses.append(scaler.run(step, *([] if whole else [optimizer])))

        assert scaler.last_step.applied

    assert {STEPS} == steps_of(optimizer) == steps_of(other)
    assert sorted(attempts) == attempts
    assert len(attempts) >= STEPS + 8
    assert STEPS == model[1].num_batches_tracked
    torch.testing.assert_close(losses, wanted, rtol=2e-2, atol=0)
    torch.testing.assert_close(
        model[1].running_var, twin[1].running_var, rtol=1e-2, atol=0
    )


@pytest.mark.parametrize("kind", ["sgd", "fused sgd"])
def test_a_step_that_leaves_clearing_to_its_caller_starts_again_without_gradients(
    kind, loop
):
    """What overflowed is not added to, and the update is that of the batch alone."""
    model, twin = net(), net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler, _, other = loop(kind, twin, init_scale=2.0**24)
    found = []

    def step():
        found.append([param.grad for param in model.parameters()])
        scaler.scale(loss_in_half(model, 0)).backward()
        scaler.step(optimizer)
        scaler.update()

    scaler.run(step)
    loss_in_half(twin, 0).backward()
    other.step()

    assert len(found) > 1
    assert all(grad is None for grads in found for grad in grads)
    assert scaler.last_step.applied
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-4)


def test_without_run_they_are_lost():
    """The same events, the old way: the test above can fail."""
    model = noisy_net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scaler = GradScaler("cpu", model=model)
    for number in range(STEPS):
        if number % 5 == 2:
            scaler.update(2.0**24)
        optimizer.zero_grad()
        scaler.scale(loss_in_half(model, number)).backward()
        scaler.step(optimizer)
        scaler.update()

    assert max(steps_of(optimizer)) < STEPS


def test_every_generator_repeats(loop):
    """Torch's, Python's and NumPy's."""
    scaler, model, optimizer = loop(init_scale=2.0**24)
    drawn = []

    def step():
        drawn.append(
            (
                torch.rand(1).item(),
                random.random(),
                float(np.random.random()),  # noqa: NPY002 - the one that users use
            )
        )
        scaler.scale(loss_in_half(model, 0)).backward()

    scaler.run(step, optimizer)

    assert len(drawn) > 2
    assert 1 == len(set(drawn))


def test_a_scale_that_is_far_too_high_falls_in_few_runs(loop):
    """Each divides by the square of what the one before has divided by."""
    scaler, model, optimizer = loop("adamw", init_scale=2.0**60)
    tries = []

    def step():
        tries.append(math.log2(scaler.get_scale()))
        scaler.scale(loss_in_half(model, 0)).backward()

    scaler.run(step, optimizer)

    assert [60.0, 59.0, 57.0, 53.0, 45.0, 29.0, -3.0] == tries
    assert scaler.last_step.applied
    assert 2.0**-3 == scaler.get_scale()


def test_a_static_scale_comes_back(loop):
    """It was lowered for one batch alone."""
    scaler, model, optimizer = loop("adamw", policy="static", init_scale=2.0**20)
    scaler.run(lambda: scaler.scale(loss_in_half(model, 0)).backward(), optimizer)

    assert scaler.last_step.applied
    assert 2.0**20 == scaler.get_scale()


@pytest.mark.parametrize("sync", ["auto", "never"])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "fused adamw"])
@pytest.mark.parametrize("policy", [None, "backoff", "static"])
def test_the_scale_that_succeeded_stays(sync, hidden, kind, policy, monkeypatch, loop):
    """Also where the scale and the outcome are on a device; a static one comes back."""
    if hidden:
        monkeypatch.setattr(backend, "in_host_memory", lambda tensor: False)
    weight = nn.Parameter(torch.ones(2))
    scaler, _, optimizer = loop(
        kind, weight, policy=policy, init_scale=2.0**20, sync=sync
    )

    def step():
        scaler.scale(weight.half().sum().float()).backward()

    for _ in range(2):
        scaler.run(step, optimizer)
        assert scaler.last_step.applied
        assert (2.0**20 if policy == "static" else 2.0**13) == scaler.get_scale()


@pytest.mark.parametrize("sync", ["auto", "never"])
@pytest.mark.parametrize(
    ("policy", "after"), [("static", 2.0**20), (None, 2.0**19), ("backoff", 2.0**19)]
)
@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
def test_used_up_retries_count_as_one_skip(
    sync, policy, after, error, hidden, monkeypatch, loop
):
    """A batch that overflows at any scale does not drive the scale down."""
    if hidden:  # as on a device
        monkeypatch.setattr(backend, "in_host_memory", lambda tensor: False)
    scaler, model, optimizer = loop(
        "adamw", policy=policy, init_scale=2.0**20, sync=sync
    )
    scaler.run(lambda: scaler.scale(loss_of(model, 0)).backward(), optimizer)
    attempts = []

    def step():
        attempts.append(1)
        if error and len(attempts) == 3:
            raise KeyError
        scaler.scale(loss_of(model, 0)).backward()
        next(model.parameters()).grad.fill_(math.inf)

    with pytest.raises(KeyError) if error else contextlib.nullcontext():
        scaler.run(step, optimizer, retries=3)

    assert len(attempts) == (3 if error else 4)
    assert after == scaler.get_scale()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [({"policy": "none"}, 1), ({"min_scale": 2.0**14}, 3)],
)
def test_the_lowest_scale_is_not_run_again(options, wanted, loop):
    """There is nothing to lower."""
    model, attempts = net(), []
    scaler, _, optimizer = loop("sgd", model, **options)

    def step():
        attempts.append(1)
        scaler.scale(loss_of(model, 0)).backward()
        next(model.parameters()).grad.fill_(math.inf)

    scaler.run(step, optimizer)

    assert wanted == len(attempts)


def test_what_no_scale_can_cure_is_not_run_again():
    """It comes back as a skip, after one attempt."""
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scaler, attempts = GradScaler("cpu"), []

    def step():
        attempts.append(1)
        scaler.scale(loss_of(model, 0) * math.nan).backward()

    scaler.run(step, optimizer)

    assert [1] == attempts
    assert Verdict.FORWARD_NONFINITE == scaler.last_step.verdict


def test_tries_are_bounded():
    """A gradient that overflows at any scale ends as a skip, and damages nothing."""
    model = net()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scaler, attempts = GradScaler("cpu"), []

    def step():
        attempts.append(1)
        scaler.scale(loss_of(model, 0)).backward()
        next(model.parameters()).grad.fill_(math.inf)

    scaler.run(step, optimizer, retries=3)

    assert 4 == len(attempts)
    assert not scaler.last_step.applied
    assert scaler.get_scale() > 0
    for mine, theirs in zip(before, model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def two_networks(skip):
    """Make two networks in two groups, of which the second overflows at first."""
    one, other = net(0), net(1)
    first = OPTIMIZERS["adamw"](one.parameters())
    second = OPTIMIZERS["adamw"](other.parameters())
    scaler = GradScaler("cpu", skip=skip)
    a, b = scaler.group("a"), scaler.group("b", init_scale=2.0**24)
    attempts = []

    def step():
        attempts.append(1)
        a.scale(loss_in_half(one, 0)).backward()
        b.scale(loss_in_half(other, 0)).backward()
        a.step(first)
        b.step(second)
        scaler.update()

    return scaler, step, (first, second), attempts


@pytest.mark.parametrize("grouped", [False, True])
def test_a_batch_with_an_unusual_loss_is_run_again(grouped, loop):
    """Whether its loss is an outlier depends on history; whether it fits does not."""
    weight = nn.Parameter(torch.ones(2))
    scaler, _, optimizer = loop("sgd", weight, lr=0.0, init_scale=2.0**4)
    one = scaler.group("a") if grouped else scaler
    attempts = []

    def step(height):
        attempts.append(height)
        optimizer.zero_grad()
        one.scale((weight.half() * height).sum().float()).backward()
        one.step(optimizer)
        scaler.update()

    for height in (1.0,) * 6 + (2.0**13,):
        scaler.run(lambda height=height: step(height))

    assert 1 < attempts.count(2.0**13)
    assert one.last_step.applied


def test_half_a_step_is_not_run_again():
    """Of independent optimizers one has stepped: that is told, once."""
    scaler, step, _, attempts = two_networks("independent")

    with pytest.warns(BuoyWarning, match="skip='joint'"):
        scaler.run(step)

    assert [1] == attempts


def test_a_joint_step_is_run_again():
    """Until both have stepped; the scale that was not at fault stays."""
    scaler, step, optimizers, attempts = two_networks("joint")

    scaler.run(step)

    assert len(attempts) > 2
    assert {1} == steps_of(optimizers[0]) == steps_of(optimizers[1])
    assert 2.0**16 == scaler.group("a").get_scale()


def test_disabled_runs_once(loop):
    """And steps."""
    scaler, model, optimizer = loop("adamw", enabled=False)
    result = scaler.run(
        lambda: scaler.scale(loss_of(model, 0)).backward() or 3, optimizer
    )

    assert 3 == result
    assert {1} == steps_of(optimizer)


def test_mistakes_are_told(loop):
    """Each with its cure."""
    scaler, model, optimizer = loop()

    def step():
        scaler.scale(loss_of(model, 0)).backward()

    with pytest.raises(CallOrderError, match=r"scaler.run\(step_fn, optimizer\)"):
        scaler.run(step)
    with pytest.raises(OptionError, match="`retries` must be"):
        scaler.run(step, optimizer, retries=-1)
    with pytest.raises(OptionError, match=r"scaler\.run"):
        scaler.group("a").run(step)
    with pytest.raises(OptionError, match="has scale groups"):
        scaler.run(step, optimizer)
    scaler = GradScaler("cpu")
    optimizer.zero_grad()
    step()
    scaler.unscale_(optimizer)
    with pytest.raises(CallOrderError, match="middle of an iteration"):
        scaler.run(step, optimizer)
