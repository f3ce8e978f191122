"""A module that leaves FP16's range runs in FP32, and the run goes on."""

import copy
import io

import pytest
import torch

from buoy.torch import GradScaler, KeptFp32, OptionError, keep_fp32

KINDS = pytest.mark.parametrize("mixed", [True, False])


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = torch.nn.Linear(8, 16)
        self.down_proj = torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.down_proj(torch.relu(self.up_proj(x)))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.mlp(x))


class Model(torch.nn.Module):
    """Two blocks; the first one's last projection yields values around 10^6."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(8, 1)
        with torch.no_grad():
            self.layers[0].mlp.up_proj.weight.mul_(300.0)
            self.layers[0].mlp.down_proj.weight.mul_(3000.0)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def losses(model, steps, *, keep_after=None, dtype=torch.float16):
    """Train on one batch; keep the culprit in FP32 from some step on."""
    torch.manual_seed(1)
    x, y = torch.randn(16, 8), torch.randn(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler("cpu", model=model, init_scale=2.0**8)
    seen, told = [], []
    for step in range(steps):
        if step == keep_after:
            keep_fp32(model, "layers.0.mlp.down_proj")
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=dtype is torch.float16):
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(loss.item())
        told.append(scaler.last_step.verdict)
    return seen, told


def test_a_run_that_overflows_forward_goes_on():
    """No scale helps; keeping one module in FP32 does, to the loss of FP32."""
    seen, told = losses(Model(), 30, keep_after=4)
    expected, _ = losses(Model(), 26, dtype=torch.float32)

    assert told[:4] == ["forward_nonfinite"] * 4
    assert told[4:] == ["applied"] * 26
    assert abs(seen[-1] - expected[-1]) < 0.02 * expected[-1] + 0.01
    assert seen[-1] < 0.9 * seen[4]


def test_under_autocast_inputs_and_outputs_are_fp32():
    """Autocast is off within, and on again after it."""
    model = Model()
    kept = keep_fp32(model, "layers.0.mlp")
    dtypes = {}

    def note(name):
        return lambda _, given, output: dtypes.update(
            {name: (given[0].dtype, output.dtype)}
        )

    for name in ("layers.0.mlp", "layers.0.mlp.up_proj", "layers.1.mlp.up_proj"):
        model.get_submodule(name).register_forward_hook(note(name))
    with torch.autocast("cpu", torch.float16):
        model(torch.randn(2, 8))
        assert torch.is_autocast_enabled("cpu")
    wide, half = torch.float32, torch.float16
    assert dtypes["layers.0.mlp"] == (wide, wide)
    assert dtypes["layers.0.mlp.up_proj"] == (wide, wide)
    assert dtypes["layers.1.mlp.up_proj"][1] == half
    kept.undo()
    with torch.autocast("cpu", torch.float16):
        model(torch.randn(2, 8))
    assert dtypes["layers.0.mlp.up_proj"][1] == half


def test_in_an_fp16_model_the_output_is_what_the_others_expect():
    """Its own parameters become FP32, and FP16 again when it is undone."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))).half()
    model[1].register_buffer("mean", torch.zeros(4).half())
    with keep_fp32(model, "1") as kept:
        assert isinstance(kept, KeptFp32)
        assert model[1].weight.dtype == torch.float32
        out = model(torch.randn(2, 4).half())
        assert out.dtype == torch.float16
        out.sum().backward()
        assert model[1].weight.grad.dtype == torch.float32
        assert model[0].weight.grad.dtype == torch.float16
        model.zero_grad()
    assert {t.dtype for t in (*model.parameters(), model[1].mean)} == {torch.float16}
    assert type(model[1]) is torch.nn.Linear


def test_masters_and_kept_modules_go_together():
    """In mid-run, with optimizer state: one skips, is kept, and goes on."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2))).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", model=model, fp16_params="master", init_scale=8.0)
    x = torch.randn(8, 4).half()
    for step in range(6):
        if step == 3:
            before = [m.detach().clone() for m in optimizer._buoy_masters.masters]
            keep_fp32(model, "1")
        optimizer.zero_grad()
        scaler.scale(model(x).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step.applied
    after = optimizer._buoy_masters.masters
    assert model[1].weight.dtype == torch.float32
    assert torch.equal(after[2], model[1].weight)
    assert (after[2] - before[2]).abs().max() < 0.01


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (
            ["layers.*.mlp.down_proj"],
            ["layers.0.mlp.down_proj", "layers.1.mlp.down_proj"],
        ),
        (["head", "layers.1.norm"], ["head", "layers.1.norm"]),
        ([["head", "layers.0.norm"]], ["head", "layers.0.norm"]),
        (["layers.?.norm"], ["layers.0.norm", "layers.1.norm"]),
    ],
)
def test_names_patterns_and_lists(names, kept):
    """All of them name modules as `named_modules` does."""
    assert sorted(kept) == sorted(keep_fp32(Model(), *names).names)


def test_modules_and_classes_may_be_given():
    """As long as they are part of the model."""
    model = Model()
    assert keep_fp32(model, model.head).names == ("head",)
    assert len(keep_fp32(model, torch.nn.LayerNorm, torch.nn.ModuleList).names) == 3
    with pytest.raises(OptionError, match="of class Conv2d"):
        keep_fp32(model, torch.nn.Conv2d)
    with pytest.raises(OptionError, match="Linear given, which is not part"):
        keep_fp32(model, torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("layers.0.mlp.down_porj", "'layers.0.mlp.down_proj'"),
        ("model.layers.0.mlp.down_proj", "'layers.0.mlp.down_proj'"),
        ("decoder.up_proj", "'layers.0.mlp.up_proj'"),
        ("zzz", "It has 12: 'layers'"),
        ("layers.9.*", "layers"),
    ],
)
def test_unknown_names_come_with_the_closest(name, said):
    """An OptionError, with what was probably meant; nothing is changed."""
    model = Model()
    with pytest.raises(OptionError) as told:
        keep_fp32(model, "head", name)
    assert said in str(told.value)
    assert repr(name) in str(told.value)
    assert type(model.head) is torch.nn.Linear
    with pytest.raises(OptionError, match="No module was given"):
        keep_fp32(model)


def test_keeping_twice_is_keeping_once():
    """And the first to be undone ends it."""
    model = Model()
    first, second = keep_fp32(model, "head"), keep_fp32(model, "head")
    kind = type(model.head)
    second.undo()
    assert type(model.head) is kind
    first.undo()
    first.undo()
    assert type(model.head) is torch.nn.Linear


def test_copies_pickles_and_state_dicts():
    """A kept module is copied and saved as one; its parameters keep their names."""
    model = Model()
    names = list(model.state_dict())
    keep_fp32(model, "head")
    assert names == list(model.state_dict())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    x = torch.randn(2, 8)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        keep_fp32(other, "layers.0.mlp.down_proj")
        assert isinstance(other.head, torch.nn.Linear)
        with torch.autocast("cpu", torch.float16):
            assert other(x).dtype == torch.float32
        other.head.weight.data.zero_()
    assert model.head.weight.any()


def test_an_error_within_leaves_autocast_as_it_was():
    """Whatever the module raises."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    keep_fp32(model, "0")
    with torch.autocast("cpu", torch.float16):
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(1, 3))
        assert torch.is_autocast_enabled("cpu")


def test_a_compiled_model_keeps_it_too():
    """The class is part of what is traced."""
    model = Model()
    keep_fp32(model, "head")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.float16):
        assert compiled(torch.randn(2, 8)).dtype == torch.float32


def test_undo_converts_gradients_with_their_parameters():
    """A backward pass can add to them again."""
    layer = torch.nn.Linear(2, 1).half()
    with keep_fp32(layer, ""):
        layer(torch.ones(1, 2, dtype=torch.float16)).sum().backward()
        assert torch.float32 is layer.weight.grad.dtype

    assert torch.float16 is layer.weight.dtype is layer.weight.grad.dtype
    layer(torch.ones(1, 2, dtype=torch.float16)).sum().backward()
    assert [[2.0, 2.0]] == layer.weight.grad.tolist()
