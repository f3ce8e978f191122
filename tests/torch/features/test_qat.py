"""Quantisation-aware training in FP16, with torch's own fake-quant modules."""

import math
import warnings

import pytest
import torch

from buoy.torch import GradScaler, keep_fp32

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.ao.quantization as tq

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


class Net(torch.nn.Module):
    """A convolution with batch norm, and two linear layers, between stubs."""

    def __init__(self):
        super().__init__()
        self.quant, self.dequant = tq.QuantStub(), tq.DeQuantStub()
        self.conv = torch.nn.Conv2d(1, 8, 3, padding=1)
        self.norm, self.relu = torch.nn.BatchNorm2d(8), torch.nn.ReLU()
        self.first, self.relu2 = torch.nn.Linear(8 * 16, 32), torch.nn.ReLU()
        self.last = torch.nn.Linear(32, 4)

    def forward(self, x):
        x = self.relu(self.norm(self.conv(self.quant(x))))
        x = torch.nn.functional.max_pool2d(x, 2).flatten(1)
        return self.dequant(self.last(self.relu2(self.first(x))))


def prepared(config):
    """Make the model, fused and with fake-quant modules for INT8."""
    torch.manual_seed(0)
    model = tq.fuse_modules_qat(
        Net().train(), [["conv", "norm", "relu"], ["first", "relu2"]]
    )
    model.qconfig = {
        "fused": lambda: tq.get_default_qat_qconfig("fbgemm"),
        "plain": lambda: tq.QConfig(
            activation=tq.default_fake_quant, weight=tq.default_weight_fake_quant
        ),
    }[config]()
    return tq.prepare_qat(model)


def data(step):
    """Four classes: which quarter of a small image is brighter."""
    source = torch.Generator().manual_seed(step % 20)
    y = torch.randint(0, 4, (32,), generator=source)
    x = torch.randn(32, 1, 8, 8, generator=source)
    for image, label in zip(x, y.tolist(), strict=True):
        row, column = 4 * (label // 2), 4 * (label % 2)
        image[0, row : row + 4, column : column + 4] += 0.7
    return x, y


def trained(config, *, half, steps=80, spoil=()):
    """Train; return the mean loss of the last twenty steps, and the model."""
    model = prepared(config)
    kept = keep_fp32(model, tq.FakeQuantizeBase)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = GradScaler("cpu", enabled=half, model=model, init_scale=2.0**20)
    if half:
        scaler.guard(model)
    losses, done = [], 0
    while done < steps:
        x, y = data(done)
        if done in spoil:
            x, spoil = x * 1e30, spoil - {done}
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=half):
            output = model(x)
        loss = torch.nn.functional.cross_entropy(output.float(), y)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        if scaler.last_step.applied:
            losses.append(loss.item())
            done += 1
    kept.undo()
    return sum(losses[-20:]) / 20, model, scaler


@pytest.mark.parametrize("config", ["fused", "plain"])
def test_fp16_ends_at_the_loss_of_fp32(config):
    """From a first scale that overflows, with clipping."""
    half, _, scaler = trained(config, half=True)
    wide, _, _ = trained(config, half=False)
    start = math.log(4)

    assert scaler.get_scale() < 2.0**20
    assert wide < 0.5 * start
    assert abs(half - wide) < 0.05 * wide


def test_without_fp32_fake_quant_torch_refuses():
    """Why they are kept in FP32: torch's kernels take nothing else."""
    model = prepared("fused")
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(RuntimeError, match="Float but found Half"),
    ):
        model(data(0)[0])


def test_an_overflow_does_not_reach_the_observers():
    """A batch beyond range is skipped, and guarded observers forget it."""
    spoiled, model, _ = trained("fused", half=True, spoil={3, 10})
    clean, _, _ = trained("fused", half=True)

    assert all(torch.isfinite(buffer.float()).all() for buffer in model.buffers())
    assert abs(spoiled - clean) < 0.05 * clean


def test_the_result_converts_to_int8():
    """Undone, the model is torch's own again, and its INT8 version as good."""
    _, model, _ = trained("fused", half=True)
    model.eval()
    x, y = data(100)
    with torch.no_grad():
        fake = (model(x).argmax(1) == y).float().mean()
        real = (tq.convert(model)(x).argmax(1) == y).float().mean()

    assert fake > 0.7
    assert abs(fake - real) < 0.1
