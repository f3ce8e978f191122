"""Gradients of several dtypes and devices, and what a library's own call is given."""

import math

import pytest
import torch
from foreign import Noting
from nets import loss_of
from passes import CHECK, Passes
from torch._subclasses.fake_tensor import FakeTensorMode

from buoy._backends.torch import measure
from buoy._backends.torch.gradients import gather
from buoy.torch import CallOrderError, GradScaler

pytestmark = pytest.mark.filterwarnings("ignore:The loss was computed in BF16")
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def mixed(count):
    """Make one parameter per dtype."""
    return [torch.nn.Parameter(torch.ones(4, dtype=d)) for d in DTYPES[:count]]


def backward(scaler, params, factor=1.0):
    """Leave gradients of 1, 2, 3, ... times the scale."""
    losses = [param.float().sum() * (i + 1) for i, param in enumerate(params)]
    scaler.scale(sum(losses) * factor).backward()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("way", ["step", "unscale", "clip", "measure", "both"])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_bad_gradient_of_any_dtype_is_found(count, way, hidden, monkeypatch):
    """Whichever it is beside, and whoever looks."""
    if hidden:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    for kind in (Noting, lambda params: torch.optim.SGD(params, lr=0.1)):
        for bad in range(-1, count):
            params = mixed(count)
            optimizer = kind(params)
            measures = way in ("measure", "both")
            policy = "lognormal" if measures else None
            scaler = GradScaler("cpu", policy=policy)
            backward(scaler, params)
            if bad >= 0:
                params[bad].grad[1] = math.inf
            if way == "unscale":
                scaler.unscale_(optimizer)
            if way in ("clip", "both"):
                norm = scaler.clip_grad_norm_(optimizer, 1.0).item()
                expected = 2 * math.sqrt(sum((i + 1) ** 2 for i in range(count)))
                assert norm == pytest.approx(math.inf if bad >= 0 else expected)
            scaler.step(optimizer)
            assert scaler.last_step.applied is (bad < 0)
            if bad >= 0:
                assert scaler.last_step.offenders == (
                    f"param_groups[0]['params'][{bad}] (4)",
                )


@pytest.mark.parametrize("order", [None, 1.0, 2.0, math.inf])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_policy_gets_the_largest_of_all_dtypes(order, count):
    """With or without a norm of any order."""
    scales = []
    for fused in (False, True):
        params = mixed(count)
        optimizer = Noting(params) if fused else torch.optim.SGD(params, lr=0.0)
        scaler = GradScaler("cpu", policy="lognormal")
        for step in range(6):
            optimizer.zero_grad()
            backward(scaler, params, 2.0**-step)
            largest = max(p.grad.abs().max().item() for p in params)
            if order is not None:
                scaler.clip_grad_norm_(optimizer, math.inf, order)
            scaler.step(optimizer)
            work = scaler._per_optimizer_states[id(optimizer)]
            assert work.amax.item() == largest
            assert "amax_log2" in work.measured
            scaler.update()
            scales.append(scaler.get_scale())
    assert scales[:6] == scales[6:]
    assert len(set(scales)) > 1


@pytest.mark.parametrize("scale", [0.5, 2.0**-10])
@pytest.mark.parametrize("way", ["step", "unscale", "clip", "measure"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
def test_an_overflow_by_unscaling_is_found(scale, way, fused, hidden, monkeypatch):
    """Dividing by a scale below 1 multiplies: 3e38 fits, and twice as much does not."""
    if hidden:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    for large in (False, True):
        param = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([param], lr=0.0, fused=fused)
        policy = "lognormal" if way == "measure" else None
        scaler = GradScaler("cpu", policy=policy, init_scale=scale)
        scaler.scale(param.sum()).backward()
        fits = 1e18 if way == "clip" else 3e38  # its square, too
        param.grad[1] = 3e38 if large else fits * scale
        if way == "unscale":
            scaler.unscale_(optimizer)
        if way == "clip":
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        assert scaler.last_step.applied is not large
        norm = scaler.last_step.norm
        assert not large or norm is None or norm > torch.finfo(torch.float32).max


@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_a_library_may_unscale_with_numbers_of_its_own(scale, loop):
    """It gets its own flag back, as from torch, after one pass."""
    scaler, model, optimizer = loop(lr=0.1, init_scale=scale)
    scaler.scale(loss_of(model, 0)).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    found, inverse = torch.zeros(()), torch.tensor(1.0 / scale)
    with Passes([p.grad for p in model.parameters()]) as passes:
        flags = scaler._unscale_grads_(optimizer, inverse, found, False)
    assert passes.seen == {CHECK: 1}
    assert flags == {torch.device("cpu"): found}
    assert flags[torch.device("cpu")] is found
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(p.grad, grad / scale)
    model[0].bias.grad[0] = math.nan
    scaler._unscale_grads_(optimizer, inverse, found, False)
    assert found.item() == 1.0


@pytest.mark.parametrize(
    ("devices", "buckets"),
    [
        (("cuda:0", "cuda:0"), 1),
        (("cuda:0", "cuda:1"), 2),
        (("cpu", "cuda:0"), 2),
        (("cuda:0", "cpu"), 2),
        (("cpu", "cpu"), 1),
    ],
)
def test_gradients_of_one_device_are_taken_together(devices, buckets):
    """Of several, by device; fake tensors stand for those that are not here."""
    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.ones(3, device=d)) for d in devices]
        optimizer = torch.optim.SGD(params, lr=0.1)
        for param in params:
            param.grad = torch.ones_like(param)
        found = gather(optimizer)
        assert len(found.buckets) == buckets
        assert [len(one.grads) for one in found.buckets] == [2 // buckets] * buckets
        for device, _, grads in found.buckets:
            assert all(grad.device == device for grad in grads)
            assert measure.largest(grads).device == device
            parts, top = measure.norms(grads, 2.0, amax=True)
            assert (len(parts), top.shape) == (len(grads), ())


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_that_moved_to_another_parameter_was_not_inspected(fused, loop):
    """There are as many as before, and they are others."""
    scaler, params, optimizer = loop(
        "sgd",
        [torch.nn.Parameter(torch.ones(2)) for _ in range(2)],
        lr=0.1,
        fused=fused,
    )
    scaler.scale(params[0].sum()).backward()
    scaler.unscale_(optimizer)
    params[1].grad, params[0].grad = params[0].grad, None
    with pytest.raises(CallOrderError, match="another backward pass"):
        scaler.step(optimizer)
