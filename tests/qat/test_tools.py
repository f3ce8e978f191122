"""Quantisation-aware training in FP16 with TensorRT's tool and with torchao."""

import copy
import math
import warnings

import pytest
import torch

import buoy.torch

STEPS, SPOIL = 40, (3, 10, 21)


def net():
    """Make two linear layers, the same each time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)
    )


def batch(step):
    """Make inputs and what a fixed linear map makes of them."""
    source = torch.Generator().manual_seed(step)
    x = torch.randn(64, 32, generator=source)
    return x, torch.tanh(x.roll(1, 1)) - 0.5 * x


def modelopt(config):
    """Quantise weights and inputs with TensorRT's tool."""
    import modelopt.torch.quantization as mtq

    model, config = net(), copy.deepcopy(getattr(mtq, config))
    return mtq.quantize(model, config, lambda m: m(batch(99)[0]))


def torchao(weight):
    """Quantise weights and inputs with torchao."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    model = net()
    act = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    low = IntxFakeQuantizeConfig(getattr(torch, weight), group_size=32)
    quantize_(
        model, QATConfig(activation_config=act, weight_config=low, step="prepare")
    )
    return model


TOOLS = {
    "modelopt int8": lambda: modelopt("INT8_DEFAULT_CFG"),
    "modelopt fp8": lambda: modelopt("FP8_DEFAULT_CFG"),
    "torchao int8": lambda: torchao("int8"),
    "torchao int4": lambda: torchao("int4"),
}


def trained(tool, *, half=True, spoil=()):
    """Train; return the loss on new data, the model and the steps skipped."""
    model = TOOLS[tool]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # A fixed scale: otherwise rounding in FP16 differs after the skips.
    scaler = buoy.torch.GradScaler(
        "cpu", enabled=half, policy=buoy.Static(init_scale=1024.0)
    )
    skipped = 0
    for step in range(STEPS):
        for spoiled in (True, False) if step in spoil else (False,):
            x, y = batch(step)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=half):
                output = model(x)
            loss = torch.nn.functional.mse_loss(output.float(), y)
            # An overflow in the backward pass: the quantizer clamps one in the input.
            scaler.scale(loss * 1e30 if spoiled else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            skipped += half and not scaler.last_step.applied
    with torch.no_grad():
        x, y = batch(1000)
        return torch.nn.functional.mse_loss(model(x), y).item(), model, skipped


@pytest.mark.parametrize("tool", TOOLS)
def test_overflows_are_skipped_and_change_nothing(tool):
    """The final loss is bit for bit that of a run without them, and as in FP32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spoiled, model, skipped = trained(tool, spoil=SPOIL)
        clean, _, none = trained(tool)
        wide, _, _ = trained(tool, half=False)

    assert (skipped, none) == (len(SPOIL), 0)
    assert spoiled == clean
    assert math.isclose(clean, wide, rel_tol=0.05)
    assert all(torch.isfinite(p).all() for p in model.parameters())
