"""`LossAhead` in the scaler, and what a policy costs that does not look ahead."""

import copy

import pytest
import torch
from nets import OPTIMIZERS, batch, loss_of, net, train
from no_host_reads import no_host_reads
from torch.utils._python_dispatch import TorchDispatchMode

import buoy
from buoy import LossAhead
from buoy._backends import torch as backend
from buoy.torch import GradScaler


class Half(torch.nn.Module):
    """Weights of 1 and a product in FP16: its gradient is the input times the scale."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, size):
        return (self.weight.half() * torch.full((4,), size).half()).float().sum()


def steps(scaler, sizes, *, clip=False, kind="sgd"):
    """Train on inputs of these sizes; return the scales used, and what was applied."""
    model = Half()
    optimizer = OPTIMIZERS[kind](model.parameters())
    used, applied = [], []
    for size in sizes:
        optimizer.zero_grad()
        with torch.no_grad():
            model.weight.fill_(1.0)
        scaler.scale(model(size)).backward()
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        used.append(scaler.last_step.scale)
        applied.append(scaler.last_step.applied)
    return used, applied


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "fused sgd"])
@pytest.mark.parametrize("sync", ["auto", "never"])
@pytest.mark.parametrize("visible", [True, False])
def test_a_batch_that_jumps_is_applied_at_a_lower_scale(
    visible, sync, kind, clip, monkeypatch
):
    """1024 x in loss and gradients, which FP16 could not hold at the usual scale."""
    if not visible:
        monkeypatch.setattr(backend, "in_host_memory", lambda tensor: False)
    sizes = [1.0] * 4 + [1024.0] + [1.0] * 2
    static = buoy.Static(init_scale=2.0**12)
    for policy, lower, skipped in ((static, 1.0, 1), (LossAhead(static), 2.0**10, 0)):
        scaler = GradScaler("cpu", policy=policy, sync=sync)
        used, applied = steps(scaler, sizes, clip=clip, kind=kind)

        assert [2.0**12] * 4 + [2.0**12 / lower] + [2.0**12] * 2 == used
        assert applied.count(False) == skipped


def test_the_lower_scale_multiplies_this_very_loss(loop):
    """And is taken out of the gradients again."""
    scaler, weight, optimizer = loop(
        "sgd", torch.ones(4), lr=0.0, policy=LossAhead("backoff")
    )
    for size in (1.0, 1.0, 2.0**10):
        optimizer.zero_grad()
        loss = weight.sum() * size
        scaled = scaler.scale(loss)
        scaled.backward()
        lowered = scaler.get_scale()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    assert 2.0**6 == lowered == scaled.item() / loss.item()
    assert torch.equal(weight.grad, torch.full((4,), 2.0**10))
    assert 2.0**16 == scaler.get_scale()


def test_nothing_is_read_on_the_host():
    """Where only the device has the loss, and the optimizer takes the flag."""
    scaler = GradScaler("cpu", policy="loss_ahead")
    model = net()
    optimizer = OPTIMIZERS["fused adam"](model.parameters())
    train(scaler, model, optimizer, ["ok"])
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, step) * (1000.0 if step == 3 else 1.0)
        with no_host_reads():
            scaled = scaler.scale(loss)
        scaled.backward()
        with no_host_reads():
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("visible", [True, False])
@pytest.mark.parametrize("inside", ["headroom", "lognormal", "backoff"])
def test_a_run_goes_on_as_if_it_had_not_been_saved(inside, visible, monkeypatch):
    """From a state dict: the same scales, jumps included, and the same state."""
    if not visible:
        monkeypatch.setattr(backend, "in_host_memory", lambda tensor: False)
    sizes = [1.0, 1.5, 1.0, 64.0, 1.0, 1.0] * 3
    whole = GradScaler("cpu", policy=LossAhead(inside))
    expected, _ = steps(whole, sizes)
    first, then = (GradScaler("cpu", policy=LossAhead(inside)) for _ in range(2))
    used, _ = steps(first, sizes[:9])
    then.load_state_dict(copy.deepcopy(first.state_dict()))
    more, _ = steps(then, sizes[9:])

    assert expected == used + more
    assert whole.state_dict() == then.state_dict()
    assert len(set(used)) > 1


def test_a_state_of_another_policy_inside_is_not_taken_for_its_own():
    """Only the scale is, with a warning."""
    saved = GradScaler("cpu", policy=LossAhead("backoff", init_scale=8.0)).state_dict()
    scaler = GradScaler("cpu", policy="loss_ahead")
    with pytest.warns(buoy.torch.BuoyWarning, match="only the scale"):
        scaler.load_state_dict(saved)

    assert 8.0 == scaler.get_scale()
    saved["buoy"]["state"]["inner"]["scale"] = -1.0
    with pytest.raises(buoy.torch.StateError, match=r"inner\.scale"):
        GradScaler("cpu", policy=LossAhead("backoff")).load_state_dict(saved)


@pytest.mark.parametrize("visible", [True, False])
def test_a_scale_that_is_set_is_gone_on_from(visible, monkeypatch):
    """By `update`, or written into the tensor."""
    if not visible:
        monkeypatch.setattr(backend, "in_host_memory", lambda tensor: False)
    scaler = GradScaler("cpu", policy=LossAhead("static"))
    steps(scaler, [1.0] * 2)
    scaler.update(2.0**8)
    used, _ = steps(scaler, [1.0] * 2)
    scaler._scale.fill_(2.0**6)
    used += steps(scaler, [1.0, 1.0, 16.0, 1.0])[0]

    assert [2.0**8] * 2 + [2.0**6] * 2 + [2.0**2, 2.0**6] == used


def test_a_batch_that_is_run_again_leaves_a_constant_scale_as_it_was():
    """Also inside the wrapper."""
    scaler = GradScaler("cpu", policy=LossAhead(buoy.Static(init_scale=2.0**14)))
    model = Half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step():
        scaler.scale(model(16.0)).backward()

    scaler.run(step, optimizer, retries=4)
    assert scaler.last_step.applied
    assert 2.0**14 > scaler.last_step.scale
    assert 2.0**14 == scaler.get_scale()


@pytest.mark.slow
def test_a_compiled_step_looks_ahead(loop):
    """In one graph with the forward pass, and another for the rest."""
    torch._dynamo.reset()
    scaler, model, optimizer = loop(policy=LossAhead("backoff"), sync="never")
    train(scaler, model, optimizer, ["ok"])

    @torch.compile(fullgraph=True, backend="eager")
    def forward(x, y, size):
        return scaler.scale(torch.nn.functional.mse_loss(model(x), y) * size)

    @torch.compile(fullgraph=True, backend="eager")
    def finish():
        scaler.step(optimizer)
        scaler.update()

    used = []
    for step in range(6):
        optimizer.zero_grad()
        size = torch.tensor(1024.0 if step == 4 else 1.0)
        scaled = forward(*batch(0), size)
        used.append(scaler._scale.item())
        scaled.backward()
        for param in model.parameters():
            param.grad.mul_(1.0 / size)
        finish()

    assert [2.0**16] * 4 == used[:4]
    assert 2.0**5 <= used[4] <= 2.0**7
    assert 2.0**16 == used[5]


class Operators(TorchDispatchMode):
    """List the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name != "_local_scalar_dense":  # a number of the host is read for free
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("policy", "alone"),
    [(None, True), ("backoff", True), ("lognormal", True), ("loss_ahead", False)],
)
@pytest.mark.parametrize("on_device", [False, True])
def test_a_policy_that_does_not_look_ahead_costs_nothing_before_backward(
    policy, alone, on_device, monkeypatch
):
    """One multiplication; and where the host cannot read the loss, its copy."""
    scaler = GradScaler("cpu", policy=policy)
    model = net()
    train(scaler, model, OPTIMIZERS["fused sgd"](model.parameters()), ["ok"] * 2)
    if on_device:
        monkeypatch.setattr(backend, "in_host_memory", lambda tensor: False)
        train(scaler, model, OPTIMIZERS["fused sgd"](model.parameters()), ["ok"] * 2)
    loss = loss_of(model, 9)
    with Operators() as ran:
        scaler.scale(loss)

    usual = ["mul"] if not on_device else ["detach", "clone", "mul"]
    assert alone == (usual == ran.names), ran.names
