"""Small trainings that torch and Keras share: an MLP, and batches that NumPy draws.

They are of the kinds of `training_tasks`, which are written in JAX, a few of each: bad
data, clipping, a loss in FP16, tiny gradients, a hidden tensor with a heavy tail.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.headroom.bad_batches import (
    NAN_GRADIENTS,
    NAN_LOSS,
    Schedule,
    clusters,
    single,
)

__all__ = ["QUICK", "TASKS", "Data", "Task", "dense"]

LARGEST_TAIL = 20.0  # bits

# One of each kind, the cheapest: for a first look.
QUICK = ("nan_gradients_single", "clipped", "fp16_loss", "hidden_tails")


class Data(NamedTuple):
    """The batches of all steps."""

    x: np.ndarray  # float32 [steps, batch, inputs]
    y: np.ndarray  # int32 [steps, batch]: classes; or float32 [steps, batch, outputs]
    bits: np.ndarray  # float32 [steps]: by how much a hidden gradient is larger


@dataclass(frozen=True)
class Task:
    """How an MLP is trained, by Adam on the mean loss.

    Whole numbers are classes, and their loss the cross-entropy in FP32; that of other
    targets is the mean squared error times `unit` squared.
    """

    draw: Callable[[np.random.Generator, int], Data]
    widths: tuple[int, ...] = (16, 64, 8)
    steps: int = 600
    rate: float = 3e-3
    max_norm: float | None = None  # of Buoy's clipping; if None, the framework's at 1
    bad: Schedule | None = None
    half_loss: bool = False
    unit: float = 1.0
    half_weights: bool = False  # with FP32 masters, where a front end has them

    @property
    def classes(self) -> bool:
        """Whether the targets are classes."""
        return self.draw is not _field


def dense(task: Task, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draw the weights and biases of a task."""
    rng = np.random.default_rng([seed, 1])
    return [
        (rng.normal(size=(a, b)) / a**0.5, np.zeros(b))
        for a, b in zip(task.widths, task.widths[1:], strict=False)
    ]


def _classes(rng: np.random.Generator, steps: int) -> Data:
    """Eight classes, as in `training_tasks.base.classify`."""
    x = rng.normal(size=(steps, 64, 16)).astype(np.float32)
    y = np.argmax(x[..., :8] * x[..., 8:], axis=2).astype(np.int32)
    return Data(x, y, np.zeros(steps, np.float32))


def _with_tails(rng: np.random.Generator, steps: int) -> Data:
    """The same, with the gradient of a hidden tensor of Student's size."""
    bits = np.minimum(2 * np.abs(rng.standard_t(2.0, steps)), LARGEST_TAIL)
    return _classes(rng, steps)._replace(bits=bits.astype(np.float32))


def _field(rng: np.random.Generator, steps: int) -> Data:
    """A field of 64 values, as in `training_tasks.units.field`."""
    w1 = rng.normal(size=(4, 32))
    w2 = rng.normal(size=(32, 64)) / 5
    x = rng.normal(size=(steps, 128, 4))
    y = (np.sin(x @ w1) @ w2).astype(np.float32)
    return Data(x.astype(np.float32), y, np.zeros(steps, np.float32))


FIELD = (4, 48, 48, 64)

TASKS = {
    "nan_loss_single": Task(_classes, steps=1500, bad=single(NAN_LOSS)),
    "nan_gradients_single": Task(_classes, steps=1500, bad=single(NAN_GRADIENTS)),
    "nan_loss_clusters": Task(_classes, steps=1500, bad=clusters(NAN_LOSS)),
    "nan_gradients_clusters": Task(
        _classes, steps=1500, bad=clusters(NAN_GRADIENTS), half_weights=True
    ),
    "bad_clusters_clipped": Task(
        _classes, steps=1500, max_norm=0.1, bad=clusters(NAN_LOSS, NAN_GRADIENTS)
    ),
    "clipped": Task(_classes, steps=1000, max_norm=0.1),
    "fp16_loss": Task(_field, FIELD, half_loss=True, unit=1e-2),
    "small_units": Task(_field, FIELD, unit=1e-5),
    "hidden_tails": Task(_with_tails, (16, 48, 48, 8), steps=1500),
}
