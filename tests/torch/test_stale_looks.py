"""What was found of some gradients is never taken for a finding about others."""

import math

import pytest
import torch
from torch.amp.grad_scaler import OptState

from buoy.torch import GradientsChangedError, GradScaler


def weight():
    return torch.nn.Parameter(torch.ones(2))


def backward(scaler, optimizer, param, bad=None):
    optimizer.zero_grad()
    scaler.scale(param.sum()).backward()
    if bad is not None:
        param.grad[0] = bad


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("then", ["clip_grad_norm_", "clip_grad_value_", "step"])
def test_a_dropped_batch_needs_an_update(fused, then):
    """Clip, drop the batch without `update`: the next batch is not taken for it."""
    param = weight()
    optimizer = torch.optim.AdamW([param], fused=fused)
    scaler = GradScaler("cpu")
    backward(scaler, optimizer, param)
    scaler.clip_grad_norm_(optimizer, 1.0)
    backward(scaler, optimizer, param, math.nan)
    arguments = () if then == "step" else (1.0,)
    with pytest.raises(GradientsChangedError, match="also for a batch that you drop"):
        getattr(scaler, then)(optimizer, *arguments)
    assert torch.equal(param, torch.ones(2))


@pytest.mark.parametrize("fused", [False, True])
def test_a_dropped_batch_with_an_update_is_fine(fused):
    """Whoever drops a batch and calls `update` goes on as if it had not been."""
    param = weight()
    optimizer = torch.optim.AdamW([param], fused=fused)
    scaler = GradScaler("cpu")
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


def test_gradients_changed_by_hand_after_unscaling_are_the_user_s():
    """Noise or clipping by hand between `unscale_` and `step` is what it is for."""
    param = weight()
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler = GradScaler("cpu")
    backward(scaler, optimizer, param)
    scaler.unscale_(optimizer)
    param.grad.mul_(2.0)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param, torch.full((2,), 0.8))


@pytest.mark.parametrize("fused", [False, True])
def test_a_batch_dropped_after_unscaling_needs_an_update(fused):
    """Or the next batch would be stepped while it is multiplied by the scale."""
    param = weight()
    optimizer = torch.optim.SGD([param], lr=0.1, fused=fused)
    scaler = GradScaler("cpu")
    backward(scaler, optimizer, param, math.inf)
    scaler.unscale_(optimizer)
    backward(scaler, optimizer, param)
    with pytest.raises(GradientsChangedError, match="also for a batch that you drop"):
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
def test_a_backward_pass_that_adds_to_checked_gradients_is_refused(way, fused):
    """What it adds is multiplied by the scale, and may be inf."""
    param = weight()
    optimizer = torch.optim.SGD([param], lr=0.1, fused=fused)
    scaler = GradScaler("cpu")
    backward(scaler, optimizer, param)
    if way in ("unscale", "both"):
        scaler.unscale_(optimizer)
    if way in ("clip", "both"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    if way == "value":
        scaler.clip_grad_value_(optimizer, 1.0)
    scaler.scale(param.sum() * math.inf).backward()
    with pytest.raises(GradientsChangedError):
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


def test_a_stage_that_is_set_back_by_hand_is_looked_at_again():
    """As loops for SAM do between their two backward passes."""
    param = weight()
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler = GradScaler("cpu")
    backward(scaler, optimizer, param)
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
    backward(scaler, optimizer, param)
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(param.detach(), torch.full((2,), 0.9))
