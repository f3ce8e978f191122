"""How often a step reads and writes the gradients: once, wherever that is possible."""

import math
from collections import Counter

import pytest
import torch
from passes import CHECK, Passes

from buoy.torch import GradScaler

COUNT = 20
ONE_PASS = {
    "unscale_": {CHECK: 1},
    "clip_grad_norm_": {"_foreach_norm": 1, "_foreach_mul_": 1},
    "fused clip_grad_norm_": {"_foreach_norm": 1},
}
# Of a policy that wants the largest gradient; beside each other, for the cache.
MEASURED = {
    "unscale_": {"aminmax": COUNT, CHECK: 1},
    "clip_grad_norm_": {
        "linalg_vector_norm": COUNT,
        "aminmax": COUNT,
        "_foreach_mul_": 1,
    },
    "largest": {"aminmax": COUNT, "_foreach_mul_": 1},
    "fused check": {"aminmax": COUNT},
}
CHECKED = {100: {CHECK: 1}, 8192: {CHECK: 1}, 8193: {"sum": COUNT}}


def gradients_of(scaler, size=100, **options):
    """Leave gradients of COUNT parameters; return them and their optimizer."""
    params = [torch.nn.Parameter(torch.randn(size)) for _ in range(COUNT)]
    scaler.scale(sum(param.square().sum() for param in params)).backward()
    optimizer = torch.optim.SGD(params, lr=1e-3, **options)
    return [param.grad for param in params], optimizer


@pytest.mark.parametrize("kind", MEASURED)
def test_what_a_policy_wants_is_measured_on_the_way(kind):
    """The largest gradient shows what is not finite, too."""
    scaler = GradScaler("cpu", policy="lognormal")
    grads, optimizer = gradients_of(scaler, fused=kind.startswith("fused"))
    with Passes(grads) as passes:
        if kind == "unscale_":
            scaler.unscale_(optimizer)
        elif kind == "fused check":
            scaler._check_inf_per_device(optimizer)
        else:
            order = math.inf if kind == "largest" else 2.0
            scaler.clip_grad_norm_(optimizer, 1.0, order)
    assert MEASURED[kind] == passes.seen


def test_headroom_reads_clipped_gradients_twice_in_every_third_step_only():
    """And in the first 16."""
    scaler = GradScaler("cpu", policy="headroom")
    extra = []
    for turn in range(31):
        grads, optimizer = gradients_of(scaler, fused=True)
        with Passes(grads) as passes:
            scaler.clip_grad_norm_(optimizer, 1.0)
        if passes.seen["aminmax"]:
            extra.append(turn)
        scaler.step(optimizer)
        scaler.update()
    assert [*range(16), 18, 21, 24, 27, 30] == extra


@pytest.mark.parametrize("size", CHECKED)
@pytest.mark.parametrize("bad", [False, True])
def test_a_check_takes_the_cheapest_kernel(size, bad):
    """A sum beats torch's kernel for large gradients; which one is bad needs both."""
    scaler = GradScaler("cpu")
    grads, optimizer = gradients_of(scaler, size, fused=True)
    if bad:
        grads[3][7] = math.inf
    with Passes(grads) as passes:
        flags = scaler._check_inf_per_device(optimizer)
    assert float(bad) == flags[torch.device("cpu")].item()
    further = {CHECK: 1} if bad else {}
    assert {**CHECKED[size], **further} == passes.seen


@pytest.mark.parametrize("first", [None, "load", "set"])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("kind", ONE_PASS)
def test_gradients_are_read_once(kind, hidden, first, monkeypatch):
    """One pass checks and unscales; with clipping one measures, and one writes."""
    if hidden:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    params = [torch.nn.Parameter(torch.randn(100)) for _ in range(20)]
    fused = kind.startswith("fused")
    optimizer = torch.optim.SGD(params, lr=1e-3, fused=fused)
    scaler = GradScaler("cpu", init_scale=1.0)  # the least that is safe to divide by
    for _ in range(3):
        optimizer.zero_grad()
        if first == "load":
            scaler.load_state_dict(scaler.state_dict())
        elif first == "set" and scaler._scale is not None:
            scaler.update(1.0)
        scaler.scale(sum(param.square().sum() for param in params)).backward()
        with Passes([param.grad for param in params]) as passes:
            if kind.endswith("clip_grad_norm_"):
                scaler.clip_grad_norm_(optimizer, 1.0)
            else:
                scaler.unscale_(optimizer)
        if hidden and kind != "unscale_":
            passes.seen -= Counter(aminmax=len(params))  # an overflow of the norm only
        assert ONE_PASS[kind] == passes.seen
        scaler.step(optimizer)
        scaler.update()


def test_gradients_of_a_joint_step_are_checked_once():
    """Before the first of the optimizers steps, for all of them."""
    scaler = GradScaler("cpu", skip="joint")
    grads, optimizer = gradients_of(scaler, fused=True)
    with Passes(grads) as passes:
        scaler.step(optimizer)
    assert passes.seen[CHECK] == 1


@pytest.mark.parametrize("order", [0.5, 1.0, 3.0])
def test_a_finite_norm_of_any_order_shows_that_all_gradients_are(order):
    """The largest of them is not needed then."""
    scaler = GradScaler("cpu")
    grads, optimizer = gradients_of(scaler)
    with Passes(grads) as passes:
        scaler.clip_grad_norm_(optimizer, 1.0, order)
    assert {"_foreach_norm": 1, "_foreach_mul_": 1} == passes.seen


def test_unscaled_gradients_are_not_measured_before_they_are_clamped():
    """Only scaled ones are: their norm would be lost."""
    scaler = GradScaler("cpu")
    grads, optimizer = gradients_of(scaler)
    scaler.unscale_(optimizer)
    with Passes(grads) as passes:
        scaler.clip_grad_value_(optimizer, 1.0)
    assert {"_foreach_clamp_min_": 1, "_foreach_clamp_max_": 1} == passes.seen
