"""FP16 parameters are updated through FP32 masters, and nobody else notices."""

import pytest
import torch
from fp16 import EVERY, MORE, by_hand, equal, loss_of, made, train, weights
from nets import batch, net, spoil
from no_host_reads import no_host_reads

from buoy.torch import (
    GradScaler,
    MasterWeights,
)


@EVERY
@pytest.mark.parametrize("clip", [None, 0.05])
def test_masters_are_what_one_would_keep_by_hand(kind, clip):
    """The same bits in weights, masters and state, for every optimizer."""
    model, optimizer, scaler = made(kind)
    train(scaler, model, optimizer, 12, clip=clip)
    expected, masters, reference = by_hand(kind, 12, clip)

    kept = optimizer._buoy_masters.masters
    if clip is None:
        assert equal(weights(expected), weights(model))
        assert equal(masters, kept)
    else:  # norms are added up in another order
        for one, other in zip(masters, kept, strict=True):
            torch.testing.assert_close(one, other)
    for one, other in zip(masters, model.parameters(), strict=True):
        for name, value in reference.state[one].items():
            if isinstance(value, torch.Tensor):
                assert optimizer.state[other][name].dtype == value.dtype
                torch.testing.assert_close(optimizer.state[other][name], value)


@pytest.mark.parametrize("kind", ["momentum", "adamw", "fused adamw"])
def test_200_steps_end_where_fp32_ends(kind):
    """At a learning rate with which bare FP16 weights stand still."""

    def small(optimizer):
        optimizer.param_groups[0]["lr"] = 2e-5 if "adam" in kind else 1e-4
        return optimizer

    def moved(model, optimizer, scaler):
        start = [p.float() for p in weights(model)]
        train(scaler, model, small(optimizer), 200)
        end = [p.float() for p in weights(model)]
        return torch.cat([(a - b).flatten() for a, b in zip(end, start, strict=True)])

    model = net().half().float()
    wide = moved(model, MORE[kind](model.parameters()), GradScaler("cpu"))
    trio = made(kind)
    start = trio[1].param_groups[0]["params"]
    masters = moved(*trio)
    kept = torch.cat([m.flatten() for m in trio[1]._buoy_masters.masters])
    exact = kept - torch.cat([p.float().flatten() for p in weights(net().half())])
    assert len(start) == 4
    assert (exact - wide).norm() < 0.02 * wide.norm()
    assert (masters - wide).norm() < 0.2 * wide.norm()

    model = net().half()
    bare = MORE[kind](model.parameters())
    old = torch.cat([p.float().flatten() for p in weights(model)])
    for step in range(200):
        bare.zero_grad()
        loss_of(model, step).backward()
        small(bare).step()
    new = torch.cat([p.float().flatten() for p in weights(model)])
    assert (new - old - wide).norm() > 0.3 * wide.norm()


@EVERY
def test_a_skipped_step_changes_nothing(kind):
    """With overflows injected the run ends like one that never saw those steps."""
    events = {0, 3, 4}
    model, optimizer, scaler = made(kind, growth_interval=10_000)
    train(scaler, model, optimizer, 10, events=events)
    clean, reference, other = made(kind)
    for step in range(10):
        if step not in events:
            train(other, clean, reference, 1, start=step)

    assert equal(weights(clean), weights(model))
    assert equal(reference._buoy_masters.masters, optimizer._buoy_masters.masters)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_device_mode_puts_masters_back(kind):
    """`sync="never"` undoes a skipped step in the masters."""
    model, optimizer, scaler = made(kind, sync="never")
    train(scaler, model, optimizer, 8, events={0, 3})
    clean, reference, other = made(kind)
    train(other, clean, reference, 8, events={0, 3})

    assert equal(weights(clean), weights(model))
    assert equal(reference._buoy_masters.masters, optimizer._buoy_masters.masters)


@pytest.mark.parametrize("policy", [None, "headroom"])
def test_unscaling_and_clipping_by_hand_act_on_fp32_gradients(policy):
    """After `unscale_` the gradients are FP32, and small ones have not underflowed."""
    model, optimizer, scaler = made("sgd", policy=policy)
    scaler.scale(loss_of(model, 0) * 1e-6).backward()
    scaler.unscale_(optimizer)
    wide = net().half().float()
    (loss_of(wide, 0) * 1e-6).backward()
    for one, other in zip(wide.parameters(), model.parameters(), strict=True):
        assert other.grad.dtype == torch.float32
        torch.testing.assert_close(one.grad, other.grad, rtol=0.01, atol=1e-9)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-9)
    scaler.step(optimizer)
    moved = [
        master - param.float()
        for master, param in zip(
            optimizer._buoy_masters.masters, net().half().parameters(), strict=True
        )
    ]
    assert torch.cat([m.flatten() for m in moved]).norm() < 1e-8


def test_micro_batches_add_up_beyond_fp16s_range():
    """Once it has masters, gradients that fit one by one are added in FP32."""
    model, optimizer, scaler = made("sgd", init_scale=1.0)
    train(scaler, model, optimizer, 1)
    optimizer.zero_grad()
    total = model[2].bias
    for _ in range(2):
        scaler.scale((total * 60000.0).sum()).backward()
        optimizer._buoy_masters.widen()
    assert total.grad.tolist() == [120000.0] * 3


@pytest.mark.parametrize("kind", ["fused adamw", "fused momentum"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_with_a_fused_optimizer_nothing_is_read_on_the_host(kind, clip):
    """Masters, their gradients and the write-back ask nobody, skipped or not."""
    model, optimizer, scaler = made(kind)
    for step in range(4):
        optimizer.zero_grad()
        scaled = scaler.scale(loss_of(model, step))
        scaled.backward()
        if step in {0, 2}:
            spoil(model, "inf")
        with no_host_reads():
            if clip is not None:
                scaler.clip_grad_norm_(optimizer, clip)
            scaler.step(optimizer)
            scaler.update()
    clean, reference, other = made(kind)
    train(other, clean, reference, 4, clip=clip, events={0, 2})
    assert equal(weights(clean), weights(model))


@pytest.mark.parametrize("name", ["Adafactor", "SparseAdam", "Muon"])
def test_optimizers_with_state_of_their_own_kind(name):
    """Factored moments, sparse gradients, matrices only."""
    if not hasattr(torch.optim, name):
        name = "Adafactor"
    layer = torch.nn.Embedding(6, 4, sparse=name == "SparseAdam").half()
    optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.01)
    scaler = GradScaler("cpu", fp16_params="master", init_scale=8.0)
    before = layer.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        loss = layer(torch.tensor([1, 1, 4])).float().square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step.applied
    moved = (layer.weight != before).any(1).nonzero().flatten().tolist()
    assert {1, 4} <= set(moved)
    state = [v for v in optimizer.state[layer.weight].values() if torch.is_tensor(v)]
    assert {v.dtype for v in state} == {torch.float32}


def test_frozen_parameters_cost_nothing():
    """A base model in FP16 under FP32 adapters has no masters until it is thawed."""
    model, optimizer, scaler = made("adamw")
    model[0].requires_grad_(False)
    train(scaler, model, optimizer, 2)
    assert len(optimizer._buoy_masters.masters) == 2
    model[0].requires_grad_(True)
    train(scaler, model, optimizer, 2)
    assert len(optimizer._buoy_masters.masters) == 4


def test_distributed_checkpoints_hold_masters():
    """torch.distributed.checkpoint names them like any other state."""
    from torch.distributed.checkpoint import state_dict as dcp

    model, optimizer, scaler = made("adamw")
    train(scaler, model, optimizer, 3)
    saved = dcp.get_optimizer_state_dict(model, optimizer)
    again, other, _ = made("adamw")
    MasterWeights(other)
    again.load_state_dict(model.state_dict())
    dcp.set_optimizer_state_dict(again, other, saved)
    assert "master_param" in saved["state"]["0.weight"]
    assert equal(optimizer._buoy_masters.masters, other._buoy_masters.masters)


# -- the optimizer looks as ever ------------------------------------------------------


def test_groups_state_and_zero_grad_are_those_of_the_model():
    """Nobody sees a master unless he asks for one."""
    model, optimizer, scaler = made("adamw")
    held = list(model.parameters())
    train(scaler, model, optimizer, 2)
    assert all(
        a is b for a, b in zip(held, optimizer.param_groups[0]["params"], strict=True)
    )
    assert set(optimizer.state) == set(held)
    assert all(p.dtype == torch.float16 for p in held)
    assert held[0].grad is not None
    optimizer.zero_grad(set_to_none=False)
    assert not any(p.grad.any() or p.grad.dtype != torch.float16 for p in held)
    optimizer.zero_grad()
    assert all(p.grad is None for p in held)


@pytest.mark.parametrize("first", ["scheduler", "masters"])
def test_schedulers_work_whichever_comes_first(first):
    """They wrap `step`, too."""
    model = net().half()
    optimizer = MORE["sgd"](model.parameters())
    if first == "masters":
        MasterWeights(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = GradScaler("cpu", fp16_params="master")
    scaler.gate(scheduler)
    train(scaler, model, optimizer, 3)
    assert optimizer.param_groups[0]["lr"] == 0.05 / 8
    assert optimizer._buoy_masters.masters[0].dtype == torch.float32


def test_a_group_added_later_gets_masters():
    """New layers are thawed in mid-run."""
    model, _, scaler = made("sgd")
    optimizer = MORE["adamw"](model[0].parameters())
    train(scaler, model, optimizer, 2)
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 1e-5})
    train(scaler, model, optimizer, 3)
    masters = optimizer._buoy_masters
    assert len(masters.masters) == 4
    assert masters.of(model[2].weight) is not None
    assert not torch.equal(masters.of(model[2].bias).half().float(), masters.masters[3])


def test_only_half_precision_parameters_get_a_master():
    """Norms kept in FP32 are updated as they are."""
    model = net().half()
    model[2].float()
    optimizer = MORE["adamw"](model.parameters())
    masters = MasterWeights(optimizer)
    x, _ = batch(0)
    model[2](model[1](model[0](x.half())).float()).sum().backward()
    optimizer.step()
    assert len(masters.masters) == 2
    assert masters.of(model[2].weight) is None
    assert model[2].weight.dtype == torch.float32


def test_writes_to_parameters_are_noticed():
    """What somebody changed is taken over; the rest keeps its low bits."""
    model, optimizer, scaler = made("sgd")
    train(scaler, model, optimizer, 3)
    masters = optimizer._buoy_masters
    old = masters.of(model[0].weight).detach().clone()
    with torch.no_grad():
        model[0].weight[0] = 0.25
    with masters.swapped():
        pass
    new = masters.of(model[0].weight)
    assert (new[0] == 0.25).all()
    assert torch.equal(new[1:], old[1:])
    model[0].weight.data[1] = 0.5
    masters.reread()
    assert (new[1] == 0.5).all()
    assert torch.equal(new[2:], old[2:])


def test_casting_to_fp32_and_back_keeps_the_masters():
    """A validation in FP32 costs nothing."""
    model, optimizer, scaler = made("sgd")
    train(scaler, model, optimizer, 3)
    old = [m.detach().clone() for m in optimizer._buoy_masters.masters]
    model.float()
    model.half()
    with optimizer._buoy_masters.swapped():
        pass
    assert equal(old, optimizer._buoy_masters.masters)


def test_a_weight_beyond_fp16s_range_saturates():
    """A finite master never becomes an inf."""
    weight = torch.nn.Parameter(torch.tensor([65000.0, -65000.0]).half())
    optimizer = torch.optim.SGD([weight], lr=1.0)
    masters = MasterWeights(optimizer)
    weight.grad = torch.tensor([-6e4, 6e4]).half()
    optimizer.step()
    assert weight.tolist() == [65504.0, -65504.0]
    assert masters.of(weight).abs().min() > 120000
    optimizer.step()
    assert masters.of(weight).abs().min() > 180000


def test_poisoned_masters_are_called_so():
    """A NaN that only the master shows is found."""
    model, optimizer, scaler = made("sgd")
    train(scaler, model, optimizer, 1)
    with torch.no_grad():
        optimizer._buoy_masters.masters[0][0, 0] = float("nan")
    train(scaler, model, optimizer, 1, start=1, events={1})
    assert scaler.last_step.verdict == "poisoned"
