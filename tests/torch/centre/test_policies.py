"""Any policy in the scaler's place: the same scales as the rule on plain numbers."""

import math

import pytest
import torch
from nets import loss_of, net, spoil, train

import buoy
from buoy import Seen
from buoy._backends import torch as backend
from buoy._core.policies.presets import PeerBackoff, Quirks
from buoy.torch import GradScaler

EVENTS = (["ok"] * 5 + ["inf", "ok", "ok", "nan", "nan"]) * 4


def amax_of(model):
    """Find the largest scaled gradient."""
    return max(p.grad.abs().max().item() for p in model.parameters())


@pytest.mark.parametrize(
    "name", ["backoff", "megatron", "deepspeed", "keras", "static", "none"]
)
@pytest.mark.parametrize("kind", ["sgd", "fused sgd"])
@pytest.mark.parametrize("visible", [True, False])
def test_the_scale_follows_the_policy(name, kind, visible, monkeypatch, loop):
    """Host mode, device mode, any optimizer: the plain run decides."""
    if not visible:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    policy = buoy.policy(name)
    state = policy.init()
    scaler, model, optimizer = loop(kind, policy=name)
    for step, event in enumerate(EVENTS):
        optimizer.zero_grad()
        assert scaler.get_scale() == state.scale
        scaler.scale(loss_of(model, step)).backward()
        spoil(model, event)
        scaler.step(optimizer)
        scaler.update()
        state = policy.update(state, Seen(finite=event == "ok"))
    assert scaler.last_step.next_scale == state.scale


@pytest.mark.parametrize("kind", ["sgd", "fused sgd"])
@pytest.mark.parametrize("clip", [True, False])
def test_a_policy_that_wants_it_gets_the_largest_gradient(kind, clip, loop):
    """`amax_log2` is that of the scaled gradients."""
    policy = buoy.LogNormal(deviations=1.0)
    state = policy.init()
    scaler, model, optimizer = loop(kind, policy=policy)
    for step in range(12):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        largest = math.log2(amax_of(model))
        if clip:
            scaler.clip_grad_norm_(optimizer, 0.1)
        scaler.step(optimizer)
        scaler.update()
        state = policy.update(state, Seen(finite=True, amax_log2=largest))
        assert scaler.get_scale() == pytest.approx(state.scale, rel=1e-4)


@pytest.mark.parametrize("visible", [True, False])
def test_a_foreseen_scale_multiplies_this_very_loss(visible, monkeypatch, loop):
    """A policy that looks ahead lowers the scale before the loss is scaled."""
    if not visible:
        monkeypatch.setattr(backend, "in_host_memory", lambda tensor: False)
    policy = buoy.LossAhead("headroom")
    scaler, weight, optimizer = loop("sgd", torch.ones(4), lr=0.0, policy=policy)
    for _ in range(20):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    usual = scaler.get_scale()
    optimizer.zero_grad()
    loss = weight.sum() * 2.0**10

    scaled = scaler.scale(loss)

    lowered = scaled.item() / loss.item()
    assert usual * 2.0**-10 == lowered == scaler.get_scale()
    scaled.backward()
    scaler.step(optimizer)
    assert torch.equal(weight.grad, torch.full((4,), 2.0**10))
    assert lowered == scaler.last_step.scale


def test_a_policy_by_name_takes_torchs_arguments():
    """Arguments that differ from torch's defaults are the policy's, if it has them."""
    scaler = GradScaler("cpu", init_scale=8.0, policy="backoff", max_scale=16.0)
    assert (scaler.policy.init_scale, scaler.policy.max_scale) == (8.0, 16.0)
    assert scaler.get_scale() == 8.0
    with pytest.raises(buoy.PolicyError, match="growth_factor"):
        GradScaler("cpu", growth_factor=3.0, policy="none")
    with pytest.raises(buoy.UnknownPolicyError, match="backoff"):
        GradScaler("cpu", policy="backof")


def test_a_policy_that_gives_up_raises_from_update():
    """DeepSpeed stops at its floor; after catching that the loop can go on."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = PeerBackoff(
        init_scale=4.0, min_scale=1.0, quirks=Quirks(stop_at_floor=True)
    )
    scaler = GradScaler("cpu", policy=policy)
    with pytest.raises(buoy.ScaleCollapsedError) as caught:
        train(scaler, model, optimizer, ["inf"] * 9)
    assert scaler._loss_scale.state == caught.value.state != policy.init()
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.applied


@pytest.mark.parametrize("growth", [2.0, 1.7])
@pytest.mark.parametrize("backoff", [0.5, 0.3])
def test_torchs_rule_written_as_a_policy_equals_its_kernel(growth, backoff):
    """`scaler.policy` replays to the very scales that the scaler took."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(
        "cpu", init_scale=100.0, growth_factor=growth, backoff_factor=backoff,
        growth_interval=3, max_scale=300.0, min_scale=2.0,
    )  # fmt: skip
    policy = scaler.policy
    state = policy.init()
    for step, event in enumerate(EVENTS + ["inf"] * 9 + ["ok"] * 30):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        spoil(model, event)
        scaler.step(optimizer)
        scaler.update()
        state = policy.update(state, Seen(finite=event == "ok"))
        assert scaler.get_scale() == state.scale


def _half_losses(model, step):
    """Give the loss of a small regression in FP16, in units of 1e-2."""
    torch.manual_seed(step)
    x = torch.randn(32, 4).half()
    weight, bias = (p.half() for p in model.parameters())
    return (((x @ weight.T + bias) - x).mul(1e-2) ** 2).mean()


@pytest.mark.parametrize("visible", [True, False])
@pytest.mark.parametrize("name", ["headroom", "lognormal"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_gradient_of_an_fp16_loss_overflows_seldom(
    name, nested, visible, monkeypatch, loop
):
    """It fits up to 2^15: policies that measure stay there once they have seen it."""
    if not visible:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    scaler, model, optimizer = loop("sgd", torch.nn.Linear(4, 4), lr=1e-3, policy=name)
    scales = []
    for step in range(60):
        loss = _half_losses(model, step)
        optimizer.zero_grad()
        if nested:
            small = 1e-6 * model(torch.ones(1, 4)).float().square().sum()
            first, second = scaler.scale([small, loss])
            (first + second).backward()
        else:
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if scaler.last_step.applied:
            scales.append(scaler.last_step.scale)
    assert len(scales) >= 50
    assert max(scales) <= 65504.0


def test_torchs_rule_scales_an_fp16_loss_as_torch_does(loop):
    """Its trajectory is torch's: 2^16 overflows once, and the step is skipped."""
    scaler, model, optimizer = loop("sgd", torch.nn.Linear(4, 4), lr=1e-3)
    scaler.scale(_half_losses(model, 0)).backward()
    scaler.step(optimizer)
    scaler.update()

    assert not scaler.last_step.applied
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("kind", ["sgd", "fused adamw"])
def test_a_scale_that_others_write_is_followed_where_it_cannot_be_read(
    kind, monkeypatch, loop
):
    """Whether the policy has run on the host so far, or on the device."""
    monkeypatch.setattr(backend, "in_host_memory", lambda tensor: False)
    scaler, model, optimizer = loop(kind, policy="backoff")
    train(scaler, model, optimizer, ["ok", "ok"])
    scaler._scale.fill_(64.0)
    seen = train(scaler, model, optimizer, ["inf", "ok", "inf"])

    assert [32.0, 32.0, 16.0] == [scale for scale, _ in seen]


@pytest.mark.parametrize("clip", [False, True])
def test_an_optimizer_without_gradients_is_measured_at_no_turn(clip):
    """Beside one that has some; small ones are counted at every 16th turn."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([param], lr=0.0, fused=True) for param in params]
    scaler = GradScaler("cpu", policy="headroom")
    for _ in range(17):
        optimizers[0].zero_grad()
        scaler.scale(params[0].sum()).backward()
        for optimizer in optimizers:
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step_of(optimizers[0]).applied


@pytest.mark.parametrize("kind", ["sgd", "fused adamw"])
@pytest.mark.parametrize("visible", [True, False])
def test_a_policy_that_wants_it_gets_the_share_of_small_gradients(
    kind, visible, monkeypatch, loop
):
    """Of those that are not zero, at every 16th turn."""
    if not visible:
        monkeypatch.setattr(backend, "in_host_memory", lambda tensor: False)
    noted = []

    class Noting(buoy.Backoff):
        wants = frozenset({"underflow"})

        def update(self, state, seen, *, ops=None):
            noted.append(seen.underflow)
            return super().update(state, seen, ops=ops)

    scaler, param, optimizer = loop(kind, torch.ones(4), policy=Noting(init_scale=1.0))
    for _ in range(17):
        optimizer.zero_grad()
        scaler.scale((param * torch.tensor([1.0, 2.0, 2.0**-30, 0.0])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [None] * 15 == noted[:15]
    assert float(noted[15]) == pytest.approx(1 / 3)
    assert noted[16] is None


@pytest.mark.parametrize("clips", [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("jumps", [0, 1])
@pytest.mark.parametrize("turn", [21, 22])
def test_headroom_follows_two_optimizers_of_which_only_some_clip(turn, clips, jumps):
    """Where one clips, the largest gradient of both is known in every third turn."""
    params = [torch.nn.Parameter(torch.zeros(50)) for _ in range(2)]
    optimizers = [torch.optim.SGD([param], lr=0.0) for param in params]
    scaler = GradScaler("cpu", policy="headroom")
    scales = []
    for now in range(24):
        sizes = [2.0**6 if now == turn and i == jumps else 1.0 for i in range(2)]
        losses = [p.sum() * size for p, size in zip(params, sizes, strict=True)]
        scaler.scale(sum(losses)).backward()
        for optimizer, clip in zip(optimizers, clips, strict=True):
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        scales.append(scaler.get_scale())

    assert scaler.last_step.applied
    known = turn % 3 == 0 or not any(clips)
    assert scales[turn - 1] / scales[turn] == (2.0**6 if known else 1.0)
