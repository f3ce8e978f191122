"""What an optimizer is given that divides and decides itself, and what it returns."""

import pytest
import torch
from foreign import Forwarding, ForwardingAll, Noting
from nets import OPTIMIZERS, loss_of, net, spoil, train

from buoy.torch import CallOrderError, GradScaler

EVENTS = ["ok", "inf", "ok"]


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
def test_an_optimizer_is_given_scale_and_flag_and_keeps_neither(
    unscaled, hidden, monkeypatch
):
    """Its result is that of `step`, and its state is its own."""
    if hidden:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    model, other = net(), net()
    optimizer = Noting(model.parameters())
    scaler = GradScaler("cpu", init_scale=64.0)
    for step, event in enumerate(EVENTS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        spoil(model, event)
        if unscaled:
            scaler.unscale_(optimizer)
        assert scaler.step(optimizer) == 7
        assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
        scaler.update()
    scales = [None] * 3 if unscaled else [64.0, 64.0, 32.0]
    assert optimizer.given == list(zip(scales, (0.0, 1.0, 0.0), strict=True))
    assert not optimizer.state
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    train(GradScaler("cpu", init_scale=64.0), other, plain, EVENTS)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_an_optimizer_is_called_without_gradients_too():
    """As torch does: its weight decay or its counter may be due."""
    optimizer = Noting(net().parameters())
    scaler = GradScaler("cpu", init_scale=64.0)
    scaler.scale(loss_of(net(1), 0)).backward()
    assert scaler.step(optimizer) == 7
    assert optimizer.given == [(64.0, 0.0)]
    assert scaler.last_step.skipped
    with pytest.raises(CallOrderError, match="No inf checks were recorded"):
        scaler.update()


def test_a_factor_of_its_own_is_kept():
    """Gradients that somebody has multiplied are divided by both."""
    model = net()
    optimizer = Noting(model.parameters())
    scaler = GradScaler("cpu", init_scale=64.0)
    scaler.scale(loss_of(model, 0)).backward()
    optimizer.grad_scale = torch.tensor(4.0)
    scaler.step(optimizer)
    assert optimizer.given == [(256.0, 0.0)]


@pytest.mark.parametrize("wrapped", [None, Forwarding, ForwardingAll])
@pytest.mark.parametrize("clip", [False, True])
def test_gradients_that_it_divides_are_not_written(wrapped, clip):
    """No pass over memory but its own; so they are after a step that it skips."""
    model, other = net(), net()
    inner = OPTIMIZERS["fused adamw"](model.parameters())
    optimizer = inner if wrapped is None else wrapped(inner)
    scaler = GradScaler("cpu", init_scale=64.0)
    held = []
    inner.register_step_pre_hook(
        lambda *_: held.append([p.grad.clone() for p in model.parameters()])
    )
    scaler.scale(loss_of(model, 0)).backward()
    (loss_of(other, 0) * 64.0).backward()
    if clip:
        scaler.clip_grad_norm_(optimizer, 0.01)
    scaler.step(optimizer)
    for grad, q in zip(held[0], other.parameters(), strict=True):
        assert torch.equal(grad, q.grad)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_managed_scaler_asks_before_it_calls(hidden, monkeypatch):
    """Libraries count the calls of their optimizer: a skipped step is none."""
    if hidden:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    model = net()
    optimizer = Noting(model.parameters())
    scaler = GradScaler("cpu", init_scale=64.0, managed=True)
    train(scaler, model, optimizer, EVENTS)
    assert optimizer.given == [(64.0, 0.0), (32.0, 0.0)]


class Summing(GradScaler):
    """A library's own check: flags of two devices, one of them a sum over ranks."""

    flags = ((torch.device("cpu"), 0.0), (torch.device("cpu", 0), 0.0))

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return {device: torch.full((1,), value) for device, value in self.flags}


@pytest.mark.parametrize("kind", ["sgd", "fused adamw", "fused momentum"])
@pytest.mark.parametrize(
    ("flags", "applied"),
    [
        ((("cpu", 0.0), ("cpu:0", 0.0)), True),
        ((("cpu", 0.0), ("cpu:0", 3.0)), False),
        ((("cpu", 3.0), ("cpu:0", 0.0)), False),
        ((("cpu:0", 3.0),), False),
        ((("cpu:0", 0.0),), True),
        ((("cpu", 0.0),), True),
        ((("cpu", 3.0),), False),
    ],
)
def test_flags_of_others_may_be_any_number_on_any_device(kind, flags, applied):
    """More than 0 is a skip, also to kernels that skip only at exactly 1."""
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = Summing("cpu", init_scale=64.0)
    scaler.flags = [(torch.device(device), value) for device, value in flags]
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)
    assert scaler.last_step.applied is applied
    assert scaler.last_step.found.shape == ()
    for p, q in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, q) is not applied
    scaler.update()
    assert scaler.get_scale() == (64.0 if applied else 32.0)


def test_momentum_begins_with_zeros_where_there_is_any():
    """Torch leaves it uninitialised; groups and parameters without one have none."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    groups = [{"params": params[:2]}, {"params": params[2:], "momentum": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True)
    begun = []
    optimizer.register_step_pre_hook(
        lambda *_: begun.append({p: dict(optimizer.state[p]) for p in params})
    )
    scaler = GradScaler("cpu")
    scaler.scale(params[0].sum() + params[2].sum()).backward()
    params[0].grad[0] = float("inf")
    scaler.step(optimizer)
    assert torch.equal(begun[0][params[0]]["momentum_buffer"], torch.zeros(3))
    assert not begun[0][params[1]]
    assert not begun[0][params[2]]


@pytest.mark.parametrize("sync", ["auto", "never"])
def test_the_result_of_an_optimizer_is_that_of_step(sync):
    """Also where it may be undone; a skipped step that was not taken has none."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    usual, seen = optimizer.step, []
    optimizer.step = lambda: (usual(), 7)[1]  # as schedulers replace it
    optimizer.register_step_post_hook(lambda *_: seen.append(params[0].tolist()))
    scaler = GradScaler("cpu", sync=sync)
    for bad, result in ((False, 7), (True, None if sync == "auto" else 7)):
        optimizer.zero_grad()
        scaler.scale(params[0].sum()).backward()
        if bad:
            params[0].grad[0] = float("nan")
        before = params[0].tolist()
        assert scaler.step(optimizer) == result
        scaler.update()
    assert params[0].tolist() == before
    assert seen[1:] == ([] if sync == "auto" else [before])  # zeros were applied
    assert params[1].grad is None
