"""Sinks, each against the real package: unscaled, and never in training's way."""

import json
import logging
import math
import struct
import sys
import threading
from pathlib import Path

import pytest
import torch

import buoy.trace
from buoy.torch import GradScaler
from buoy.trace import Recorder, Row, TraceWarning, outlet
from buoy.trace.sinks import JsonLines, Logging, MLflow, TensorBoard, WandB, values

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def train(tmp_path, sink, scale=2.0**12, steps=4):
    """Train a weight whose gradient is 3, and skip one step."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    recorder = Recorder(tmp_path / "run.buoy", sinks=[sink])
    scaler = GradScaler("cpu", init_scale=scale, trace=recorder)
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale(3.0 * weight.sum() + 0.5).backward()
        if step == 2:
            weight.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
    recorder.close()
    return buoy.trace.load(tmp_path / "run.buoy").rows


EXPECTED = [
    {"scale": 4096.0, "skipped": 0.0, "norm": 3.0, "amax": 3.0, "loss": 0.5},
    {"scale": 4096.0, "skipped": 0.0, "norm": 3.0, "amax": 3.0, "loss": 0.5},
    {"scale": 4096.0, "skipped": 1.0, "loss": 0.5},
    {"scale": 2048.0, "skipped": 0.0, "norm": 3.0, "amax": 3.0, "loss": 0.5},
]


def without_headroom(known):
    """Leave out what is not the same at every scale."""
    return {name: value for name, value in known.items() if name != "headroom"}


def test_values_are_unscaled_and_finite(tmp_path):
    """Norm, size and loss do not move when the scale does."""
    rows = train(tmp_path, JsonLines(tmp_path / "rows.jsonl"))
    assert [without_headroom(values(row)) for row in rows] == EXPECTED


def test_json_lines(tmp_path):
    """One object a step; infinities as text, offenders by name."""
    train(tmp_path, JsonLines(tmp_path / "rows.jsonl"))
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    read = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [line["step"] for line in read] == [0, 1, 2, 3]
    assert read[0]["norm"] == 3.0
    assert (read[2]["norm"], read[2]["verdict"]) == ("inf", "scale_too_high")
    assert len(read[2]["offenders"]) == 1


def test_logging(tmp_path, caplog):
    """A line now and then, and one for every skip."""
    with caplog.at_level(logging.INFO, "buoy.trace"):
        train(tmp_path, Logging(every=3))
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "step 0",
        "step 2 skipped",
        "step 3",
    ]
    assert "norm 3" in caplog.records[0].message
    assert "1 skipped so far" in caplog.records[2].message


def events(folder):
    """Read scalars out of TensorBoard's files: records of length, checksum, data."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in Path(folder).glob("events.*"):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


@pytest.mark.parametrize("own", [False, True])
def test_tensorboard(tmp_path, own):
    """Into a folder, or through a writer that the user has and keeps."""
    from tensorboardX import SummaryWriter

    where = SummaryWriter(str(tmp_path / "logs")) if own else tmp_path / "logs"
    train(tmp_path, TensorBoard(where, every=1))
    if own:
        where.add_scalar("mine", 1.0)
        where.close()
    found = events(tmp_path / "logs")
    assert found["buoy/norm"] == {0: 3.0, 1: 3.0, 3: 3.0}
    assert found["buoy/scale"] == {0: 4096.0, 1: 4096.0, 2: 4096.0, 3: 2048.0}
    assert found["buoy/skipped"][2] == 1.0
    assert ("mine" in found) == own


def test_only_some_steps_are_sent_but_every_skip(tmp_path):
    """A dashboard need not have every step."""
    train(tmp_path, TensorBoard(tmp_path / "logs", every=100))
    assert set(events(tmp_path / "logs")["buoy/scale"]) == {0, 2}


@pytest.mark.slow
def test_mlflow(tmp_path):
    """Into a database of its own, in a run of its own."""
    import mlflow

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    sink = MLflow(tracking_uri=uri, every=1)
    train(tmp_path, sink)
    client = mlflow.MlflowClient(tracking_uri=uri)
    history = client.get_metric_history(sink.run_id, "buoy/norm")
    assert [(point.step, point.value) for point in history] == [
        (0, 3.0),
        (1, 3.0),
        (3, 3.0),
    ]
    assert client.get_run(sink.run_id).info.status == "FINISHED"

    mlflow.set_tracking_uri(uri)
    with mlflow.start_run() as active:
        sink = MLflow(tracking_uri=uri, every=1)
        train(tmp_path, sink)
        assert sink.run_id == active.info.run_id


@pytest.mark.slow
def test_wandb(tmp_path, monkeypatch):
    """Offline: what was logged is in the file that would be sent."""
    import wandb

    # Its service is a process of its own: on a busy machine it starts slowly.
    monkeypatch.setattr(outlet, "PATIENCE", 300.0)
    monkeypatch.setattr(outlet, "_MOST", 300.0)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    sink = WandB(every=1, mode="offline", project="buoy", dir=str(tmp_path))
    train(tmp_path, sink)
    wandb.teardown()  # its service writes the file; this waits for it
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    data = path.read_bytes()
    assert data.count(b"buoy/norm") >= 3
    assert b"buoy/step" in data


class Broken:
    """A sink that fails from its second batch on."""

    def __init__(self):
        self.calls = 0

    def write(self, rows):
        self.calls += 1
        if self.calls > 1:
            raise ConnectionError("no route to the dashboard")

    def close(self):
        raise AssertionError("a sink that is off is left alone")


def test_a_sink_that_fails_is_off_with_one_warning(tmp_path):
    """The file and the other sinks go on."""
    broken, fine = Broken(), JsonLines(tmp_path / "rows.jsonl")
    recorder = Recorder(tmp_path / "run.buoy", sinks=[broken, fine])
    for _ in range(2):
        recorder.step(scale=1.0, applied=True)
        if broken.calls:
            with pytest.warns(TraceWarning, match="Broken has failed.*no route"):
                recorder.flush()
        else:
            recorder.flush()
    recorder.step(scale=1.0, applied=True)
    recorder.close()
    assert broken.calls == 2
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3
    assert len(buoy.trace.load(tmp_path / "run.buoy").rows) == 3


def test_sinks_alone_need_no_file(tmp_path):
    """`Recorder(None, sinks=...)` writes to the sinks and nowhere else."""
    with Recorder(None, sinks=[JsonLines(tmp_path / "rows.jsonl")]) as recorder:
        recorder.step(scale=1.0, applied=True)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("sink", "modules", "package"),
    [
        (MLflow, ["mlflow"], "mlflow"),
        (WandB, ["wandb"], "wandb"),
        (TensorBoard, ["tensorboardX", "torch.utils.tensorboard"], "tensorboardX"),
    ],
)
def test_a_package_that_is_missing_costs_the_sink_alone(
    sink, modules, package, tmp_path, monkeypatch
):
    """The warning says what to install."""
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    recorder = Recorder(None, sinks=[sink(tmp_path) if sink is TensorBoard else sink()])
    recorder.step(scale=1.0, applied=True)
    with pytest.warns(TraceWarning, match=f"pip install {package}"):
        recorder.flush()
    recorder.close()
    assert values(Row(0, 1.0, True)) == {"scale": 1.0, "skipped": 0.0}


def test_a_recorder_may_be_closed_by_its_own_thread(tmp_path):
    """Where garbage is collected is not for us to say; nothing waits for itself."""
    made, errors, closed = [], [], threading.Event()

    class Closing:
        def write(self, *_):
            try:
                made[0]._close()  # as when the last reference goes away here
            except RuntimeError as error:
                errors.append(error)
            closed.set()

        def close(self):
            """Have nothing to close."""

    made.append(Recorder(tmp_path / "run.buoy", sinks=[Closing()]))
    scaler = GradScaler("cpu", trace=made[0])
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert closed.wait(30)
    assert not errors


class Exits:
    """Ends the process, or so it believes."""

    def write(self, rows):
        raise SystemExit(1)

    def close(self):
        """Do nothing."""


class Hangs:
    """Never returns."""

    def __init__(self):
        self.entered = threading.Event()

    def write(self, rows):
        self.entered.set()
        threading.Event().wait()

    def close(self):
        """Do nothing."""


def test_a_sink_that_exits_costs_the_sink_alone(tmp_path):
    """SystemExit is no Exception."""
    recorder = Recorder(tmp_path / "run.buoy", sinks=[Exits()])
    recorder.step(scale=2.0, applied=True)
    with pytest.warns(TraceWarning, match="sink Exits has failed.*SystemExit: 1"):
        recorder.flush()
    recorder.step(scale=2.0, applied=True)
    recorder.close()
    assert len(buoy.trace.load(recorder.path).rows) == 2


def test_a_sink_that_hangs_holds_up_neither_file_nor_other_sinks(tmp_path, monkeypatch):
    """Everything else is written; closing does not wait for it."""
    monkeypatch.setattr("buoy.trace.outlet.PATIENCE", 0.5)
    hanging, other = Hangs(), JsonLines(tmp_path / "run.jsonl")
    recorder = Recorder(tmp_path / "run.buoy", sinks=[hanging, other])
    recorder.step(scale=2.0, applied=True)
    assert hanging.entered.wait(30)
    for _ in range(9):
        recorder.step(scale=2.0, applied=True)
    with pytest.warns(TraceWarning, match="sink Hangs does not return"):
        recorder.close()
    recording = buoy.trace.load(recorder.path)
    assert (len(recording.rows), recording.ended) == (10, True)
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 10
