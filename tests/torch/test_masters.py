"""FP16 parameters are refused by name, or updated through FP32 masters."""

import copy
import io

import pytest
import torch
from nets import OPTIMIZERS, batch, net, spoil
from no_host_reads import no_host_reads

from buoy.torch import (
    DtypeDriftError,
    Fp16GradientsError,
    GradScaler,
    MasterWeights,
    MasterWeightsError,
    OptionError,
)

MORE = {
    **OPTIMIZERS,
    "foreach adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}
EVERY = pytest.mark.parametrize("kind", list(MORE))


def loss_of(model, step):
    """Compute a step's loss in the dtype of the model."""
    dtype = next(model.parameters()).dtype
    x, y = (part.to(dtype) for part in batch(step % 7))
    return torch.nn.functional.mse_loss(model(x).float(), y.float())


def train(scaler, model, optimizer, steps, *, start=0, clip=None, events=()):
    """Train on a few batches over and over; return the losses."""
    losses = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss).backward()
        if step in events:
            spoil(model, "inf")
        if clip is not None:
            scaler.clip_grad_norm_(optimizer, clip)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def made(kind, *, seed=0, **options):
    """Make an FP16 model, its optimizer and a scaler that keeps masters."""
    model = net(seed).half()
    optimizer = MORE[kind](model.parameters())
    options = {"init_scale": 2.0**10, "fp16_params": "master", **options}
    return model, optimizer, GradScaler("cpu", model=model, **options)


def by_hand(kind, steps, clip=None):
    """Keep masters as one would without Buoy: a second list of parameters."""
    model = net().half()
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = MORE[kind](masters)
    for step in range(steps):
        model.zero_grad()
        (loss_of(model, step) * 2.0**10).backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad = param.grad.float() / 2.0**10
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master)
    return model, masters, optimizer


def equal(ones, others):
    """Say whether two lists of tensors are equal, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


def weights(model):
    """Copy the parameters of a model."""
    return [param.detach().clone() for param in model.parameters()]


# -- refused --------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["step", "unscale", "clip"])
def test_the_error_lists_parameters_modules_and_the_cure(way):
    """Torch's type and first words; then who, where, and what to do."""
    model = net().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", model=model)
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16") as told:
        {
            "step": scaler.step,
            "unscale": scaler.unscale_,
            "clip": lambda one: scaler.clip_grad_norm_(one, 1.0),
        }[way](optimizer)
    assert isinstance(told.value, Fp16GradientsError)
    for said in ("`0.weight` (Linear)", "`2.bias` (Linear)", "fp16_params='master'"):
        assert said in str(told.value)
    assert "model.float()" in str(told.value)


def test_names_come_from_named_parameters_or_the_place_in_the_optimizer():
    """Whatever is known is said."""
    model = net().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for options, said in (
        ({"named_parameters": model.named_parameters()}, "`2.weight`"),
        ({}, "`param_groups[0]['params'][2] (3x8)`"),
    ):
        scaler = GradScaler("cpu", **options)
        scaler.scale(loss_of(model, 0)).backward()
        with pytest.raises(Fp16GradientsError) as told:
            scaler.step(optimizer)
        assert said in str(told.value)


def test_a_long_list_is_cut():
    """Eight are named, the others are counted."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(6))).half()
    scaler = GradScaler("cpu", model=model)
    scaler.scale(model(torch.ones(1, 2).half()).sum()).backward()
    with pytest.raises(Fp16GradientsError, match="12 parameters.*and 4 more"):
        scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))


def test_fused_optimizers_take_fp16_as_in_torch_unless_told_otherwise():
    """None does as torch; "error" refuses them, too."""
    for wanted in (None, "error"):
        model = net().half()
        optimizer = MORE["fused sgd"](model.parameters())
        scaler = GradScaler("cpu", fp16_params=wanted, model=model)
        scaler.scale(loss_of(model, 0)).backward()
        if wanted is None:
            scaler.step(optimizer)
            scaler.update()
            continue
        with pytest.raises(Fp16GradientsError, match="`0.bias`"):
            scaler.step(optimizer)


def test_an_unknown_choice_is_refused():
    """The accepted ones are listed."""
    with pytest.raises(OptionError, match="'error'.*'master'.*got 'in_place'"):
        GradScaler("cpu", fp16_params="in_place")
    with pytest.raises(OptionError, match="'nearest'.*'stochastic'.*got 'up'"):
        MasterWeights(torch.optim.SGD(net().parameters(), lr=0.1), rounding="up")


@pytest.mark.parametrize("kind", ["sgd", "adamw", "fused adamw"])
@pytest.mark.parametrize("wanted", [None, "error", "master"])
def test_a_parameter_that_turns_fp16_in_mid_run_is_named(kind, wanted):
    """Validation casts a layer and forgets to cast it back."""
    model = net()
    optimizer = MORE[kind](model.parameters())
    scaler = GradScaler("cpu", model=model, fp16_params=wanted)
    train(scaler, model, optimizer, 2)
    before = weights(model)
    model[2].half()
    optimizer.zero_grad()
    x, _ = batch(0)
    scaler.scale(model[2](model[1](model[0](x)).half()).sum()).backward()
    with pytest.raises(DtypeDriftError, match="were float32.*`2.weight` .Linear."):
        scaler.step(optimizer)
    assert equal(weights(model[0]), before[:2])


# -- masters --------------------------------------------------------------------------


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
@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_with_a_fused_optimizer_nothing_is_read_on_the_host(kind, hidden, clip):
    """Masters, their gradients and the write-back ask nobody, skipped or not."""
    model, optimizer, scaler = made(kind)
    for step in range(4):
        optimizer.zero_grad()
        scaled = scaler.scale(loss_of(model, step))
        scaled.backward()
        if step in {0, 2}:
            spoil(model, "inf")
        with no_host_reads(hidden=hidden):
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


# -- checkpoints ----------------------------------------------------------------------


def through_a_file(state):
    """Save and load as people do."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw", "fused adamw", "asgd"])
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_resume_is_exact(kind, order):
    """Stop after any step, load, and the rest is bit-equal."""
    for stop in (0, 1, 4):
        model, optimizer, scaler = made(kind)
        train(scaler, model, optimizer, stop, events={2})
        saved = through_a_file(
            [model.state_dict(), optimizer.state_dict(), scaler.state_dict()]
        )
        train(scaler, model, optimizer, 7 - stop, start=stop, events={2})

        again, other, fresh = made(kind, seed=5)
        MasterWeights(other, model=again)
        if order == "model first":
            again.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        again.load_state_dict(saved[0])
        fresh.load_state_dict(saved[2])
        train(fresh, again, other, 7 - stop, start=stop, events={2})
        assert equal(weights(model), weights(again))
        assert equal(optimizer._buoy_masters.masters, other._buoy_masters.masters)


def test_a_plain_fp32_optimizers_checkpoint_loads_and_the_other_way_round():
    """One run goes on as the other."""
    wide = net()
    plain = MORE["adamw"](wide.parameters())
    train(GradScaler("cpu"), wide, plain, 3)
    model, optimizer, scaler = made("adamw")
    MasterWeights(optimizer)
    optimizer.load_state_dict(plain.state_dict())
    moment = optimizer.state[model[0].weight]["exp_avg"]
    assert moment.dtype == torch.float32
    assert torch.equal(moment, plain.state[wide[0].weight]["exp_avg"])
    train(scaler, model, optimizer, 3)

    plain.load_state_dict(through_a_file(optimizer.state_dict()))
    train(GradScaler("cpu"), wide, plain, 2)
    assert torch.isfinite(wide[0].weight).all()


def test_going_back_to_a_checkpoint_without_masters_takes_the_weights_as_they_are():
    """No low bits of the run that was given up stay behind."""
    model, optimizer, scaler = made("adamw")
    MasterWeights(optimizer)
    saved = model.state_dict(), optimizer.state_dict()  # masters equal weights
    saved = through_a_file(saved)
    optimizer.param_groups[0]["lr"] = 1e-7
    train(scaler, model, optimizer, 2)
    assert equal(weights(net().half()), weights(model))
    optimizer.load_state_dict(saved[1])
    model.load_state_dict(saved[0])
    with optimizer._buoy_masters.swapped():
        pass
    start = [param.float() for param in net().half().parameters()]
    assert equal(start, optimizer._buoy_masters.masters)


def test_a_parameter_that_never_had_a_gradient_is_not_saved_as_if_it_had():
    """A plain Adam that loads the checkpoint begins its state when one comes."""
    model, optimizer, scaler = made("adamw")
    spare = torch.nn.Parameter(torch.ones(2).half())
    optimizer.add_param_group({"params": [spare]})
    train(scaler, model, optimizer, 2)
    saved = optimizer.state_dict()
    assert "master_param" in saved["state"][0]
    assert 4 not in saved["state"]
    wide = [*net().parameters(), torch.nn.Parameter(torch.ones(2))]
    plain = MORE["adamw"](wide[:4])
    plain.add_param_group({"params": wide[4:]})
    plain.load_state_dict(saved)
    wide[4].grad = torch.ones(2)
    plain.step()
    assert (wide[4] < 1.0).all()


def test_a_failed_load_leaves_everything_in_place():
    """Parameters are back in their groups."""
    model, optimizer, scaler = made("adamw")
    train(scaler, model, optimizer, 1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["params"] = [0, 1]
    before = weights(model)
    with pytest.raises(ValueError, match="doesn't match"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert equal(before, weights(model))


def test_state_that_was_loaded_too_early_is_refused():
    """Torch has cast it to FP16 by then."""
    model, optimizer, scaler = made("adamw")
    train(scaler, model, optimizer, 1)
    again, late, other = made("adamw")
    late.load_state_dict(optimizer.state_dict())
    other.scale(loss_of(again, 0)).backward()
    with pytest.raises(MasterWeightsError, match="0.weight.*before.*load_state_dict"):
        other.step(late)
    with pytest.raises(MasterWeightsError, match="already"):
        MasterWeights(optimizer)


def test_a_copied_or_pickled_scaler_still_keeps_masters():
    """The choice is part of it."""
    _, _, scaler = made("sgd")
    model = net().half()
    optimizer = MORE["sgd"](model.parameters())
    train(copy.deepcopy(scaler), model, optimizer, 1)
    assert len(optimizer._buoy_masters.masters) == 4


def test_distributed_data_parallel_sees_the_gradients_it_expects(tmp_path):
    """Its buckets are FP16; views of them or not, cleared or zeroed."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        for views in (True, False):
            model, optimizer, scaler = made("adamw")
            wrapped = torch.nn.parallel.DistributedDataParallel(
                model, gradient_as_bucket_view=views
            )
            for step in range(4):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                scaler.scale(loss_of(wrapped, step)).backward()
                scaler.step(optimizer)
                scaler.update()
                assert scaler.last_step.applied
            alone, single, other = made("adamw")
            train(other, alone, single, 4)
            assert equal(weights(alone), weights(model))
    finally:
        torch.distributed.destroy_process_group()
