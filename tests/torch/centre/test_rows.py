"""Rows of iterations with several optimizers: what all of them found, together."""

import math

import pytest
import torch
from nets import OPTIMIZERS, loss_of, net, spoil

import buoy.trace
from buoy.torch import GradScaler
from buoy.trace import Recorder

EVENTS = ["ok", "inf", "ok", "ok"]


def sizes_of(model, scale):
    """Take the norm and the largest of the unscaled gradients."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters()]) / scale
    return flat.norm().item(), flat.abs().max().item()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("clips", [(), (0,)])
@pytest.mark.parametrize("kind", ["sgd", "fused adamw"])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_row_is_of_all_optimizers(count, clips, kind, hidden, tmp_path, monkeypatch):
    """The norm of all, whoever clips, the largest of all, the last loss."""
    if hidden:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    models = [net(seed) for seed in range(count)]
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model in models]
    recorder = Recorder(tmp_path / "run.buoy", every=1000)
    scaler = GradScaler("cpu", policy="lognormal", trace=recorder)
    expected = []
    for step, event in enumerate(EVENTS):
        losses, found = [], []
        scale = scaler.get_scale()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(loss_of(model, step))
            scaler.scale(losses[-1]).backward()
            found.append(sizes_of(model, scale))
        spoil(models[-1], event)
        for place, optimizer in enumerate(optimizers):
            if place in clips:
                scaler.clip_grad_norm_(optimizer, 100.0)
            scaler.step(optimizer)
        scaler.update()
        norm = math.hypot(*(norm for norm, _ in found))
        amax = max(size for _, size in found)
        expected.append((scale, norm, amax, losses[-1].item()))
    recorder.close()
    rows = buoy.trace.load(recorder.path).rows
    assert [row.step for row in rows] == [0, 1, 2, 3]
    for row, event, one in zip(rows, EVENTS, expected, strict=True):
        scale, norm, amax, loss = one
        assert row.applied is (event == "ok")
        assert row.verdict == ("applied" if row.applied else "scale_too_high")
        assert row.scale == scale
        assert row.loss == pytest.approx(loss)
        if row.applied:
            assert row.amax == pytest.approx(amax, rel=1e-6)
            assert row.norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("hidden", [False, True])
def test_gradients_that_were_checked_and_not_stepped_by_are_an_overflow_too(
    hidden, loop
):
    """`unscale_` and `update`, without `step`: the watch counts them."""
    alarms = []
    scaler, model, optimizer = loop(
        "fused adamw", on_stuck=alarms.append, patience=4, init_scale=64.0
    )
    with pytest.MonkeyPatch.context() as patch:
        if hidden:
            patch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
        for step in range(12):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            spoil(model, "inf")
            scaler.unscale_(optimizer)
            scaler.update()
    assert scaler.last_step is None
    assert scaler.get_scale() == 64.0 * 2.0**-12
    assert [alarm.verdict for alarm in alarms] == ["scale_too_high"]


def test_of_several_one_may_be_clipped():
    """Its norm is then the only one that is known."""
    models = net(0), net(1)
    scaler = GradScaler("cpu")
    scaler.scale(sum(loss_of(model, 0) for model in models)).backward()
    for clipped, model in enumerate(models):
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        if clipped:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
    scaler.update()
    assert "applied=1, skipped=0" in repr(scaler)


def test_of_several_that_were_skipped_the_first_is_named():
    """By the alarm."""
    models, alarms = torch.nn.Sequential(net(0), net(1)), []
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    scaler = GradScaler("cpu", patience=1, on_stuck=alarms.append, model=models)
    scaler.scale(sum(loss_of(model, 0) for model in models)).backward()
    for model, optimizer in zip(models, optimizers, strict=True):
        spoil(model, "inf")
        scaler.step(optimizer)
    scaler.update()
    assert [alarm.offenders for alarm in alarms] == [("0.2.bias",)]


def test_gradients_that_were_checked_and_not_stepped_by_are_no_skip(loop):
    """The user has dropped a batch that was fine."""
    scaler, model, optimizer = loop("fused adamw")
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.unscale_(optimizer)
        scaler.update()
    assert "applied=3, skipped=0" in repr(scaler)


@pytest.mark.parametrize(("count", "largest"), [(1, 0), (2, 0), (2, 1), (3, 1)])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_bad_batch_is_told_from_the_largest_of_its_losses(
    count, largest, hidden, monkeypatch
):
    """Against the largest of each earlier iteration, of applied steps only."""
    if hidden:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.0, fused=True)
    scaler, verdicts = GradScaler("cpu"), []
    sizes = [1.0, 1.1, *[1e6] * 5, 1.0, 0.9, 1.1, 5.0, 10.0]
    for size in sizes:
        optimizer.zero_grad()
        for place in range(count):
            loss = param.sum() / 2 * (size if place == largest else size / 10)
            scaler.scale(loss).backward()
        if size in (1e6, 5.0, 10.0):
            param.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        verdicts.append(scaler.last_step.verdict.value)
    assert verdicts[2] == "scale_too_high"  # too few losses to tell
    assert verdicts[-2:] == ["scale_too_high", "bad_batch"]


@pytest.mark.parametrize("losses", [(math.nan, 1.0), (1.0, math.nan), (1.0, 1.0)])
def test_a_late_row_knows_whether_any_loss_was_finite(losses):
    """Of several micro-batches, not only of the last."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler, rows = GradScaler("cpu", sync="never"), []
    scaler._log.record = lambda row, entry: rows.append(row)
    for factor in losses:
        scaler.scale(weight.sum() * factor).backward()
    weight.grad.fill_(math.inf)
    scaler.step(optimizer)
    scaler.update()
    scaler._log.collect(wait=True)

    assert [scaler.last_step.verdict] == [row.verdict for row in rows]


@pytest.mark.parametrize("orders", [(2.0, 2.0), (math.inf, math.inf), (2.0, math.inf)])
def test_norms_of_several_optimizers_are_combined_by_their_order(orders):
    """Norms of different orders make none."""
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    scaler, rows = GradScaler("cpu"), []
    scaler._log.record = lambda row, entry: rows.append(row)
    scaler.scale(3.0 * weights[0].sum() + 4.0 * weights[1].sum()).backward()
    for weight, order in zip(weights, orders, strict=True):
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler.clip_grad_norm_(optimizer, 10.0, order)
        scaler.step(optimizer)
    scaler.update()

    expected = {(2.0, 2.0): 5.0, (math.inf, math.inf): 4.0}.get(orders)
    assert [expected] == [row.norm for row in rows]
