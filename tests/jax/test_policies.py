"""Every policy and preset moves the scale under jit as it does on plain numbers."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import buoy
from buoy._core.bounds import bounds_of
from buoy.jax import applied_of, loss_scaled, scale_of
from tests.golden import load, presets

_LARGE = float(np.finfo(np.float32).max)


def scanned(tx, grads, losses, starts):
    """Run the front end over gradients and losses, from a fresh state where told."""
    first = tx.init(jnp.ones(()))

    def body(state, row):
        grad, loss, start = row
        state = jax.tree.map(lambda a, b: jnp.where(start, a, b), first, state)
        grad = grad * jnp.minimum(scale_of(state), _LARGE).astype(jnp.float32)
        _, state = tx.update(grad, state, value=loss)
        collapsed = getattr(state.scaling, "collapsed", None)  # None: it never does
        gave_up = jnp.asarray(False if collapsed is None else collapsed)
        return state, (scale_of(state), applied_of(state), gave_up)

    return jax.lax.scan(body, first, (grads, losses, starts))[1]


@functools.cache
def runner(*policies):
    """Compile several policies at once: one program costs less than many."""
    txs = [loss_scaled(optax.identity(), policy, history=1) for policy in policies]

    def run(grads, losses, starts):
        rows = zip(txs, grads, losses, starts, strict=True)
        return [scanned(*row) for row in rows]

    return jax.jit(run, compiler_options=QUICKLY)


# Hundreds of programs for a few steps each: to compile them is what takes time.
# test_conformance_arrays.py runs the same traces through the policies as users compile.
QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}


def by_policy(preset):
    """Group the traces that share a policy."""
    found = {}
    for trace in load()[preset]:
        if not trace.refused:
            found.setdefault(trace.policy(), []).append(trace)
    return list(found.items())


def needs_x64(policy):
    """Say whether a policy computes in float64, if only inside."""
    tx = loss_scaled(optax.identity(), policy)
    zero = jnp.zeros(())
    try:
        jax.eval_shape(tx.update, zero, tx.init(zero))
    except buoy.PolicyError:
        return True
    return False


TOGETHER = 12  # policies in a program


@pytest.mark.slow
@pytest.mark.parametrize("preset", presets())
def test_presets_keep_to_their_golden_traces(preset):
    """Every trace through `loss_scaled`, jit and scan: the real scaler's own scales."""
    for wide in (False, True):
        held = [item for item in by_policy(preset) if needs_x64(item[0]) == wide]
        for i in range(0, len(held), TOGETHER):
            with jax.enable_x64(wide):
                follow(held[i : i + TOGETHER])


def follow(held):
    """Run these policies over their traces, end to end, and compare each."""
    lengths = [sum(len(trace.seen) for trace in traces) for _, traces in held]
    grads = np.zeros((len(held), max(lengths)), np.float32)
    starts = np.zeros(grads.shape, bool)
    for row, (_, traces) in enumerate(held):
        at = 0
        for trace in traces:
            seen = np.array([event == "1" for event in trace.seen])
            sizes = 0.0 if trace.amax_log2 is None else np.exp2(trace.amax_log2)
            grads[row, at : at + len(seen)] = np.where(seen, sizes, np.nan)
            starts[row, at] = True
            at += len(seen)
    ran = runner(*(policy for policy, _ in held))(grads, np.ones_like(grads), starts)
    for (policy, traces), told in zip(held, ran, strict=True):
        at = 0
        for trace in traces:
            part = slice(at, at + len(trace.seen))
            assert_same(policy, trace, *(np.asarray(x)[part] for x in told))
            at = part.stop


def assert_same(policy, trace, scales, applied, collapsed):
    """Compare one trace, up to where the peer gave up or left the bounds of a scale."""
    ends, bounds = np.array(trace.ends, int), bounds_of(policy)
    expected, shown = np.asarray(trace.scales), scales[ends].astype(np.float64)
    assert np.all((shown >= bounds.low) & (shown <= bounds.high))
    inside = (expected >= bounds.low) & (expected <= bounds.high)  # NaN is not
    beyond = np.flatnonzero(~inside)
    until = int(beyond[0]) if beyond.size else len(ends)
    what = f"{trace.case} {trace.params}"
    if trace.amax_log2 is None:
        np.testing.assert_array_equal(shown[:until], expected[:until], what)
    else:  # a measured size is a float32, those of the traces are not
        np.testing.assert_allclose(shown[:until], expected[:until], 1e-4, err_msg=what)
    finite = np.array([event == "1" for event in trace.seen])[ends]
    np.testing.assert_array_equal(applied[ends], finite, what)
    flagged = np.flatnonzero(collapsed)
    if beyond.size:
        return
    if trace.collapsed_at is None:
        assert not flagged.size, what
    else:
        assert trace.collapsed_at == flagged[-1 if trace.go_on else 0], what


EVENTS = st.lists(
    st.tuples(
        st.floats(-40, 20), st.floats(-10, 10), st.sampled_from(["fine"] * 6 + ["nan"])
    ),
    min_size=24,
    max_size=24,
)


@given(EVENTS)
@settings(max_examples=30)
def test_headroom_under_jit_equals_headroom_on_plain_numbers(events):
    """Largest gradient and loss, seen by the front end, give the same scales."""
    policy = buoy.Headroom()
    sizes = [np.float32(2.0**a) for a, _, _ in events]
    losses = [np.float32(2.0**b) for _, b, _ in events]
    bad = [kind == "nan" for _, _, kind in events]
    grads = np.where(bad, np.float32(np.nan), np.array(sizes))
    starts = np.zeros(len(events), bool)
    rows = (np.array(row)[None] for row in (grads, losses, starts))
    [(scales, _, _)] = runner(policy)(*rows)

    state, expected = policy.init(), []
    for i, (size, loss) in enumerate(zip(sizes, losses, strict=True)):
        before = policy.foresee(state, float(loss))
        scaled = np.float32(size * np.float32(state.scale))
        scaled = float(scaled * np.float32(before.scale / state.scale))
        small = float(scaled < 2.0**-20 and not bad[i])  # a NaN is not small
        seen = buoy.Seen(
            finite=not bad[i],
            amax_log2=float(np.log2(np.float32(scaled))) if not bad[i] else math.nan,
            underflow=small if (i + 1) % 16 == 0 else math.nan,
        )
        state = policy.update(before, seen)
        expected.append(state.scale)
    assert expected == scales.tolist()
