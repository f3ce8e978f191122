"""Windows of micro-batches: only the bad one is lost, or none."""

import contextlib
import copy
import math

import pytest
import torch
from nets import OPTIMIZERS, batch, loss_of, net
from no_host_reads import no_host_reads
from torch import nn

from buoy._backends import torch as backend
from buoy.torch import CallOrderError, GradScaler

N = 8


def window(scaler, model, optimizer, numbers, bad=(), *, clip=None):
    """One window and its step; give the number of micro-batches that were dropped."""
    with scaler.accumulate(N, optimizer) as opened:
        for number in numbers:
            factor = math.inf if number in bad else 1.0
            opened.backward(loss_of(model, number) * factor / N)
    if clip is not None:
        scaler.clip_grad_norm_(optimizer, clip)
    scaler.step(optimizer)
    scaler.update()
    return opened


def plain(model, optimizer, numbers, weight, clip=None):
    optimizer.zero_grad()
    for number in numbers:
        (loss_of(model, number) * weight).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def close(model, twin, **how):
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **how)


@pytest.mark.parametrize("kind", ["sgd", "adamw", "fused adamw"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_without_overflow_it_is_plain_accumulation(kind, clip):
    """Bit for bit: scales are powers of two."""
    model, twin = net(), net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    other = OPTIMIZERS[kind](twin.parameters())
    scaler = GradScaler("cpu")
    for start in range(0, 32, N):
        numbers = range(start, start + N)
        assert 0 == window(scaler, model, optimizer, numbers, clip=clip).dropped
        plain(twin, other, numbers, 1 / N, clip)

        close(model, twin, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["sgd", "fused adamw"])
@pytest.mark.parametrize("hidden", [False, True])
def test_one_bad_micro_batch_of_eight_costs_one(kind, hidden):
    """The mean is over the good ones; the scale falls at the update, once."""
    model, twin = net(), net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    other = OPTIMIZERS[kind](twin.parameters())
    scaler = GradScaler("cpu", init_scale=2.0**10)
    if hidden:
        sync = {"sgd": "never"}.get(kind, "auto")
        scaler = GradScaler("cpu", init_scale=2.0**10, sync=sync)
        window(scaler, model, optimizer, range(100, 108))
        plain(twin, other, range(100, 108), 1 / N)
        held = [v["step"] for v in optimizer.state.values() if "step" in v]
        with no_host_reads(hidden=True, allowed=held):
            opened = window(scaler, model, optimizer, range(N), bad={0, 3})
    else:
        opened = window(scaler, model, optimizer, range(N), bad={0, 3})
    plain(twin, other, [1, 2, 4, 5, 6, 7], 1 / 6)

    assert 2 == opened.dropped
    assert scaler.last_step.applied
    assert 2.0**9 == scaler.get_scale()
    close(model, twin, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sync", ["auto", "never"])
def test_a_window_with_nothing_good_is_skipped(sync):
    """And the next one is not harmed."""
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scaler = GradScaler("cpu", sync=sync)
    window(scaler, model, optimizer, range(N))
    before = [param.detach().clone() for param in model.parameters()]

    window(scaler, model, optimizer, range(N), bad=set(range(N)))

    assert not scaler.last_step.applied
    for mine, theirs in zip(before, model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    window(scaler, model, optimizer, range(N))
    assert scaler.last_step.applied


def test_the_last_window_of_an_epoch_may_be_short():
    """Fewer micro-batches give what the plain loop gives."""
    model, twin = net(), net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    other = OPTIMIZERS["sgd"](twin.parameters())
    window(GradScaler("cpu"), model, optimizer, range(3))
    plain(twin, other, range(3), 1 / N)

    close(model, twin, rtol=0, atol=0)


@pytest.mark.parametrize("policy", [None, "headroom", "megatron"])
def test_the_scale_stands_still_inside(policy):
    """Whatever the policy."""
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scaler = GradScaler("cpu", policy=policy)
    for start in range(0, 40, N):
        seen = set()
        with scaler.accumulate(N, optimizer) as opened:
            for number in range(start, start + N):
                factor = math.inf if number == start + 2 else 1.0
                opened.backward(loss_of(model, number) * factor / N)
                seen.add(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()

        assert 1 == len(seen)
        assert scaler.last_step.applied


def test_guarded_buffers_follow_the_good_ones():
    """Statistics of a dropped micro-batch do not count."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = GradScaler("cpu")
    scaler.guard(model)

    window(scaler, model, optimizer, range(N), bad={2, 5})

    assert N - 2 == model[1].num_batches_tracked


@pytest.mark.parametrize("hidden", [False, True])
def test_guarded_buffers_are_those_of_the_good_ones_alone(hidden):
    """Where nobody asks the device, too: the bad are undone and the good are kept."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    twin = copy.deepcopy(model)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = GradScaler("cpu", sync="never")
    scaler.guard(model)
    guarded = no_host_reads(hidden=True) if hidden else contextlib.nullcontext()

    with guarded:
        window(scaler, model, optimizer, range(N), bad={2, 5})

    for number in set(range(N)) - {2, 5}:
        twin(batch(number)[0])
    for name, value in twin.named_buffers():
        assert torch.equal(value, model.get_buffer(name)), name


@pytest.mark.parametrize("hidden", [False, True])
def test_sparse_gradients_are_kept_apart_too(hidden):
    """Of a bad micro-batch nothing is left."""
    table = nn.Embedding(5, 3, sparse=True)
    start = table.weight.detach().clone()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    guarded = no_host_reads(hidden=True) if hidden else contextlib.nullcontext()
    with guarded, scaler.accumulate(2, optimizer) as opened:
        for row, factor in ((1, 1.0), (2, math.inf)):
            opened.backward(table(torch.tensor([row])).sum() * factor)
    scaler.step(optimizer)
    scaler.update()

    moved = (start - table.weight.detach()).sum(1)
    assert [0.0, 6.0, 0.0, 0.0, 0.0] == moved.round(decimals=4).tolist()


def test_an_optimizer_without_gradients_is_not_stepped():
    """Others' good micro-batches do not give it zeros to step by."""
    model, idle = net(0), net(1)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    other = OPTIMIZERS["adamw"](idle.parameters())
    scaler = GradScaler("cpu")
    with scaler.accumulate(1, optimizer, other) as opened:
        opened.backward(loss_of(model, 0))
    scaler.step(optimizer)
    with pytest.raises(CallOrderError):
        scaler.step(other)


def test_an_error_inside_leaves_no_window_open():
    """And no gradients."""
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = GradScaler("cpu")
    opened = scaler.accumulate(N, optimizer)
    opened.__enter__()
    opened.backward(loss_of(model, 0))
    opened.__exit__(KeyError, KeyError(), None)

    assert all(param.grad is None for param in model.parameters())
    window(scaler, model, optimizer, range(N))


def test_known_optimizers_need_not_be_named():
    """From the second window on."""
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = GradScaler("cpu")
    with pytest.raises(CallOrderError, match=r"scaler.accumulate\(n, optimizer\)"):
        scaler.accumulate(N)
    window(scaler, model, optimizer, range(N))
    with scaler.accumulate(2) as opened:
        opened.backward(loss_of(model, 0))
    scaler.step(optimizer)
    scaler.update()


def test_disabled_windows_do_nothing():
    """The loop is the plain one."""
    model, twin = net(), net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    other = OPTIMIZERS["sgd"](twin.parameters())
    window(GradScaler("cpu", enabled=False), model, optimizer, range(N))
    plain(twin, other, range(N), 1 / N)

    close(model, twin, rtol=0, atol=0)


def test_mistakes_are_told():
    """Each with its cure."""
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = GradScaler("cpu")
    for wrong in (0, 2.0, True):
        with pytest.raises(CallOrderError, match="at least 1"):
            scaler.accumulate(wrong, optimizer)
    with scaler.accumulate(1, optimizer) as opened:
        opened.backward(loss_of(model, 0))
        with pytest.raises(CallOrderError, match="add up the losses"):
            opened.backward(loss_of(model, 1))
        with pytest.raises(CallOrderError, match="while another one is open"):
            scaler.accumulate(1, optimizer).__enter__()
        for method in (
            scaler.step,
            scaler.unscale_,
            lambda o: scaler.clip_grad_norm_(o, 1.0),
            lambda o: scaler.clip_grad_value_(o, 1.0),
            lambda _: scaler.update(),
        ):
            with pytest.raises(CallOrderError, match="Leave the"):
                method(optimizer)
    with pytest.raises(CallOrderError, match="before the next window"):
        scaler.accumulate(1, optimizer).__enter__()
    with pytest.raises(CallOrderError, match="Call it inside"):
        opened.backward(loss_of(model, 0))


@pytest.mark.parametrize("policy", [None, "headroom"])
@pytest.mark.parametrize("kind", ["sgd", "fused adamw"])
def test_a_step_inside_is_refused_after_a_micro_batch(kind, policy):
    """Also where a policy has had its gradients measured already."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = GradScaler("cpu", policy=policy)
    with scaler.accumulate(2, optimizer) as opened:
        for number in range(2):
            opened.backward(loss_of(model, number) / 2)
            with pytest.raises(CallOrderError, match="Leave the"):
                scaler.step(optimizer)
    scaler.step(optimizer)
    scaler.update()

    assert scaler.last_step.applied


@pytest.mark.parametrize("again", [False, True])
def test_a_loss_that_passes_the_window_by_is_refused(again):
    """Its gradients were not checked; nothing of the window is left behind."""
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = GradScaler("cpu")

    def by_hand():
        with scaler.accumulate(2, optimizer) as opened:
            scaler.scale(loss_of(model, 0)).backward()
            if again:
                opened.backward(loss_of(model, 1))

    with pytest.raises(CallOrderError, match=r"window\.backward\(loss\)"):
        by_hand()
    assert all(param.grad is None for param in model.parameters())
    window(scaler, model, optimizer, range(N))
    assert scaler.last_step.applied


@pytest.mark.parametrize("factor", [1.0, math.nan])
@pytest.mark.parametrize("kind", ["sgd", "fused adamw"])
@pytest.mark.parametrize("cleared", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_backward_pass_after_the_window_is_refused(factor, kind, cleared, scaled):
    """It would be applied unchecked, and maybe multiplied by the scale."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    before = [param.detach().clone() for param in model.parameters()]
    scaler = GradScaler("cpu")
    with scaler.accumulate(1, optimizer) as opened:
        opened.backward(loss_of(model, 0))
    if cleared:
        optimizer.zero_grad()
    loss = loss_of(model, 1) * factor
    (scaler.scale(loss) if scaled else loss).backward()

    with pytest.raises(CallOrderError, match="another backward pass"):
        scaler.step(optimizer)
    for mine, theirs in zip(before, model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("hidden", [False, True])
def test_the_policy_sees_the_largest_gradient_of_the_window(hidden, monkeypatch):
    """Of all micro-batches, not of the last one."""
    if hidden:
        monkeypatch.setattr(backend, "in_host_memory", lambda tensor: False)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales = []
    for sizes in ([2.0**12, 1.0], [1.0, 2.0**12], [1.0, 1.0]):
        scaler = GradScaler("cpu", policy="headroom", init_scale=1.0)
        for _ in range(4):
            with scaler.accumulate(2, optimizer) as opened:
                for size in sizes:
                    opened.backward((weight * size).sum())
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())

    assert scales[0] == scales[1] < scales[2]
