"""The recipe that drops single micro-batches (docs/guides/accumulation.md)."""

import math

import pytest
import torch
from nets import OPTIMIZERS, loss_of, net

from buoy.torch import GradScaler
from tests.pages import recipe

N = 8  # micro-batches


def set_up(kind, policy=None):
    """Run the recipe's block, and give it a network of these tests."""
    model, page = net(), recipe("guides/accumulation.md", "accumulate")
    page["model"] = model
    page["optimizer"] = OPTIMIZERS[kind](model.parameters())
    page["scaler"] = GradScaler("cpu", policy=policy)
    page["whole"] = GradScaler("cpu", policy="none")
    return page


def accumulate(page, bad=()):
    """Accumulate the micro-batches and step; return how many were good."""
    losses = (
        loss_of(page["model"], number) * (math.inf if number in bad else 1.0)
        for number in range(N)
    )
    good = page["accumulate"](losses)
    page["whole"].step(page["optimizer"])
    page["whole"].update()
    return good


@pytest.mark.parametrize("policy", [None, "headroom"])
@pytest.mark.parametrize("kind", ["sgd", "adamw", "fused adamw"])
def test_the_good_micro_batches_make_the_step(kind, policy):
    """It is the step of a plain loop over their mean."""
    page, twin = set_up(kind, policy), net()
    other = OPTIMIZERS[kind](twin.parameters())

    assert N - 2 == accumulate(page, bad={2, 5})
    for number in set(range(N)) - {2, 5}:
        (loss_of(twin, number) / (N - 2)).backward()
    other.step()

    assert page["whole"].last_step.applied
    for mine, theirs in zip(page["model"].parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_scale_falls_with_each_bad_micro_batch():
    """And is the next micro-batch's."""
    page = set_up("sgd")

    accumulate(page, bad={2, 5})

    assert 2.0**14 == page["scaler"].get_scale()


@pytest.mark.parametrize("kind", ["sgd", "fused adamw"])
def test_a_step_without_a_good_micro_batch_is_skipped(kind):
    """The weights stay, and the next step is applied."""
    page = set_up(kind)
    before = [param.detach().clone() for param in page["model"].parameters()]

    assert 0 == accumulate(page, bad=range(N))

    assert not page["whole"].last_step.applied
    assert all(map(torch.equal, before, page["model"].parameters()))
    assert N == accumulate(page)
    assert page["whole"].last_step.applied
