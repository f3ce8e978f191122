"""The scale stays within its bounds, whoever writes it and however."""

import math
import warnings

import pytest
import torch

import buoy
from buoy.torch import BuoyWarning, GradScaler, OptionError

Stock = torch.amp.GradScaler


def run(scaler, *events):
    """Take a step per event on a fresh weight; return the weight."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    for bad in events:
        optimizer.zero_grad()
        scaler.scale(param.sum()).backward()
        if bad is not None:
            param.grad[0] = bad
        scaler.step(optimizer)
        scaler.update()
    return param


def test_a_loaded_scale_outside_of_the_bounds_is_mended_and_told():
    """A checkpoint from elsewhere does not lift a ceiling."""
    scaler = GradScaler("cpu", init_scale=256.0, max_scale=1024.0)
    with pytest.warns(BuoyWarning, match="continues from 1024"):
        scaler.load_state_dict(Stock("cpu").state_dict())
    assert scaler.get_scale() == 1024.0


@pytest.mark.filterwarnings("ignore:The loaded state is from policy")
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("policy", [None, "headroom"])
@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_checkpoint_of_a_collapsed_run_can_be_gone_on_from(scale, policy, used):
    """torch saves a scale of 0 without a word; from 0 there would be no way back."""
    scaler = GradScaler("cpu", policy=policy)
    saved = {**Stock("cpu").state_dict(), "scale": scale}
    if used:
        run(scaler, None)
    with pytest.warns(BuoyWarning, match="cannot use"):
        scaler.load_state_dict(saved)
    assert 0.0 < scaler.get_scale() < math.inf
    param = run(scaler, None, math.inf, None)
    assert param.isfinite().all()
    assert scaler.last_step.applied


@pytest.mark.parametrize("policy", [None, "backoff"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -4.0])
def test_a_tensor_that_is_no_scale_changes_nothing(value, policy):
    """It may lie on a device, where nobody asks for its value."""
    scaler = GradScaler("cpu", policy=policy)
    run(scaler, None)
    before = scaler.get_scale()
    scaler.scale(torch.ones((), requires_grad=True))
    scaler.update(torch.tensor(value))
    assert before == scaler.get_scale()


def test_a_number_outside_of_given_bounds_is_refused():
    """Bounds that were asked for hold against the one who asked."""
    scaler = GradScaler("cpu", init_scale=256.0, min_scale=64.0, max_scale=1024.0)
    scaler.scale(torch.ones((), requires_grad=True))
    for value in (2.0**20, 1.0):
        with pytest.raises(OptionError, match="outside of `min_scale` 64"):
            scaler.update(value)
    with pytest.raises(OptionError, match="Got 'x'"):
        scaler.update("x")
    assert scaler.get_scale() == 256.0


@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -2.0, "2"])
def test_a_factor_that_would_spoil_the_scale_is_refused(name, value):
    """Setting is checked like making."""
    scaler = GradScaler("cpu")
    with pytest.raises(OptionError, match="must be a finite number"):
        getattr(scaler, f"set_{name}")(value)


@pytest.mark.parametrize("name", sorted(buoy.policies()))
def test_no_policy_brings_the_scale_to_nothing(name):
    """Whatever its rule does elsewhere: 200 overflows, and the next step counts."""
    try:
        scaler = GradScaler("cpu", policy=name, patience=1000)
    except buoy.PolicyError:
        pytest.fail(f"{name} cannot be made without parameters")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BuoyWarning)
        try:
            run(scaler, *[math.nan] * 200)
        except buoy.ScaleCollapsedError:
            return  # this one says so aloud, as the scaler that it reproduces
    assert 0.0 < scaler.get_scale() < math.inf
    run(scaler, None)
    assert scaler.last_step.applied


@pytest.mark.parametrize("how", ["replace", "fill", "data", "silently"])
@pytest.mark.parametrize("policy", [None, "torch"])
def test_a_scale_that_others_write_is_gone_on_from(how, policy):
    """Public code writes to `_scale`; collectives do, without raising its version."""
    scaler = GradScaler("cpu", policy=policy)
    run(scaler, None)
    if how == "replace":
        scaler._scale = torch.tensor(128.0)
    elif how == "fill":
        scaler._scale.fill_(128.0)
    elif how == "data":
        scaler._scale.data.fill_(128.0)
    else:
        scaler._scale.numpy()[...] = 128.0
    run(scaler, math.inf)
    assert scaler.get_scale() == 64.0
    assert scaler.last_step.scale == 128.0


def test_torch_s_setters_reach_the_policy():
    """What a getter says is what the rule does."""
    scaler = GradScaler("cpu", policy="torch", init_scale=8.0)
    scaler.set_growth_interval(1)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    run(scaler, None)
    assert scaler.get_scale() == 32.0
    run(scaler, float("inf"))
    assert scaler.get_scale() == 8.0
    with pytest.raises(OptionError, match="has no `growth_factor`"):
        GradScaler("cpu", policy="headroom").set_growth_factor(4.0)


def test_a_scale_set_by_hand_is_brought_within_a_policy_s_bounds():
    """Far outside means the nearest bound, not a fresh start."""
    scaler = GradScaler("cpu", policy="headroom", max_scale=2.0**20)
    for given, expected in ((1e30, 2.0**20), (100.0, 64.0), (1e-30, 2.0**-24)):
        scaler.scale(torch.ones((), requires_grad=True))
        scaler.update(given)
        assert expected == scaler.get_scale()
    free = GradScaler("cpu", policy="static")
    free.scale(torch.ones((), requires_grad=True))
    free.update(0.25)
    assert free.get_scale() == 0.25
    fixed = GradScaler("cpu", policy="none")
    fixed.scale(torch.ones((), requires_grad=True))
    with pytest.raises(OptionError, match="has no scale of its own"):
        fixed.update(4.0)


@pytest.mark.parametrize("small", [1e-39, 2.0**-128, 2.0**-149])
def test_a_scale_that_nothing_can_be_divided_by_is_refused(small, loop):
    """1 / scale would be inf, and a gradient of 0 times that NaN."""
    with pytest.raises(OptionError):
        GradScaler("cpu", init_scale=small)
    with pytest.raises(OptionError):
        GradScaler("cpu", min_scale=small)
    scaler, weight, optimizer = loop(
        "fused adamw", torch.ones(2), lr=1e-3, init_scale=8.0
    )
    scaler.scale(weight.sum() * 0.0).backward()
    scaler.step(optimizer)
    with pytest.raises(OptionError):
        scaler.update(small)
    scaler.update(torch.tensor(small))
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("fused", [True, False])
def test_zero_gradients_are_not_multiplied_by_an_infinite_number(order, fused, loop):
    """Whoever wrote such a scale into the tensor: the step is skipped."""
    scaler, weight, optimizer = loop(
        "sgd", torch.ones(2), lr=0.1, fused=fused, init_scale=8.0
    )
    scaler.scale(weight.sum() * 0.0).backward()
    scaler._scale.fill_(1e-40)
    scaler.clip_grad_norm_(optimizer, 1.0, norm_type=order)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, torch.ones(2))


@pytest.mark.parametrize("written", [0.0, 1e-39])
@pytest.mark.parametrize("policy", [None, "backoff", "headroom"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_scale_that_others_write_and_nothing_can_be_divided_by(
    fused, policy, written, loop
):
    """The step is skipped, and the scale comes back."""
    scaler, weight, optimizer = loop(
        "sgd", torch.ones(2), lr=0.1, fused=fused, policy=policy
    )
    scaler.scale(weight.sum()).backward()
    scaler._scale.fill_(written)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, torch.ones(2))
    assert scaler.get_scale() >= 2.0**-24


def test_a_scale_beyond_a_policys_bounds_is_the_same_for_loss_and_gradients(loop):
    """What others wrote is brought within the bounds before a loss is multiplied."""
    scaler, weight, optimizer = loop(
        "sgd",
        torch.ones(2),
        lr=0.1,
        policy="backoff",
        init_scale=1024.0,
        max_scale=2048.0,
    )
    scaler.scale(torch.ones((), requires_grad=True))
    scaler._scale.fill_(2.0**16)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(weight.detach(), torch.full((2,), 0.9))


@pytest.mark.parametrize("visible", [True, False])
@pytest.mark.parametrize("bounds", [{"max_scale": 16.0}, {"min_scale": 128.0}])
def test_a_scale_that_others_write_beyond_given_bounds_is_brought_back(
    visible, bounds, monkeypatch, loop
):
    """By the next update, on the host as on a device."""
    if not visible:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    scaler, weight, optimizer = loop(
        "sgd", torch.ones(2), lr=0.0, init_scale=next(iter(bounds.values())), **bounds
    )
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    scaler._scale.fill_(64.0)

    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()

    assert [scaler.get_scale()] == list(bounds.values())
