"""Reductions, products and layers against torch's half kernels: one rounding apart.

Torch's kernels add up in FP32 or, some of them, in FP16; ours in FP32 always.  So the
emulated result is held to be the true one within one rounding, and torch's within one
step of the grid of ours where its kernel adds in FP32.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from buoy.emulate import emulate


def grid_step(x):
    """Give the distance between neighbours on FP16's grid."""
    size = x.abs().double().clamp(2.0**-14, 65504.0)
    return torch.exp2(torch.floor(torch.log2(size)) - 10)


def run(function, *halves, dtype=None):
    """Compute a function and its gradients."""
    args = [h.to(dtype or h.dtype).clone().requires_grad_() for h in halves]
    result = function(*args)
    into = torch.linspace(0.5, 1.5, result.numel()).half().to(result.dtype)
    result.backward(into.reshape(result.shape))
    return [result.detach(), *(arg.grad for arg in args)]


def emulated(function, *halves):
    """Compute the same in float32 under emulation."""
    with emulate("fp16"):
        return run(function, *halves, dtype=torch.float32)


REDUCTIONS = {
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(1),
    "mean": lambda x: x.mean(0),
    "var": lambda x: x.var(1),
    "norm": lambda x: x.norm(),
    "logsumexp": lambda x: x.logsumexp(1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "cumsum": lambda x: x.cumsum(0),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[1:]),
    "amax": lambda x: x.amax(1),
    "prod": lambda x: x[:4].prod(0),
    "avg_pool": lambda x: functional.avg_pool1d(x[None], 3),
    "max_pool": lambda x: functional.max_pool1d(x[None], 3),
    "mse_loss": lambda x: functional.mse_loss(x, x.detach().flip(0)),
    "cross_entropy": lambda x: functional.cross_entropy(x, torch.arange(len(x))),
}
PRODUCTS = {
    "mm": torch.mm,
    "matmul of vectors": lambda x, y: x[0] @ y,
    "linear": lambda x, y: functional.linear(x, y.t()),
    "bmm": lambda x, y: torch.bmm(x.view(4, 8, 48).mT, y[:32].reshape(4, 8, 20)),
    "addmm": lambda x, y: torch.addmm(x[:, : y.shape[1]].detach(), x, y),
    "einsum": lambda x, y: torch.einsum("ij,jk->ki", x, y),
    "conv1d": lambda x, y: functional.conv1d(x[None], y[:32].t()[..., None]),
}


def assert_one_rounding_apart(mine, real, exact):
    """Hold ours to the exact result, and torch's to ours."""
    for a, b, c in zip(mine, real, exact, strict=True):
        step = grid_step(c)
        assert (a == a.half().float()).all()
        assert ((a - c).abs() <= 0.51 * step + 1e-5 * c.abs().max()).all()
        assert ((a - b).abs() <= step + 1e-5 * c.abs().max()).all()


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_are_within_one_rounding(name):
    """Forward, against FP64 and torch's half kernel."""
    x = torch.randn(24, 24).half()
    function = REDUCTIONS[name]
    mine, real = emulated(function, x)[0], function(x)

    assert_one_rounding_apart([mine], [real.float()], [function(x.double())])


@pytest.mark.parametrize("name", REDUCTIONS)
def test_gradients_of_reductions_are_near_torchs(name):
    """Backward: several operators, each rounded, so a few steps of the grid."""
    x = torch.randn(24, 24).half()
    mine, real = emulated(REDUCTIONS[name], x), run(REDUCTIONS[name], x)

    scale = real[1].abs().max().float()
    assert (mine[1] == mine[1].half().float()).all()
    assert ((mine[1] - real[1]).abs() <= 4e-3 * scale).all()


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_within_one_rounding(name):
    """Forward and both gradients, at sizes where torch adds up in blocks."""
    x, y = torch.randn(32, 48).half(), torch.randn(48, 20).half()
    function = PRODUCTS[name]

    assert_one_rounding_apart(
        emulated(function, x, y),
        run(function, x, y),
        run(function, x, y, dtype=torch.float64),
    )


def test_products_overflow_and_underflow_as_in_fp16():
    """Beyond 65504 is inf, below half the smallest number is 0, and sums are FP32."""
    big, small = torch.full((1, 4), 200.0), torch.full((1, 4), 2.0**-13)
    with emulate("fp16"):
        assert torch.inf == (big @ big.t()).item()
        assert 0.0 == (small[:, :1] * 2.0**-12).item()
        # Each product is 2^-26 and would be lost alone; their sum is on the grid.
        assert 2.0**-24 == (small @ small.t()).item()


def networks():
    """Small networks of every kind of layer, with their inputs."""
    torch.manual_seed(1)
    mlp = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 4))
    conv = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(54, 4),
    )  # fmt: skip
    block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return {
        "mlp": (mlp, torch.randn(8, 12)),
        "conv": (conv, torch.randn(5, 3, 8, 8)),
        "transformer": (block, torch.randn(2, 6, 16)),
        "gru": (First(nn.GRU(6, 8, batch_first=True)), torch.randn(3, 5, 6)),
    }


class First(nn.Module):
    """Give the first of several results."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)[0]


@pytest.mark.parametrize("name", ["mlp", "conv", "transformer", "gru"])
def test_networks_need_no_edit_and_agree_with_half_modules(name):
    """A float32 module gives what its `.half()` gives, to a few roundings."""
    model, x = networks()[name]
    into = torch.randn(model(x).shape).half()
    with emulate("fp16"):
        mine = model(x)
        mine.backward(into.float())
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    real = model.half()(x.half())
    real.backward(into)

    assert (mine == mine.half().float()).all()
    assert torch.allclose(
        mine, real.float(), rtol=0, atol=4e-3 * real.abs().max().item()
    )
    for grad, param in zip(grads, model.parameters(), strict=True):
        size = max(param.grad.abs().max().item(), 2.0**-14)
        assert (grad == grad.half().float()).all()
        assert torch.allclose(grad, param.grad.float(), rtol=0, atol=1e-2 * size)
