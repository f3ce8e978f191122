"""How many Python calls an iteration makes in Buoy: what a tiny model pays for.

Counts do not depend on the machine, so they can be held where times cannot.
Run as a script it prints them: `python tests/torch/test_calls.py`.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.amp import grad_scaler

import buoy
from buoy.torch import GradScaler

PLACES = (str(Path(buoy.__file__).parent), grad_scaler.__file__)
WARM_UP, COUNTED = 40, 20
MOST = {"plain": 68, "clipped": 111}  # Python 3.11; later ones inline comprehensions


def calls_of(work):
    """Count the calls of functions in Buoy and in torch's scaler, by name."""
    seen = Counter()

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(PLACES):
            seen[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen


def iteration(kind, scaler_class=GradScaler):
    """Make one iteration of a tiny model: 20 tensors of 100 elements."""
    params = [torch.nn.Parameter(torch.randn(100)) for _ in range(20)]
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=False)
    scaler = scaler_class("cpu")

    def iterate():
        optimizer.zero_grad()
        loss = torch.stack([param.square().sum() for param in params]).sum()
        scaler.scale(loss).backward()
        if kind == "clipped":
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return iterate


def counts(kind):
    """Count each of some iterations, once everything that happens once has happened."""
    iterate = iteration(kind)
    for _ in range(WARM_UP):
        iterate()
    return [calls_of(iterate) for _ in range(COUNTED)]


@pytest.mark.parametrize("kind", MOST)
def test_an_iteration_makes_no_more_calls_than_it_did(kind):
    """Every one of them, not their mean."""
    for seen in counts(kind):
        assert seen.total() <= MOST[kind], seen.most_common()


def test_calls_are_counted():
    """The test above can fail: torch's scaler makes calls too, and is counted."""
    iterate = iteration("plain", torch.amp.GradScaler)
    iterate()

    seen = calls_of(iterate)

    assert {"GradScaler.scale", "GradScaler.step", "GradScaler.update"} <= set(seen)
    assert 1 == seen["GradScaler.step"]


if __name__ == "__main__":
    for kind, most in MOST.items():
        found = counts(kind)
        sizes = sorted({seen.total() for seen in found})
        print(f"{kind}: {sizes} calls per iteration, at most {most}")  # noqa: T201
        for name, count in found[0].most_common():
            print(f"  {count:3d} {name}")  # noqa: T201
