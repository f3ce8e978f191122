"""A policy that wants it is told whether the losses were finite before scaling."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from nets import OPTIMIZERS
from no_host_reads import METHODS, no_host_reads
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from buoy.torch import BuoyWarning, GradScaler, install
from tests.told import FINITE, NOT_FINITE, UNKNOWN, Told

NOT_WANTED = Told(wants=frozenset())
BAD = [np.nan, np.inf, -np.inf]
OPTIONS = {
    "sgd": {},
    "adamw": {"sync": "never"},
    "fused adamw": {},
    "momentum": {"managed": True},
    "fused sgd": {"managed": True},
    "adam": {"skip": "joint"},
}


def made(kind="sgd", **options):
    """Make a scaler, a weight and its optimizer."""
    weight = torch.nn.Parameter(torch.ones(3))
    scaler = GradScaler("cpu", **{"policy": Told(), **options})
    return scaler, weight, OPTIMIZERS[kind]([weight])


def loss_of(weight, value, dtype=torch.float32):
    """Make a loss of this value, whose gradients are finite whatever it is."""
    nothing = (weight - weight.detach()).sum()
    return (nothing + torch.tensor(value, dtype=torch.float64)).to(dtype)


def told_of(scaler):
    """Return what the policy was told of the last iteration."""
    scaler.get_scale()  # ends an iteration whose update was deferred
    return float(scaler._loss_scale.state.told)


def step(scaler, weight, optimizer, *values, clip=False):
    """Take a step on losses of these values; return what was told."""
    optimizer.zero_grad()
    for value in values:
        scaler.scale(loss_of(weight, value)).backward()
    if clip:
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    return told_of(scaler)


# -- what counts -----------------------------------------------------------------------


@pytest.mark.parametrize("bad", BAD)
def test_a_loss_that_is_not_finite_is_told_of_its_step_only(bad):
    """Whatever the gradients: here they are finite, and every step is applied."""
    three = made()

    told = [step(*three, value) for value in (0.5, bad, 0.5)]

    assert told == [FINITE, NOT_FINITE, FINITE]
    assert three[0].last_step.applied


def test_finite_losses_are_told_as_such_whatever_the_gradients():
    """An overflow of the backward pass says nothing of the loss."""
    scaler, weight, optimizer = made()
    scaler.scale(weight.sum()).backward()
    weight.grad[0] = np.nan
    scaler.step(optimizer)
    scaler.update()

    assert told_of(scaler) == FINITE
    assert scaler.last_step.skipped


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(
    ("dtype", "large"),
    [(torch.float32, 3e38), (torch.float16, 6e4), (torch.float64, 1e306)],
)
def test_the_unscaled_loss_counts(dtype, large, hidden, monkeypatch):
    """In its own dtype: the scaled one may be inf."""
    scaler, weight, optimizer = made()
    told = []
    for value in (large, np.inf, np.nan, -np.inf):
        optimizer.zero_grad()
        scaled = scaler.scale(loss_of(weight, value, dtype))
        assert dtype is torch.float16 or not scaled.isfinite()
        scaled.backward()
        if hidden:
            monkeypatch.setattr(
                "buoy._backends.torch.in_host_memory", lambda tensor: False
            )
        scaler.step(optimizer)
        scaler.update()
        told.append(told_of(scaler))

    assert told == [FINITE, NOT_FINITE, NOT_FINITE, NOT_FINITE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_loss_counts_as_it_was_when_it_was_scaled(dtype):
    """The tensor of the loss may be changed afterwards."""
    scaler, weight, optimizer = made()
    loss = loss_of(weight, np.inf, dtype)
    scaler.scale(loss).backward()
    loss.detach().zero_()
    scaler.step(optimizer)
    scaler.update()

    assert told_of(scaler) == NOT_FINITE


@pytest.mark.parametrize(("bad", "told"), [(0.5, FINITE), (np.inf, NOT_FINITE)])
@pytest.mark.parametrize("several", ["tuple", "tensor", "empty"])
def test_every_element_of_every_loss_counts(several, bad, told):
    scaler, weight, optimizer = made()
    losses = [loss_of(weight, value) for value in (0.5, bad, 0.5)]
    if several != "tuple":
        losses = [torch.stack(losses)]
    if several == "empty":
        losses.append(weight[:0])
    for scaled in scaler.scale(tuple(losses)):
        scaled.sum().backward(retain_graph=True)
    scaler.step(optimizer)
    scaler.update()

    assert told_of(scaler) == told


def test_a_loss_without_a_value_is_not_known():
    """In a transform of `torch.func`; another that is NaN counts all the same."""
    scaler, weight, optimizer = made()
    assert step(scaler, weight, optimizer, 0.5) == FINITE
    told = []
    for value in (None, 0.5, np.nan):
        weight.grad = torch.func.grad(lambda w: scaler.scale((w * w).sum()))(
            weight.detach()
        )
        if value is not None:
            scaler.scale(loss_of(weight, value))
        scaler.step(optimizer)
        scaler.update()
        told.append(told_of(scaler))

    assert told == [UNKNOWN, UNKNOWN, NOT_FINITE]


# -- every way to take a step ----------------------------------------------------------


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", OPTIONS)
def test_every_way_to_step_tells_it(kind, clip, hidden, monkeypatch):
    """Also on a device whose memory the host cannot read."""
    if hidden:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    three = made(kind, **OPTIONS[kind])

    told = [step(*three, value, clip=clip) for value in (0.5, np.nan, 0.5)]

    assert told == [FINITE, NOT_FINITE, FINITE]


@pytest.mark.parametrize("count", [2, 200])
def test_accumulation_tells_of_all_losses(count):
    """Also of more than are kept for the verdict."""
    for hidden in (False, True):
        for bad in (0, count // 2, count - 1):
            three = made()
            values = [np.inf if i == bad else 0.5 for i in range(count)]
            with no_host_reads() if hidden else nullcontext():
                for value in values[:-1]:
                    three[0].scale(loss_of(three[1], value))
            assert step(*three, values[-1]) == NOT_FINITE
            assert step(*three, *[0.5] * count) == FINITE


@pytest.mark.parametrize("joint", ["independent", "joint"])
@pytest.mark.parametrize("bad", [None, 0, 1])
@pytest.mark.parametrize("hidden", [False, True])
def test_several_losses_and_optimizers_are_one_iteration(
    bad, joint, hidden, monkeypatch
):
    """A loss that only the first optimizer's step depends on counts, too."""
    if hidden:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    scaler, *first = made(skip=joint)
    _, *second = made("fused adamw")
    for turn, (weight, optimizer) in enumerate((first, second)):
        scaler.scale(loss_of(weight, np.nan if bad == turn else 0.5)).backward()
        scaler.step(optimizer)
    scaler.update()

    assert told_of(scaler) == (FINITE if bad is None else NOT_FINITE)


def test_scale_groups_are_told_of_their_own_losses():
    scaler, *first = made()
    _, *second = made()
    critic = scaler.group("critic")
    for one, (weight, _), value in ((scaler, first, 0.5), (critic, second, np.nan)):
        one.scale(loss_of(weight, value)).backward()
    scaler.step(first[1])
    critic.step(second[1])
    scaler.update()

    assert (told_of(scaler), told_of(critic)) == (FINITE, NOT_FINITE)


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize(
    ("bad", "told"), [(9, FINITE), (0, NOT_FINITE), (2, NOT_FINITE)]
)
def test_a_closure_tells_of_every_evaluation(bad, told, scales):
    scaler, weight, _ = made()
    optimizer = torch.optim.LBFGS([weight], lr=0.1, max_iter=4)
    calls = []

    def closure():
        optimizer.zero_grad()
        calls.append(1)
        away = (weight - 3.0).square().sum()
        loss = away + (np.inf if len(calls) == bad + 1 else 0.0)
        if scales:
            scaler.scale(loss).backward()
        return loss

    scaler.step(optimizer, closure)
    scaler.update()

    assert len(calls) > 2
    assert told_of(scaler) == told


def test_each_attempt_of_a_rerun_has_losses_of_its_own():
    """The last one's forward pass fails, so that it is not run again."""
    scaler, weight, optimizer = made()
    told, values = [], iter([(0.5, np.inf), (np.nan, np.inf), (0.5, 1.0)])

    def attempt():
        told.append(told_of(scaler))
        loss, grad = next(values)
        scaler.scale(loss_of(weight, loss)).backward()
        weight.grad[0] = grad

    scaler.run(attempt, optimizer)
    scaler.run(attempt, optimizer)

    assert [*told, told_of(scaler)] == [UNKNOWN, FINITE, NOT_FINITE, FINITE]
    assert scaler.last_step.applied


def test_installed_scalers_tell_it():
    with install(policy=Told(), device="cpu"):
        scaler = torch.amp.GradScaler("cpu")
    weight = torch.nn.Parameter(torch.ones(3))
    three = scaler, weight, OPTIMIZERS["sgd"]([weight])

    assert [step(*three, value) for value in (np.nan, 0.5)] == [NOT_FINITE, FINITE]


def test_a_loss_that_was_scaled_before_a_state_was_loaded_is_forgotten():
    three = made()
    three[0].scale(loss_of(three[1], np.nan))
    with pytest.warns(BuoyWarning, match="only the scale"):
        three[0].load_state_dict(torch.amp.GradScaler("cpu").state_dict())

    assert step(*three, 0.5) == FINITE


def test_a_pipelines_loss_counts():
    """It is scaled inside of a schedule."""
    scaler, weight, optimizer = made()
    loss_fn = scaler.loss_fn(loss_of)
    told = []
    for value in (np.nan, 0.5):
        loss_fn(weight, value).backward()
        scaler.step(optimizer)
        scaler.update()
        told.append(told_of(scaler))

    assert told == [NOT_FINITE, FINITE]


@pytest.mark.parametrize("together", [False, True])
@torch._dynamo.config.patch(trace_autograd_ops=True, error_on_recompile=True)
def test_compiled_steps_tell_it(together):
    """Of every loss of a graph, without a second compilation."""
    torch._dynamo.reset()
    scaler, weight, optimizer = made(sync="never")
    step(scaler, weight, optimizer, 0.5)

    def forward(x):
        for part in x:
            scaler.scale((weight - weight.detach()).sum() + part).backward()
        scaler.scale(torch.full((9,), 6e4, dtype=torch.float16))

    def finish():
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    def both(x):
        forward(x)
        finish()

    graphs = [both] if together else [forward, finish]
    graphs = [torch.compile(one, fullgraph=True, backend="eager") for one in graphs]
    told = []
    for values in ([0.5, 0.5], [np.inf, 0.5], [0.5, np.nan], [3e38, 0.5]):
        optimizer.zero_grad()
        for graph in graphs:
            graph(torch.tensor(values)) if graph is graphs[0] else graph()
        told.append(told_of(scaler))

    assert told == [FINITE, NOT_FINITE, NOT_FINITE, FINITE]


# -- what it costs ---------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Record the name of every tensor operation."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name != "_local_scalar_dense":  # a number of the host is read for free
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", [Told(), NOT_WANTED, None])
def test_scaling_a_loss_is_one_multiplication(policy):
    """It is not looked at before the backward pass."""
    scaler, weight = GradScaler("cpu", policy=policy), torch.ones(3, requires_grad=True)
    scaler.scale(weight.sum())
    loss = weight.sum()
    with Operations() as operations:
        scaler.scale(loss)

    assert operations.names == ["mul"]


def operations_of(kind, policy):
    """Return the operations of `step` and `update`."""
    scaler, weight, optimizer = made(kind, policy=policy, **OPTIONS[kind])
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(weight, 0.5)).backward()
        with Operations() as operations:
            scaler.step(optimizer)
            scaler.update()
    return operations.names


@pytest.mark.parametrize("kind", sorted(OPTIONS.keys() - {"adamw"}))
def test_a_step_has_no_operation_more_where_the_host_has_the_numbers(kind):
    wanted, without = operations_of(kind, Told()), operations_of(kind, NOT_WANTED)

    assert wanted == without


@pytest.mark.parametrize("kind", OPTIONS)
def test_gradients_are_not_read_for_it(kind, monkeypatch):
    """On a device, a step has a few operations more, all of them on single numbers."""
    monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    wanted, without = operations_of(kind, Told()), operations_of(kind, NOT_WANTED)

    assert passes(wanted) == passes(without) > 0


def passes(names):
    """Count the operations that read gradients."""
    return sum("foreach" in name or name == "aminmax" for name in names)


class Reads(TorchFunctionMode):
    """Count the calls that read a tensor on the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") in METHODS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("clip", [False, True])
def test_the_host_reads_it_with_the_flag(clip, monkeypatch):
    """One read per step, as without it."""
    monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    scaler, weight, optimizer = made("sgd")
    step(scaler, weight, optimizer, 0.5)
    scaler.scale((weight - weight.detach()).sum() + np.inf).backward()
    with Reads() as reads:
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    assert reads.count == 1
    assert told_of(scaler) == NOT_FINITE


@pytest.mark.parametrize("kind", ["fused adamw", "sgd"])
def test_steps_without_a_host_read_stay_without(kind):
    scaler, weight, optimizer = made(kind, sync="never")
    step(scaler, weight, optimizer, 0.5)
    with no_host_reads():
        scaler.scale((weight - weight.detach()).sum() + np.inf).backward()
        scaler.step(optimizer)
        scaler.update()

    assert told_of(scaler) == NOT_FINITE
