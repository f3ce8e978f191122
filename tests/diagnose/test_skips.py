"""Skipped steps are explained while training goes on, and their batches saved."""

import logging
import os
import random
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from buoy import TraceError
from buoy._core.errors import OptionError
from buoy.diagnose import (
    ExplainSkips,
    first_nonfinite,
    load_batch,
    rng_state,
    save_batch,
)
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


class Opaque:
    """Can be pickled, and only be loaded by executing something."""


class Rerun:
    """Trains two steps, both skipped; does something only in the second run."""

    def __init__(self, folder=None, batch=(), again=lambda: None):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler("cpu")
        self.runs = 0
        self.skips = ExplainSkips(scaler, model, folder=folder)

        def step_fn(*_):
            self.runs += 1
            if not self.runs % 2:
                again()
            scaler.scale((model(torch.ones(1, 2)) * torch.nan).sum()).backward()

        for _ in range(2):
            optimizer.zero_grad()
            self.skips.run(step_fn, *batch)
            scaler.step(optimizer)
            scaler.update()
        self.skipped = scaler.last_step.skipped


def raising(error):
    """Make a function that raises this."""

    def raise_it():
        raise error

    return raise_it


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a loader that is exhausted"),
        torch.OutOfMemoryError("no memory left"),
        SystemExit(3),
        Warning("as an error"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_in_the_second_run_does_not_end_training(error, caplog):
    """It is logged with its reason; the skip counts as looked at."""
    done = Rerun(again=raising(error))

    assert (4, True, []) == (done.runs, done.skipped, done.skips.culprits)
    assert "update 1 could not be explained, and training continues: " in caplog.text
    assert f"{type(error).__name__}: {error}" in caplog.text


def test_ctrl_c_in_the_second_run_is_the_users():
    """It ends training as it always does."""
    with pytest.raises(KeyboardInterrupt):
        Rerun(again=raising(KeyboardInterrupt()))


def test_a_folder_that_cannot_be_written_does_not_end_training(tmp_path, caplog):
    """The culprits are found all the same."""
    (tmp_path / "file").write_text("in the way")
    done = Rerun(tmp_path / "file" / "skipped")

    assert ["loss", "loss"] == [culprit.part for culprit in done.skips.culprits]
    assert "update 2 could not be saved, and training continues: " in caplog.text
    assert "NotADirectoryError" in caplog.text


@pytest.mark.parametrize(
    "thing", [lambda: 1, Opaque(), nn.Linear(1, 1)], ids=["function", "class", "module"]
)
def test_a_batch_that_could_not_be_loaded_again_is_not_saved(thing, tmp_path, caplog):
    """Training goes on, no file is left, and the log says why."""
    done = Rerun(tmp_path / "skipped", batch=({"x": [thing]},))

    assert 2 == len(done.skips.culprits)
    assert [] == list((tmp_path / "skipped").iterdir())
    assert "OptionError: The batch cannot be saved" in caplog.text
    with pytest.raises(OptionError, match="can be saved and loaded"):
        save_batch(tmp_path / "b.pt", (thing,), rng=rng_state())


def test_random_numbers_that_cannot_be_read_do_not_end_training(monkeypatch, caplog):
    """Before the pass, too: the step itself is run."""
    monkeypatch.setattr(random, "getstate", raising(RuntimeError("no state")))
    done = Rerun()

    assert (2, []) == (done.runs, done.skips.culprits)
    assert "update 1 could not be kept, and training continues" in caplog.text


ENTRIES = {
    "batch": (torch.ones(2),),
    "rng": rng_state(),
    "culprit": None,
    "step": 3,
}
JUNK = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["module", "poisoned", "a"]), inner)
        | st.tuples(inner, inner)
    ),
    max_leaves=5,
)


def written(path, document):
    """Write a file as `save_batch` does, whatever it holds."""
    torch.save({"buoy_batch": 1, **document}, path)
    return path


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_a_damaged_entry_is_named(name, tmp_path):
    """At once, by a `TraceError`, whatever stands in its place."""
    plain = {**ENTRIES, "rng": {k: v for k, v in rng_state().items() if k != "numpy"}}
    assert 3 == load_batch(written(tmp_path / "whole.pt", plain)).step
    without = {key: value for key, value in plain.items() if key != name}
    with pytest.raises(TraceError, match=f"no entry `{name}`"):
        load_batch(written(tmp_path / "b.pt", without))
    with pytest.raises(TraceError, match=rf"`{name}` is damaged: \['x'\]"):
        load_batch(written(tmp_path / "b.pt", {**plain, name: ["x"]}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("python", (3, (0,) * 625, None, 4)),
        ("torch", torch.zeros(3, dtype=torch.uint8)),
        ("numpy", ("MT19937", torch.zeros(624, dtype=torch.int64), 10**6, 0, 0.0)),
        ("numpy", ("MT19937", torch.zeros(2, dtype=torch.int64), 0, 0, 0.0)),
        ("cuda", [torch.zeros(3)]),
    ],
)
def test_random_numbers_that_no_source_takes_are_refused(field, value, tmp_path):
    """When the file is read, not when the batch is run again."""
    pytest.importorskip("numpy.random")
    rng = {k: v for k, v in rng_state().items() if k != "numpy"} | {field: value}
    with pytest.raises(TraceError, match="`rng` is damaged"):
        load_batch(written(tmp_path / "b.pt", {**ENTRIES, "rng": rng}))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(ENTRIES)), junk=JUNK)
def test_whatever_stands_in_a_file_it_loads_or_is_a_trace_error(
    name, junk, tmp_path_factory
):
    """No foreign exception, and what loads can be printed."""
    rng = {k: v for k, v in rng_state().items() if k != "numpy"}
    path = tmp_path_factory.getbasetemp() / "junk.pt"
    try:
        kept = load_batch(written(path, {**ENTRIES, "rng": rng, name: junk}))
    except TraceError:
        return
    assert str(kept.culprit)
    assert isinstance(kept.batch, tuple)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_a_trace_error(data, tmp_path_factory):
    """Cut off, or with bytes changed: it loads or says that it is no batch."""
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    save_batch(path, (torch.ones(2),), rng=rng_state())
    content = bytearray(path.read_bytes())
    end = data.draw(st.integers(0, len(content)))
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content[:end])
    try:
        kept = load_batch(path)
    except TraceError:
        return
    assert isinstance(kept.batch, tuple)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_what_is_no_file_is_refused_at_once(tmp_path):
    """A FIFO would be waited for."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(TraceError, match="not a regular file"):
            load_batch(path)


def test_numpys_random_numbers_come_back(tmp_path):
    """As NumPy takes them."""
    numpy = pytest.importorskip("numpy")
    assert "numpy.random" in sys.modules
    rng = rng_state()
    first = numpy.random.rand()
    save_batch(tmp_path / "b.pt", (1,), rng=rng)
    numpy.random.set_state(load_batch(tmp_path / "b.pt").rng["numpy"])

    assert first == numpy.random.rand()
