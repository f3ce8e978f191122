"""The optimizer follows golden traces; TensorFlow computes those of every preset.

torch and JAX are held to all of them by tests/test_conformance_arrays.py.
"""

import math
import random

import numpy as np
import pytest

import buoy
from buoy._core.formats import FLOAT32_TINY
from buoy._core.ops import ops_of
from buoy._core.state import map_state
from tests.golden import load
from tests.keras.nets import BACKEND, Loop, scaled
from tests.test_backends import histories, seen_of

of_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="of TensorFlow")
STEPS = 40
SAMPLE = 3  # traces of each preset
PEERS = ["cerebras", "flax", "jmp", "keras", "megatron", "mpx", "tf_keras", "torch"]
WIDE = ["apex", "deepspeed", "mxnet", "nnabla"]  # in float64


def chosen(preset, precision="float32"):
    """Choose some traces, always the same ones."""
    traces = [t for t in load()[preset] if not t.refused]
    traces = [t for t in traces if t.policy().precision == precision]
    # TensorFlow flushes subnormal numbers; front ends stop the scale at 2^-24.
    traces = [t for t in traces if min(t.scales) >= FLOAT32_TINY]
    return random.Random(0).sample(traces, min(SAMPLE, len(traces)))


PRESETS = [preset for preset in sorted(load()) if chosen(preset)]


def run(policy, finite, amax):
    """Run a policy over events, in one graph with a loop; return the scales."""
    import tensorflow as tf

    from buoy._backends.tensorflow import lift, ops

    start = map_state(lift, policy.init())
    kind = type(start)
    names = [name for name in kind.__slots__ if getattr(start, name) is not None]

    def step(values, event):
        state = kind(**dict(zip(names, values, strict=True)))
        seen = buoy.Seen(finite=event[0])
        if amax is not None:
            seen = buoy.Seen(event[0], event[1] + ops().log2(state.scale))
        state = policy.update(state, seen, ops=ops())
        return [getattr(state, name) for name in names]

    @tf.function(autograph=False)
    def scan(finite, amax):
        first = [getattr(start, name) for name in names]
        return tf.scan(step, (finite, amax), first)[names.index("scale")]

    sizes = np.zeros(len(finite)) if amax is None else amax
    return scan(np.asarray(finite), np.asarray(sizes, "float32")).numpy()


@pytest.mark.parametrize("preset", PEERS + (WIDE if BACKEND == "torch" else []))
def test_the_optimizer_follows_its_peers(preset):
    """Gradients that overflow where the peer's did move the scale as they moved it."""
    traces = chosen(preset, "float64" if preset in WIDE else "float32")
    trace = max(traces, key=lambda trace: trace.seen[:STEPS].count("0"))
    finite = [event == "1" for event in trace.seen[:STEPS]]
    loop, scales = Loop(scaled(trace.policy()), size=1), []
    for good in finite:
        loop.apply([1.0 if good else math.inf])
        scales.append(loop.optimizer.scale)

    ends = [end for end in trace.ends if end < len(finite)]
    assert [scales[end] for end in ends] == trace.scales[: len(ends)]
    assert 0 < finite.count(False)
    assert np.isfinite(loop.weight).all()


@of_tensorflow
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_reproduce_their_peers(preset):
    """Each sequence yields exactly its recorded scales."""
    for trace in chosen(preset):
        finite = [event == "1" for event in trace.seen]
        scales = run(trace.policy(), finite, trace.amax_log2)[trace.ends]
        np.testing.assert_array_equal(scales.astype(float), trace.scales)


@of_tensorflow
@pytest.mark.parametrize("jit", [False, True])
def test_our_own_policies_agree_with_plain_numbers(jit):
    """Headroom and the others, eagerly in a graph and under XLA."""
    import tensorflow as tf

    from buoy._backends.tensorflow import lift, ops

    for policy in (buoy.Headroom(), buoy.Backoff(growth_interval=3, hysteresis=2)):
        state, plain = map_state(lift, policy.init()), policy.init()
        kind, names = type(state), type(state).__slots__

        @tf.function(jit_compile=jit, autograph=False)
        def step(values, event, policy=policy, kind=kind, names=names):
            made = kind(**dict(zip(names, values, strict=True)))
            made = policy.foresee(made, event[3], ops=ops())
            made = policy.update(made, seen_of(policy, event), ops=ops())
            return [getattr(made, name) for name in names]

        values = [getattr(state, name) for name in names]
        for event in histories(1, 100)[0]:
            values = step(values, [lift(x) for x in event])
            plain = policy.update(
                policy.foresee(plain, event[3]), seen_of(policy, event)
            )
            assert float(values[names.index("scale")]) == plain.scale


@of_tensorflow
def test_ops_are_found_by_type_and_exact_at_powers_of_two():
    """Eager and symbolic tensors; the whole range of normal numbers."""
    import tensorflow as tf

    from buoy._backends.tensorflow import lift, ops

    assert ops_of(lift(1.0)) is ops()
    found = []
    tf.function(lambda x: found.append(ops_of(x)))(lift(1.0))
    assert found == [ops()]
    powers = [float(power) for power in range(-126, 128)]
    assert ops().exp2(tf.constant(powers)).numpy().tolist() == [2.0**p for p in powers]
    logs = ops().log2(tf.constant([2.0**p for p in powers])).numpy().tolist()
    assert logs == powers
    assert ops().log2(tf.constant([0.0, math.inf])).numpy().tolist() == [
        -math.inf,
        math.inf,
    ]
