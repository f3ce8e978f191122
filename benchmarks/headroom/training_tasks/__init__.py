"""The trainings that judge a policy, one short function each, in files by theme.

A task is a function of a random key that returns its weights and its loss::

    @task(steps=600)
    def parabola(key):
        \"\"\"Find the lowest point of a parabola.\"\"\"

        def loss(weights, key, dtype):
            return jnp.square(weights.astype(dtype) - 1).sum().astype(FULL)

        return jax.random.normal(key, (8,)), loss

The loss draws its batch from the key of the step and computes in `dtype`, FP16 or FP32;
the weights are FP32.  A third value that is returned measures the result in FP32 where
the loss does not, e.g. the expected reward of reinforcement learning.
"""

from benchmarks.headroom.training_tasks import (
    bad_data,
    hidden,
    kinds,
    sizes,
    units,
)
from benchmarks.headroom.training_tasks.base import TASKS

__all__ = ["TASKS", "bad_data", "hidden", "kinds", "sizes", "units"]
