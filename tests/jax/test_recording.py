"""Traces from JAX: every step, read late, and never in the way."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import buoy
import buoy.report
import buoy.trace
from buoy.jax import (
    Feed,
    OptionError,
    StuckError,
    StuckWarning,
    last_step,
    loss_scaled,
    value_and_grad,
)
from tests.jax.nets import batch_of, loss_fn, params_of

TX = loss_scaled(optax.adam(1e-2), "headroom", history=32)


@jax.jit
def plain(params, state, x):
    loss, grads = value_and_grad(loss_fn)(state, params, x)
    updates, state = TX.update(grads, state, params, value=loss)
    return optax.apply_updates(params, updates), state


step = jax.jit(plain, donate_argnums=(0, 1))


def recorded(path, steps, bad=(), every=8):
    params, state = params_of(), TX.init(params_of())
    with buoy.trace.Recorder(path) as recorder:
        feed = Feed(recorder, every=every)
        for i in range(steps):
            x = batch_of(i % 4, jnp.nan if i in bad else 1.0)
            params, state = step(params, state, x)
            feed(state)
    return buoy.trace.load(recorder.path), feed, state


def test_every_step_becomes_a_row(tmp_path):
    """With donated buffers too: numbers, verdicts and culprits are the state's."""
    run, feed, _ = recorded(tmp_path / "run.buoy", 45, bad={3, 17, 44})

    assert list(range(45)) == [row.step for row in run.rows]
    assert [3, 17, 44] == [row.step for row in run.rows if not row.applied]
    assert 0 == feed.lost
    bad = run.rows[17]
    assert "forward_nonfinite" == bad.verdict
    assert ("first.b", "first.w", "last.w") == tuple(sorted(bad.offenders))
    fine = run.rows[20]
    assert 0 < fine.norm
    assert 0 < fine.amax <= fine.norm
    assert 0 < fine.loss
    assert all(a.time <= b.time for a, b in zip(run.rows, run.rows[1:], strict=False))


def test_what_was_recorded_can_be_replayed(tmp_path):
    """The report's other readers take it as they take PyTorch's."""
    recorded(tmp_path / "run.buoy", 30)
    trace = buoy.trace.read(tmp_path / "run.buoy")

    assert 30 == len(trace)
    assert 30 == buoy.replay(trace, buoy.policy("torch"))[0].steps


@pytest.mark.slow
def test_the_report_reads_it_as_it_reads_any_other(tmp_path):
    """Figures, causes, layers by key path and where it ran: all on the page."""
    params, state = params_of(), TX.init(params_of())
    with buoy.trace.Recorder(tmp_path / "run.buoy") as recorder:
        feed = Feed(recorder, every=8)
        for i in range(40):
            if i % 20 == 10:
                _, grads = value_and_grad(loss_fn)(state, params, batch_of(i))
                feed.gradients(state, grads)
            x = batch_of(i % 4, jnp.nan if i in {3, 30} else 1.0)
            params, state = plain(params, state, x)
            feed(state)
    page = buoy.report.write([recorder.path], tmp_path / "report.html").read_text()
    facts = dict(re.findall(r'data-fact="([a-z_]+)">([^<]*)<', page))
    found = buoy.report.sum_up(buoy.trace.load(recorder.path))

    assert ("40", "2", "5 %") == tuple(
        facts[name] for name in ("steps", "skipped", "skipped_share")
    )
    assert 'data-skips="2"' in page
    assert buoy.Verdict.FORWARD_NONFINITE in page
    assert {"first.b", "first.w", "last.w"} == {layer.name for layer in found.layers}
    assert all(layer.name in page for layer in found.layers)
    assert [2, 2, 2] == [layer.offences for layer in found.layers]
    assert found.last_loss == pytest.approx(last_step(state).loss)
    assert jax.__version__ in page
    assert "Headroom" in page


def test_feeding_reads_only_what_has_arrived(monkeypatch):
    """The first reading is one period late, and the last at the flush."""
    from jax._src.array import ArrayImpl

    rows, read = [], []

    class Keeps:
        def step(self, **facts):
            rows.append(facts["step"])

    value = ArrayImpl._value
    monkeypatch.setattr(
        ArrayImpl, "_value", property(lambda a: (read.append(a), value.fget(a))[1])
    )
    params, state = params_of(), TX.init(params_of())
    batches = [batch_of(i) for i in range(4)]
    feed = Feed(Keeps(), every=4)
    for i in range(8):
        params, state = step(params, state, batches[i % 4])
        before = len(read)
        feed(state)
        if i < 7:
            assert before == len(read)
    assert [0, 1, 2, 3] == rows
    feed.flush()
    assert list(range(8)) == rows


def test_histograms_of_the_scaled_gradients(tmp_path):
    """By key path, exact, at the step and scale that they belong to."""
    params = {"layer": {"w": jnp.array([1.0, -1.5, 0.0, 2.0**-30])}}
    tx = loss_scaled(optax.sgd(0.1), "static")
    state = tx.init(params)
    with buoy.trace.Recorder(tmp_path / "run.buoy") as recorder:
        feed = Feed(recorder)
        feed.gradients(state, params)
        _, state = tx.update(params, state, params)
        feed(state)
    run = buoy.trace.load(recorder.path)
    snapshot = run.shots[0]

    assert (0, 1024.0) == (snapshot.step, snapshot.scale)
    counts = snapshot.tensors["layer.w"]
    assert (1, -30, 4) == (counts.zeros, counts.low, counts.size)
    assert 2 == counts.counts[30]


def test_a_run_that_is_stuck_is_warned_about(tmp_path):
    """Once, with the cause, at the user's line; the run goes on."""
    with pytest.warns(StuckWarning) as caught:
        run, _, _ = recorded(tmp_path / "run.buoy", 120, bad=set(range(120)))

    (warning,) = caught
    assert re.search("stuck.*50 .*skipped.*`first.b`.*inf or NaN", str(warning.message))
    assert __file__ == warning.filename
    assert 120 == len(run.rows)


def test_a_run_that_learns_nothing_is_warned_about():
    """Applied steps whose gradients are all exactly zero."""
    rows, found = [], []
    tx = loss_scaled(optax.sgd(0.1), "static")
    state = tx.init(jnp.ones(2))

    class Keeps:
        def step(self, **facts):
            rows.append(facts["applied"])

    feed = Feed(Keeps(), every=4, on_stuck=found.append, patience=8)
    for _ in range(20):
        _, state = tx.update(jnp.zeros(2), state)
        feed(state)
    feed.flush()

    assert [True] * 20 == rows
    assert [(8, "applied")] == [(stuck.zeros, stuck.verdict) for stuck in found]


def test_a_stuck_run_can_be_stopped(tmp_path):
    """With an error that has the verdict; the trace is whole."""
    tx = loss_scaled(optax.sgd(0.1), "static")
    state = tx.init(jnp.ones(2))
    recorder = buoy.trace.Recorder(tmp_path / "run.buoy")
    feed = Feed(recorder, on_stuck="raise", patience=4)
    for _ in range(6):
        _, state = tx.update(jnp.full(2, jnp.inf), state)
        feed(state)
    with pytest.raises(StuckError, match="4 steps in a row") as caught:
        recorder.close()

    assert "scale_too_high" == caught.value.verdict
    assert 6 == len(buoy.trace.load(recorder.path).rows)
    with pytest.raises(OptionError, match="`patience` must be a whole number"):
        Feed(recorder, patience=0)


@pytest.mark.slow
def test_steps_that_nobody_asked_about_are_counted(tmp_path):
    """A scan of a hundred steps overwrites what 32 rows hold."""
    state = TX.init(params_of())
    kept = []

    class Keeps:
        def step(self, **facts):
            kept.append(facts["step"])

    feed = Feed(Keeps(), every=1)

    @jax.jit
    def fifty(params, state):
        def body(carry, _):
            return plain(*carry, batch_of(0)), None

        return jax.lax.scan(body, (params, state), length=50)[0]

    params = params_of()
    for _ in range(2):
        params, state = fifty(params, state)
        feed(state)
    feed.flush()

    assert 64 == len(kept)
    assert 18 == feed.lost


def test_the_period_must_fit_into_the_state():
    class Keeps:
        def step(self, **facts):
            pass

    with pytest.raises(OptionError, match="keeps only 32 steps"):
        Feed(Keeps(), every=33)(TX.init(params_of()))
    with pytest.raises(OptionError, match="whole number"):
        Feed(Keeps(), every=0)
