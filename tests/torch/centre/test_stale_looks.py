"""What was found of some gradients is never taken for a finding about others."""

import contextlib
import math

import pytest
import torch
from torch.amp.grad_scaler import OptState

from buoy.torch import CallOrderError, GradScaler


def weight():
    return torch.nn.Parameter(torch.ones(2))


def backward(scaler, optimizer, param, bad=None):
    optimizer.zero_grad()
    scaler.scale(param.sum()).backward()
    if bad is not None:
        param.grad[0] = bad


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("then", ["clip_grad_norm_", "clip_grad_value_", "step"])
def test_a_dropped_batch_needs_an_update(fused, then, loop):
    """Clip, drop the batch without `update`: the next batch is not taken for it."""
    param = weight()
    scaler, _, optimizer = loop("adamw", param, lr=1e-3, fused=fused)
    backward(scaler, optimizer, param)
    scaler.clip_grad_norm_(optimizer, 1.0)
    backward(scaler, optimizer, param, math.nan)
    arguments = () if then == "step" else (1.0,)
    with pytest.raises(CallOrderError, match="also for a batch that you drop"):
        getattr(scaler, then)(optimizer, *arguments)
    assert torch.equal(param, torch.ones(2))


@pytest.mark.parametrize("fused", [False, True])
def test_a_dropped_batch_with_an_update_is_fine(fused, loop):
    """Whoever drops a batch and calls `update` goes on as if it had not been."""
    param = weight()
    scaler, _, optimizer = loop("adamw", param, lr=1e-3, fused=fused)
    for bad in (math.inf, None, math.nan, None):
        backward(scaler, optimizer, param, bad)
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        if norm.isfinite():
            scaler.step(optimizer)
        scaler.update()
    assert optimizer.state[param]["step"] == 2
    assert param.isfinite().all()


@pytest.mark.parametrize("fused", [False, True])
def test_another_model_s_backward_pass_is_no_change(fused):
    """A GAN may compute the second loss between clipping and stepping."""
    first, second = weight(), weight()
    optimizers = [torch.optim.AdamW([p], fused=fused) for p in (first, second)]
    scaler = GradScaler("cpu")
    for _ in range(3):
        for param, optimizer in zip((first, second), optimizers, strict=True):
            backward(scaler, optimizer, param)
            scaler.clip_grad_norm_(optimizer, 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert torch.equal(first, second)


def test_gradients_changed_by_hand_after_unscaling_are_the_user_s(loop):
    """Noise or clipping by hand between `unscale_` and `step` is what it is for."""
    param = weight()
    scaler, _, optimizer = loop("sgd", param, lr=0.1)
    backward(scaler, optimizer, param)
    scaler.unscale_(optimizer)
    param.grad.mul_(2.0)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param, torch.full((2,), 0.8))


@pytest.mark.parametrize("fused", [False, True])
def test_a_batch_dropped_after_unscaling_needs_an_update(fused, loop):
    """Or the next batch would be stepped while it is multiplied by the scale."""
    param = weight()
    scaler, _, optimizer = loop("sgd", param, lr=0.1, fused=fused)
    backward(scaler, optimizer, param, math.inf)
    scaler.unscale_(optimizer)
    backward(scaler, optimizer, param)
    with pytest.raises(CallOrderError, match="also for a batch that you drop"):
        scaler.step(optimizer)
    assert torch.equal(param, torch.ones(2))


def test_clipping_by_hand_before_another_model_s_backward_pass_is_no_change():
    """As a GAN may do it with torch's own functions."""
    first, second = weight(), weight()
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in (first, second)]
    scaler = GradScaler("cpu")
    for param, optimizer in zip((first, second), optimizers, strict=True):
        backward(scaler, optimizer, param)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([param], 0.5)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.ones(2))


@pytest.mark.parametrize("way", ["unscale", "clip", "both", "value"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_backward_pass_that_adds_to_checked_gradients_is_refused(way, fused, loop):
    """What it adds is multiplied by the scale, and may be inf."""
    param = weight()
    scaler, _, optimizer = loop("sgd", param, lr=0.1, fused=fused)
    backward(scaler, optimizer, param)
    if way in ("unscale", "both"):
        scaler.unscale_(optimizer)
    if way in ("clip", "both"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    if way == "value":
        scaler.clip_grad_value_(optimizer, 1.0)
    scaler.scale(param.sum() * math.inf).backward()
    with pytest.raises(CallOrderError):
        scaler.step(optimizer)
    assert torch.equal(param, torch.ones(2))
    scaler.update()
    assert not param._post_accumulate_grad_hooks


def test_gradients_changed_by_hand_after_another_model_s_loss_are_the_user_s():
    """In whichever order a GAN does it."""
    first, second = weight(), weight()
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in (first, second)]
    scaler = GradScaler("cpu")
    backward(scaler, optimizers[0], first)
    scaler.unscale_(optimizers[0])
    backward(scaler, optimizers[1], second)
    first.grad = first.grad * 0.5
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert torch.equal(first, torch.full((2,), 0.95))


def test_a_stage_that_is_set_back_by_hand_is_looked_at_again(loop):
    """As loops for SAM do between their two backward passes."""
    param = weight()
    scaler, _, optimizer = loop("sgd", param, lr=0.1)
    backward(scaler, optimizer, param)
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
    backward(scaler, optimizer, param)
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(param.detach(), torch.full((2,), 0.9))


@pytest.mark.parametrize("bad", [None, math.inf])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_a_step_that_raised_does_not_vouch_for_the_next_batch(fused, clip, bad, loop):
    """What was looked at before the error is looked at anew, or refused."""
    param = weight()
    scaler, _, optimizer = loop("sgd", param, lr=0.1, fused=fused, init_scale=1024.0)

    def interrupt(*_):
        handle.remove()
        raise KeyboardInterrupt

    handle = optimizer.register_step_pre_hook(interrupt)
    backward(scaler, optimizer, param)
    if clip:
        scaler.clip_grad_norm_(optimizer, 1e9)
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer)
    backward(scaler, optimizer, param, bad)
    with contextlib.suppress(CallOrderError):
        scaler.step(optimizer)
    assert param.detach().tolist() in ([1.0, 1.0], pytest.approx([0.9, 0.9]))


@pytest.mark.parametrize("look", ["unscale_", "clip_grad_norm_"])
@pytest.mark.parametrize("fused", [False, True])
def test_losses_that_were_scaled_together_and_run_back_apart(fused, look, loop):
    """The second backward pass comes after the look, and no `scale` announces it."""
    param = weight()
    scaler, _, optimizer = loop("sgd", param, lr=0.1, fused=fused)
    first, second = scaler.scale([param.sum(), param.sum()])
    first.backward()
    getattr(scaler, look)(optimizer, *([1.0] if "clip" in look else []))
    second.backward()
    with pytest.raises(CallOrderError, match="found gradients that have changed"):
        scaler.step(optimizer)
    assert torch.equal(param, torch.ones(2))


def test_a_check_through_torchs_private_method_is_not_one_of_later_gradients(loop):
    """Libraries call it; what a backward pass adds after that is looked at again."""
    param = weight()
    scaler, _, optimizer = loop("fused sgd", param, lr=0.1)
    backward(scaler, optimizer, param)
    scaler._check_inf_per_device(optimizer)
    scaler.scale(param.sum() * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param, torch.ones(2))
    assert not scaler.last_step.applied


@pytest.mark.parametrize("policy", ["headroom", "lognormal"])
def test_the_scale_does_not_move_once_a_loss_was_multiplied_by_it(policy, loop):
    """A policy that looks ahead looks at the first loss, or at none."""
    param = weight()
    scaler, _, optimizer = loop("sgd", param, lr=0.1, policy=policy)
    for _ in range(20):
        backward(scaler, optimizer, param)
        scaler.step(optimizer)
        scaler.update()
    before = param.detach().clone()
    optimizer.zero_grad()
    scaler.scale(param + torch.ones(2)).sum().backward()
    scaler.scale((param + 1e5).sum()).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(param.detach(), before - 0.2)


def test_a_later_loss_in_fp16_does_not_move_the_scale_either():
    """It would be lowered to what FP16 holds, were it the first one."""
    scaler = GradScaler("cpu", policy="lognormal", init_scale=2.0**20)
    scaler.scale(torch.ones((), requires_grad=True))
    scaler.scale(torch.ones((), dtype=torch.float16, requires_grad=True))
    assert scaler.get_scale() == 2.0**20


def test_a_group_added_after_the_look_is_refused(loop):
    """Its gradients were neither checked nor unscaled."""
    param, other = weight(), weight()
    for look in ("unscale_", "clip_grad_norm_"):
        scaler, _, optimizer = loop("sgd", param, lr=0.1)
        scaler.scale(param.sum() + other.sum()).backward()
        getattr(scaler, look)(optimizer, *([1.0] if "clip" in look else []))
        optimizer.add_param_group({"params": [other]})
        with pytest.raises(CallOrderError, match="parameter group was added"):
            scaler.step(optimizer)
        assert torch.equal(other, torch.ones(2))
        param.grad = other.grad = None


def unscaled_by(way, scaler, optimizer, param):
    """Leave unscaled gradients in `.grad`, in one of the ways that a scaler has."""
    scaler.scale(param.sum()).backward()
    getattr(scaler, way)(optimizer, *([9.0] if "clip" in way else []))


WAYS = ["unscale_", "clip_grad_norm_", "clip_grad_value_"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("then", ["step", "clip_grad_norm_"])
@pytest.mark.parametrize("sync", ["auto", "never"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("times", [1.0, math.nan])
def test_a_further_backward_pass_is_refused_whatever_came_before(
    times, fused, sync, then, way, loop
):
    """Its gradients were never checked, and are multiplied by the scale."""
    param = weight()
    scaler, _, optimizer = loop("sgd", param, lr=0.1, fused=fused, sync=sync)
    unscaled_by(way, scaler, optimizer, param)
    scaler.scale(param.sum() * times).backward()
    with pytest.raises(CallOrderError, match="found gradients that have changed"):
        getattr(scaler, then)(optimizer, *([1.0] if "clip" in then else []))
    assert torch.equal(param, torch.ones(2))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sync", ["auto", "never"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_group_added_later_is_refused_whatever_came_before(fused, sync, way, loop):
    """Also if its gradient comes from elsewhere."""
    param, other = weight(), weight()
    scaler, _, optimizer = loop("sgd", param, lr=0.1, fused=fused, sync=sync)
    unscaled_by(way, scaler, optimizer, param)
    other.grad = torch.full((2,), math.nan)
    optimizer.add_param_group({"params": [other]})
    with pytest.raises(CallOrderError, match="parameter group was added"):
        scaler.step(optimizer)
    assert torch.equal(param, torch.ones(2))
    assert torch.equal(other, torch.ones(2))


@pytest.mark.parametrize("sync", ["auto", "never"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("look", ["step", "unscale_", "clip_grad_norm_"])
@pytest.mark.parametrize("tied", ["parameter", "gradient"])
def test_gradients_of_two_optimizers_are_divided_once(tied, look, fused, sync):
    """The second would divide again what the first has divided."""
    param = weight()
    other = param if tied == "parameter" else weight()
    first, second = (
        torch.optim.SGD([one], lr=0.1, fused=fused) for one in (param, other)
    )
    scaler = GradScaler("cpu", sync=sync)
    scaler.scale(param.sum()).backward()
    other.grad = param.grad
    arguments = [9.0] if "clip" in look else []
    getattr(scaler, look)(first, *arguments)
    with pytest.raises(CallOrderError, match="already checked or unscaled"):
        getattr(scaler, look)(second, *arguments)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("fused", [False, True])
def test_two_optimizers_may_step_one_parameter_by_gradients_of_their_own(
    fused, to_none
):
    """Cleared and computed again in between, they are other gradients."""
    param = weight()
    optimizers = [torch.optim.SGD([param], lr=0.1, fused=fused) for _ in range(2)]
    scaler = GradScaler("cpu")
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=to_none)
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(param.detach(), torch.full((2,), 0.8))


@pytest.mark.parametrize("look", ["step", "unscale_", "clip_grad_norm_"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_that_two_parameters_share_is_refused(fused, look, loop):
    """It would be divided once for each of them."""
    param, other = weight(), weight()
    scaler, _, optimizer = loop("sgd", [param, other], lr=0.1, fused=fused)
    scaler.scale(param.sum()).backward()
    other.grad = param.grad
    with pytest.raises(CallOrderError, match=r"same tensor as `.grad`.*\[1\] \(2\)"):
        getattr(scaler, look)(optimizer, *([9.0] if "clip" in look else []))
    assert torch.equal(other, torch.ones(2))


def test_one_parameter_listed_twice_is_refused():
    """Torch's constructor warns or refuses; groups edited by hand pass it by."""
    param = weight()
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.param_groups.append(dict(optimizer.param_groups[0]))
    scaler = GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    with pytest.raises(CallOrderError, match="listed twice"):
        scaler.step(optimizer)


@pytest.mark.parametrize("visible", [True, False])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("first", ["unscale_", "clip_grad_norm_", "clip_grad_value_"])
def test_a_loss_that_was_not_scaled_is_checked_too(
    visible, fused, first, monkeypatch, loop
):
    """Its gradients are added after the check; finite ones are applied."""
    if not visible:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda _: False)
    param = weight()
    scaler, _, optimizer = loop("adamw", param, lr=1e-3, fused=fused)
    for bad in (math.nan, 1.0, math.inf):
        backward(scaler, optimizer, param)
        arguments = () if first == "unscale_" else (1.0,)
        getattr(scaler, first)(optimizer, *arguments)
        (param.sum() * bad).backward()
        before = param.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step.applied == math.isfinite(bad)
        assert torch.equal(param, before) != math.isfinite(bad)


def test_no_backward_pass_of_a_frozen_parameter_is_expected(loop):
    """It takes no hook, and the others of its optimizer are stepped."""
    weight, frozen = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    frozen.requires_grad_(False)
    scaler, _, optimizer = loop("sgd", [weight, frozen], lr=0.1, init_scale=64.0)
    losses = [scaler.scale(weight.sum()), scaler.scale(2.0 * weight.sum())]
    torch.autograd.backward(losses)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    torch.testing.assert_close(weight.detach(), torch.full((2,), 0.7))
    assert torch.equal(frozen, torch.ones(2))
