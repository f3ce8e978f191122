"""The spike guard: outliers do not count, and healthy runs never meet it."""

import copy
import gzip
import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from nets import OPTIMIZERS, loss_of, net
from no_host_reads import no_host_reads

from buoy import PolicyError, Verdict
from buoy.torch import GradScaler, OptionError, SpikeGuard
from buoy.trace import load

TRACES = sorted(
    (Path(__file__).parents[3] / "benchmarks/headroom/traces").glob("*.json.gz")
)
QUICK = SpikeGuard(warmup=8)


def scaler_with(guard, **options):
    return GradScaler("cpu", init_scale=2.0**10, spike_guard=guard, **options)


def train(scaler, model, optimizer, steps, spikes=(), *, clip=None, height=1e4):
    """Train; at the steps in `spikes` the loss is `height` times as large."""
    reports = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step) * (height if step in spikes else 1.0)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.clip_grad_norm_(optimizer, clip)
        scaler.step(optimizer)
        reports.append(scaler.last_step)
        scaler.update()
    return reports


@pytest.mark.parametrize("kind", ["adamw", "fused adamw", "momentum"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_spike_is_skipped_counted_and_named(kind, clip):
    """The run ends like one that never saw the spike, and the scale does not fall."""
    model, twin = net(), net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    other = OPTIMIZERS[kind](twin.parameters())
    scaler, plain = scaler_with(QUICK), scaler_with(None)

    reports = train(scaler, model, optimizer, range(30), {20}, clip=clip)
    train(plain, twin, other, [*range(20), *range(21, 30)], clip=clip)

    assert [20] == [i for i, report in enumerate(reports) if not report.applied]
    assert Verdict.SPIKE == reports[20].verdict
    assert reports[20].norm > 1e3
    assert reports[20].offenders == ()
    assert 1 == scaler.spikes
    assert 2.0**10 == scaler.get_scale()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "fused sgd"])
def test_a_spike_is_clipped_to_the_limit(kind, by_hand):
    """The step is applied, no larger than the largest that is no spike."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = scaler_with(SpikeGuard(warmup=8, mode="clip"))
    before = train(scaler, model, optimizer, range(20))
    usual = sorted(report.norm for report in before)[10]
    start = [param.detach().clone() for param in model.parameters()]

    optimizer.zero_grad()
    scaler.scale(loss_of(model, 20) * 1e4).backward()
    if by_hand:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()

    moved = sum(
        ((a - b) ** 2).sum() for a, b in zip(start, model.parameters(), strict=True)
    )
    assert scaler.last_step.applied
    assert Verdict.SPIKE == scaler.last_step.verdict
    assert scaler.last_step.norm > 1e3
    assert 0.5 * usual < moved.sqrt() / 0.05 < 16 * usual


@pytest.mark.filterwarnings("ignore:The loss was computed in BF16")
@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_spike_in_mixed_dtypes_is_clipped(other, by_hand):
    """Gradients of every dtype are multiplied by the same factor."""
    held = [torch.nn.Parameter(torch.ones(4, dtype=d)) for d in (torch.float32, other)]
    optimizer = torch.optim.SGD(held, lr=1e-9)
    scaler = scaler_with(SpikeGuard(warmup=8, mode="clip"))
    for step in range(12):
        optimizer.zero_grad()
        height = 1e4 if step == 11 else 1.0 + 0.1 * (step % 2)
        scaler.scale(sum(p.float().sum() for p in held) * height).backward()
        if by_hand:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    assert scaler.last_step.applied
    assert Verdict.SPIKE == scaler.last_step.verdict
    sizes = [param.grad.double().abs().max().item() for param in held]
    assert 1.0 < sizes[0] < 16.0
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)


def test_an_overflow_is_no_spike():
    """What is not finite teaches the guard nothing and keeps its own verdict."""
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scaler = scaler_with(QUICK)
    train(scaler, model, optimizer, range(12))
    known = scaler.state_dict()["buoy"]["spikes"]

    reports = train(scaler, model, optimizer, [12], {12}, height=math.inf)

    assert Verdict.FORWARD_NONFINITE == reports[0].verdict
    assert 0 == scaler.spikes
    assert known == scaler.state_dict()["buoy"]["spikes"]


def test_a_level_that_stays_is_believed():
    """After `patience` skips the run goes on at the new height."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    scaler = scaler_with(SpikeGuard(warmup=8, patience=3))

    reports = train(scaler, model, optimizer, range(40), set(range(20, 40)))

    missed = [i for i, report in enumerate(reports) if not report.applied]
    assert [20, 21, 22] == missed


def test_the_spike_guard_reads_nothing_on_the_host():
    """Norm, decision and count stay on the device."""
    for kind, sync in (("fused adamw", "auto"), ("adamw", "never")):
        model = net()
        optimizer = OPTIMIZERS[kind](model.parameters())
        scaler = scaler_with(QUICK, sync=sync)
        train(scaler, model, optimizer, range(10))
        steps = [v["step"] for v in optimizer.state.values()]
        with no_host_reads(allowed=steps):
            train(scaler, model, optimizer, range(10, 16), {14})

        assert 1 == scaler.spikes


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.split(".")[0])
def test_healthy_runs_never_meet_it(path):
    """48 recorded trainings; only the one with heavy tails by design has outliers."""
    recorded = json.loads(gzip.decompress(path.read_bytes()))
    guard = SpikeGuard()
    state = guard.init()
    for size in recorded["amax_log2"]:
        state = guard.look(state, -math.inf if size is None else size / 64.0).state

    allowed = 3 if recorded["name"] == "heavy_tail" else 0
    assert state.spikes <= allowed


@pytest.mark.parametrize("policy", [None, "headroom"])
def test_resuming_is_exact(policy, loop):
    """The distribution is in the state, as plain numbers."""
    model, twin = net(), net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scaler, _, other = loop("adamw", twin, policy=policy, spike_guard=QUICK)
    train(scaler, model, optimizer, range(15))
    saved = json.loads(json.dumps(scaler.state_dict()))
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed = GradScaler("cpu", policy=policy, spike_guard=QUICK)
    resumed.load_state_dict(saved)

    whole = train(scaler, model, optimizer, range(15, 25), {18})
    rest = train(resumed, twin, other, range(15, 25), {18})

    assert [r.applied for r in whole] == [r.applied for r in rest]
    assert scaler.state_dict() == resumed.state_dict()
    torch.amp.GradScaler("cpu").load_state_dict(saved)


@pytest.mark.parametrize("bad", ["sometimes", 3.0, True])
def test_a_wrong_option_is_told(bad):
    """The message names what is accepted."""
    with pytest.raises(OptionError, match="'skip', 'clip' or a buoy.torch.SpikeGuard"):
        GradScaler("cpu", spike_guard=bad)


@pytest.mark.parametrize(
    "field", [{"mode": "x"}, {"threshold": 0}, {"least": 0.5}, {"warmup": 0}]
)
def test_wrong_fields_are_told(field):
    """Each names itself."""
    with pytest.raises(PolicyError, match=next(iter(field))):
        SpikeGuard(**field)


def test_a_scaler_with_a_guard_can_be_copied_after_steps(loop):
    """The copy goes on from the same distribution, with whichever optimizer comes."""
    scaler, model, optimizer = loop("adamw", spike_guard="skip")
    train(scaler, model, optimizer, range(3))
    other = copy.deepcopy(scaler)
    assert other.state_dict() == scaler.state_dict()
    train(other, model, optimizer, [3])
    assert other.last_step.applied


@pytest.mark.parametrize("mode", ["skip", "clip"])
def test_an_optimizer_that_checks_for_itself_is_refused(mode):
    """It asks the scaler for the flags anew: the guard's decision would be lost."""

    class TakesScaler(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            grad_scaler._check_inf_per_device(self)

    model = net()
    optimizer = TakesScaler(model.parameters(), lr=0.1)
    scaler = scaler_with(mode)
    scaler.scale(loss_of(model, 0)).backward()

    with pytest.raises(OptionError, match="TakesScaler.*takes `grad_scaler`"):
        scaler.step(optimizer)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_recorded_spike_is_called_one(tmp_path, hidden):
    """Also where the host learns of the skip later."""
    mode = no_host_reads if hidden else nullcontext
    model = net()
    optimizer = OPTIMIZERS["fused adamw"](model.parameters())
    scaler = scaler_with(QUICK, trace=tmp_path / "run.buoy")
    for step in range(24):
        optimizer.zero_grad()
        loss = loss_of(model, step) * (1e4 if step == 20 else 1.0)
        with mode():
            scaled = scaler.scale(loss)
        scaled.backward()
        with mode():
            scaler.step(optimizer)
            scaler.update()
    scaler.trace.close()

    rows = load(tmp_path / "run.buoy").rows
    assert [(20, Verdict.SPIKE)] == [(r.step, r.verdict) for r in rows if not r.applied]
