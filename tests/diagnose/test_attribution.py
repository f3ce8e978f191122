"""The first module to go non-finite is named, and training does not notice."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from transformer import Transformer, batch, loss_of, spoil

from buoy._core.errors import OptionError
from buoy.diagnose import first_nonfinite
from buoy.torch import GradScaler, keep_fp32

BLOCKS = pytest.mark.parametrize(
    "blocks", [2, pytest.param(12, marks=pytest.mark.long)]
)


def names_in(model):
    """List the modules that can be spoilt."""
    return [
        name
        for name, module in model.named_modules()
        if not isinstance(module, nn.ModuleList)
    ]


def one_line(culprit):
    """Say it without line breaks."""
    return " ".join(str(culprit).split())


def culprit_of(model, **options):
    """Attribute one step of a spoilt transformer."""
    tokens = batch()
    return first_nonfinite(
        model, lambda: loss_of(model, tokens).backward(), measure=False, **options
    )


@pytest.mark.slow
@BLOCKS
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_module_is_named_when_it_overflows(direction, blocks):
    """Injected into each of them in turn, in either direction: all are found."""
    wrong, model = [], Transformer(blocks)
    names = names_in(model)
    for name in names:
        undo = spoil(model.get_submodule(name), direction)
        found = culprit_of(model)
        undo()
        if found is None or (found.module, found.direction) != (name, direction):
            wrong.append((name, found))

    assert [] == wrong
    assert len(names) == 4 + 11 * blocks


@pytest.mark.slow
@BLOCKS
def test_every_module_is_named_when_the_gradient_of_its_input_overflows(blocks):
    """The other end of each module; of the first one no gradient is asked."""
    wrong, model = [], Transformer(blocks)
    for name in names_in(model):
        if name in ("", "embed"):  # they take whole numbers
            continue
        undo = spoil(model.get_submodule(name), "backward", at_input=True)
        found = culprit_of(model)
        undo()
        if found is None or (found.module, found.direction) != (name, "backward"):
            wrong.append((name, found))

    assert [] == wrong


def test_a_healthy_step_has_no_culprit():
    """Masks of -inf on the way are none."""
    assert culprit_of(Transformer()) is None


LINEAR = [n for n, m in Transformer().named_modules() if isinstance(m, nn.Linear)]


@pytest.mark.slow
def test_every_linear_layer_is_named_when_it_overflows_in_fp16():
    """Under autocast, by weights that are too large for FP16's range of outputs."""
    wrong, model, tokens = [], Transformer(), batch()

    def step():
        with torch.autocast("cpu", torch.float16):
            return loss_of(model, tokens)

    for name in LINEAR:
        weight = model.get_submodule(name).weight
        kept = weight.detach().clone()
        weight.data[:, ::3] = 60000.0
        model.get_submodule(name).bias.data.fill_(65504.0)
        model.get_submodule(name).bias.data[::2] *= -1  # one of the signs goes over
        found = first_nonfinite(model, step, measure=False)
        weight.data.copy_(kept)
        nn.init.zeros_(model.get_submodule(name).bias)
        if found is None or (found.module, found.direction) != (name, "forward"):
            wrong.append((name, found))

    assert [] == wrong
    assert len(LINEAR) == 49


class Half(nn.Module):
    """A module whose output needs more than FP16 has."""

    def __init__(self, factor):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.wide = nn.Linear(8, 8)
        nn.init.constant_(self.wide.weight, factor)
        nn.init.zeros_(self.wide.bias)

    def forward(self, x):
        return self.wide(self.inner(x).clamp(1.0, 1.0))


def test_a_real_fp16_overflow_forward_is_measured():
    """Input and output, the distance to 65504 in bits, and that no scale helps."""
    model = Half(factor=2.0**14)

    def step():
        with torch.autocast("cpu", torch.float16):
            return model(torch.ones(2, 8)).float().mean()

    found = first_nonfinite(model, step)

    assert ("wide", "Linear", "forward") == (found.module, found.kind, found.direction)
    assert "float16" == found.dtype
    assert 1.0 == found.input_amax
    assert 2.0**17 == found.needed
    assert -1.0 == pytest.approx(found.headroom, abs=1e-3)
    assert found.fitting_scale is None
    assert "No scale helps" in one_line(found)
    assert "1.0 bits above" in one_line(found)


def test_a_real_fp16_overflow_backward_tells_the_scale_that_fits():
    """At the scale that it names the step is finite, at twice that it is not."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    scaler = GradScaler("cpu", init_scale=2.0**24)
    x = torch.randn(3, 8)

    def step():
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()

    found = first_nonfinite(model, step)

    assert ("backward", 2.0**24) == (found.direction, found.scale)
    assert found.headroom < 0
    assert found.fitting_scale < 2.0**24
    at_fit = first_nonfinite(model, step, scale=found.fitting_scale)
    assert at_fit is None or at_fit.module != found.module
    above = first_nonfinite(model, step, scale=2 * found.fitting_scale)
    assert above.module == found.module
    assert "it would have fitted at 2^" in one_line(found)


def test_code_between_modules_is_laid_to_the_module_that_holds_it():
    """`inside blocks.3, after attn`."""
    model = Transformer(4)
    block = model.blocks[3]

    def forward(x, mask):
        x = (x + block.attn(block.ln1(x), mask=mask)) * float("inf")
        return x + block.mlp(block.ln2(x))

    block.forward = forward
    found = culprit_of(model)

    assert ("blocks.3", "between") == (found.module, found.part)
    assert ("blocks.3.attn", "blocks.3.ln2") == (found.after, found.before)
    assert "inside `blocks.3` (Block), after `attn`, before `ln2`" in one_line(found)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_loss_itself_can_be_the_culprit(direction):
    """Finite logits, and what is made of them, or of its gradient, is not."""
    model = Transformer(1)
    tokens = batch()

    def step():
        nothing = model(tokens) * 0
        loss = nothing.log() if direction == "forward" else nothing.abs().sqrt()
        loss.sum().backward()
        return loss.sum()

    found = first_nonfinite(model, step)

    assert ("loss", direction) == (found.part, found.direction)
    assert "after the model" in str(found)


def test_a_batch_that_is_not_finite_is_said_to_be():
    """Nothing of the model is to blame."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    found = first_nonfinite(
        model, lambda: model(torch.tensor([[1.0, torch.nan]])).sum()
    )

    assert "input" == found.part
    assert "the batch itself" in str(found)


def test_weights_that_are_not_finite_are_named():
    """The module is right, and so is what to do."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data[0, 0] = float("nan")
    found = first_nonfinite(model, lambda: model(torch.ones(1, 2)).sum())

    assert ("1", ("weight",)) == (found.module, found.poisoned)
    assert "checkpoint" in str(found)


def everything(model):
    """Copy all that a rehearsal must leave alone."""
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        {
            n: None if p.grad is None else p.grad.clone()
            for n, p in model.named_parameters()
        },
        [id(p.grad) for p in model.parameters()],
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    )


def same(a, b):
    """Compare nested values, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails):
    """Weights, gradients, BatchNorm's buffers, random numbers, hooks, the scaler."""
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", policy="headroom")
    x = torch.randn(8, 4)

    def step():
        random.random()
        np.random.rand()  # noqa: NPY002
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        if fails:
            raise KeyError("stop")
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    scaler.scale(model(x).square().mean()).backward()
    before, state = everything(model), scaler.state_dict()
    losses, stages = list(scaler._iteration.losses), dict(scaler._per_optimizer_states)
    if fails:
        with pytest.raises(KeyError):
            first_nonfinite(model, step)
    else:
        assert first_nonfinite(model, step) is None

    assert same(before, everything(model))
    assert state == scaler.state_dict()
    assert losses == list(scaler._iteration.losses)
    assert stages == dict(scaler._per_optimizer_states)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.applied


def test_a_step_may_be_one_that_is_run_again():
    """It is rehearsed, and does not count."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    spoil(model, "backward")

    def loss():
        return model(torch.ones(1, 2)).sum()

    def step():
        scaler.run(lambda: scaler.scale(loss()).backward(), optimizer)

    state, weights = scaler.state_dict(), model.weight.detach().clone()

    assert "backward" == first_nonfinite(model, step).direction
    assert state == scaler.state_dict()
    assert torch.equal(weights, model.weight)
    assert scaler.last_step is None


def test_gradients_that_live_in_a_bucket_are_put_back():
    """DDP's backward pass writes into the memory that gradients are views of."""
    model = nn.Linear(2, 1, bias=False)
    bucket = torch.arange(2.0)
    model.weight.grad = bucket.view(1, 2)

    def step():
        bucket.fill_(7.0)
        return model(torch.ones(1, 2)).sum()

    first_nonfinite(model, step)

    assert [[0.0, 1.0]] == model.weight.grad.tolist()


def test_random_numbers_are_those_of_the_step():
    """With the state taken down before it, dropout drops what it dropped."""
    from buoy.diagnose import rng_state

    model, seen = nn.Sequential(nn.Linear(4, 64), nn.Dropout()), []
    rng = rng_state()

    def step():
        out = model(torch.ones(1, 4))
        seen.append((out == 0).tolist())
        return out.sum()

    step()
    torch.rand(3)
    first_nonfinite(model, step, rng=rng)

    assert seen[0] == seen[1]


def test_activation_checkpoints_are_seen_through():
    """Modules that run again during the backward pass confuse nothing."""
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), Block2(), nn.Linear(4, 1))
        spoil(model[1].inner, "backward")
        step = model_step(model, reentrant, checkpoint)
        assert "1.inner" == first_nonfinite(model, step).module


class Block2(nn.Module):
    """A module with one inside."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).relu()


def model_step(model, reentrant, checkpoint):
    """Run the middle of a model under a checkpoint."""

    def step():
        x = model[0](torch.ones(2, 4))
        x = checkpoint(model[1], x, use_reentrant=reentrant)
        model[2](x).sum().backward()

    return step


def test_modules_of_the_field_can_be_watched():
    """Torch's own encoder layer, called with keywords, returning tuples."""
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    spoil(model.linear2, "backward")
    found = first_nonfinite(model, lambda: model(torch.randn(2, 3, 16)).sum())

    assert ("linear2", "backward") == (found.module, found.direction)


# -- advice is tried before it is given -----------------------------------------------


class Apply(nn.Module):
    """A module that computes one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def fp16_step(model, x):
    """Make a step under autocast."""

    def step():
        with torch.autocast("cpu", torch.float16):
            return model(x).float().mean() * 1e-3

    return step


def lone(function):
    """Make a network that multiplies by 4 and applies a function."""
    model = nn.Sequential(nn.Linear(1, 1), Apply(function))
    nn.init.constant_(model[0].weight, 4.0)
    nn.init.zeros_(model[0].bias)
    return model


def test_fp32_is_advised_where_it_helps():
    """With this module in FP32 the step is finite, and so it is when one does that."""
    model = lone(lambda x: x**8)
    step = fp16_step(model, torch.ones(2, 1))
    found = first_nonfinite(model, step)

    assert ("1", "module", 4.0**8) == (found.module, found.cured_by, found.needed)
    assert 'keep_fp32(model, "1")' in one_line(found)
    with keep_fp32(model, found.module):
        assert first_nonfinite(model, step) is None


@pytest.mark.parametrize(
    "function",
    [lambda x: (x * 0).log(), lambda x: 1 / (x - x), lambda x: (x.float() * 99).exp()],
    ids=["log", "division", "exp"],
)
def test_fp32_is_not_advised_where_it_does_not_help(function):
    """It was tried; the words say that, and what to look for."""
    model = lone(function)
    found = first_nonfinite(model, fp16_step(model, torch.ones(2, 1)))

    assert ("1", "forward", "nothing") == (
        found.module, found.direction, found.cured_by,
    )  # fmt: skip
    assert "FP32 does not help either" in one_line(found)
    assert "keep_fp32" not in str(found)
    assert "logarithm or a division of 0" in one_line(found)


def test_a_module_whose_input_is_lost_already_is_not_cured_alone():
    """log of what FP16 rounded to 0: only with the layer before it in FP32."""
    model = lone(lambda x: x.abs().log())
    nn.init.constant_(model[0].weight, 1e-6)
    found = first_nonfinite(model, fp16_step(model, torch.full((2, 1), 1e-3)))

    assert ("1", "model") == (found.module, found.cured_by)
    assert "With this module alone in FP32 the forward pass is still not" in one_line(
        found
    )


def test_a_module_that_casts_to_fp16_itself_cannot_be_tried():
    """Then neither is claimed."""
    model = lone(lambda x: x.half() ** 8)
    found = first_nonfinite(model, fp16_step(model, torch.ones(2, 1)))

    assert ("1", "") == (found.module, found.cured_by)
    assert "It was not tried in FP32. If it is finite there, keep" in one_line(found)


@pytest.mark.parametrize("cure", ["model", "nothing"])
def test_a_loss_in_fp32_is_advised_where_it_helps(cure):
    """After the model the same holds."""
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 4.0)
    nn.init.zeros_(model.bias)
    loss_of_output = {"model": lambda y: y**8, "nothing": lambda y: (y * 0).log()}[cure]

    def step():
        with torch.autocast("cpu", torch.float16):
            return loss_of_output(model(torch.ones(1, 1))).sum()

    found = first_nonfinite(model, step)

    assert ("loss", "forward", cure) == (found.part, found.direction, found.cured_by)
    assert ("output.float()" in str(found)) == (cure == "model")


@pytest.mark.parametrize(
    ("function", "scale", "cure", "words"),
    [
        (lambda x: x.float() * 1e6, 2.0**127, "scale", "at scale 1 it fits"),
        (lambda x: (x - x).sqrt(), 2.0**4, "nothing", "at scale 1 it is not finite"),
    ],
    ids=["lower", "none"],
)
def test_a_lower_scale_is_advised_where_it_helps(function, scale, cure, words):
    """Where FP32 is not finite either, scale 1 is tried."""
    model = lone(function)
    found = first_nonfinite(model, fp16_step(model, torch.ones(2, 1)), scale=scale)

    assert ("backward", cure) == (found.direction, found.cured_by)
    assert words in one_line(found)


def test_trying_leaves_an_fp16_model_as_it_was():
    """The same parameters in the same memory, and the same classes."""
    model = lone(lambda x: x**8).half()
    before = [(p.data_ptr(), p.dtype, p.clone()) for p in model.parameters()]
    kinds = [type(module) for module in model.modules()]
    found = first_nonfinite(
        model, lambda: model(torch.ones(2, 1, dtype=torch.float16)).float().sum()
    )
    after = [(p.data_ptr(), p.dtype, p) for p in model.parameters()]

    assert "1" == found.module
    assert [entry[:2] for entry in before] == [entry[:2] for entry in after]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(before, after, strict=True))
    assert kinds == [type(module) for module in model.modules()]


# -- nothing looked at is not the same as all finite ----------------------------------


@pytest.mark.parametrize("value", [1.0, torch.nan])
def test_a_function_that_runs_no_module_is_refused(value):
    """None would say that all is finite."""
    other = nn.Linear(1, 1)
    with pytest.raises(OptionError, match="ran no module of the Sequential") as caught:
        first_nonfinite(
            nn.Sequential(nn.Linear(1, 1)),
            lambda: value * other(torch.ones(1, 1))[0, 0],
        )

    assert ("Its loss was not finite." in str(caught.value)) == (value != 1.0)


@pytest.mark.parametrize("returned", ["dict", "nothing", "output", "number"])
def test_a_function_without_a_backward_pass_is_refused(returned):
    """Only half of the step was looked at; a forward culprit is still named."""
    model = nn.Linear(2, 2)

    def step(factor=1.0):
        y = model(torch.ones(1, 2)) * factor
        made = {"dict": {"loss": y.sum()}, "nothing": None, "output": y}
        return made.get(returned, y.sum().item())

    with pytest.raises(OptionError, match="ran no backward pass"):
        first_nonfinite(model, step)
    model.weight.data.fill_(torch.inf)
    assert "forward" == first_nonfinite(model, step).direction


def test_parameters_used_without_their_module_are_looked_at():
    """Their gradients are what there is to see, whoever has written them."""
    model = nn.Linear(1, 1)
    used = first_nonfinite(model, lambda: (model.weight * 0).sqrt().sum())

    def by_hand():
        model(torch.ones(1, 1))
        model.bias.grad = torch.full((1,), torch.nan)

    assert ("backward", "weight", "") == (used.direction, used.parameter, used.module)
    assert "bias" == first_nonfinite(model, by_hand).parameter
    assert first_nonfinite(model, lambda: 2 * model.weight[0, 0]) is None
