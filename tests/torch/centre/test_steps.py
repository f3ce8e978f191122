"""What became of a step: `last_step`, gates, and the names of culprits."""

import gc
import math
import weakref
from functools import partial

import pytest
import torch
from nets import OPTIMIZERS, loss_of, net, spoil, train

import buoy
from buoy import Row, Verdict
from buoy.torch import BuoyWarning, Extension, GradScaler, OptionError


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_last_step_tells_applied_scale_and_next_scale(kind, loop):
    """Right for optimizers that skip by themselves, too."""
    scaler, model, optimizer = loop(kind, init_scale=64.0, growth_interval=2)
    assert scaler.last_step is None
    seen = []
    for event in ("ok", "ok", "inf", "ok"):
        train(scaler, model, optimizer, [event])
        last = scaler.last_step
        seen.append((last.applied, last.scale, last.next_scale, last.verdict.value))
    assert seen == [
        (True, 64.0, 64.0, "applied"),
        (True, 64.0, 128.0, "applied"),
        (False, 128.0, 64.0, "scale_too_high"),
        (True, 64.0, 64.0, "applied"),
    ]


@pytest.mark.parametrize("kind", ["adamw", "fused adamw"])
@pytest.mark.parametrize("clip", [True, False])
def test_last_step_has_the_unscaled_norm_if_it_was_measured(kind, clip, loop):
    """For clipping; nothing is measured afterwards."""
    model, other = net(), net()
    scaler, _, optimizer = loop(kind, model, init_scale=64.0)
    loss_of(other, 0).backward()
    expected = torch.cat([p.grad.flatten() for p in other.parameters()]).norm().item()
    scaler.scale(loss_of(model, 0)).backward()
    if clip:
        scaler.clip_grad_norm_(optimizer, 0.001)
    scaler.step(optimizer)
    scaler.update()
    measured = pytest.approx(expected, rel=1e-5) if clip else None
    assert scaler.last_step.norm == measured


def test_read_gives_the_plain_record(loop):
    """`read()` is a `Row`, with nothing left on the device."""
    scaler, model, optimizer = loop(lr=0.1)
    train(scaler, model, optimizer, ["inf"])
    record = scaler.last_step.read()
    assert isinstance(record, Row)
    assert (record.step, record.applied, record.scale, record.next_scale) == (
        0,
        False,
        65536.0,
        32768.0,
    )
    assert not math.isfinite(record.norm)
    assert "SCALE_TOO_HIGH" in repr(scaler.last_step)


@pytest.mark.parametrize("kind", ["adamw", "fused adamw"])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("which", range(4))
def test_offenders_are_named(kind, clip, which):
    """Exactly the parameters with a non-finite gradient, by their names."""
    model = net()
    names = [name for name, _ in model.named_parameters()]
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = GradScaler("cpu", model=model)
    scaler.scale(loss_of(model, 0)).backward()
    spoil(model, "inf", which)
    if clip:
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.offenders == (names[which],)
    assert scaler.last_step.groups == (0,)


def test_offenders_are_named_by_optimizer_when_no_model_is_given(loop):
    """Names that the optimizer was built with, or else the place in its groups."""
    model = net()
    for given, expected in (
        (model.named_parameters(), "0.weight"),
        (model.parameters(), "param_groups[0]['params'][0] (8x6)"),
    ):
        scaler, _, optimizer = loop("sgd", given, lr=0.1)
        scaler.scale(loss_of(model, 0)).backward()
        spoil(model, "nan", 0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step.offenders == (expected,)
        optimizer.zero_grad()
    scaler = GradScaler("cpu", named_parameters=[("my.weight", model[0].weight)])
    scaler.scale(loss_of(model, 0)).backward()
    spoil(model, "nan", 0)
    scaler.step(optimizer)
    assert scaler.last_step.offenders == ("my.weight",)


def test_a_later_step_does_not_change_what_an_earlier_one_says():
    """A report kept by the user stays what it was."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", model=model)
    train(scaler, model, optimizer, ["inf"])
    kept = scaler.last_step
    train(scaler, model, optimizer, ["ok"])
    assert (kept.applied, kept.offenders) == (False, ("2.bias",))
    assert scaler.last_step.applied


def test_each_optimizer_has_its_own_last_step():
    """`last_step_of` tells them apart."""
    models = [net(1), net(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    scaler = GradScaler("cpu")
    for model in models:
        scaler.scale(loss_of(model, 0)).backward()
    spoil(models[0], "inf")
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [scaler.last_step_of(o).applied for o in optimizers] == [False, True]
    assert scaler.last_step is scaler.last_step_of(optimizers[1])
    assert scaler.last_step_of(object()) is None


class Ema:
    """Counts its updates."""

    def __init__(self):
        self.updates = 0

    def update(self):
        """Count one."""
        self.updates += 1


@pytest.mark.parametrize("kind", ["adamw", "fused adamw"])
def test_gates_advance_only_for_applied_steps(kind, loop):
    """A scheduler, an average, a callable and a counter after 3 of 5 steps."""
    scaler, model, optimizer = loop(kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    ema, calls, attempts = Ema(), [], []
    scaler.gate(scheduler, ema, lambda: calls.append(1))
    scaler.gate(lambda: attempts.append(1), advance_on="attempted")
    start = optimizer.param_groups[0]["lr"]
    train(scaler, model, optimizer, ["ok", "inf", "ok", "nan", "ok"])
    assert optimizer.param_groups[0]["lr"] == start * 0.5**3
    assert (ema.updates, len(calls), len(attempts)) == (3, 3, 5)


def test_gates_follow_their_own_optimizer():
    """A scheduler of one optimizer does not wait for the other's steps."""
    models = [net(1), net(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in models]
    schedulers = [
        torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5) for o in optimizers
    ]
    scaler = GradScaler("cpu")
    both, mine = [], []
    scaler.gate(*schedulers, lambda: both.append(1))
    scaler.gate(lambda: mine.append(1), optimizer=optimizers[1])
    for model in models:
        scaler.scale(loss_of(model, 0)).backward()
    spoil(models[0], "inf")
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [o.param_groups[0]["lr"] for o in optimizers] == [1.0, 0.5]
    assert (both, mine) == ([], [1])


def test_a_disabled_scaler_tells_of_applied_steps(loop):
    """A loop that asks `last_step.applied` runs with scaling off, too."""
    scaler, model, optimizer = loop(lr=0.1, enabled=False)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)
    scaler.update()
    record = scaler.last_step.read()
    assert (record.applied, record.scale, record.next_scale) == (True, 1.0, 1.0)
    assert record.norm is None


def test_gates_of_a_disabled_scaler_always_advance():
    """Without scaling every step is applied."""
    calls = []
    scaler = GradScaler("cpu", enabled=False)
    scaler.gate(lambda: calls.append(1))
    scaler.update()
    assert calls == [1]


def test_what_cannot_be_gated_is_refused():
    """A module, a dict or a number has no step to take; a bad option is named."""
    scaler = GradScaler("cpu")
    for thing in (torch.nn.Linear(1, 1), {"steps": 0}, {1}, 3):
        with pytest.raises(OptionError, match="cannot be gated"):
            scaler.gate(thing)
    with pytest.raises(OptionError, match="'attempted'"):
        scaler.gate(print, advance_on="always")


def test_verdict_is_a_string_too():
    """Logs and dashboards get a plain word."""
    assert Verdict.SCALE_TOO_HIGH == "scale_too_high"


def test_what_needs_an_argument_is_refused_where_it_is_gated():
    """A plateau wants its metric, an average its model: with the cure."""
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    scaler = GradScaler("cpu")
    with pytest.raises(OptionError, match=r"`metrics`.*lambda: .*step\(metrics\)"):
        scaler.gate(plateau)
    with pytest.raises(OptionError, match="needs `epoch`"):
        scaler.gate(lambda epoch: None)
    with pytest.raises(OptionError, match=r"scaler\.step\(optimizer\)"):
        scaler.gate(optimizer)
    scaler.gate(lambda: plateau.step(1.0), lambda *rest, **more: None, iter([1]), dict)


class Wrapper:
    """Forwards to an optimizer, as accelerate's and others do."""

    def __init__(self, optimizer, copies=False):
        self.optimizer, self.copies = optimizer, copies

    @property
    def param_groups(self):
        """The same list, or one that looks the same."""
        groups = self.optimizer.param_groups
        return list(groups) if self.copies else groups

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


@pytest.mark.parametrize("inside", [True, False])
def test_gates_follow_an_optimizer_through_its_wrapper(inside):
    """Whichever of the two steps, and whichever the scheduler was built with."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    if not inside:
        scheduler.optimizer = Wrapper(optimizer)
    scaler = GradScaler("cpu")
    scaler.gate(scheduler)
    start = optimizer.param_groups[0]["lr"]
    train(
        scaler, model, Wrapper(optimizer) if inside else optimizer, ["ok", "inf", "ok"]
    )
    assert optimizer.param_groups[0]["lr"] == start * 0.5**2


def test_a_gate_that_waits_in_vain_is_told_once():
    """Another object steps the parameters of its optimizer."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    scaler = GradScaler("cpu")
    scaler.gate(scheduler)
    train(scaler, model, Wrapper(optimizer, copies=True), ["ok"] * 9)
    with pytest.warns(BuoyWarning, match="never steps.*scaler.gate") as caught:
        train(scaler, model, Wrapper(optimizer, copies=True), ["ok"] * 20)
    assert len(caught) == 1


def test_a_gate_may_wait_for_an_optimizer_that_steps_seldom():
    """A generator that steps after every twelfth step of its critic."""
    critic, generator = net(1), net(2)
    first = torch.optim.SGD(critic.parameters(), lr=0.1)
    second = torch.optim.SGD(generator.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(second, step_size=1, gamma=0.5)
    scaler = GradScaler("cpu")
    scaler.gate(scheduler)
    train(scaler, critic, first, ["ok"] * 12)
    train(scaler, generator, second, ["ok"])
    assert second.param_groups[0]["lr"] == 0.5


def test_a_step_that_was_not_taken_moves_no_gate(loop):
    """Unscaled, looked at, and given up: what the step before did does not count."""
    calls = []
    scaler, model, optimizer = loop(lr=0.1)
    scaler.gate(lambda: calls.append(1))
    train(scaler, model, optimizer, ["ok"])
    kept = scaler.last_step
    scaler.scale(loss_of(model, 1)).backward()
    scaler.unscale_(optimizer)
    scaler.update(2.0)
    assert calls == [1]
    assert kept.next_scale == 65536.0


def patch(optimizer, model):
    """Put a `step` into an optimizer that holds on to its model."""
    step = optimizer.step

    def stepped():
        model.train()
        step()

    optimizer.step = stepped


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("event", ["ok", "inf"])
def test_a_scaler_keeps_no_model_alive(clip, event):
    """Nor a `step` that somebody has put in an optimizer's."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    patch(optimizer, model)
    scaler = GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    spoil(model, event)
    if clip:
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    held = [weakref.ref(thing) for thing in (optimizer, *model.parameters())]
    del model, optimizer
    gc.collect()
    assert [] == [thing() for thing in held if thing() is not None]


def test_a_report_belongs_to_its_optimizer_and_not_to_its_place_in_memory():
    """A new optimizer where an old one was has not stepped yet."""
    model = net()
    scaler = GradScaler("cpu")
    seen = set()
    for _ in range(20):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert scaler.last_step_of(optimizer) is None
        seen.add(id(optimizer))
        train(scaler, model, optimizer, ["ok"])
        assert scaler.last_step_of(optimizer) is scaler.last_step
        del optimizer
    assert len(seen) < 20


@pytest.mark.parametrize("enabled", [False, True])
def test_a_gate_that_raises_keeps_no_other_from_advancing(enabled, loop):
    """The step was applied: every schedule and average belongs to it."""
    scaler, param, optimizer = loop("sgd", torch.ones(2), lr=0.1, enabled=enabled)
    seen = []

    def fail():
        raise ZeroDivisionError

    class Fails(Extension):
        def updated(self, scaler, pendings):
            raise ZeroDivisionError

    scaler.gate(partial(seen.append, 1), fail, partial(seen.append, 2))
    if enabled:
        scaler.attach(Fails())
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(ZeroDivisionError):
        scaler.update()
    assert [1, 2] == seen


@pytest.mark.parametrize("early", [False, True])
def test_the_state_of_an_extension_is_found_by_its_key(early):
    """Attached before the state is loaded, or after."""

    class Counts(Extension):
        key = "counts"
        steps = 0

        def updated(self, scaler, pendings):
            self.steps += 1

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    scaler, counts = GradScaler("cpu"), Counts()
    scaler.attach(counts)
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    train(scaler, model, optimizer, ["ok"])
    saved = scaler.state_dict()
    other, again = GradScaler("cpu"), Counts()
    if early:
        other.attach(again)
    other.load_state_dict(saved)
    assert saved == other.state_dict()  # kept for whoever comes later
    if not early:
        other.attach(again)
    assert again.steps == counts.steps == 1


def test_torch_s_average_is_gated_by_its_own_method():
    """It follows the scaler's model, and only applied steps count."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    scaler = GradScaler("cpu", model=model)
    scaler.gate(average)
    for bad in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum() * bad).backward()
        scaler.step(optimizer)
        scaler.update()
    assert 2 == average.n_averaged


def test_an_average_without_a_model_is_refused_in_one_line():
    """With the call to write instead, and without the model printed."""
    average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 1))
    with pytest.raises(OptionError, match=r"average\.update_parameters\(model\)") as it:
        GradScaler("cpu").gate(average)
    assert "Linear" not in str(it.value)


@pytest.mark.parametrize("sync", ["auto", "never"])
def test_a_scaler_prints_as_one_line(sync, loop):
    """Its policy, its scale, and what became of the steps so far."""
    scaler, param, optimizer = loop("sgd", torch.ones(2), lr=0.1, sync=sync)
    for bad in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(param.sum() * bad).backward()
        scaler.step(optimizer)
        scaler.update()
    expected = "GradScaler(policy='torch', scale=32768, applied=2, skipped=1)"
    assert expected == repr(scaler)
    assert "policy='headroom'" in repr(GradScaler("cpu", policy="headroom"))
    assert "policy='Static'" in repr(
        GradScaler("cpu", policy=buoy.Static(init_scale=8.0))
    )
    assert "GradScaler(enabled=False)" == repr(GradScaler("cpu", enabled=False))
