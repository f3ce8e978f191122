"""What is rounded, what is kept, and what is never touched."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import buoy.emulate
from buoy.emulate import AUTOCAST, LOSSES, StepInsideError, emulate, fp32
from buoy.torch import GradScaler

FINE = 1.0 + 2.0**-20  # not on any narrow grid


def on_grid(x, dtype=torch.float16):
    """Say whether all numbers are of a format."""
    return bool((x == x.to(dtype).float()).all())


def net():
    """Make a small network that feels every rounding."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def test_public_names_are_frozen():
    """The surface changes only together with a line in CHANGELOG.md."""
    names = "AUTOCAST LOSSES StepInsideError UnknownOperatorError emulate fp32 round_to"
    assert names.split() == buoy.emulate.__all__


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp16", torch.float16),
        ("bf16", torch.bfloat16),
        ("fp8_e4m3fn", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
    ],
)
def test_every_format_forward_and_backward(name, dtype):
    """Results and gradients lie on the grid; weights do not move."""
    model, x = net(), torch.randn(5, 6)
    before = copy.deepcopy(model.state_dict())
    with emulate(name):
        out = model(x)
        out.sum().backward()

    assert on_grid(out, dtype)
    assert all(on_grid(p.grad, dtype) for p in model.parameters())
    assert all((before[k] == v).all() for k, v in model.state_dict().items())


def test_fp32_rounds_nothing():
    """The same bits as without."""
    model, x = net(), torch.randn(5, 6)
    with emulate("fp32"):
        out = model(x)

    assert (out == model(x)).all()


def test_weights_and_data_are_rounded_on_entry():
    """As if they had been cast; only what is computed shows it."""
    with emulate("fp16"):
        product = torch.full((2,), FINE) * 4096.0

    assert [4096.0, 4096.0] == product.tolist()


def test_what_is_made_inside_stays_fp32_until_it_is_used():
    """A scaler that is first used inside keeps a scale beyond FP16's maximum."""
    with emulate("fp16"):
        assert 2.0**20 == torch.full((), 2.0**20).item()
        scaler = GradScaler("cpu", init_scale=2.0**20)
        scaled = scaler.scale(torch.tensor(0.5, requires_grad=True))

    assert 2.0**19 == scaled.item()


def test_views_are_what_their_base_is_and_in_place_results_are_rounded():
    """Also through a view, and through an elementwise kernel of torch's own."""
    with emulate("fp16"):
        x = torch.ones(4) * 3
        x[:2].mul_(1.0 / 3.0 + 1e-5)
        x[2:].sqrt_()
        x += 1e-4

    expected = torch.tensor([3.0, 3.0, 3.0, 3.0]).half()
    expected[:2] *= 1.0 / 3.0 + 1e-5
    expected[2:].sqrt_()
    expected += 1e-4
    assert expected.tolist() == x.tolist()


def test_in_place_on_what_is_fp32_stays_fp32():
    """Averages and masters are not made narrow by being updated inside."""
    average = torch.full((2,), FINE)
    with emulate("fp16"):
        average.add_(torch.ones(2))

    assert not on_grid(average)


def test_out_is_rounded():
    """A result written with out= is of the format, whatever it is written to."""
    out = torch.empty(2, 2)
    with emulate("fp16"):
        torch.mm(torch.rand(2, 3), torch.rand(3, 2), out=out)

    assert on_grid(out)


def test_batch_norm_keeps_its_running_averages_in_fp32():
    """They move, and are not rounded."""
    norm, x = nn.BatchNorm1d(3), torch.randn(64, 3)
    with emulate("fp16"):
        out = norm(x)

    assert on_grid(out)
    assert (norm.running_mean != 0).all()
    assert not on_grid(norm.running_mean)


def test_lists_of_tensors_are_rounded():
    """cat takes a list, and split gives one."""
    fine = torch.full((3,), FINE)
    with emulate("fp16"):
        joined = torch.cat([fine, fine * 1])
        parts = joined.split(2)

    assert on_grid(joined)
    assert all(map(on_grid, parts))


def test_other_dtypes_are_left_alone():
    """Integers, booleans and float64 pass."""
    with emulate("fp16"):
        assert FINE == (torch.full((1,), FINE, dtype=torch.float64) * 1).item()
        assert 100_000 == (torch.tensor([100_000]) + 0).item()


def test_nothing_remains_after_leaving():
    """Outside, results are float32's again, also after an error inside."""
    with pytest.raises(ZeroDivisionError), emulate("fp16"):
        1 / 0  # noqa: B018
    with emulate("fp16"):
        x = torch.ones(1) * 3

    assert not on_grid(x / 7)
    stored = io.BytesIO()
    torch.save(x, stored)
    stored.seek(0)
    assert torch.load(stored, weights_only=True).item() == 3.0


def test_the_same_context_may_be_entered_again_and_within_itself():
    """As one `mode = emulate(...)` for a whole training."""
    mode = emulate("fp16")
    for _ in range(2):
        with mode, mode:
            assert on_grid(torch.full((1,), FINE) * 1)
        assert not on_grid(torch.full((1,), FINE) * 1)


# -- kept operators -------------------------------------------------------------------


def half_with_float_loss(model, x, y, scale):
    """Train as one does on a GPU: half network, loss in FP32."""
    model = copy.deepcopy(model).half()
    loss = functional.mse_loss(model(x.half()).float() * 1e-3, y)
    (loss * scale).backward()
    return loss.detach(), [p.grad.float() for p in model.parameters()]


@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**20, 2.0**40])
def test_a_region_in_fp32_is_fp32_in_the_backward_pass_too(scale):
    """Gradients underflow and overflow where those of a half network do."""
    model, x, y = net(), torch.randn(5, 6), torch.randn(5, 3) * 1e-3
    with emulate("fp16"):
        out = model(x)
        with fp32():
            loss = functional.mse_loss(out * 1e-3, y)
            scaled = loss * scale
        scaled.backward()
    real, grads = half_with_float_loss(model, x, y, scale)

    assert torch.allclose(real, loss.detach(), rtol=1e-3, atol=0)
    for param, grad in zip(model.parameters(), grads, strict=True):
        assert (param.grad.isfinite() == grad.isfinite()).all()
        size = grad.abs().max().item()
        if size < float("inf"):
            near = max(4e-3 * size, 2.0**-23)
            assert torch.allclose(param.grad, grad, rtol=0, atol=near)


def test_kept_losses_give_the_same_as_a_region():
    """`keep` by name, and the scale that follows, which is FP32 as well."""
    x, y = torch.randn(5, 6), torch.randn(5, 3)
    kept, region = net(), net()
    with emulate("fp16", keep=LOSSES):
        (functional.mse_loss(kept(x), y) * 2.0**18).backward()
    with emulate("fp16"):
        out = region(x)
        with fp32():
            scaled = functional.mse_loss(out, y) * 2.0**18
        scaled.backward()

    for a, b in zip(kept.parameters(), region.parameters(), strict=True):
        assert (a.grad == b.grad).all()
        assert a.grad.abs().max() > 0


def test_a_loss_in_fp16_overflows_at_the_root():
    """Without `keep` a scale beyond 65504 meets an FP16 loss, and all is lost."""
    model = net()
    with emulate("fp16"):
        loss = functional.mse_loss(model(torch.randn(5, 6)), torch.randn(5, 3))
        (loss * torch.tensor(2.0**17)).backward()

    assert not model[0].weight.grad.isfinite().all()


def test_what_follows_a_kept_operator_is_fp32_up_to_the_next_product():
    """As under autocast: layer norm and its residual are FP32, linear is FP16."""
    x = torch.randn(4, 8)
    norm, linear = nn.LayerNorm(8), nn.Linear(8, 8)
    with emulate("fp16", keep=AUTOCAST):
        wide = norm(x) + x
        narrow = linear(wide)

    assert not on_grid(wide)
    assert on_grid(narrow)


def test_backward_passes_of_other_operators_are_not_kept():
    """`sum` is kept forward, but a bias's gradient is summed in FP16."""
    linear = nn.Linear(3, 3)
    with emulate("fp16", keep="sum"):
        (linear(torch.randn(7, 3)) * 0.3).sum().backward()

    assert on_grid(linear.bias.grad)


def test_gradients_are_added_up_in_fp32():
    """Accumulated over two batches like under autocast: the weights are FP32."""
    linear = nn.Linear(1, 1)
    with emulate("fp16"):
        for factor in (1.0, 2.0**-12):
            linear(torch.full((1, 1), factor)).sum().backward()

    assert 1.0 + 2.0**-12 == linear.weight.grad.item()


def test_second_derivatives_and_checkpoints_work():
    """A graph made in the backward pass, and one made again there."""
    model, x = net(), torch.randn(5, 6)
    with emulate("fp16", keep=LOSSES):
        loss = functional.mse_loss(
            checkpoint(model, x, use_reentrant=False), torch.zeros(5, 3)
        )
        grads = torch.autograd.grad(loss, model.parameters(), create_graph=True)
        sum(g.square().sum() for g in grads).backward()

    assert all(map(on_grid, grads))
    assert all(on_grid(p.grad) for p in model.parameters())
    assert model[0].weight.grad.abs().max() > 0


def test_functions_of_ones_own_run_inside():
    """A custom autograd function is made of operators like everything else."""

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x * x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 3 * x * x * grad

    x = torch.full((3,), 1.1, requires_grad=True)
    with emulate("fp16"):
        y = Cube.apply(x)
        y.sum().backward()

    assert on_grid(y)
    assert on_grid(x.grad)


# -- mistakes -------------------------------------------------------------------------


def test_an_optimizer_inside_is_refused_and_nothing_is_stepped():
    """It would round weights and moments; the error says where the step belongs."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    before = copy.deepcopy(model.state_dict())
    with emulate("fp16"):
        model(torch.randn(5, 6)).sum().backward()
        with pytest.raises(StepInsideError, match="outside of it"):
            optimizer.step()

    assert all((before[k] == v).all() for k, v in model.state_dict().items())
    optimizer.step()
    assert not (before["0.weight"] == model[0].weight).all()


def test_an_unknown_operator_is_refused():
    """With the name, and what is accepted."""
    with pytest.raises(buoy.emulate.UnknownOperatorError, match="'sotfmax'"):
        emulate("fp16", keep=["sotfmax"])


def test_errors_of_torch_come_through():
    """A wrong shape is said as torch says it."""
    with emulate("fp16"), pytest.raises(RuntimeError, match="size"):
        torch.atan2(torch.ones(3), torch.ones(4))


def test_every_name_of_autocasts_list_is_an_operator():
    """Of this torch."""
    assert emulate("fp16", keep=AUTOCAST).keep >= {"_softmax", "exp", "mse_loss"}


def test_a_training_with_a_scaler_reaches_fp32():
    """Two hundred steps of a small regression, masters and optimizer in FP32."""
    losses = {}
    for name in ("fp32", "fp16"):
        model = net()
        source = torch.Generator().manual_seed(5)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        scaler = GradScaler("cpu", policy="headroom")
        for _ in range(200):
            x = torch.randn(32, 6, generator=source)
            optimizer.zero_grad()
            with emulate(name, keep=LOSSES):
                loss = functional.mse_loss(model(x), x[:, :3].sin())
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses[name] = loss.item()

    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=0.05)
