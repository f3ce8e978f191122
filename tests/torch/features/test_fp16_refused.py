"""FP16 parameters are refused by name, or taken as torch takes them."""

import pytest
import torch
from fp16 import MORE, equal, loss_of, train, weights
from nets import batch, net

from buoy.torch import (
    Fp16ParametersError,
    GradScaler,
    MasterWeights,
    OptionError,
)


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
    assert isinstance(told.value, Fp16ParametersError)
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
        with pytest.raises(Fp16ParametersError) as told:
            scaler.step(optimizer)
        assert said in str(told.value)


def test_a_long_list_is_cut():
    """Eight are named, the others are counted."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(6))).half()
    scaler = GradScaler("cpu", model=model)
    scaler.scale(model(torch.ones(1, 2).half()).sum()).backward()
    with pytest.raises(Fp16ParametersError, match="12 parameters.*and 4 more"):
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
        with pytest.raises(Fp16ParametersError, match="`0.bias`"):
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
    with pytest.raises(Fp16ParametersError, match="were float32.*`2.weight` .Linear."):
        scaler.step(optimizer)
    assert equal(weights(model[0]), before[:2])
