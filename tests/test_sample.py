"""Small gradients are counted on a sample, the same elements in every front end."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buoy._core.step import BLOCK, SAMPLE, SMALL, sample_stride

SHAPES = [(700, 768), (3, 64, 59), (1000,), (64,), (7,), (), (0,), (5 * 64 * 5 + 63,)]
COUNT = sum(math.prod(shape) for shape in SHAPES)
STRIDE = sample_stride(COUNT)


def gradients():
    """Make gradients of all shapes: some zero, some small, some large."""
    rng = np.random.default_rng(3)
    made = []
    for shape in SHAPES:
        grad = np.exp2(rng.integers(-24, -8, size=shape).astype(np.float32))
        grad = grad * rng.choice([-1.0, 0.0, 1.0], size=shape)
        made.append(np.asarray(grad, np.float32))
    return made


def in_sample(grad, stride):
    """Return the elements that the definition names."""
    flat = grad.reshape(-1)
    return flat[np.arange(flat.size) % (BLOCK * stride) < BLOCK]


def share(grads, stride):
    """Count them by the definition."""
    sizes = np.abs(np.concatenate([in_sample(grad, stride) for grad in grads]))
    there = np.count_nonzero(sizes)
    small = np.count_nonzero(sizes[sizes > 0] < SMALL)
    return np.float32(small) / np.float32(there)


@given(st.integers(0, 10**13))
def test_the_sample_is_all_of_a_small_model_and_bounded_for_any(count):
    """It is at most `SAMPLE` elements, at least a fifth of that, and no more sparse."""
    stride = sample_stride(count)

    assert math.gcd(stride, 6) == 1
    assert (stride == 1) == (count <= SAMPLE)
    assert count / stride <= SAMPLE
    assert stride == 1 or count / stride > SAMPLE / 5


def test_the_sample_reaches_every_column():
    """A stride that shared a factor with the width would see the same columns only."""
    width, stride = 768, sample_stride(30_000_000)
    places = np.arange(1_000_000)
    seen = places[places % (BLOCK * stride) < BLOCK] % width

    assert len(np.unique(seen)) == width


def test_the_sample_is_not_the_whole_here():
    """Else the tests below would show nothing."""
    grads = gradients()

    assert STRIDE == 5
    assert share(grads, STRIDE) != share(grads, 1)


def test_torch_counts_that_sample():
    """On one device, and for gradients of two dtypes, in float64 bit for bit."""
    torch = pytest.importorskip("torch")
    from buoy._backends.torch.look import MEASURE
    from buoy._backends.torch.measure import sampled, small_share

    grads = [torch.tensor(grad) for grad in gradients()]
    home = torch.device("cpu")
    wide = [grad.double() for grad in grads[1:]]

    for grad in grads:
        got = torch.cat([torch.zeros(0), *map(torch.ravel, sampled(grad, STRIDE))])
        want = in_sample(grad.numpy(), STRIDE)
        assert sorted(got.tolist()) == sorted(want.tolist())
    assert small_share([grads], home).item() == share(gradients(), STRIDE)
    assert small_share([grads[:1], wide], home).item() == share(gradients(), STRIDE)
    assert MEASURE["underflow"](grads, torch.ones(())) == share(gradients(), STRIDE)
    assert small_share([grads[1:]], home).item() == share(gradients()[1:], 1)


def test_torch_counts_a_transposed_gradient_by_position():
    """Not by where its elements are in memory."""
    torch = pytest.importorskip("torch")
    from buoy._backends.torch.measure import small_share

    (grad, *_) = gradients()
    turned = torch.tensor(np.ascontiguousarray(grad.T)).T

    assert not turned.is_contiguous()
    got = small_share([[turned]], torch.device("cpu"))
    assert got.item() == share([grad], sample_stride(grad.size))


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_jax_counts_that_sample(jit):
    """In `buoy.jax` and for Keras, compiled or not."""
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    from buoy._backends.jax import MEASURE as KERAS
    from buoy.jax.survey import MEASURE

    grads = [jnp.asarray(grad) for grad in gradients()]
    for measure in (MEASURE["underflow"], KERAS["underflow"]):
        count = jax.jit(measure) if jit else measure
        assert count(grads, jnp.ones(())) == share(gradients(), STRIDE)
        # Gradients that are unscaled already are compared with the limit / the scale.
        unscaled = [grad / 16.0 for grad in grads]
        assert count(unscaled, jnp.full((), 16.0)) == share(gradients(), STRIDE)


@pytest.mark.parametrize("graph", [False, True])
def test_tensorflow_counts_that_sample(graph):
    """Eagerly and in a graph, also where a sparse gradient's length is not known."""
    tf = pytest.importorskip("tensorflow")
    from buoy._backends.tensorflow import MEASURE

    grads = [tf.constant(grad) for grad in gradients()]
    measure = MEASURE["underflow"]
    count = tf.function(measure, autograph=False) if graph else measure
    assert float(count(grads, tf.constant(1.0))) == share(gradients(), STRIDE)


@pytest.mark.parametrize("clip", [False, True])
def test_what_torch_reads_for_headroom(clip):
    """Each gradient once, and at every 16th turn a bounded sample.

    With clipping, twice in the first 16 turns and then in every third.
    """
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    from buoy.torch import GradScaler

    class Reads(TorchDispatchMode):
        """Counts the elements that reductions read."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            first = args[0] if args else None
            if name in ("aminmax", "linalg_vector_norm", "count_nonzero", "sum"):
                self.seen[name] += first.numel()
            elif name == "_foreach_norm":
                self.seen[name] += sum(grad.numel() for grad in first)
            return func(*args, **(kwargs or {}))

    shapes = [(1000, 1000), (37,)]
    count = 1000 * 1000 + 37
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = torch.optim.SGD(params, lr=0.0, fused=True)
    scaler = GradScaler("cpu", policy="headroom")
    seen = []
    for _ in range(33):
        scaler.scale(torch.ones((), requires_grad=True))
        for param in params:
            param.grad = torch.full_like(param, 1e-3)
        with Reads() as reads:
            reads.seen = Counter()
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        seen.append(reads.seen)

    stride = sample_stride(count)
    sample = len(in_sample(np.zeros(1000 * 1000), stride)) + 37
    for turn, reads in enumerate(seen):
        twice = clip and (turn < 16 or turn % 3 == 0)
        norms = count + len(shapes) if clip else 0
        assert reads["aminmax"] == (count if twice or not clip else 0)
        assert reads["_foreach_norm"] == (count if clip and not twice else 0)
        assert reads["linalg_vector_norm"] + reads["_foreach_norm"] == norms
        assert reads["count_nonzero"] == (2 * sample if turn % 16 == 15 else 0)
        assert reads["sum"] <= 8
    assert sample < SAMPLE < count
