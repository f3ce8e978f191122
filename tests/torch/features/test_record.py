"""A run is recorded as it was, without one host read; off costs nothing."""

import copy
import math
import os
import pickle
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from nets import loss_of, net, spoil, train
from no_host_reads import no_host_reads

import buoy.trace
from buoy._backends.torch.exponents import SAMPLE, exponents
from buoy._core.feed import BINS
from buoy.torch import GradScaler
from buoy.torch.features.record import Record
from buoy.trace import Counts, Recorder, TraceWarning

EVENTS = ["ok", "inf", "ok", "ok", "nan", "ok"]


def recorded(tmp_path, *, fused=False, hidden=False, clip=False, policy=None, events):
    """Train with a trace; return it and what the scaler itself said of each step."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    recorder = Recorder(tmp_path / "run.buoy", every=3)
    scaler = GradScaler("cpu", policy=policy, model=model, trace=recorder)
    said = []
    for step, event in enumerate(events):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        with no_host_reads() if hidden else nullcontext():
            scaled = scaler.scale(loss)
        scaled.backward()
        size = max(p.grad.abs().max().item() for p in model.parameters())
        scale = scaler.get_scale()
        total = [p.grad.flatten() / scale for p in model.parameters()]
        spoil(model, event)
        with no_host_reads() if hidden else nullcontext():
            if clip:
                scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer)
            scaler.update()
        norm = torch.cat(total).norm().item()
        said.append((loss.item(), scale, norm, size / scale, scaler.last_step.applied))
    recorder.close()
    return buoy.trace.load(recorder.path), said


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("policy", [None, "headroom"])
def test_rows_hold_what_happened(tmp_path, hidden, clip, policy):
    """Unscaled sizes, and no host read on the way; `hidden` is as on a GPU."""
    recording, said = recorded(
        tmp_path, fused=True, hidden=hidden, clip=clip, policy=policy, events=EVENTS * 4
    )
    assert [row.step for row in recording.rows] == list(range(24))
    for row, (loss, scale, norm, amax, applied) in zip(
        recording.rows, said, strict=True
    ):
        assert (row.scale, row.applied) == (scale, applied)
        assert row.loss == pytest.approx(loss)
        if applied:
            assert row.norm == pytest.approx(norm, rel=1e-5)
            assert row.amax == pytest.approx(amax, rel=1e-6)
            assert row.verdict == "applied"
        else:
            assert not math.isfinite(row.norm)
            assert row.verdict == "scale_too_high"
            if clip or not hidden:
                assert row.offenders == ("2.bias",)


def test_what_the_run_was_is_in_the_file(tmp_path):
    """Model, policy, versions, device, rank."""
    recording, _ = recorded(tmp_path, fused=True, policy="headroom", events=["ok"])
    meta = recording.meta
    assert (meta["model"], meta["parameters"]) == ("Sequential", 83)
    assert (meta["policy"], meta["device"], meta["rank"]) == ("Headroom", "cpu", 0)
    assert meta["torch"] == torch.__version__
    assert meta["policy_settings"]["init_scale"] == 256.0


@pytest.mark.parametrize("hidden", [False, True])
def test_histograms_are_of_the_scaled_gradients(tmp_path, hidden):
    """Every so many steps, by name, exact for tensors that are not sampled."""
    recording, said = recorded(tmp_path, fused=True, hidden=hidden, events=["ok"] * 7)
    assert [shot.step for shot in recording.shots] == [0, 3, 6]
    shot = recording.shots[1]
    assert set(shot.tensors) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert shot.scale == said[3][1]
    assert sum(seen.size for seen in shot.tensors.values()) == 83
    top = max(seen.amax_log2 for seen in shot.tensors.values())
    assert top == math.floor(math.log2(said[3][3] * shot.scale)) + 1


def test_exponents_are_counted_exactly():
    """Every power of two, zeros and what is not finite, of every dtype."""
    powers = torch.tensor([2.0**e for e in range(-126, 128)])
    odd = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -1.5])
    counted = exponents([torch.cat([powers, odd]), torch.ones(3, dtype=torch.float16)])
    expected = [2] + [1] * 254 + [3]
    expected[127] += 1
    assert counted[0].tolist() == expected
    assert counted[1].nonzero().tolist() == [[127]]
    seen = Counts.of_exponents(counted[0].tolist(), size=260)
    assert (seen.low, len(seen.counts), seen.zeros, seen.nonfinite) == (-126, 254, 2, 3)


def test_large_tensors_are_sampled_within_a_percentage_point():
    """Shares below FP16's limits, of a matrix whose columns differ wildly."""
    torch.manual_seed(1)
    columns = torch.linspace(-30, 0, 512)
    grad = torch.exp2(columns + torch.randn(2048, 512)) * 1.2
    counted = exponents([grad, *[torch.ones(1)] * 127], turn=5)[0]
    assert SAMPLE <= counted.sum() < grad.numel()
    seen = Counts.of_exponents(counted.tolist(), grad.numel())
    for limit in (-24, -14):
        truth = (grad < 2.0**limit).double().mean().item()
        assert seen.below(limit) == pytest.approx(truth, abs=0.01)
    assert counted.shape == (BINS,)


def test_views_and_empty_tensors_are_counted_too():
    """Whatever a gradient's strides are."""
    base = torch.randn(40, 30)
    same = exponents([base.t(), base[::2], torch.zeros(0)])
    assert same[0].sum() == 1200
    assert same[1].sum() == 600
    assert same[2].sum() == 0


def test_nothing_changes_by_being_recorded(tmp_path, loop):
    """Weights and scales are those of a run without a trace, bit for bit."""
    plain, traced = net(), net()
    results = []
    for model, trace in ((plain, None), (traced, tmp_path / "run.buoy")):
        scaler, _, optimizer = loop("adamw", model, policy="headroom", trace=trace)
        results.append(train(scaler, model, optimizer, EVENTS * 3))
        if scaler.trace is not None:
            scaler.trace.close()
    assert results[0] == results[1]
    for p, q in zip(plain.parameters(), traced.parameters(), strict=True):
        assert torch.equal(p, q)


def test_off_is_off(tmp_path, monkeypatch):
    """No extension, no recorder; and a disabled scaler leaves no file."""
    assert GradScaler("cpu").trace is None
    assert GradScaler("cpu")._hooks.find(Record) is None
    off = GradScaler("cpu", enabled=False, trace=tmp_path / "run.buoy")
    assert off.trace is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert GradScaler("cpu", trace=tmp_path / "run.buoy").trace is None
    assert list(tmp_path.iterdir()) == []


def test_copies_do_not_write_to_the_same_file(tmp_path):
    """A pickle or a copy starts without a trace."""
    scaler = GradScaler("cpu", trace=tmp_path / "run.buoy")
    for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):  # noqa: S301
        assert other.trace is None
        assert other._hooks.find(Record) is None
    scaler.trace.close()


def test_several_optimizers_make_one_row(tmp_path):
    """The norm is of all gradients together, the size the largest."""
    model = net()
    halves = [list(model[0].parameters()), list(model[2].parameters())]
    optimizers = [torch.optim.SGD(half, lr=0.01) for half in halves]
    scaler = GradScaler("cpu", init_scale=8.0, model=model, trace=tmp_path / "run.buoy")
    scaler.scale(loss_of(model, 0)).backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item() / 8
    size = max(p.grad.abs().max().item() for p in model.parameters()) / 8
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    scaler.trace.close()
    recording = buoy.trace.load(tmp_path / "run.buoy")
    (row,) = recording.rows
    assert row.norm == pytest.approx(norm)
    assert row.amax == pytest.approx(size)
    assert len(recording.shots[0].tensors) == 4


def test_a_failure_while_recording_ends_the_recording_alone(tmp_path, monkeypatch):
    """One warning; the steps go on as if nothing had been asked for."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler("cpu", model=model, trace=tmp_path / "run.buoy")
    train(scaler, model, optimizer, ["ok"])
    monkeypatch.setattr(scaler._names, "of", None)
    monkeypatch.setattr(scaler.trace, "every", 1)
    before = model[0].weight.clone()
    train(scaler, model, optimizer, ["ok"] * 3, start=1)
    assert not torch.equal(before, model[0].weight)
    with pytest.warns(TraceWarning, match="recording has stopped"):
        scaler.trace.close()
    assert len(buoy.trace.load(tmp_path / "run.buoy").rows) == 1


RANK = """
import sys, torch
from buoy.torch import GradScaler
rank, meeting, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
torch.distributed.init_process_group(
    "gloo", init_method="file://" + meeting, rank=rank, world_size=2
)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = GradScaler("cpu", model=model, trace=path)
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).sum() * (float("inf") if step == rank == 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(rank, scaler.trace is not None)
if scaler.trace is not None:
    scaler.trace.close()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_of_several_ranks_the_first_records(tmp_path):
    """Two real processes: one file, and what the other rank broke is in it."""
    path = tmp_path / "run.buoy"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meet"), str(path)],
            env={**os.environ, "PYTHONPATH": str(Path(buoy.__file__).parents[1])},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = sorted(rank.communicate(timeout=120)[0] for rank in ranks)
    assert said == ["0 True\n", "1 False\n"]
    recording = buoy.trace.load(path)
    assert [row.applied for row in recording.rows] == [True, False, True]
    assert (recording.meta["rank"], recording.meta["world"]) == (0, 2)
    assert not list(tmp_path.glob("run-*.buoy"))
