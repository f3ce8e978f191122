"""Skipped steps are explained while training goes on, and their batches saved."""

import logging

import pytest
import torch
from torch import nn

from buoy import TraceError
from buoy.diagnose import ExplainSkips, first_nonfinite, load_batch
from buoy.torch import GradScaler


def trained(folder=None, *, explained=True, steps=6):
    """Train with dropout, batch norm and two overflows; return all there is."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 1)
    )
    optimizer = torch.optim.Adam(model.parameters())
    scaler = GradScaler("cpu", init_scale=2.0**21, growth_interval=3)
    skips = ExplainSkips(scaler, model, folder=folder) if explained else None

    def forward_backward(x, y):
        with torch.autocast("cpu", torch.float16):
            loss = (model(x).float() - y).square().mean()
        scaler.scale(loss).backward()

    applied = []
    for step in range(steps):
        source = torch.Generator().manual_seed(step)
        x, y = torch.randn(4, 8, generator=source), torch.ones(4, 1)
        optimizer.zero_grad()
        if skips is None:
            forward_backward(x, y)
        else:
            skips.run(forward_backward, x, y)
        scaler.step(optimizer)
        scaler.update()
        applied.append(scaler.last_step.applied)
    return model, scaler, skips, applied, forward_backward


def test_skips_are_explained_and_training_does_not_notice(caplog):
    """The same weights, bit for bit, as without; the culprit and its scale logged."""
    caplog.set_level(logging.WARNING, "buoy.diagnose")
    model, scaler, skips, applied, _ = trained()
    plain, other, _, alone, _ = trained(explained=False)

    assert applied == alone
    assert applied.count(False) >= 2
    assert applied.count(False) == len(skips.culprits)
    assert scaler.state_dict() == other.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    assert all(culprit.direction == "backward" for culprit in skips.culprits)
    assert 2.0**21 == skips.culprits[0].scale
    assert "Update 1 was skipped. Backward, after the model" in caplog.text


def test_the_batch_can_be_saved_and_run_again_later(tmp_path):
    """With its random numbers and at its scale it fails in the same place."""
    model, _, skips, _, step_fn = trained(tmp_path / "skipped")
    kept = load_batch(tmp_path / "skipped" / "step-1.pt")

    assert skips.culprits[0] == kept.culprit
    assert 1 == kept.step
    again = first_nonfinite(
        model, lambda: step_fn(*kept.batch), scale=kept.culprit.scale, rng=kept.rng
    )
    assert again.module == kept.culprit.module


def test_only_so_many_skips_are_looked_at():
    """A run that skips for hours is not slowed down for hours."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    skips = ExplainSkips(scaler, model, limit=2)
    runs = []

    def step_fn():
        runs.append(1)
        scaler.scale((model(torch.ones(1, 2)) * torch.nan).sum()).backward()

    for _ in range(5):
        optimizer.zero_grad()
        skips.run(step_fn)
        scaler.step(optimizer)
        scaler.update()

    assert 2 == len(skips.culprits)
    assert ["loss", "loss"] == [culprit.part for culprit in skips.culprits]


def test_a_file_that_is_no_batch_is_refused(tmp_path):
    """Nothing in it is executed."""

    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("executed",))

    for number, content in enumerate([{"a": 1}, Evil()]):
        path = tmp_path / f"{number}.pt"
        torch.save(content, path)
        with pytest.raises(TraceError, match="not a batch"):
            load_batch(path)
    with pytest.raises(FileNotFoundError):
        load_batch(tmp_path / "nowhere.pt")
