"""TensorFlow: several replicas of a model take one decision.

Each replica of a `tf.distribute` strategy has its own gradients until the inner
optimizer adds them up.  All replicas check their gradients, one decision is made from
all findings, and either every replica applies the step or none does.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from buoy._core.advance import Found
from buoy._core.errors import OptionError
from buoy.keras.scaling import Grads, Looked, Scaling

__all__ = ["apply_together", "are_replicas"]


def are_replicas() -> bool:
    """Return whether this code runs once per replica, with mirrored variables."""
    strategy = tf.distribute.get_strategy()
    if not tf.__internal__.distribute.strategy_supports_no_merge_call():
        return True
    if strategy.num_replicas_in_sync > 1:
        raise OptionError(
            f"{type(strategy).__name__} has no `merge_call`, in which replicas agree "
            "on a step. Use `tf.distribute.MirroredStrategy`, or Keras on JAX with "
            "`keras.distribution`."
        )
    return False


def apply_together(
    scaling: Scaling, grads: Grads, apply: Callable[[Grads, Any], None]
) -> None:
    """Apply the gradients of every replica, or of none.

    `apply` takes the gradients of a replica and the factor to multiply them by.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        raise OptionError(
            "apply() must be called in a replica context: call the function that "
            "computes the gradients and applies them by `strategy.run`."
        )
    parts = tf.distribute.get_strategy().num_replicas_in_sync

    def merged(strategy: Any, looked: Looked, tensors: Any) -> None:
        everyone = tf.nest.map_structure(strategy.experimental_local_results, looked)
        applied, factor = scaling.conclude(_agreed(everyone), scaled=grads.scaled)

        def apply_one(tensors: Any, factor: Any) -> None:
            apply(grads._replace(tensors=tensors), factor)

        def apply_all() -> None:
            strategy.extended.call_for_each_replica(apply_one, args=(tensors, factor))

        tf.cond(applied, apply_all, lambda: None)

    context.merge_call(merged, args=(scaling.look(grads, parts), list(grads.tensors)))


def _agreed(everyone: Any) -> Looked:
    """Combine the findings of all replicas: the worst counts."""
    found, measured, told = everyone
    bad = tf.reduce_any(tf.stack(found.bad), axis=0)
    return Looked(
        Found(
            bad=bad,
            finite=tf.reduce_all(tf.stack(found.finite)),
            amax=tf.reduce_max(tf.stack(found.amax)),
            norm=None,  # of the sum of the gradients, which is not made yet
        ),
        {name: tf.reduce_max(tf.stack(each)) for name, each in measured.items()},
        None if told[0] is None else tf.reduce_all(tf.stack(told)),
    )
