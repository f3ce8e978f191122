"""Bad data: batches whose loss or gradients are not finite at any scale."""

import jax
from jax.typing import DTypeLike

from benchmarks.headroom.bad_batches import (
    INF_LOSS,
    NAN_GRADIENTS,
    NAN_LOSS,
    at,
    clusters,
    every,
    single,
)
from benchmarks.headroom.training_tasks.base import (
    Made,
    Net,
    classification,
    classify,
    dense,
    task,
)
from benchmarks.headroom.training_tasks.units import field

FIRST_STEPS = (2, 3, 9, 10, 11, 17)
TWO_CLUSTERS = (300, 301, 302, 310, 311, 312)


@task(steps=2000, bad=single(NAN_LOSS))
def nan_loss_single(key: jax.Array) -> Made:
    """The loss of one batch in a hundred is NaN."""
    return classification(key)


@task(steps=2000, bad=single(NAN_GRADIENTS))
def nan_gradients_single(key: jax.Array) -> Made:
    """One batch in a hundred has NaN gradients and a finite loss."""
    return classification(key)


@task(steps=900, bad=every(NAN_LOSS))
def nan_loss_three_in_a_row(key: jax.Array) -> Made:
    """Three batches in a row every 150 steps have a NaN loss."""
    return classification(key)


@task(steps=900, bad=every(NAN_GRADIENTS))
def nan_gradients_three_in_a_row(key: jax.Array) -> Made:
    """Three batches in a row every 150 steps have NaN gradients, a finite loss."""
    return classification(key)


@task(steps=2000, bad=clusters(NAN_LOSS))
def nan_loss_clusters(key: jax.Array) -> Made:
    """A tenth of all batches has a NaN loss, in random clusters of 1 to 10."""
    return classification(key)


@task(steps=2000, bad=clusters(NAN_GRADIENTS))
def nan_gradients_clusters(key: jax.Array) -> Made:
    """A tenth of all batches has NaN gradients, in random clusters of 1 to 10."""
    return classification(key)


@task(bad=at(NAN_LOSS, *FIRST_STEPS))
def nan_loss_first_steps(key: jax.Array) -> Made:
    """Six of the first 20 batches have a NaN loss."""
    return classification(key)


@task(bad=at(NAN_GRADIENTS, *FIRST_STEPS))
def nan_gradients_first_steps(key: jax.Array) -> Made:
    """Six of the first 20 batches have NaN gradients."""
    return classification(key)


@task(steps=1500, bad=at(NAN_LOSS, *TWO_CLUSTERS))
def nan_loss_two_clusters(key: jax.Array) -> Made:
    """Three batches with a NaN loss, seven good ones, three bad ones again."""
    return classification(key)


@task(steps=1500, bad=at(NAN_GRADIENTS, *TWO_CLUSTERS))
def nan_gradients_two_clusters(key: jax.Array) -> Made:
    """Three batches with NaN gradients, seven good ones, three bad ones again."""
    return classification(key)


@task(bad=at(NAN_GRADIENTS, *range(25, 35)))
def nan_gradients_ten_in_a_row(key: jax.Array) -> Made:
    """Ten batches in a row have NaN gradients, around step 30."""
    return classification(key)


@task(steps=2000, bad=clusters(NAN_LOSS, NAN_GRADIENTS, INF_LOSS))
def bad_clusters_of_all_kinds(key: jax.Array) -> Made:
    """NaN losses, infinite losses and NaN gradients, a tenth of all batches."""
    return classification(key)


@task(steps=2000, bad=clusters(NAN_GRADIENTS))
def bad_clusters_tiny_gradients(key: jax.Array) -> Made:
    """Clusters of NaN gradients where the others are near 2^-24."""
    return classification(key, size=2.0**-20)


@task(steps=2000, bad=clusters(NAN_LOSS, NAN_GRADIENTS))
def bad_clusters_large_gradients(key: jax.Array) -> Made:
    """Clusters of bad batches where the gradients of the others are near 2^4."""
    return classification(key, size=2.0**7)


@task(steps=2000, max_norm=0.1, bad=clusters(NAN_LOSS, NAN_GRADIENTS))
def bad_clusters_clipped(key: jax.Array) -> Made:
    """Clusters of bad batches where `loss_scaled` clips, and so measures norms."""
    return classification(key)


@task(steps=2000, bad=clusters(NAN_LOSS, NAN_GRADIENTS))
def bad_clusters_fp16_loss(key: jax.Array) -> Made:
    """Clusters of bad batches where the loss is FP16 and limits the scale, too."""
    return field(key, 1e-2, half=True, total=False)


@task(steps=2000, timed=True, bad=every(NAN_GRADIENTS, 200, 4))
def bad_batches_shrinking_gradients(key: jax.Array) -> Made:
    """Clusters of NaN gradients while the others shrink by 2^20 during the run."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike, step: jax.Array) -> jax.Array:
        return classify(net, key, dtype, weight=2.0 ** (-step / 100))

    return dense(key, 16, 64, 8), loss
