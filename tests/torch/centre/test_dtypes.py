"""Every dtype and layout; with the amp kernel and without; the start-up self-test."""

import math
import subprocess
import sys

import pytest
import torch
from nets import OPTIMIZERS, loss_of, net, train

from buoy._backends import torch as backend
from buoy.torch import GradScaler

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("factor", [0.25, 2.0**-24, 1 / 3, 2.0**-126])
def test_the_plain_way_gives_the_kernels_bits(dtype, bad, factor):
    """No private kernel and no float64 needed: the same flag, the same gradients."""
    grads = [torch.randn(33).to(dtype), (torch.randn(4, 6) * 1e3).to(dtype)[:, ::2]]
    if bad is not None:
        grads[1][2, 1] = bad
    other = [grad.clone() for grad in grads]
    flags = [torch.zeros(()), torch.zeros(())]
    multiplier = torch.tensor(factor)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, flags[0], multiplier)
    backend.check_and_multiply_plainly_(other, flags[1], multiplier)
    assert flags[0].item() == flags[1].item() == (bad is not None)
    for a, b in zip(grads, other, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("kind", ["adamw", "fused adamw"])
def test_a_broken_kernel_is_noticed_and_not_used(kind, monkeypatch):
    """A kernel that zeroes gradients silently, as one on MPS did, is left alone."""

    def zeroing(grads, found, factor):
        for grad in grads:
            grad.zero_()

    expected = net()
    train(
        GradScaler("cpu"),
        expected,
        OPTIMIZERS[kind](expected.parameters()),
        ["ok", "inf"],
    )
    monkeypatch.setattr(backend, "_PASSED", {})
    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", zeroing)
    model = net()
    scaler = GradScaler("cpu")
    assert not any(backend._PASSED.values())
    assert len(backend._PASSED) == 4
    train(scaler, model, OPTIMIZERS[kind](model.parameters()), ["ok", "inf"])
    assert scaler.get_scale() == 32768.0
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_kernel_is_tested_where_the_first_loss_is(monkeypatch):
    """With every dtype, and before the first step, which reads nothing then."""
    monkeypatch.setattr(backend, "_PASSED", {})
    scaler = GradScaler("mps")
    assert backend._PASSED == {}
    scaler.scale(torch.ones((), requires_grad=True))
    assert {torch.device("cpu")} == {device for device, _ in backend._PASSED}
    assert len(backend._PASSED) == 4


def test_a_missing_kernel_is_no_obstacle(monkeypatch):
    """A torch without the private kernel trains all the same."""
    monkeypatch.setattr(backend, "_PASSED", {})
    monkeypatch.delattr(torch, "_amp_foreach_non_finite_check_and_unscale_")
    model = net()
    scaler = GradScaler("cpu")
    train(scaler, model, torch.optim.SGD(model.parameters(), lr=0.1), ["ok", "inf"])
    assert scaler.get_scale() == 32768.0


@pytest.mark.parametrize("bad", [False, True])
def test_complex_parameters_train(bad, loop):
    """Torch has no kernel for complex gradients; as pairs of reals they are as any."""
    scaler, weight, optimizer = loop(
        "sgd", torch.ones(3, dtype=torch.complex64), lr=0.25
    )
    scaler.scale((weight.abs() ** 2).sum()).backward()
    if bad:
        weight.grad[1] = complex(1.0, math.inf)
    scaler.step(optimizer)
    scaler.update()
    expected = 1.0 if bad else 0.5
    assert torch.equal(
        weight.detach(), torch.full((3,), expected, dtype=torch.complex64)
    )


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_sparse_embeddings_train(bad, clip, loop):
    """A sparse embedding, its optimizer, and clipping of its values."""
    table = torch.nn.Embedding(10, 4, sparse=True)
    before = table.weight.detach().clone()
    scaler, _, optimizer = loop("sgd", table, lr=0.1)
    scaler.scale(table(torch.tensor([1, 3, 3])).sum()).backward()
    if bad:
        table.weight.grad._values()[0, 0] = math.nan
    if clip:
        norm = scaler.clip_grad_norm_(optimizer, 100.0)
        assert math.isfinite(norm) is not bad
    scaler.step(optimizer)
    scaler.update()
    moved = (table.weight.detach() - before).abs().sum(1) > 0
    assert moved.nonzero().flatten().tolist() == ([] if bad else [1, 3])


def test_empty_gradients_are_finite(loop):
    """A tensor without elements has nothing wrong with it."""
    params = [torch.nn.Parameter(torch.zeros(0)), torch.nn.Parameter(torch.ones(2))]
    for fused in (False, True):
        for clip in (False, True):
            scaler, _, optimizer = loop("sgd", params, lr=0.1, fused=fused)
            scaler.scale(params[1].sum()).backward()
            params[0].grad = torch.zeros(0)
            if clip:
                assert math.isfinite(scaler.clip_grad_norm_(optimizer, 1.0))
            scaler.step(optimizer)
            scaler.update()
            assert scaler.last_step.applied


def test_large_gradients_are_summed_and_looked_at_again(loop):
    """Sums that overflow are no overflow; a single inf in millions is one."""
    for value, applied in (
        (1.0, True),
        (3e38, True),
        (math.inf, False),
        (math.nan, False),
    ):
        scaler, weight, optimizer = loop(
            "fused sgd", torch.zeros(20_000), lr=1e-38, init_scale=1.0
        )
        scaler.scale(weight.sum()).backward()
        weight.grad.fill_(3e38 if value == 3e38 else 1.0)
        weight.grad[777] = value
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step.applied is applied


def test_importing_buoy_imports_no_torch_and_buoy_torch_does():
    """The front end is the only room that needs the framework."""
    for module, expected in (("buoy", "False"), ("buoy.torch", "True")):
        code = f"import sys, {module}; print('torch' in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == expected


def test_without_torch_the_import_says_what_to_install():
    """`MissingBackendError` names the extra."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from buoy import MissingBackendError\n"
        "try:\n    import buoy.torch\n"
        "except MissingBackendError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "[torch]" in done.stdout


def test_the_loss_of_several_elements_or_dtypes_is_scaled(loop):
    """Outputs need not be scalars."""
    scaler, model, optimizer = loop(lr=0.1, policy="lognormal")
    losses = torch.stack([loss_of(model, 0), loss_of(model, 1)])
    scaler.scale(losses).sum().backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.applied
