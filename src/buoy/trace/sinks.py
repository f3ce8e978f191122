"""Further outputs for a run's rows: files, loggers, dashboards.

Example::

    Recorder("run.buoy", sinks=[TensorBoard("logs"), JsonLines("run.jsonl")])

A sink imports its package with its first row, in its own thread.  A sink that fails is
switched off, with one warning.  All values are those of *unscaled* gradients, so the
curves of a dashboard do not depend on the scale.
"""

import json
import logging
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from buoy._core.errors import MissingBackendError
from buoy._core.step import Row

__all__ = ["JsonLines", "Logging", "MLflow", "TensorBoard", "WandB", "values"]

_MOST = 1000  # metrics that MLflow takes at once


def values(row: Row) -> dict[str, float]:
    """Return the finite numbers of a step, by name.

    Example:
        >>> values(Row(7, 1024.0, False, norm=math.inf, loss=0.5))
        {'scale': 1024.0, 'skipped': 1.0, 'loss': 0.5}
    """
    known = {
        "scale": row.scale,
        "skipped": 0.0 if row.applied else 1.0,
        "norm": row.norm,
        "amax": row.amax,
        "headroom": row.headroom,
        "loss": row.loss,
    }
    return {
        name: float(value)
        for name, value in known.items()
        if value is not None and math.isfinite(value)
    }


def _chosen(rows: Iterable[Row], every: int) -> list[Row]:
    """Keep every so many steps, and all that were skipped."""
    return [row for row in rows if row.step % every == 0 or not row.applied]


def _missing(package: str, extra: str) -> MissingBackendError:
    return MissingBackendError(f"{package} is not installed: `pip install {extra}`")


class JsonLines:
    """Write a JSON object per step to a file; inf and NaN are written as text.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sink = JsonLines(folder + "/run.jsonl")
        ...     sink.write([Row(0, 2.0, True, loss=0.5, time=0.0)])
        ...     sink.close()
        ...     print(Path(folder, "run.jsonl").read_text(), end="")
        {"step": 0, "time": 0.0, "applied": true, "scale": 2.0, "loss": 0.5}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file: Any = None

    def write(self, rows: Sequence[Row]) -> None:
        """Take the next rows."""
        if self._file is None:
            self._file = self._path.open("w", encoding="utf-8")
        for row in rows:
            self._file.write(json.dumps(self._line(row), allow_nan=False) + "\n")
        self._file.flush()

    def _line(self, row: Row) -> dict[str, Any]:
        line: dict[str, Any] = {
            "step": row.step,
            "time": row.time,
            "applied": row.applied,
            "scale": row.scale,
        }
        if not row.applied:
            line["verdict"] = row.verdict.value
        for name in ("norm", "amax", "headroom", "loss"):
            value = getattr(row, name)
            if value is not None:
                line[name] = value if math.isfinite(value) else str(value)
        if row.offenders:
            line["offenders"] = list(row.offenders)
        return line

    def close(self) -> None:
        """Finish."""
        if self._file is not None:
            self._file.close()


class Logging:
    """Log a line every few steps, and one for every skipped step, with `logging`.

    Example:
        >>> Logging(every=100).write([Row(1, 2.0, True)])  # not a hundredth
    """

    def __init__(self, logger: str = "buoy.trace", every: int = 100) -> None:
        self._log = logging.getLogger(logger)
        self._every = every
        self._skipped = 0

    def write(self, rows: Sequence[Row]) -> None:
        """Take the next rows."""
        for row in rows:
            self._skipped += not row.applied
            if row.applied and row.step % self._every == 0:
                self._log.info("step %d: %s", row.step, self._said(row))
            elif not row.applied:
                where = f" in {', '.join(row.offenders[:3])}" if row.offenders else ""
                self._log.info(
                    "step %d skipped: %s%s at scale %g",
                    row.step, row.verdict.value, where, row.scale,
                )  # fmt: skip

    def _said(self, row: Row) -> str:
        known = values(row)
        parts = [f"scale {row.scale:g}", f"{self._skipped} skipped so far"]
        names = ("headroom", "norm", "loss")
        parts += [f"{name} {known[name]:.4g}" for name in names if name in known]
        return ", ".join(parts)

    def close(self) -> None:
        """Finish."""


class TensorBoard:
    """Write scalars under `buoy/` for TensorBoard.

    Takes a folder, or an existing `SummaryWriter` of tensorboardX or torch.
    """

    def __init__(self, where: Any, every: int = 10) -> None:
        self._where = where
        self._every = every
        self._writer: Any = where if hasattr(where, "add_scalar") else None

    def write(self, rows: Sequence[Row]) -> None:
        """Take the next rows."""
        if self._writer is None:
            self._writer = _summary_writer()(os.fspath(self._where))
        for row in _chosen(rows, self._every):
            for name, value in values(row).items():
                self._writer.add_scalar(
                    f"buoy/{name}", value, global_step=row.step, walltime=row.time
                )

    def close(self) -> None:
        """Finish; an existing writer is only flushed."""
        if self._writer is None:
            return
        self._writer.flush()
        if self._writer is not self._where:
            self._writer.close()


def _summary_writer() -> Any:
    try:
        from tensorboardX import SummaryWriter  # noqa: PLC0415
    except ImportError:
        try:
            from torch.utils.tensorboard import (  # noqa: PLC0415
                SummaryWriter,
            )
        except ImportError as error:
            raise _missing("TensorBoard's writer", "tensorboardX") from error
    return SummaryWriter


class WandB:
    """Log to Weights & Biases under `buoy/`, with a step axis of its own.

    Takes an existing run, or the arguments of `wandb.init`.  `buoy/step` is the
    axis; your own calls of `wandb.log` keep theirs.
    """

    def __init__(self, run: Any = None, every: int = 10, **init: Any) -> None:
        self._run = run
        self._every = every
        self._init = init
        self._started = self._own = False

    def write(self, rows: Sequence[Row]) -> None:
        """Take the next rows."""
        if not self._started:
            self._start()
        for row in _chosen(rows, self._every):
            known = {f"buoy/{name}": value for name, value in values(row).items()}
            self._run.log({"buoy/step": row.step, **known})

    def _start(self) -> None:
        try:
            import wandb  # noqa: PLC0415
        except ImportError as error:
            raise _missing("W&B", "wandb") from error
        if self._run is None:
            self._own = wandb.run is None
            self._run = wandb.run or wandb.init(**self._init)
        self._run.define_metric("buoy/step")
        self._run.define_metric("buoy/*", step_metric="buoy/step")
        self._started = True

    def close(self) -> None:
        """Finish a run that was started here."""
        if self._own and self._run is not None:
            self._run.finish()


class MLflow:
    """Log metrics under `buoy/` to MLflow.

    Takes the id of an existing run; otherwise uses the run that is active where the
    sink is made, or a new one in `experiment`.
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        tracking_uri: str | None = None,
        experiment: str = "buoy",
        every: int = 10,
    ) -> None:
        self.run_id = _active_run() if run_id is None else run_id
        self._uri = tracking_uri
        self._experiment = experiment
        self._every = every
        self._client: Any = None
        self._own = False

    def write(self, rows: Sequence[Row]) -> None:
        """Take the next rows."""
        if self._client is None:
            self._start()
        from mlflow.entities import Metric  # noqa: PLC0415

        metrics = [
            Metric(f"buoy/{name}", value, int(1000 * row.time), row.step)
            for row in _chosen(rows, self._every)
            for name, value in values(row).items()
        ]
        for start in range(0, len(metrics), _MOST):
            self._client.log_batch(self.run_id, metrics[start : start + _MOST])

    def _start(self) -> None:
        try:
            import mlflow  # noqa: PLC0415
        except ImportError as error:
            raise _missing("MLflow", "mlflow-skinny") from error
        self._client = mlflow.MlflowClient(tracking_uri=self._uri)
        if self.run_id is None:
            found = self._client.get_experiment_by_name(self._experiment)
            number = (
                self._client.create_experiment(self._experiment)
                if found is None
                else found.experiment_id
            )
            self.run_id = self._client.create_run(number).info.run_id
            self._own = True

    def close(self) -> None:
        """Finish a run that was started here."""
        if self._own:
            self._client.set_terminated(self.run_id)


def _active_run() -> str | None:
    """Return the id of MLflow's active run, which only this thread can ask for."""
    mlflow = sys.modules.get("mlflow")
    active = None if mlflow is None else mlflow.active_run()
    return None if active is None else str(active.info.run_id)
