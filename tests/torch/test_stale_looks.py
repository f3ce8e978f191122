"""What was found of some gradients is never taken for a finding about others."""

import math

import pytest
import torch

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
