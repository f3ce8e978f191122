"""No host read where the optimizer takes `found_inf`, one elsewhere, none if asked."""

from contextlib import nullcontext

import pytest
import torch
from nets import OPTIMIZERS, loss_of, net, spoil, train
from no_host_reads import METHODS, HostReadError, no_host_reads
from torch.overrides import TorchFunctionMode

import buoy
from buoy.torch import DeviceModeError, GradScaler

FUSED = [kind for kind in OPTIMIZERS if kind.startswith("fused")]
EVENTS = ["inf", "ok", "ok", "nan", "ok", "ok", "ok", "inf", "ok"]


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.item(),
        lambda t: t.tolist(),
        bool,
        float,
        int,
        lambda t: t.cpu(),
        lambda t: t.numpy(),
        lambda t: t.nonzero(),
        lambda t: torch.equal(t, t),
        lambda t: [1, 2][t.long()],
    ],
)
def test_the_mode_itself_catches_reads(read):
    """A proof by a mode that cannot fail would prove nothing."""
    value = torch.tensor(1.0)
    with pytest.raises(HostReadError), no_host_reads():
        read(value)
    read(value.clone())


def run(scaler, model, optimizer, events, *, clip, allowed=()):
    """Train in the mode; only the backward pass is outside of it."""
    scales = []
    for step, event in enumerate(events):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        with no_host_reads():
            scaled = scaler.scale(loss)
        scaled.backward()
        spoil(model, event)
        with no_host_reads(allowed=allowed):
            if clip:
                scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler._scale.clone())
    return torch.stack(scales).tolist()


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("clip", [True, False])
def test_fused_optimizers_never_read(kind, clip):
    """From the very first step, and with the results of the asking way."""
    model, other = net(), net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales = run(scaler, model, optimizer, EVENTS, clip=clip)
    assert scales == [32.0, 32.0, 64.0, 32.0, 32.0, 64.0, 64.0, 32.0, 32.0]
    unfused = OPTIMIZERS[kind.removeprefix("fused ")] if kind != "fused adagrad" else (
        lambda params: torch.optim.Adagrad(params, lr=0.01)
    )  # fmt: skip
    second = unfused(other.parameters())
    plain = GradScaler("cpu", init_scale=64.0, growth_interval=2)
    train(
        plain,
        other,
        second,
        EVENTS,
        before_step=lambda: plain.clip_grad_norm_(second, 0.5) if clip else None,
    )
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("policy", ["backoff", "megatron", "lognormal", "headroom"])
@pytest.mark.parametrize("clip", [True, False])
def test_policies_never_read_either(policy, clip, loop):
    """Whatever a policy wants is measured and used on the device."""
    events = EVENTS * 2
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = GradScaler("cpu", policy=policy)
    scales = run(scaler, model, optimizer, events, clip=clip)
    other = net()
    second = torch.optim.AdamW(other.parameters(), lr=0.01)
    plain = GradScaler("cpu", policy=policy)
    asked = train(
        plain,
        other,
        second,
        events,
        before_step=lambda: plain.clip_grad_norm_(second, 0.5) if clip else None,
    )
    assert scales == pytest.approx([scale for scale, _ in asked], rel=1e-3)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_other_optimizers_read_exactly_once(monkeypatch):
    """One question per step, as torch has always asked."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    for policy in (None, "backoff", "lognormal"):
        scaler = GradScaler("cpu", policy=policy)
        train(scaler, model, optimizer, ["ok"] * 4)
        reads = []
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            with counting(reads):
                scaler.clip_grad_norm_(optimizer, 1.0)
                scaler.step(optimizer)
                scaler.update()
        assert len(reads) == 6


@pytest.mark.parametrize("policy", [None, "backoff", "lognormal"])
@pytest.mark.parametrize("clip", [False, True])
def test_the_one_read_brings_all_that_the_policy_needs(policy, clip, monkeypatch, loop):
    """So that a step is over, scale and outcome known, after one wait."""
    monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    scaler, model, optimizer = loop(policy=policy)
    for step, event in enumerate(["ok", "ok", "inf", "ok"]):
        reads, known = [], []
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        spoil(model, event)
        with counting(reads):
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert event == "inf" or len(reads) == 1
        with counting(known):
            assert scaler.last_step.applied == (event == "ok")
            assert scaler.last_step.next_scale > 0
        assert not known


class counting(TorchFunctionMode):  # noqa: N801
    """Count the values that are read."""

    def __init__(self, reads):
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in METHODS:
            self.reads.append(func)
        return func(*args, **(kwargs or {}))


NEVER = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2]),
}


@pytest.mark.parametrize("kind", list(NEVER))
def test_never_syncing_equals_asking_bit_for_bit(kind):
    """Weights, state and step counters, skipped first step included."""
    models = net(), net()
    made = [NEVER[kind](model.parameters()) for model in models]
    scalers = (
        GradScaler("cpu", init_scale=64.0, growth_interval=2, sync="never"),
        GradScaler("cpu", init_scale=64.0, growth_interval=2),
    )
    results = [
        train(*three, EVENTS) for three in zip(scalers, models, made, strict=True)
    ]
    assert results[0] == results[1]
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
        for name, value in made[1].state[q].items():
            assert torch.equal(
                torch.as_tensor(made[0].state[p][name]), torch.as_tensor(value)
            ), name


@pytest.mark.parametrize("policy", ["backoff", "lognormal", "headroom", "bmtrain"])
def test_a_state_on_the_device_is_saved_as_the_same_numbers(policy):
    """Counters as whole numbers, the others as precise as the policy has them."""
    saved = []
    for sync in ("never", "auto"):
        model, scaler = net(), GradScaler("cpu", policy=policy, sync=sync)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for i in range(20):
            scaler.scale(torch.ones((), requires_grad=True))
            for p in model.parameters():
                p.grad = torch.full_like(p, float("inf") if i == 7 else 1.0 + i)
            scaler.step(optimizer)
            scaler.update()
        saved.append(repr(scaler.state_dict()["buoy"]))
    assert saved[0] == saved[1]


@pytest.mark.parametrize("clip", [True, False])
def test_gradients_with_a_graph_leave_none_in_the_scale(clip):
    """Else the graph of every step so far would stay in memory."""
    model, scaler = net(), GradScaler("cpu", policy="headroom", sync="never")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        loss = scaler.scale(loss_of(model, 0))
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.scale(torch.ones(())).grad_fn is None


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("clip", [True, False])
def test_never_syncing_never_reads(kind, clip):
    """But for what an optimizer reads of its own counters, which lie on the CPU."""
    model = net()
    optimizer = NEVER[kind](model.parameters())
    scaler = GradScaler("cpu", sync="never")
    allowed = []
    if kind == "adamw":
        train(scaler, model, optimizer, ["ok"])
        allowed = [state["step"] for state in optimizer.state.values()]
    run(scaler, model, optimizer, EVENTS, clip=clip, allowed=allowed)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_never_syncing_refuses_what_it_cannot_undo():
    """An unknown optimizer's first step, and a momentum that starts otherwise."""

    class Own(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure=None):
            """Keep something nobody knows of."""
            called.append(self)

    model, called = net(), []
    for optimizer, word in (
        (Own(model.parameters()), "Own"),
        (
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1),
            "dampening",
        ),
    ):
        scaler = GradScaler("cpu", sync="never")
        scaler.scale(loss_of(model, 0)).backward()
        with pytest.raises(DeviceModeError, match=word):
            scaler.step(optimizer)
        assert all(map(torch.equal, model.parameters(), net().parameters()))
    assert called == []


def test_the_last_step_waits_only_when_read(loop):
    """Making it reads nothing; each field reads when looked at."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = GradScaler("cpu", init_scale=64.0)
    run(scaler, model, optimizer, ["ok", "inf"], clip=True)
    last = scaler.last_step
    with pytest.raises(HostReadError), no_host_reads():
        assert last.applied is not None
    assert not last.applied
    assert (last.scale, last.next_scale) == (64.0, 32.0)
    assert last.offenders == ("param_groups[0]['params'][3] (3)",)
    assert last.verdict == "scale_too_high"
    assert isinstance(last.found, torch.Tensor)


def alarmed():
    """Make a model, a fused optimizer, a scaler, and the list of its alarms."""
    model, alarms = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = GradScaler("cpu", on_stuck=alarms.append, patience=4)
    return model, optimizer, scaler, alarms


def test_a_device_reports_late_that_training_is_stuck():
    """With the next rows that are copied to the host."""
    model, optimizer, scaler, alarms = alarmed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
        train(scaler, model, optimizer, ["inf"] * 12)
    assert [alarm.skipped for alarm in alarms] == [4]
    assert alarms[0].verdict == "scale_too_high"
    assert alarms[0].offenders == ("param_groups[0]['params'][3] (3)",)


@pytest.mark.parametrize("last", ["inf", "ok"])
def test_a_late_alarm_names_gradients_of_a_skipped_step_only(last):
    """If the last step was applied, its gradients are not those that overflowed."""
    model, optimizer, scaler, alarms = alarmed()
    four = ["ok", "inf", "inf", "inf"] if last == "inf" else ["inf", "inf", "inf", "ok"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
        train(scaler, model, optimizer, four * 5)  # four rows are copied together
    assert [(alarm.skipped, alarm.window) for alarm in alarms] == [(12, 16)]
    assert alarms[0].verdict == "scale_too_high"
    named = ("param_groups[0]['params'][3] (3)",) if last == "inf" else ()
    assert alarms[0].offenders == named


def test_a_late_alarm_about_losses_examines_no_gradients():
    """A loss that is not finite is the cause; every gradient only follows from it."""
    model, optimizer, scaler, alarms = alarmed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step) * torch.nan).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [alarm.verdict for alarm in alarms] == ["forward_nonfinite"]
    assert alarms[0].offenders == ()


@pytest.mark.parametrize("policy", ["headroom", "backoff", "apex", "static"])
@pytest.mark.parametrize("when", [0, 1])
def test_a_scale_on_a_device_is_taken_over_by_a_policy_unread(policy, when, loop):
    """Set by a tensor, in a step that asks nobody; it goes on as if it were read."""
    scales = []
    for hidden in (True, False):
        scaler, model, optimizer = loop("fused adamw", policy=policy)
        seen = []
        for step, event in enumerate(["ok", "ok", "inf", "ok", "ok"]):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            spoil(model, event)
            with no_host_reads() if hidden else nullcontext():
                scaler.step(optimizer)
                scaler.update(torch.tensor(300.0) if step == when else None)
            seen.append(scaler.get_scale())
        scales.append(seen)
    assert scales[0] == scales[1]
    assert scales[0][when] in (256.0, 300.0)  # some policies take powers of two only


def test_a_policy_object_is_taken_as_it_is():
    """`scaler.policy` is what was given, or torch's rule written as a policy."""
    given = buoy.Backoff(init_scale=8.0)
    assert GradScaler("cpu", policy=given).policy is given
    for interval in (1, 7):
        own = GradScaler("cpu", init_scale=8.0, growth_interval=interval).policy
        assert (own.init_scale, own.growth_interval) == (8.0, interval)
        assert own.min_scale == 2.0**-24


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_hooks_never_see_a_weight_that_will_be_put_back_as_non_finite(bad):
    """An average kept in an optimizer's own hook survives a skipped step."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    average = param.detach().clone()
    optimizer.register_step_post_hook(lambda *_: average.lerp_(param.detach(), 0.1))
    scaler = GradScaler("cpu", sync="never")
    for value in (None, bad, None):
        optimizer.zero_grad()
        scaler.scale(param.sum()).backward()
        if value is not None:
            param.grad[0] = value
        scaler.step(optimizer)
        scaler.update()
    assert average.isfinite().all()
    assert scaler.last_step.applied


def test_a_step_that_is_undone_has_gradients_of_zero():
    """Hooks of plain SGD see the old weights; `.grad` is what it was afterwards."""
    weight, idle = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([weight, idle], lr=0.1)
    seen = []
    optimizer.register_step_post_hook(
        lambda *_: seen.append((weight.grad.tolist(), weight.tolist()))
    )
    scaler = GradScaler("cpu", init_scale=1.0, sync="never")
    scaler.scale(weight.sum()).backward()
    weight.grad[0] = float("inf")
    scaler.step(optimizer)
    assert seen == [([0.0, 0.0], [1.0, 1.0])]
    assert weight.grad.tolist() == [float("inf"), 1.0]
    assert idle.grad is None


@pytest.mark.parametrize("bad", [False, True])
def test_a_step_that_raises_is_put_back(bad, loop):
    """Whatever a hook does, weights and state are those of before or of after."""
    scaler, param, optimizer = loop("momentum", torch.ones(2), lr=0.1, sync="never")

    def interrupt(*_):
        raise KeyboardInterrupt

    optimizer.register_step_post_hook(interrupt)
    scaler.scale(param.sum()).backward()
    if bad:
        param.grad[0] = float("nan")
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer)
    assert torch.equal(param, torch.ones(2))
    assert optimizer.state[param]["momentum_buffer"].isfinite().all()
    assert param.grad[0].isnan() == bad


class Own(torch.optim.Optimizer):
    """Replaces its state instead of writing into it, and may count on the host."""

    def __init__(self, params, *, count):
        super().__init__(params, {"lr": 0.1})
        self.count = count

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["m"] = torch.zeros_like(param)
                if self.count:
                    state["step"] = 0
            if self.count:
                state["step"] += 1
            state["m"] = state["m"] * 0.9 + param.grad
            param.add_(state["m"], alpha=-0.1)


def stepped_once(**options):
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = Own([param], **options)
    param.grad = torch.ones(2)
    optimizer.step()
    return param, optimizer


def test_state_that_an_optimizer_replaces_is_put_back_too():
    """A state is known by its name, not by the tensor it was."""
    param, optimizer = stepped_once(count=False)
    scaler = GradScaler("cpu", sync="never")
    for bad in (None, float("inf")):
        optimizer.zero_grad()
        scaler.scale(param.sum()).backward()
        if bad is not None:
            param.grad[0] = bad
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(optimizer.state[param]["m"], torch.full((2,), 1.9))


def test_state_on_the_host_is_refused():
    """A counter that is no tensor cannot be put back without asking."""
    param, optimizer = stepped_once(count=True)
    scaler = GradScaler("cpu", sync="never")
    scaler.scale(param.sum()).backward()
    with pytest.raises(DeviceModeError, match="keeps `step` as int"):
        scaler.step(optimizer)
