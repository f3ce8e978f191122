"""Masters survive checkpoints, copies and going back."""

import copy
import io

import pytest
import torch
from fp16 import MORE, equal, loss_of, made, train, weights
from nets import net

from buoy.torch import (
    Fp16ParametersError,
    GradScaler,
    MasterWeights,
)


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


@pytest.mark.parametrize("kind", ["momentum", "adamw", "fused adamw"])
def test_masters_are_saved_beside_the_state_and_loaded_out_of_it(kind):
    """`optimizer.state` holds what the optimizer put there, before and after."""
    model, optimizer, scaler = made(kind)
    train(scaler, model, optimizer, 2)
    own = [set(optimizer.state[param]) for param in model.parameters()]
    saved = through_a_file(optimizer.state_dict())
    again, other, _ = made(kind, seed=5)
    MasterWeights(other, model=again)

    other.load_state_dict(saved)

    assert own == [set(other.state[param]) for param in again.parameters()]
    for number, state in saved["state"].items():
        assert own[number] < set(state)  # the masters


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


def test_a_loaded_master_is_no_part_of_the_optimizers_state():
    """It is saved there, and taken out again: optimizers iterate over their state."""
    model, optimizer, scaler = made("adamw")
    train(scaler, model, optimizer, 2)
    saved = optimizer.state_dict()
    assert "master_param" in saved["state"][0]
    optimizer.load_state_dict(saved)
    for state in optimizer.state.values():
        assert {"step", "exp_avg", "exp_avg_sq"} == set(state)


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
    with pytest.raises(Fp16ParametersError, match="0.weight.*before.*load_state_dict"):
        other.step(late)
    with pytest.raises(Fp16ParametersError, match="already"):
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
