"""Options that cannot be are refused at once, by name, with the cure."""

import math
import re

import numpy as np
import pytest
import torch
from against import expect
from nets import net, train

from buoy.torch import (
    CallOrderError,
    GradScaler,
    OptionError,
)


@pytest.mark.parametrize(
    "factors",
    [{"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"backoff_factor": 2.0}],
)
def test_factors_that_go_the_wrong_way(factors):
    """Torch's assertion, with the value; and none when the scaler is off."""
    with expect(OptionError, AssertionError, "factor must be", "0"):
        GradScaler("cpu", **factors)
    GradScaler("cpu", enabled=False, **factors)


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("growth_factor", "2", "float.growth_factor."),
        ("backoff_factor", None, "float.backoff_factor."),
        ("init_scale", "65536", "float.init_scale."),
        ("growth_interval", "x", "int.growth_interval."),
        ("growth_interval", 2.5, "whole number"),
        ("min_scale", "1", "positive number"),
        ("max_scale", [], "positive number"),
        ("growth_factor", float("nan"), "greater|> 1"),
        ("backoff_factor", float("nan"), "< 1"),
    ],
)
def test_numbers_that_are_none_are_refused_at_once(name, value, cure):
    """Text from a command line, for one: said by name, not in the first update."""
    with pytest.raises(OptionError, match=f"`{name}`") as caught:
        GradScaler("cpu", **{name: value})
    assert re.search(cure, str(caught.value))


@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor"])
def test_text_for_a_number_is_torchs_type_error(name):
    """Torch compares, and that is a TypeError."""
    for make in (torch.amp.GradScaler, GradScaler):
        with pytest.raises(TypeError):
            make("cpu", **{name: "2"})


def test_numbers_of_other_kinds_are_taken():
    """NumPy's, and whatever else is a number."""
    numpy = pytest.importorskip("numpy")
    scaler = GradScaler(
        "cpu",
        init_scale=numpy.float32(8),
        growth_factor=numpy.float64(4),
        growth_interval=np.int64(1),
        min_scale=numpy.float32(1),
    )
    model = net()
    train(scaler, model, torch.optim.SGD(model.parameters(), lr=0.1), ["ok"])
    assert scaler.get_scale() == 32.0


@pytest.mark.parametrize(
    "named",
    [
        lambda model: dict(model.named_parameters()),
        lambda model: model.parameters(),
        lambda model: list(model.parameters()),
        lambda model: model.named_parameters,
        lambda model: model[0].weight,
        lambda model: [(1, model[0].weight)],
    ],
)
def test_names_without_parameters_are_refused_at_once(named):
    """Not when the first name is needed, which is when a step has failed."""
    with expect(OptionError, ValueError, "named_parameters", "pairs"):
        GradScaler("cpu", named_parameters=named(net()))


def test_a_model_that_is_none_is_refused_at_once():
    """Its parameters, for one."""
    with expect(OptionError, ValueError, "`model`", "generator", "named_parameters"):
        GradScaler("cpu", model=net().parameters())


@pytest.mark.parametrize("device", [2.0**10, "gpu", "cud a", None, 0])
def test_what_is_no_device_type_is_refused(device):
    """Also the scale in first place, where torch.cuda.amp has it."""
    with pytest.raises(OptionError, match=r"not of torch\.cuda\.amp, got"):
        GradScaler(device)


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "xpu", "meta", "cuda:0"])
@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_every_device_type_of_torch_is_taken(device):
    """Whether this machine has one or not: scripts are often started elsewhere."""
    assert repr(GradScaler(device)).startswith("GradScaler(")


@pytest.mark.parametrize("interval", [1.5, math.inf, math.nan, "3", None])
def test_an_interval_that_is_no_count_is_refused_at_once(interval):
    """Not steps later, where the growth would be due."""
    scaler = GradScaler("cpu")
    with pytest.raises(OptionError, match="whole number of steps"):
        scaler.set_growth_interval(interval)
    assert 2000 == scaler.get_growth_interval()


def test_update_of_a_joint_scaler_before_any_step_says_what_is_missing():
    """As that of any other scaler."""
    with pytest.raises(CallOrderError, match="Attempted update but _scale is None"):
        GradScaler("cpu", skip="joint").update()


@pytest.mark.parametrize("interval", [9, np.int64(9)])
def test_an_interval_may_be_any_integer(interval):
    """As in the constructor."""
    scaler = GradScaler("cpu")
    scaler.set_growth_interval(interval)
    assert 9 == scaler.get_growth_interval()
