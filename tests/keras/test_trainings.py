"""The trainings in Keras that judge a policy do what their names say."""

import pytest

from benchmarks.headroom import keras_trainings
from tests import short_trainings

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("changes", short_trainings.KINDS)
def test_a_training_skips_bad_batches_alone(changes, monkeypatch):
    """At a scale at which nothing overflows; and it learns what FP32 learns."""
    short_trainings.bad_batches_alone_are_skipped(keras_trainings, changes, monkeypatch)


def test_a_training_loses_gradients_and_overflows_in_hidden_tensors(monkeypatch):
    """All gradients at a tiny scale; at a large one, those of hidden tails first."""
    short_trainings.gradients_are_lost(keras_trainings, monkeypatch)
    short_trainings.hidden_tails_overflow(keras_trainings, monkeypatch)
