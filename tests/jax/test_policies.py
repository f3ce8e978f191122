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
from buoy.jax import applied_of, loss_scaled, scale_of
from tests.golden import load

_TINY = 2.0**-126  # XLA flushes what is smaller


@functools.lru_cache(maxsize=4)
def scanner(policy, length):
    """Compile the front end over a sequence of gradients and losses."""
    tx = loss_scaled(optax.sgd(0.0), policy, history=1)

    @jax.jit
    def run(grads, losses):
        def body(state, row):
            grad, loss = row
            grad = grad * scale_of(state).astype(jnp.float32)
            _, state = tx.update(grad, state, value=loss)
            return state, (scale_of(state), applied_of(state))

        return jax.lax.scan(body, tx.init(jnp.ones(())), (grads, losses))[1]

    del length
    return run


@pytest.mark.parametrize("preset", sorted(load()))
def test_presets_keep_to_their_golden_traces(preset):
    """Through `loss_scaled`, jit and scan: the recorded scales of the real scaler."""
    traces = [
        trace
        for trace in load()[preset]
        if not trace.refused
        and trace.collapsed_at is None
        and trace.amax_log2 is None
        and trace.attempts is None
    ]
    by_params = {}
    for trace in traces:
        by_params.setdefault(str(sorted(trace.params.items())), trace)
    for trace in list(by_params.values())[:2]:
        policy = trace.policy()
        length = min(len(trace.seen), 256)
        with jax.enable_x64(policy.precision == "float64"):
            finite = np.array([event == "1" for event in trace.seen[:length]])
            pad = -length % 64
            grads = np.where(np.pad(finite, (0, pad)), 0.0, np.nan).astype(np.float32)
            run = scanner(policy, len(grads))
            scales, applied = run(grads, np.ones_like(grads))
        expected = np.asarray(trace.scales[:length])
        shown = np.asarray(scales[:length], np.float64)
        small = np.flatnonzero(expected < _TINY)
        until = int(small[0]) if small.size else length
        np.testing.assert_array_equal(
            shown[:until], expected[:until], f"{trace.case} {trace.params}"
        )
        if getattr(policy, "skip", True):
            assert finite[:until].tolist() == applied[:until].tolist()


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
    scales, _ = scanner(policy, len(events))(grads, np.array(losses))

    state, expected = policy.init(), []
    for i, (size, loss) in enumerate(zip(sizes, losses, strict=True)):
        before = policy.foresee(state, float(loss))
        scaled = np.float32(size * np.float32(state.scale))
        scaled = float(scaled * np.float32(before.scale / state.scale))
        seen = buoy.Seen(
            finite=not bad[i],
            amax_log2=float(np.log2(np.float32(scaled))) if not bad[i] else math.nan,
            underflow=float(scaled < 2.0**-20) if (i + 1) % 16 == 0 else math.nan,
        )
        state = policy.update(before, seen)
        expected.append(state.scale)
    assert expected == scales.tolist()
