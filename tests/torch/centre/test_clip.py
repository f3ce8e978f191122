"""Check, unscale and clip are one look and one multiplication."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import loss_of, net

from buoy._backends import torch as backend
from buoy._core.step import clip_factor
from buoy.torch import (
    CallOrderError,
    GradScaler,
    NonfiniteNormError,
    OptionError,
)
from buoy.torch.scale import clip_factor_on_host


def scaled_gradients(model, scale):
    """Leave the gradients that a backward pass of a scaled loss would leave."""
    model.zero_grad()
    (loss_of(model, 0) * scale).backward()


@pytest.mark.parametrize("order", [1.0, 2.0])
def test_the_norm_is_that_of_torch_to_the_last_bit(order):
    """With a scale that is a power of two, which rounds nothing."""
    weight = torch.nn.Parameter(torch.zeros(1000))
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    scaler = GradScaler("cpu", init_scale=64.0)
    scaler.scale((weight * values).sum()).backward()
    norm = scaler.clip_grad_norm_(torch.optim.SGD([weight], lr=0.1), 1.0, order)
    assert torch.equal(norm, torch.nn.utils.get_total_norm([values], order))


@pytest.mark.parametrize("kind", ["sgd", "adamw", "fused sgd", "fused adamw"])
@pytest.mark.parametrize("order", [2.0, math.inf, 1.0, 3.0])
@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_one_pass_equals_unscale_then_torchs_clipping(kind, order, max_norm, loop):
    """The same norm, and the same weights, as in the documented three calls."""
    outcomes = []
    for one_pass in (True, False):
        scaler, model, optimizer = loop(kind, init_scale=1000.0)
        norms = []
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if one_pass:
                norms.append(scaler.clip_grad_norm_(optimizer, max_norm, order))
            else:
                scaler.unscale_(optimizer)
                norms.append(
                    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, order)
                )
            scaler.step(optimizer)
            scaler.update()
        outcomes.append((torch.stack(norms), model))
    torch.testing.assert_close(outcomes[0][0], outcomes[1][0], rtol=1e-5, atol=0.0)
    for p, q in zip(
        outcomes[0][1].parameters(), outcomes[1][1].parameters(), strict=True
    ):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["sgd", "fused adamw"])
@pytest.mark.parametrize("max_norm", [0.05, 3.0, 100.0])
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_bound_may_be_a_tensor(kind, max_norm, unscaled, loop):
    """The same norm, gradients and weights as with the plain number."""
    outcomes = []
    for bound in (max_norm, torch.tensor(max_norm)):
        scaler, model, optimizer = loop(kind, init_scale=1024.0)
        scaler.scale(loss_of(model, 0) * 7.0).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        norm = scaler.clip_grad_norm_(optimizer, bound)
        if kind == "fused adamw" and not unscaled:
            scaler.unscale_(optimizer)  # writes what was decided
        grads = torch.cat([param.grad.flatten() for param in model.parameters()])
        assert grads.norm().item() == pytest.approx(min(norm.item(), max_norm), 1e-5)
        scaler.step(optimizer)
        outcomes.append([norm, grads, *(p.detach() for p in model.parameters())])

    for number, tensor in zip(*outcomes, strict=True):
        torch.testing.assert_close(number, tensor, rtol=1e-6, atol=0.0)


def test_nothing_is_written_for_optimizers_that_take_grad_scale(loop):
    """The gradients stay as the backward pass left them until the optimizer's step."""
    scaler, model, optimizer = loop("fused adamw", lr=0.1, init_scale=8.0)
    scaler.scale(loss_of(model, 0)).backward()
    before = [(p.grad, p.grad._version) for p in model.parameters()]
    scaler.clip_grad_norm_(optimizer, 0.1)
    assert [(p.grad, p.grad._version) for p in model.parameters()] == before


def test_unfused_optimizers_have_unscaled_clipped_gradients_after_the_call(loop):
    """Who reads `.grad` between clipping and stepping sees what will be applied."""
    scaler, model, optimizer = loop(lr=0.1)
    scaler.scale(loss_of(model, 0)).backward()
    norm = scaler.clip_grad_norm_(optimizer, 0.01)
    left = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert norm.item() > 0.01
    assert left.item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("kind", ["sgd", "fused adamw"])
@pytest.mark.parametrize("bad", ["inf", "-inf", "nan"])
def test_a_non_finite_gradient_skips_and_the_norm_says_so(kind, bad, loop):
    """The norm is inf or NaN, the weights stay, the scale falls."""
    scaler, model, optimizer = loop(kind)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(loss_of(model, 0)).backward()
    model[0].weight.grad[0, 0] = float(bad)
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert not math.isfinite(norm)
    assert all(
        torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
    )
    assert scaler.get_scale() == 32768.0


@pytest.mark.parametrize("kind", ["sgd", "fused sgd"])
@pytest.mark.parametrize("visible", [True, False])
def test_a_sum_of_squares_that_overflows_is_not_called_non_finite(
    kind, visible, monkeypatch, loop
):
    """Gradients of 1e25 are finite though their squares are not, on any device."""
    if not visible:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    scaler, weight, optimizer = loop(kind, torch.zeros(4), init_scale=2.0**80)
    scaler.scale(weight.sum()).backward()
    weight.grad.fill_(1e25)
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert norm.item() == pytest.approx(2e25 / 2.0**80, rel=1e-5)
    assert scaler.last_step.applied
    assert weight.abs().max().item() == pytest.approx(0.05 * min(0.5, 1e25 / 2.0**80))


def test_error_if_nonfinite_is_torchs_error(loop):
    """Who wants an exception gets one, of torch's type."""
    scaler, model, optimizer = loop(lr=0.1)
    scaler.scale(loss_of(model, 0)).backward()
    model[0].weight.grad[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match="non-finite") as caught:
        scaler.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    assert isinstance(caught.value, NonfiniteNormError)


def test_clipping_after_unscaling_by_hand_does_not_unscale_again(loop):
    """`unscale_` then our clipping is torch's clipping of unscaled gradients."""
    model, other = net(), net()
    scaler, _, optimizer = loop("sgd", model, lr=0.1)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.unscale_(optimizer)
    loss_of(other, 0).backward()
    expected = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    assert scaler.clip_grad_norm_(optimizer, 0.1).item() == pytest.approx(
        expected.item()
    )
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("kind", ["sgd", "fused sgd"])
def test_clipping_twice_keeps_the_tighter_bound(kind, loop):
    """The second call sees what the first left."""
    scaler, model, optimizer = loop(kind)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(loss_of(model, 0)).backward()
    scaler.clip_grad_norm_(optimizer, 0.5)
    assert scaler.clip_grad_norm_(optimizer, 0.1).item() == pytest.approx(0.5, rel=1e-3)
    scaler.step(optimizer)
    scaler.update()
    moved = torch.cat(
        [(a - b).flatten() for a, b in zip(before, model.parameters(), strict=True)]
    )
    assert moved.norm().item() == pytest.approx(0.05 * 0.1, rel=1e-3)


@pytest.mark.parametrize("kind", ["sgd", "fused sgd"])
def test_unscale_after_clipping_writes_what_was_decided(kind, loop):
    """With either kind of optimizer the gradients can be had in the end."""
    scaler, model, optimizer = loop(kind)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.clip_grad_norm_(optimizer, 0.01)
    if kind == "fused sgd":
        scaler.unscale_(optimizer)
    left = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert left.item() == pytest.approx(0.01, rel=1e-3)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.applied


@pytest.mark.parametrize("kind", ["sgd", "fused sgd"])
def test_clip_by_value(kind, loop):
    """Every unscaled gradient is clamped; an inf still skips the step."""
    for bad in (False, True):
        scaler, weight, optimizer = loop(kind, torch.tensor([3.0, 0.25]))
        scaler.scale((weight**2).sum() - 9.0 * weight[1]).backward()
        if bad:
            weight.grad[1] = float("inf")
        scaler.clip_grad_value_(optimizer, 1.0)
        assert weight.grad.tolist() == [1.0, 1.0 if bad else -1.0]
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step.applied is not bad


def test_clipping_after_the_step_is_refused(loop):
    """Too late to clip: an error says where the call belongs."""
    scaler, model, optimizer = loop(lr=0.1)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)
    for clip in (scaler.clip_grad_norm_, scaler.clip_grad_value_):
        with pytest.raises(CallOrderError, match="after step"):
            clip(optimizer, 1.0)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_negative_clip_value_is_refused_wherever_it_is(hidden, monkeypatch, loop):
    """Values are clamped by a number, so one on a device is read."""
    if hidden:
        monkeypatch.setattr(backend, "in_host_memory", lambda tensor: False)
    scaler, model, optimizer = loop(lr=0.1)
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(OptionError, match="clip_value"):
        scaler.clip_grad_value_(optimizer, torch.tensor(-1.0))


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
def test_no_gradients_have_norm_zero(unscaled, hidden, monkeypatch, loop):
    """As torch's function answers for parameters without gradients."""
    if hidden:
        monkeypatch.setattr(backend, "in_host_memory", lambda tensor: False)
    scaler, model, optimizer = loop(lr=0.1)
    scaler.scale(loss_of(model, 0))
    if unscaled:
        scaler.unscale_(optimizer)
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 0.0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
def test_clipping_to_zero_applies_zeros(fused, hidden, monkeypatch, loop):
    """That is what was asked for; it is not a factor that has underflowed."""
    if hidden:
        monkeypatch.setattr(backend, "in_host_memory", lambda tensor: False)
    scaler, weight, optimizer = loop("sgd", torch.ones(2), lr=0.1, fused=fused)
    scaler.scale(weight.sum()).backward()
    scaler.clip_grad_norm_(optimizer, 0.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.applied
    assert torch.equal(weight, torch.ones(2))


def test_mixed_dtypes_and_layouts_have_one_norm(loop):
    """BF16, FP64, complex and sparse gradients count together, and are unscaled."""
    params = [
        torch.nn.Parameter(torch.zeros(3)),
        torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)),
        torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)),
        torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64)),
    ]
    scaler, _, optimizer = loop("sgd", params, lr=1.0, init_scale=4.0)
    scaler.scale(params[0].sum()).backward()
    for param in params:
        param.grad = torch.full_like(param, 4.0)
    params[3].grad = torch.full((3,), 4.0 + 4.0j)
    norm = scaler.clip_grad_norm_(optimizer, 100.0)
    assert norm.item() == pytest.approx(math.sqrt(3 + 3 + 3 + 6))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(params[3].detach(), torch.full((3,), -1.0 - 1.0j))
    assert torch.equal(params[1].detach(), torch.full((3,), -1.0, dtype=torch.bfloat16))


def test_half_precision_gradients_do_not_round_the_factor(loop):
    """A multiplier far below FP16's range still unscales FP16 gradients (fused)."""
    scaler, weight, optimizer = loop(
        "fused sgd", torch.zeros(3, dtype=torch.float16), lr=1.0, init_scale=2.0**30
    )
    scaler.scale(torch.ones((), requires_grad=True))
    weight.grad = torch.full((3,), 2.0**14, dtype=torch.float16)
    scaler.clip_grad_norm_(optimizer, 2.0**40)
    scaler.unscale_(optimizer)
    assert torch.equal(weight.grad, torch.full((3,), 2.0**-16, dtype=torch.float16))


def test_an_optimizer_that_takes_the_scaler_gets_clipped_gradients():
    """The old contract knows nothing of a multiplier: it is written before."""

    class TakesScaler(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            """Step by what `.grad` holds."""
            self.used = self.param_groups[0]["params"][0].grad.norm().item()

    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = TakesScaler([weight], lr=0.1)
    scaler = GradScaler("cpu")
    scaler.scale((weight**2).sum()).backward()
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(10.0)
    with pytest.warns(FutureWarning):
        scaler.step(optimizer)
    scaler.update()
    assert optimizer.used == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("order", [0.0, -1.0, -math.inf, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_no_order_of_norm_lets_a_bad_gradient_through(fused, order, bad, loop):
    """Some norms are finite though an element is not; the check does not hang on it."""
    scaler, param, optimizer = loop("adamw", torch.ones(3), lr=1e-3, fused=fused)
    scaler.scale(param.sum()).backward()
    param.grad[0] = bad
    scaler.clip_grad_norm_(optimizer, 1.0, norm_type=order)
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last_step.applied
    assert torch.equal(param, torch.ones(3))


@pytest.mark.parametrize("value", [math.nan, -1.0, None, "1"])
def test_a_threshold_that_would_spoil_gradients_is_refused(value, loop):
    """Not a number, below 0, or nothing at all."""
    scaler, param, optimizer = loop("sgd", torch.ones(3), lr=0.1)
    scaler.scale(param.sum()).backward()
    with pytest.raises(OptionError, match="`max_norm` must be a number"):
        scaler.clip_grad_norm_(optimizer, value)
    with pytest.raises(OptionError, match="`clip_value` must be a number"):
        scaler.clip_grad_value_(optimizer, value)


@pytest.mark.parametrize("by", ["norm", "value"])
def test_duplicate_rows_of_a_sparse_gradient_are_clipped_as_their_sum(by, loop):
    """A word that occurs three times has one row of gradient, not three."""
    moved = []
    for sparse in (False, True):
        layer = torch.nn.Embedding(4, 3, sparse=sparse)
        torch.nn.init.zeros_(layer.weight)
        scaler, _, optimizer = loop("sgd", layer, lr=1.0)
        weights = torch.tensor([1.0, 2.0, 3.0])
        loss = (layer(torch.tensor([0, 0, 0, 1])) * weights).sum()
        scaler.scale(loss).backward()
        if by == "norm":
            torch.testing.assert_close(
                scaler.clip_grad_norm_(optimizer, 1.0), torch.tensor(140.0).sqrt()
            )
        else:
            scaler.clip_grad_value_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        moved.append(layer.weight.detach().clone())
    torch.testing.assert_close(*moved)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, 4.0, math.inf])
def test_complex_gradients_have_torch_s_norm(order, loop):
    """The magnitude of 3 - 4i is 5, whatever the order."""
    scaler, param, optimizer = loop(
        "sgd", torch.zeros(2, dtype=torch.complex64), lr=0.1, init_scale=4.0
    )
    scaler.scale(param.real.sum()).backward()
    param.grad.copy_(torch.tensor([3 - 4j, 1 + 0j]) * 4)
    expected = torch.linalg.vector_norm(torch.tensor([5.0, 1.0]), order)
    torch.testing.assert_close(
        scaler.clip_grad_norm_(optimizer, 100.0, order), expected
    )
    torch.testing.assert_close(param.grad, torch.tensor([3 - 4j, 1 + 0j]))


def test_complex_gradients_whose_magnitude_float32_cannot_hold_are_skipped():
    """Both parts are finite, but not the norm that would be clipped by."""
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler = GradScaler("cpu")
    scaler.scale(param.real.sum()).backward()
    param.grad.fill_(3e38 + 3e38j)
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    assert norm.item() == math.inf
    scaler.step(optimizer)
    assert scaler.last_step.skipped


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_twice_by_different_norms_does_both(fused, loop):
    """First to a length of 1, then no element above 0.1: fused or not."""
    scaler, param, optimizer = loop("sgd", torch.zeros(4), lr=1.0, fused=fused)
    scaler.scale(param.sum()).backward()
    scaler.clip_grad_norm_(optimizer, 1.0, 2.0)
    scaler.clip_grad_norm_(optimizer, 0.1, math.inf)
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(param.detach(), torch.full((4,), -0.1))


def test_a_wrapper_of_a_fused_optimizer_cannot_lose_the_clipping(loop):
    """What was clipped through one object is not stepped through another."""

    class Wrapper:
        _step_supports_amp_scaling = True

        def __init__(self, optimizer):
            self.step = optimizer.step
            self.param_groups = optimizer.param_groups

    scaler, param, optimizer = loop("fused sgd", torch.ones(2), lr=1.0)
    scaler.scale(param.sum() * 10).backward()
    scaler.clip_grad_norm_(Wrapper(optimizer), 1.0)
    with pytest.raises(CallOrderError, match="Pass the same object"):
        scaler.step(optimizer)


@pytest.mark.parametrize("unscaled", [True, False])
def test_parameters_without_elements_have_no_largest_one(unscaled, loop):
    """Of which torch makes an error."""
    scaler, params, optimizer = loop(
        "sgd",
        [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(0))],
        lr=0.1,
    )
    scaler.scale(sum(param.sum() for param in params)).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    assert scaler.clip_grad_norm_(optimizer, 0.5, norm_type=math.inf) == 1.0
    torch.testing.assert_close(params[0].grad, torch.full((2,), 0.5))


@pytest.mark.parametrize("order", [0.5, 1.0, 2.0, math.inf])
@pytest.mark.parametrize("limit", [math.inf, torch.tensor(math.inf), 1.0])
@pytest.mark.parametrize("fused", [True, False])
def test_a_norm_beyond_float32_of_finite_gradients_makes_no_nan(
    order, limit, fused, monkeypatch, loop
):
    """The step is skipped, and the scale falls; nothing is multiplied by inf."""
    monkeypatch.setattr(backend, "in_host_memory", lambda tensor: False)
    scaler, weight, optimizer = loop(
        "adamw", torch.ones(64), fused=fused, init_scale=2.0**100
    )
    scaler.scale(weight.sum()).backward()
    weight.grad.fill_(3e38)
    scaler.clip_grad_norm_(optimizer, limit, norm_type=order)
    scaler.step(optimizer)
    scaler.update()
    assert weight.isfinite().all()
    assert all(value.isfinite().all() for value in optimizer.state[weight].values())
    # A fused kernel cannot divide by 1 / factor here: at this scale it is inf.
    cannot = order != math.inf or (fused and limit == 1.0)
    assert scaler.last_step.applied is not cannot
    assert scaler.get_scale() == (2.0**99 if cannot else 2.0**100)
    moved = 0.0 if cannot else 0.01 + 0.01 * 0.01  # the gradient and weight decay
    torch.testing.assert_close(weight.detach(), torch.full((64,), 1.0 - moved))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("policy", [None, "headroom"])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("hidden", [True, False])
def test_no_dtype_hides_what_is_not_finite(
    dtype, bad, policy, clip, fused, hidden, monkeypatch, loop
):
    """Alone or beside others, whoever looks at it."""
    if hidden:
        monkeypatch.setattr(backend, "in_host_memory", lambda tensor: False)
    params = [
        torch.nn.Parameter(torch.ones(3, dtype=d)) for d in (dtype, torch.float32)
    ]
    scaler, _, optimizer = loop("adamw", params, fused=fused, policy=policy)
    scaler.scale(sum(param.float().sum() for param in params)).backward()
    params[0].grad[1] = bad
    if clip:
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last_step.applied
    assert all(torch.equal(param, torch.ones_like(param)) for param in params)


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_whose_scaled_norm_float32_cannot_hold_is_skipped(order, fused):
    """A lower scale makes it fit; the largest element fits at once."""
    weight = torch.nn.Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**100)
    scaler.scale(weight.sum()).backward()
    weight.grad.fill_(3e38)
    plain = 3e38 / 2.0**100
    norm = scaler.clip_grad_norm_(optimizer, 1e3, norm_type=order)
    scaler.step(optimizer)
    scaler.update()
    fits = order == math.inf
    assert norm.item() == (pytest.approx(plain) if fits else math.inf)
    assert scaler.last_step.applied is fits
    moved = 1e3 if fits else 0.0
    torch.testing.assert_close(weight.detach(), torch.full((64,), 1.0 - moved))
    assert scaler.get_scale() == (2.0**100 if fits else 2.0**99)


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sync", ["auto", "never"])
@pytest.mark.parametrize(
    ("dtype", "size", "scale"),
    [(torch.float64, 1e60, 2.0**16), (torch.float32, 1e38, 1.0), (None, 1e33, 2.0**16)],
)
def test_a_step_whose_norm_float32_cannot_hold_is_not_clipped_to_zeros(
    dtype, size, scale, sync, fused, unscaled
):
    """That would be a step that learns nothing; it is skipped."""
    weight = torch.nn.Parameter(torch.ones(64, dtype=dtype or torch.float32))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = GradScaler("cpu", init_scale=scale, sync=sync)
    scaler.scale((weight * size).sum()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    norm = scaler.clip_grad_norm_(optimizer, 2.0)
    scaler.step(optimizer)
    scaler.update()
    fits = unscaled and size < 1e34
    expected = pytest.approx(8.0 * size) if fits else math.inf
    assert norm.item() == expected
    assert scaler.last_step.norm == expected
    assert scaler.last_step.applied is fits
    moved = 0.25 if fits else 0.0
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, 1.0 - moved))


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
@pytest.mark.parametrize(
    "bound", [-1.0, math.nan, None, "1", torch.tensor(-1.0), torch.tensor(math.nan)]
)
def test_a_bound_that_would_reverse_or_spoil_gradients_is_refused(
    bound, clip, enabled, unscaled, loop
):
    """As a number or as a tensor, whatever happened to the gradients before."""
    scaler, weight, optimizer = loop("sgd", torch.ones(2), lr=0.1, enabled=enabled)
    scaler.scale(weight.sum()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    before = weight.grad.clone()
    with pytest.raises(OptionError, match="at least 0"):
        getattr(scaler, clip)(optimizer, bound)
    assert torch.equal(weight.grad, before)


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_negative_bound_on_a_device_skips_the_step(
    fused, unscaled, monkeypatch, loop
):
    """It is not read there, and must not turn the step around."""
    monkeypatch.setattr(backend, "in_host_memory", lambda tensor: False)
    scaler, weight, optimizer = loop("sgd", torch.ones(2), lr=0.1, fused=fused)
    scaler.scale(weight.sum()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, torch.tensor(-1.0))
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last_step.applied
    assert torch.equal(weight, torch.ones(2))


@pytest.mark.parametrize("order", [math.nan, "two", None])
@pytest.mark.parametrize("enabled", [False, True])
def test_an_order_that_is_none_is_refused(order, enabled, loop):
    """A norm of order NaN is NaN, and so were the gradients after it."""
    scaler, weight, optimizer = loop("sgd", torch.ones(2), lr=0.1, enabled=enabled)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(OptionError, match="`norm_type` must be the order of a norm"):
        scaler.clip_grad_norm_(optimizer, 1.0, order)


def test_torch_s_argument_foreach_is_taken(loop):
    """Code that passes it to torch's functions passes it here."""
    scaler, weight, optimizer = loop("sgd", torch.ones(2), lr=0.1)
    scaler.scale((weight * 4.0).sum()).backward()
    scaler.clip_grad_value_(optimizer, 3.0, foreach=False)
    assert scaler.clip_grad_norm_(optimizer, math.inf, foreach=True) == math.sqrt(18.0)


@pytest.mark.parametrize("first", ["clip", "unscale", "value"])
@pytest.mark.parametrize("sync", ["auto", "never"])
def test_sparse_gradients_are_clipped_again(first, sync, loop):
    """Torch has no norm of a sparse tensor; its values have one."""
    scaler, table, optimizer = loop(
        "sgd", torch.nn.Embedding(4, 2, sparse=True), lr=0.1, sync=sync
    )
    scaler.scale(table(torch.tensor([0, 0, 1])).sum()).backward()  # 2, 2, 1, 1
    if first == "unscale":
        scaler.unscale_(optimizer)
    elif first == "value":
        scaler.clip_grad_value_(optimizer, 10.0)
    else:
        scaler.clip_grad_norm_(optimizer, 100.0)
    assert scaler.clip_grad_norm_(optimizer, 0.5).item() == pytest.approx(10**0.5)
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(0.5)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.applied
    assert scaler.last_step.norm == pytest.approx(10**0.5)


@pytest.mark.parametrize("sync", ["auto", "never"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("by", ["torch", "clamp"])
def test_the_norm_of_gradients_edited_by_hand_is_not_guessed(by, fused, sync, loop):
    """What `.grad` holds then is not the norm before clipping."""
    scaler, weight, optimizer = loop(
        "sgd", torch.ones(2), lr=0.1, fused=fused, sync=sync
    )
    for bad in (1.0, math.inf):
        optimizer.zero_grad()
        scaler.scale((weight * 1000.0 * torch.tensor([1.0, bad])).sum()).backward()
        scaler.unscale_(optimizer)
        if by == "torch":
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
        else:
            weight.grad.clamp_(-1.0, 1.0)
        scaler.step(optimizer)
        scaler.update()
        if bad == 1.0:
            assert scaler.last_step.norm is None
    assert scaler.last_step.norm == math.inf
    assert scaler.last_step.offenders == ("param_groups[0]['params'][0] (2)",)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("sync", ["auto", "never"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_clipping_by_value_keeps_norm_and_offenders(
    bad, fused, sync, hidden, monkeypatch, loop
):
    """The clamped gradients show neither."""
    if hidden:
        monkeypatch.setattr(backend, "in_host_memory", lambda tensor: False)
    scaler, params, optimizer = loop(
        "sgd",
        [torch.nn.Parameter(torch.ones(2)) for _ in range(2)],
        lr=0.1,
        fused=fused,
        sync=sync,
    )
    scaler.scale(3.0 * params[0].sum() + 4.0 * params[1].sum()).backward()
    if bad is not None:
        params[1].grad[0] = bad
    scaler.clip_grad_value_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    last = scaler.last_step
    if bad is None:
        assert last.norm == pytest.approx(50**0.5)
        assert torch.equal(params[0], torch.full((2,), 0.9))
    else:
        assert not math.isfinite(last.norm)
        assert last.offenders == ("param_groups[0]['params'][1] (2)",)


def test_a_disabled_scaler_reports_the_norm_before_clipping():
    """As an enabled one, and nothing if nobody has measured it."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = GradScaler("cpu", enabled=False)
    norms = []
    for way in ("ours", "torch", "none"):
        optimizer.zero_grad()
        scaler.scale((weight * 1000.0).sum()).backward()
        if way == "ours":
            scaler.clip_grad_norm_(optimizer, 1.0)
        elif way == "torch":
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
        scaler.step(optimizer)
        scaler.update()
        norms.append(scaler.last_step.norm)
    assert norms == [pytest.approx(2e6**0.5), None, None]


def test_a_count_is_not_divided_by_the_scale(loop):
    """The norm of order 0 counts, whatever multiplies the gradients; as in torch."""
    scaler, layer, optimizer = loop(
        "sgd", torch.nn.Linear(3, 2), lr=1.0, init_scale=2.0**16
    )
    scaler.scale(layer(torch.ones(4, 3)).sum()).backward()
    plain = [param.grad.clone() / 2.0**16 for param in layer.parameters()]

    expected = torch.nn.utils.get_total_norm(plain, 0.0)
    assert expected == scaler.clip_grad_norm_(optimizer, 100.0, norm_type=0)
    scaler.clip_grad_norm_(optimizer, 100.0, norm_type=2)
    assert expected == scaler.clip_grad_norm_(optimizer, 100.0, norm_type=0)
    for param, grad in zip(layer.parameters(), plain, strict=True):
        torch.testing.assert_close(param.grad, grad)


@given(
    st.floats(0.0, width=32) | st.just(math.nan),
    st.floats(0.0) | st.sampled_from([1.0, 0.1, 1e-30, math.inf]),
)
def test_the_host_computes_the_clip_factor_as_kernels_do(size, max_norm):
    """Bit for bit: a norm in host memory saves four kernels, and changes nothing."""
    norm = torch.tensor(size, dtype=torch.float32)

    by_kernels = clip_factor(norm, max_norm, backend.ops())

    assert by_kernels.item() == clip_factor_on_host(size, max_norm)


def test_clipping_before_the_backward_pass_leaves_a_step_that_can_be_taken(loop):
    """A policy that reads the norm gets none: nothing was clipped."""
    scaler, weight, optimizer = loop("sgd", torch.ones(2), lr=0.1, policy="headroom")
    loss = scaler.scale(weight.sum())

    assert 0.0 == scaler.clip_grad_norm_(optimizer, 1.0)
    loss.backward()
    scaler.step(optimizer)
    scaler.update()

    assert scaler.last_step.applied
