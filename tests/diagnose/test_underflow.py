"""What FP16 loses is measured exactly, and estimated closely from what is left."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from transformer import Transformer, batch, loss_of

from buoy._backends.torch.exponents import exponents
from buoy._core.errors import OptionError
from buoy.diagnose import estimate_run, estimate_underflow
from buoy.torch import GradScaler
from buoy.trace import Counts, Recording, load


def lognormal(mu, sigma, size, natural=0.0, seed=0):
    """Invent gradients; return their histogram in FP16, and the truth about them."""
    source = torch.Generator().manual_seed(seed)
    exact = torch.exp2(
        torch.randn(size, generator=source, dtype=torch.float64) * sigma + mu
    )
    exact[: round(natural * size)] = 0.0
    half = exact.to(torch.float16).float()
    there = exact != 0
    zero = (there & (half == 0)).sum() / there.sum()
    small = ((half != 0) & (half < 2.0**-14)).sum() / there.sum()
    seen = Counts.of_exponents(exponents([half])[0].tolist(), size)
    return seen, zero.item(), small.item()


@given(
    mu=st.floats(-40.0, 0.0),
    sigma=st.floats(0.3, 5.0),
    size=st.integers(200, 2**15),
    seed=st.integers(0, 9),
)
@example(mu=-24.0, sigma=0.3, size=2**15, seed=0)
def test_the_estimate_is_within_a_point_of_the_truth(mu, sigma, size, seed):
    """Log-normal gradients of any size and spread, at any share of loss."""
    seen, zero, small = lognormal(mu, sigma, size, seed=seed)
    told = estimate_underflow(seen)

    assert zero == pytest.approx(told.zero, abs=0.01)
    assert small == pytest.approx(told.subnormal, abs=0.01)


@pytest.mark.parametrize("natural", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("sigma", [1.0, 2.0, 3.0])
def test_zeros_by_nature_are_not_taken_for_lost(sigma, natural):
    """Dead units and words that do not occur, while little is lost."""
    for mu in range(-22, -6, 2):
        seen, zero, _ = lognormal(mu, sigma, 2**15, natural)
        if zero < 0.15:
            told = estimate_underflow(seen).zero
            assert zero == pytest.approx(told, abs=0.01), (mu, sigma)


def test_gradients_that_never_were_in_fp16_lose_nothing():
    """A norm's weights get FP32 gradients, some of them far below 2^-24."""
    grads = torch.exp2(torch.randn(5000) * 3 - 26)
    grads[:100] = 0.0
    seen = Counts.of_exponents(exponents([grads])[0].tolist(), 5000)

    assert 0.0 == estimate_underflow(seen).zero


def test_a_recorded_run_tells_what_the_shadow_measures(tmp_path):
    """From its last histograms, per parameter; a run without any tells nothing."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run.buoy"
    scaler = GradScaler("cpu", init_scale=1.0, model=model, trace=path)
    x = torch.randn(8, 64)

    def loss():
        with torch.autocast("cpu", torch.float16):
            return 1e-5 * model(x).float().square().mean()

    exact = scaler.measure_underflow(loss)
    scaler.scale(loss()).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.trace.close()
    told = estimate_run(load(path))

    assert set(exact.parameters) == set(told.parameters)
    assert exact.zero > 0.1
    for name in ("0.weight", "2.weight"):
        share = told.parameters[name].zero
        assert exact.parameters[name].zero == pytest.approx(share, abs=0.01)
    assert estimate_run(Recording("empty.buoy")) is None


def test_nothing_left_is_all_lost():
    """And of nothing, nothing."""
    assert 1.0 == estimate_underflow(Counts(0, (), zeros=7, size=7)).zero
    assert 0.0 == estimate_underflow(Counts(0, (), size=0)).zero


class Weights(nn.Module):
    """Its gradient is a given vector, through FP16."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, wanted):
        half = torch.is_autocast_enabled("cpu")
        weight = self.weight.half() if half else self.weight
        return (weight.float() * wanted).sum() if half else (weight * wanted).sum()


@pytest.mark.parametrize("scale", [1.0, 2.0**8, 2.0**16])
def test_the_shadow_counts_every_value(scale):
    """Log-uniform gradients: exactly those below 2^-25 after scaling are lost."""
    model = Weights(4096)
    wanted = 10.0 ** (torch.rand(4096) * 10 - 12)
    scaler = GradScaler("cpu", init_scale=scale, model=model)

    def step():
        with torch.autocast("cpu", torch.float16):
            scaler.scale(model(wanted)).backward()

    told = scaler.measure_underflow(step)
    half = (wanted * scale).half()

    assert (half == 0).float().mean().item() == pytest.approx(told.zero, abs=1e-9)
    small = ((half != 0) & (half < 2.0**-14)).float().mean().item()
    assert small == pytest.approx(told.subnormal, abs=1e-9)
    assert scale == told.scale


def test_a_transformer_loses_less_at_a_higher_scale():
    """Per parameter and per module, with training none the wiser."""
    model, tokens = Transformer(2), batch()
    scaler = GradScaler("cpu", init_scale=2.0**-14, model=model)

    def loss():
        with torch.autocast("cpu", torch.float16):
            return loss_of(model, tokens)

    low = scaler.measure_underflow(loss, activations=True)
    high = scaler.measure_underflow(loss, activations=True, scale=2.0**14)

    assert low.zero > 0.05
    assert high.zero < 0.01
    assert set(low.parameters) == {name for name, _ in model.named_parameters()}
    assert (
        low.activations["blocks.1.mlp.0"].zero > high.activations["blocks.1.mlp.0"].zero
    )
    assert low.worst(1)[0][0] in str(low)
    assert all(param.grad is None for param in model.parameters())
    assert 2.0**-14 == scaler.get_scale()


def test_fp16_weights_are_widened_for_the_shadow():
    """And are the same FP16 tensors afterwards."""
    model = nn.Linear(8, 8).half()
    before = [param.data_ptr() for param in model.parameters()]
    scaler = GradScaler("cpu", init_scale=1.0)
    x = torch.full((2, 8), 1e-3, dtype=torch.float16)
    told = scaler.measure_underflow(lambda: model(x).float().sum() * 1e-6, model=model)

    assert told.zero > 0.5
    assert before == [param.data_ptr() for param in model.parameters()]
    assert {torch.float16} == {param.dtype for param in model.parameters()}


def test_what_cannot_be_measured_is_said():
    """No model; and a step that casts by itself."""
    scaler = GradScaler("cpu")
    with pytest.raises(OptionError, match="model="):
        scaler.measure_underflow(lambda: None)
    body, head = nn.Linear(2, 2), nn.Linear(2, 1).half()
    model = nn.ModuleList([body, head])
    with pytest.raises(OptionError, match="casts to FP16 itself"):
        scaler.measure_underflow(
            lambda: head(body(torch.ones(1, 2)).half()).sum(), model=model
        )


@pytest.mark.parametrize("returned", ["another model", "no loss"])
def test_a_step_without_gradients_is_refused(returned):
    """A share of 0 would say that nothing is lost."""
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    scaler = GradScaler("cpu")

    def step():
        if returned == "no loss":
            return {"loss": model(torch.ones(1, 2)).sum()}
        return other(torch.ones(1, 2)).sum()

    with pytest.raises(OptionError, match="left no gradient in any parameter"):
        scaler.measure_underflow(step, model=model)
