"""Buffers of a skipped step do not count."""

import copy
import math

import pytest
import torch
from nets import OPTIMIZERS, batch
from no_host_reads import no_host_reads
from torch import nn

from buoy.torch import GradScaler, OptionError


class Counting(nn.Module):
    """Replaces its buffer instead of writing into it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + len(x)
        return x


def model_with_buffers():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), Counting(), nn.Tanh(), nn.Linear(8, 3)
    )


def buffers(model):
    return {name: value.clone() for name, value in model.named_buffers()}


def step(scaler, model, optimizer, number, *, bad=False):
    optimizer.zero_grad()
    x, y = batch(number)
    loss = (model(x) - y).square().mean()
    scaler.scale(loss * (math.inf if bad else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("kind", ["adamw", "fused adamw"])
@pytest.mark.parametrize("sync", ["auto", "never"])
def test_a_run_with_skips_ends_like_one_without(kind, sync, loop):
    """Weights and buffers, running statistics and counters: bit for bit."""
    model, twin = model_with_buffers(), model_with_buffers()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler, _, other = loop(kind, twin, sync=sync, init_scale=4.0)
    plain = GradScaler("cpu", sync=sync, init_scale=4.0)
    scaler.guard(model)
    for number in range(12):
        bad = number % 3 == 1
        step(scaler, model, optimizer, number, bad=bad)
        if not bad:
            step(plain, twin, other, number)

    for name, value in twin.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_without_a_guard_they_are_lost():
    """The test above can fail."""
    model = model_with_buffers()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    before = buffers(model)

    step(GradScaler("cpu"), model, optimizer, 0, bad=True)

    assert not torch.equal(before["1.running_mean"], model[1].running_mean)


@pytest.mark.parametrize(("kind", "sync"), [("fused adamw", "auto"), ("sgd", "never")])
def test_guarded_buffers_are_not_read_on_the_host(kind, sync, loop):
    """Buffers are selected on the device."""
    model = model_with_buffers()
    scaler, _, optimizer = loop(kind, model, sync=sync)
    scaler.guard(model)
    step(scaler, model, optimizer, 0)
    before = buffers(model)
    steps = [v["step"] for v in optimizer.state.values() if "step" in v]

    with no_host_reads(allowed=steps):
        step(scaler, model, optimizer, 1, bad=True)

    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name


def test_a_model_follows_its_own_optimizer(loop):
    """With two networks the one that stepped keeps its statistics."""
    one, two = model_with_buffers(), model_with_buffers()
    first = OPTIMIZERS["sgd"](one.parameters())
    scaler, _, second = loop("sgd", two)
    scaler.guard(one, two)
    before = buffers(two)
    x, _ = batch(0)
    scaler.scale(one(x).mean()).backward()
    scaler.scale(two(x).mean() * math.inf).backward()
    scaler.step(first)
    scaler.step(second)
    scaler.update()

    assert 1 == one[1].num_batches_tracked
    for name, value in two.named_buffers():
        assert torch.equal(value, before[name]), name


def test_parts_of_a_model_may_be_called_alone(loop):
    """A forward pass that goes around the model's own is seen as well."""
    model = model_with_buffers()
    scaler, _, optimizer = loop("sgd", model)
    scaler.guard(model)
    before = buffers(model)
    x, _ = batch(0)
    hidden = model[1](model[0](x))
    scaler.scale(model[4](hidden).mean() * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()

    assert torch.equal(before["1.running_mean"], model[1].running_mean)


def test_buffers_loaded_between_steps_stay(loop):
    """What was written before the forward pass is what a skip goes back to."""
    model = model_with_buffers()
    scaler, _, optimizer = loop("sgd", model)
    scaler.guard(model)
    step(scaler, model, optimizer, 0)
    state = copy.deepcopy(model.state_dict())
    state["1.running_mean"].fill_(7.0)
    model.load_state_dict(state)

    step(scaler, model, optimizer, 1, bad=True)

    assert torch.equal(torch.full((8,), 7.0), model[1].running_mean)


def validate(model):
    model.eval()
    model(batch(50)[0])
    model.train()


def update_statistics(model):
    torch.optim.swa_utils.update_bn([batch(51)[0]], model)


@pytest.mark.parametrize("between", [validate, update_statistics])
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("sync", ["auto", "never"])
def test_what_is_done_between_iterations_stays(between, by_hand, sync, loop):
    """A copy is taken when the next iteration trains, not by a pass before it."""
    model = model_with_buffers()
    scaler, _, optimizer = loop("sgd", model, sync=sync)
    scaler.guard(model)
    step(scaler, model, optimizer, 0)
    between(model)
    if by_hand:
        model[1].running_mean.fill_(7.0)
    else:
        state = copy.deepcopy(model.state_dict())
        state["1.running_mean"].fill_(7.0)
        model.load_state_dict(state)
    before = buffers(model)

    step(scaler, model, optimizer, 1, bad=True)

    assert torch.equal(torch.full((8,), 7.0), model[1].running_mean)
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name


def test_a_pass_between_forward_and_update_is_undone_too(loop):
    """The first pass that trains is what a skip goes back to."""
    model = model_with_buffers()
    scaler, _, optimizer = loop("sgd", model)
    scaler.guard(model)
    before = buffers(model)
    model(batch(3)[0])
    step(scaler, model, optimizer, 0, bad=True)

    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name


def load(model):
    state = copy.deepcopy(model.state_dict())
    state["1.running_mean"].fill_(7.0)
    model.load_state_dict(state)


def set_by_hand(model):
    model[1].running_mean.fill_(7.0)


@pytest.mark.parametrize("between", [load, set_by_hand, update_statistics, validate])
@pytest.mark.parametrize("sync", ["auto", "never"])
def test_an_iteration_that_was_abandoned_leaves_no_copy(between, sync, loop):
    """What is written after it stays: its gradients were cleared, so it is over."""
    model = model_with_buffers()
    scaler, _, optimizer = loop("sgd", model, sync=sync)
    scaler.guard(model)
    step(scaler, model, optimizer, 0)
    scaler.scale(model(batch(1)[0]).mean()).backward()  # and then an exception
    between(model)
    optimizer.zero_grad()
    before = buffers(model)

    step(scaler, model, optimizer, 2, bad=True)

    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name


def test_what_is_loaded_after_a_failed_forward_pass_stays(loop):
    """Before any loss was scaled."""
    model = model_with_buffers()
    scaler, _, optimizer = loop("sgd", model)
    scaler.guard(model)
    model(batch(1)[0])  # and then an exception
    load(model)
    before = buffers(model)

    step(scaler, model, optimizer, 2, bad=True)

    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("bad", [1.0, math.inf])
def test_a_closure_that_raises_changes_no_buffer(bad):
    """Nor do its copies stay: what is written after it is kept by the next skip."""
    model = model_with_buffers()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    scaler, height = GradScaler("cpu"), [1.0]
    scaler.guard(model)

    def closure():
        return model(batch(0)[0]).square().mean() * height[0]

    def failing():
        closure()
        raise KeyError

    scaler.step(optimizer, closure)
    scaler.update()
    before = buffers(model)
    with pytest.raises(KeyError):
        scaler.step(optimizer, failing)
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name
    set_by_hand(model)
    before, height[0] = buffers(model), bad
    scaler.step(optimizer, closure)
    scaler.update()

    assert scaler.last_step.applied is (bad == 1.0)
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]) is (bad != 1.0), name


@pytest.mark.parametrize("inside", [False, True])
def test_a_guarded_model_is_compiled_without_a_break(inside):
    """Guarded before or after it is compiled."""
    model = model_with_buffers()
    scaler = GradScaler("cpu")
    scaler.guard(model) if inside else None
    whole = torch.compile(model, fullgraph=True, backend="eager")
    scaler.guard(whole)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step(scaler, whole, optimizer, 0)
    before = buffers(model)

    step(scaler, whole, optimizer, 1, bad=True)

    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("set_to_none", [False, True])
def test_an_accumulated_iteration_goes_back_to_its_beginning(set_to_none, loop):
    """The gradients of the first micro-batch are still there."""
    model = model_with_buffers()
    scaler, _, optimizer = loop("sgd", model)
    scaler.guard(model)
    step(scaler, model, optimizer, 0)
    optimizer.zero_grad(set_to_none=set_to_none)
    before = buffers(model)
    for bad in (1.0, math.inf):
        scaler.scale(model(batch(1)[0]).mean() * bad).backward()
    scaler.step(optimizer)
    scaler.update()

    assert not scaler.last_step.applied
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name


def test_a_disabled_scaler_guards_nothing(loop):
    """And says nothing."""
    model = model_with_buffers()
    scaler, _, optimizer = loop("sgd", model, enabled=False)
    scaler.guard(model)
    step(scaler, model, optimizer, 0)

    assert 1 == model[1].num_batches_tracked


def test_what_is_no_module_is_refused():
    """With the way to what was probably meant."""
    with pytest.raises(OptionError, match="scaler.gate"):
        GradScaler("cpu").guard(OPTIMIZERS["sgd"](nn.Linear(1, 1).parameters()))
