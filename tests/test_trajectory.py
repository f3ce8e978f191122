"""One history, one trajectory: every front end and replay make the same of it.

A history is what happened at each step: unscaled gradients and the loss.  A front end
is one function, `run(history, policy)`, which returns the scale that each step used and
whether it was applied.  To add one, write its function and put it into `FRONT_ENDS`.
Those that clip take `clips=True`.
"""

import math
import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import pytest

import buoy
from buoy._core.ops import PLAIN
from buoy._core.step import MEASUREMENTS, SMALL, Measurement, decide, schedule

LARGEST, SMALLEST = 65504.0, 2.0**-25  # FP16's range; what is below rounds to zero
SPREAD = (0, 3, 9, 14, 18, 21, 24, 28)  # binades below the largest gradient


class Event(NamedTuple):
    """What happened at one step."""

    grads: tuple[float, ...]  # unscaled
    loss: float | None  # None: the front end does not get it

    @property
    def amax(self) -> float:
        """The largest magnitude; NaN wins."""
        if any(math.isnan(grad) for grad in self.grads):
            return math.nan
        return max(map(abs, self.grads))


History = Sequence[Event]
Ran = list[tuple[float, bool]]  # scale used, applied


@cache
def history(steps: int = 320, seed: int = 6) -> tuple[Event, ...]:
    """Invent one: drifts, jumps, spikes with their losses, inf, NaN, zeros, rows."""
    rng = random.Random(seed)
    level, made = -6, []
    for step in range(steps):
        if rng.random() < 0.08:
            level = max(-16, min(4, level + rng.choice((-4, -2, -1, 1, 2, 5))))
        spike = 6 if rng.random() < 0.04 else 0
        loss = 2.0 ** (level // 2 + (spike if rng.random() < 0.7 else 0))
        top = level + spike
        grads = tuple(math.ldexp(1.25, top - lower) for lower in SPREAD)
        event = rng.random()
        if event < 0.04 or 100 <= step < 104:
            bad = rng.choice((math.inf, -math.inf, math.nan))
            grads = (*grads[:3], bad, *grads[4:])
        elif event < 0.08 or 200 <= step < 205:
            grads = (0.0,) * len(grads)
        if event < 0.01:
            loss = math.nan
        made.append(Event(grads, loss))
    return tuple(made)


def uneven() -> list[Event]:
    """Return a history whose largest gradients differ in their distance to the norm."""
    return [
        event._replace(grads=(event.grads[0] / 2 ** (7 * step % 4), *event.grads[1:]))
        for step, event in enumerate(history())
    ]


def in_range(scaled: float) -> float:
    """Give a number as a format of FP16's range, and of any precision, holds it."""
    if math.isnan(scaled) or abs(scaled) > LARGEST:
        return math.nan if math.isnan(scaled) else math.copysign(math.inf, scaled)
    return scaled if abs(scaled) >= SMALLEST else 0.0


def run_plain(events: History, policy: Any, *, clips: bool = False) -> Ran:
    """Run the core's own step on Python numbers: what all others must do."""
    state, ran = policy.init(), []
    wanted = schedule(policy.wants, clips=clips)
    for turn, event in enumerate(events):
        usable = None if event.loss is None else math.isfinite(event.loss)
        if "loss" in policy.wants and event.loss is not None:
            state = policy.foresee(state, event.loss, ops=PLAIN)
        grads = [in_range(grad * state.scale) for grad in event.grads]
        there = [abs(grad) for grad in grads if grad]
        small = sum(size < SMALL for size in there)
        sizes = {
            "amax_log2": PLAIN.log2(Event(tuple(grads), 0.0).amax),
            "underflow": small / len(there) if there else math.nan,
        }
        seen = buoy.Seen(
            finite=all(map(math.isfinite, grads)),
            loss_finite=usable if "loss_finite" in policy.wants else None,
            **{name: sizes[name] for name, one in wanted.items() if one.due(turn)},
        )
        decided = decide(policy, state, seen, inverse=1.0 / state.scale, ops=PLAIN)
        ran.append((state.scale, decided.applied))
        state = decided.state
    return ran


def run_replay(events: History, policy: Any) -> Ran:
    """Replay a trace of the same sizes, losses and histograms."""
    sizes = [event.amax for event in events]
    trace = buoy.Trace(
        amax_log2=[PLAIN.log2(size) for size in sizes],
        loss_log2=[PLAIN.log2(event.loss) for event in events],
        weight_histograms=[
            buoy.Histogram(step, *_binades(event))
            for step, event in enumerate(events)
            if 0.0 < sizes[step] < math.inf
        ],
    )
    (result,) = buoy.replay(trace, [policy])
    skips = set(result.skips)
    return [
        (PLAIN.exp2(log2), step not in skips)
        for start, end, log2 in result.scales()
        for step in range(start, end)
    ]


def _binades(event: Event) -> tuple[int, list[int]]:
    exponents = [math.frexp(grad)[1] - 1 for grad in event.grads]
    low, high = min(exponents), max(exponents)
    return low, [exponents.count(binade) for binade in range(low, high + 1)]


def run_jax(events: History, policy: Any, *, clips: bool = False) -> Ran:
    """Run `loss_scaled` under jit, with x64 only where the policy asks for it."""
    jax = pytest.importorskip("jax")
    try:
        return _run_jax(events, policy, clips=clips)
    except buoy.PolicyError:
        with jax.enable_x64(True):
            return _run_jax(events, policy, clips=clips)


def _run_jax(events: History, policy: Any, *, clips: bool) -> Ran:
    import jax
    import jax.numpy as jnp
    import optax

    from buoy.jax import Feed, loss_scaled, value_and_grad

    @jax.custom_vjp
    def carries(weights, grads):
        """Give 0; its gradient is `grads`, times the scale, in the format's range."""
        return jnp.zeros((), jnp.float32)

    def backward(grads, scale):
        scaled = grads * scale
        scaled = jnp.where(jnp.abs(scaled) < SMALLEST, 0.0, scaled)
        return jnp.where(jnp.abs(scaled) > LARGEST, jnp.inf, scaled), None

    carries.defvjp(lambda weights, grads: (carries(weights, grads), grads), backward)
    limit = 1.0 if clips else None
    tx = loss_scaled(optax.sgd(0.0), policy, history=len(events), max_norm=limit)
    weights = jnp.zeros(len(SPREAD), jnp.float32)

    def step(state, event):
        grads, loss = event
        loss, grads = value_and_grad(lambda w: loss + carries(w, grads))(state, weights)
        return tx.update(grads, state, weights, value=loss)[1], None

    rows = (
        jnp.asarray([event.grads for event in events], jnp.float32),
        jnp.asarray([event.loss for event in events], jnp.float32),
    )
    state, _ = jax.jit(lambda state, rows: jax.lax.scan(step, state, rows))(
        tx.init(weights), rows
    )
    kept = _Kept()
    feed = Feed(kept, on_stuck=lambda stuck: None)
    feed(state)
    feed.flush()
    return kept.ran


class _Kept:
    """A recorder that keeps what the comparison needs."""

    def __init__(self) -> None:
        self.ran: Ran = []

    def step(self, *, scale: float, applied: bool, **rest: Any) -> None:
        """Keep one step."""
        self.ran.append((scale, applied))


def run_torch(
    events: History,
    policy: Any,
    *,
    fused: bool = False,
    compiled: bool = False,
    clips: bool = False,
    **options: Any,
) -> Ran:
    """Run `GradScaler`, with gradients that leave a backward pass in FP16's range."""
    torch = pytest.importorskip("torch")
    from buoy.torch import GradScaler

    class Carries(torch.autograd.Function):
        """Give 0; its gradient is `grads`, times the scale, in the format's range."""

        @staticmethod
        def forward(ctx: Any, weights: Any, grads: Any) -> Any:
            ctx.save_for_backward(grads)
            return weights.new_zeros(())

        @staticmethod
        def backward(ctx: Any, scale: Any) -> Any:
            (grads,) = ctx.saved_tensors
            scaled = grads * scale
            scaled = torch.where(scaled.abs() < SMALLEST, 0.0, scaled)
            return torch.where(scaled.abs() > LARGEST, math.inf, scaled), None

    weights = torch.nn.Parameter(torch.zeros(len(SPREAD)))
    optimizer = torch.optim.SGD([weights], lr=0.0, fused=fused)
    scaler = GradScaler("cpu", policy=policy, on_stuck=lambda stuck: None, **options)

    def forward(loss: Any, grads: Any) -> Any:
        return scaler.scale(loss + Carries.apply(weights, grads))

    def finish() -> None:
        if clips:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    if compiled:
        torch._dynamo.reset()
        compiler = torch.compile(backend="eager", fullgraph=True)
        forward, finish = compiler(forward), compiler(finish)
    ran = []
    for event in events:
        optimizer.zero_grad()
        forward(torch.tensor(event.loss), torch.tensor(event.grads)).backward()
        finish()
        ran.append((scaler.last_step.scale, scaler.last_step.applied))
    assert torch.isfinite(weights).all()
    return ran


FRONT_ENDS: dict[str, Callable[..., Ran]] = {
    "replay": run_replay,
    "jax": run_jax,
    "torch": run_torch,
    "torch, fused": partial(run_torch, fused=True),
    "torch, sync never": partial(run_torch, sync="never"),
    "torch, compiled": partial(run_torch, sync="never", compiled=True),
}

POLICIES = {
    "headroom": buoy.policy("headroom"),
    "backoff": buoy.Backoff(growth_interval=20),
    "lognormal": buoy.policy("lognormal"),
    "static": buoy.policy("static", init_scale=2.0**13),
    "none": buoy.policy("none"),
    "torch": buoy.policy("torch", growth_interval=25),
    "apex": buoy.policy("apex", scale_window=20),
    "apex, static": buoy.policy("apex", loss_scale=2.0**12),
    "tf_keras, static": buoy.policy("tf_keras", dynamic=False),
    "deepspeed": buoy.policy("deepspeed", scale_window=20),
    "megatron": buoy.policy("megatron", initial_scale=2.0**20, growth_interval=20),
    "colossalai": buoy.policy("colossalai", growth_interval=15),
    "nemo": buoy.policy("nemo", growth_interval=20, hysteresis=2),
    "flax": buoy.policy("flax", growth_interval=20),
    "jmp": buoy.policy("jmp", period=20),
    "keras": buoy.policy("keras", dynamic_growth_steps=20),
    "tf": buoy.policy("tf", increment_period=20),
    "paddle": buoy.policy("paddle", incr_every_n_steps=20, decr_every_n_nan_or_inf=2),
}


def marked(names: Sequence[str]) -> list[Any]:
    """Mark what takes seconds: compiling."""
    slow = pytest.mark.slow
    return [pytest.param(n, marks=slow) if "compiled" in n else n for n in names]


def every_pair() -> list[Any]:
    """List front ends with policies; `make test` compiles two of the policies."""
    pairs = [(front_end, name) for front_end in FRONT_ENDS for name in POLICIES]
    return [pytest.param(*pair, marks=marks_of(*pair)) for pair in pairs]


def marks_of(front_end: str, name: str) -> Any:
    """Mark what compiles a step for one policy more."""
    if "compiled" not in front_end:
        return ()
    return pytest.mark.slow if name in {"headroom", "torch"} else pytest.mark.long


@pytest.mark.parametrize(("front_end", "name"), every_pair())
def test_one_history_makes_one_trajectory(front_end, name):
    """Step for step the scale that was used and whether the step was applied."""
    policy = POLICIES[name]
    want = run_plain(history(), policy)
    got = FRONT_ENDS[front_end](history(), policy)

    assert [applied for _, applied in got] == [applied for _, applied in want]
    if name == "lognormal":  # sizes are measured in float32, to the last bit or so
        assert [s for s, _ in got] == pytest.approx([s for s, _ in want], rel=1e-4)
    else:
        assert [scale for scale, _ in got] == [scale for scale, _ in want]


@pytest.mark.parametrize("name", ["headroom", "backoff", "static"])
@pytest.mark.parametrize("front_end", marked([n for n in FRONT_ENDS if n != "replay"]))
def test_one_history_makes_one_trajectory_with_clipping(front_end, name):
    """Then Headroom infers most of the largest gradients from the norm."""
    policy, events = POLICIES[name], uneven()
    want = run_plain(events, policy, clips=True)

    assert FRONT_ENDS[front_end](events, policy, clips=True) == want
    differs = want != run_plain(events, policy)
    assert differs == (name == "headroom")


@pytest.mark.parametrize(
    "front_end", marked([name for name in FRONT_ENDS if name.startswith("torch")])
)
def test_torchs_arguments_make_the_trajectory_of_its_preset(front_end):
    """The short path of torch's own rule, on the host and in torch's kernel."""
    want = run_plain(history(), POLICIES["torch"])
    got = FRONT_ENDS[front_end](history(), None, growth_interval=25)

    assert got == want


@pytest.mark.parametrize("name", POLICIES)
def test_the_history_has_everything_in_it(name):
    """Steps that are lost by themselves and by the scale, and scales that move."""
    ran = run_plain(history(), POLICIES[name])
    events = history()
    lost = [not math.isfinite(event.amax) for event in events]
    skipped = [not applied for _, applied in ran]

    assert sum(event.amax == 0.0 for event in events) > 10
    assert sum(lost) > 10
    assert all(skip for skip, bad in zip(skipped, lost, strict=True) if bad)
    if "static" not in name and name != "none":
        assert len({scale for scale, _ in ran}) > 3
    if name not in {"none", "headroom", "lognormal"}:
        assert sum(skipped) > sum(lost)


def test_the_schedule_of_measurements_makes_a_difference(monkeypatch):
    """Counting small gradients at other turns is another trajectory, and is seen."""
    policy = POLICIES["headroom"]
    want = run_plain(history(), policy)
    shifted = Measurement("underflow", every=16, phase=0)
    monkeypatch.setitem(MEASUREMENTS, "underflow", shifted)

    assert run_replay(history(), policy) != want
