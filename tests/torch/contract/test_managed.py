"""`managed=True`: a training library calls the scaler, and `update` more than once."""

import copy
import math
import subprocess
import sys
from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from nets import OPTIMIZERS, loss_of, net, spoil

import buoy
from buoy.torch import CallOrderError, GradScaler, OptionError

START = {"init_scale": 64.0, "growth_interval": 2}


class Pair:
    """Two models with an optimizer each, and one scaler for both."""

    def __init__(self, kind="adamw", **options):
        self.models = net(1), net(2)
        self.optimizers = [OPTIMIZERS[kind](m.parameters()) for m in self.models]
        self.scaler = GradScaler("cpu", **START, **options)

    def backward(self, step, bad=()):
        """Leave scaled gradients in both models, those of `bad` with an inf."""
        for index, model in enumerate(self.models):
            self.optimizers[index].zero_grad()
            self.scaler.scale(loss_of(model, step)).backward()
            if index in bad:
                spoil(model, "inf", 0)

    def weights(self):
        """Return a copy of all weights."""
        return [p.detach().clone() for m in self.models for p in m.parameters()]


def same(left, right):
    """Compare two lists of tensors, bit for bit."""
    return all(map(torch.equal, left, right))


@pytest.mark.parametrize("kind", ["sgd", "adamw", "fused adamw", "fused momentum"])
@settings(max_examples=20, deadline=None)
@given(
    bads=st.lists(st.sets(st.sampled_from([0, 1])), min_size=1, max_size=6),
    twice=st.booleans(),
)
def test_an_update_after_each_optimizer_ends_as_one_update_after_both(
    kind, bads, twice
):
    """Weights, scale and counters, wherever the overflows are."""
    ours, plain = Pair(kind, managed=True), Pair(kind)
    for step, bad in enumerate(bads):
        for run in (ours, plain):
            run.backward(step, bad)
        for optimizer in ours.optimizers:
            for _ in range(2 if twice else 1):
                ours.scaler.unscale_(optimizer)
            ours.scaler.step(optimizer)
            ours.scaler.update()
        for optimizer in plain.optimizers:
            if twice:
                plain.scaler.unscale_(optimizer)
            plain.scaler.step(optimizer)
        plain.scaler.update()
    assert same(ours.weights(), plain.weights())
    assert ours.scaler.state_dict() == plain.scaler.state_dict()


@pytest.mark.parametrize(
    ("kind", "clip", "bad"),
    list(product(["sgd", "fused adamw"], [False, True], [0, 1])),
)
def test_an_optimizer_is_called_only_for_applied_steps(kind, clip, bad):
    """That is how a library sees that a step was skipped."""
    run, called = Pair(kind, managed=True), []
    for index, optimizer in enumerate(run.optimizers):
        optimizer.register_step_post_hook(lambda *_, index=index: called.append(index))
    run.backward(0, [bad])
    for optimizer in run.optimizers:
        if clip:
            run.scaler.clip_grad_norm_(optimizer, 1.0)
        run.scaler.step(optimizer)
        run.scaler.update()
    assert called == [1 - bad]
    outcomes = [run.scaler.last_step_of(one).applied for one in run.optimizers]
    assert outcomes == [bad == 1, bad == 0]


FLUSHES = {
    "scale": lambda run: run.scaler.scale(torch.ones(())),
    "get_scale": lambda run: run.scaler.get_scale(),
    "state_dict": lambda run: run.scaler.state_dict(),
    "copy": lambda run: copy.deepcopy(run.scaler),
    "close": lambda run: run.scaler.trace.close(),
}


@pytest.mark.parametrize("how", FLUSHES)
def test_a_deferred_update_is_carried_out(how, tmp_path):
    """By each of these; before, the scale stands still and gates are closed."""
    moved = []
    run = Pair("sgd", managed=True, trace=tmp_path / "run.buoy")
    run.scaler.gate(lambda: moved.append(1))
    run.backward(0)
    for optimizer in run.optimizers:
        run.scaler.step(optimizer)
        run.scaler.update()
        run.scaler.update()
    assert not moved
    FLUSHES[how](run)
    assert moved == [1]
    run.scaler.trace.close()
    assert len(buoy.trace.load(tmp_path / "run.buoy").rows) == 1


def test_the_scale_of_the_next_loss_is_the_new_one():
    """The deferred update comes first."""
    run = Pair("sgd", managed=True)
    run.backward(0, bad=[0])
    for optimizer in run.optimizers:
        run.scaler.step(optimizer)
        run.scaler.update()
    assert run.scaler.scale(torch.ones(())).item() == 32.0


def test_a_second_step_without_a_loss_is_refused():
    """The deferred update has moved the scale; these gradients have the old one."""
    run = Pair("sgd", managed=True)
    run.backward(0)
    run.scaler.step(run.optimizers[0])
    run.scaler.update()
    with pytest.raises(CallOrderError, match="No loss was scaled since"):
        run.scaler.step(run.optimizers[0])


def test_unscaling_after_the_step_of_the_same_iteration_does_nothing():
    """Accelerate unscales all optimizers before it clips one."""
    run, plain = Pair("sgd", managed=True), Pair("sgd")
    for each in (run, plain):
        each.backward(0)
    first, second = run.optimizers
    run.scaler.step(first)
    run.scaler.update()
    for optimizer in (first, second):
        run.scaler.unscale_(optimizer)
    run.scaler.step(second)
    run.scaler.update()
    for optimizer in plain.optimizers:
        plain.scaler.step(optimizer)
    assert same(run.weights(), plain.weights())


def test_an_update_without_a_step_is_refused_at_once():
    """Not at the next loss, where the cause could no longer be seen."""
    run = Pair(managed=True)
    run.backward(0)
    with pytest.raises(CallOrderError, match="No inf checks were recorded"):
        run.scaler.update()


def test_a_new_scale_is_set_at_once():
    """It replaces the deferred update."""
    run = Pair(managed=True)
    run.backward(0)
    run.scaler.step(run.optimizers[0])
    run.scaler.update()
    run.scaler.update(8.0)
    assert run.scaler.get_scale() == 8.0
    run.backward(1)


def test_a_loaded_state_replaces_a_deferred_update():
    """Whatever was deferred belongs to the state before."""
    run = Pair(managed=True)
    saved = {**run.scaler.state_dict(), "scale": 4.0}
    run.backward(0, bad=[0])
    run.scaler.step(run.optimizers[0])
    run.scaler.update()
    run.scaler.load_state_dict(saved)
    assert run.scaler.get_scale() == 4.0


def test_rerunning_a_batch_moves_the_scale_between_attempts(loop):
    """`run` needs the update before it tries again."""
    scaler, weight, optimizer = loop("sgd", torch.ones(2), lr=0.1, managed=True)

    def backward():
        loss = weight.half().sum()  # its gradient fits up to 2^15
        scaler.scale(loss.float()).backward()

    for _ in range(2):
        scaler.run(backward, optimizer)
        assert scaler.last_step.applied
        assert scaler.get_scale() == 2.0**15
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()  # deferred
    scaler.run(backward, optimizer)
    assert scaler.last_step.applied


def test_managed_does_not_work_without_host_reads():
    """One of the two must go."""
    with pytest.raises(OptionError, match="managed"):
        GradScaler("cpu", managed=True, sync="never")


def test_without_it_gradients_of_an_earlier_scale_are_refused():
    """`step(A); update(); step(B)` divides B's gradients by another scale."""
    run = Pair("sgd")
    run.backward(0, bad=[0])
    run.scaler.step(run.optimizers[0])
    run.scaler.update()
    before = run.weights()
    with pytest.raises(CallOrderError, match="managed=True"):
        run.scaler.step(run.optimizers[1])
    assert same(before, run.weights())


def test_a_loss_that_compiled_code_scaled_is_not_refused(loop):
    """Though an eager iteration came before it."""
    scaler, weight, optimizer = loop("sgd", torch.ones(2), lr=0.1, init_scale=64.0)
    scaled = torch.compile(lambda: scaler.scale(weight.sum()), backend="eager")
    for loss in (lambda: scaler.scale(weight.sum()), scaled):
        optimizer.zero_grad()
        loss().backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step.applied


@pytest.mark.slow
def test_a_deferred_update_is_carried_out_at_exit(tmp_path):
    """Gates are opened and the trace is complete."""
    script = """
import sys, torch
from buoy.torch import GradScaler
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
scaler = GradScaler("cpu", managed=True, trace=sys.argv[1])
scaler.gate(lambda: print("moved"))
for _ in range(3):
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
"""
    path = tmp_path / "run.buoy"
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["moved"] * 3
    assert len(buoy.trace.load(path).rows) == 3


def with_a_deferred_skip():
    """Make a scaler whose update after an overflow has not been carried out."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0, managed=True)
    scaler.scale(weight.sum() * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler


def test_a_setter_counts_from_the_next_iteration_on():
    """A deferred update is carried out first."""
    scaler = with_a_deferred_skip()

    scaler.set_backoff_factor(0.25)

    assert 4.0 == scaler.get_scale()


def test_a_scale_set_by_hand_follows_a_deferred_update():
    """The skipped step is not lost."""
    scaler = with_a_deferred_skip()

    scaler.update(64.0)

    assert "scale=64, applied=0, skipped=1" in repr(scaler)
