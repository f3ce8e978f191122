"""A run whose gradients were clipped while they were scaled is not called healthy."""

import math
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
import torch

import buoy
import buoy.report
from buoy.jax import Feed, loss_scaled, value_and_grad
from buoy.report import Run, sum_up, summary
from buoy.torch import BuoyWarning, GradScaler
from buoy.trace import Recorder, Recording, Row, load

HEADLINE = "Gradients were clipped while scaled"
POLICIES = [None, "headroom", "lognormal", "backoff", "static", "deepspeed"]


def trained(path, policy, change, size=8):
    """Record 40 steps of a small model; return the file's recording."""
    torch.manual_seed(0)
    model = torch.nn.Linear(size, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", policy=policy, trace=path)
    for _ in range(40):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, size)).square().mean()).backward()
        change(model, scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
    scaler.trace.close()
    return load(path)


def clipped(model, scaler, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def unscaled(model, scaler, optimizer):
    scaler.unscale_(optimizer)
    clipped(model, scaler, optimizer)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_report_names_the_mistake_under_every_policy(policy, tmp_path):
    """The summary and the page, with the step in which it was noticed."""
    path = tmp_path / "run.buoy"
    with pytest.warns(BuoyWarning, match="clipped"):
        recording = trained(path, policy, clipped)

    found = summary(sum_up(recording))
    buoy.report.write([Run(path)], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()

    assert (found.level, found.headline) == ("trouble", HEADLINE)
    assert "noticed in step 2" in found.sentences[0]
    assert HEADLINE in page
    assert "Healthy" not in page


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("change", [unscaled, lambda *_: None])
def test_honest_runs_are_healthy(policy, change, tmp_path):
    found = summary(sum_up(trained(tmp_path / "run.buoy", policy, change)))
    assert found.level == "healthy"


# -- rows without a front end that noticed ---------------------------------------------

CLIP = optax.clip_by_global_norm(1.0)


def in_jax(path, tx, before):
    """Train a linear model for 60 steps; return the recording."""
    params = {"w": jnp.zeros(4)}
    state, key = tx.init(params), jax.random.key(0)

    def loss_fn(params, x):
        return jnp.mean((x @ params["w"] - x.sum(1) - 3.0) ** 2)

    @jax.jit
    def step(params, state, x):
        loss, grads = value_and_grad(loss_fn)(state, params, x)
        grads, _ = before.update(grads, before.init(params))
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    with Recorder(path) as recorder:
        feed = Feed(recorder)
        for i in range(60):
            x = jax.random.normal(jax.random.fold_in(key, i), (8, 4))
            params, state = step(params, state, x)
            feed(state)
    return load(path)


@pytest.mark.parametrize("policy", ["headroom", "backoff"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_jax_run_is_told_by_its_rows(nested, policy, tmp_path):
    """Clipped in a chain around `loss_scaled`, or by hand, which no state shows.

    In a chain the scale of headroom is held, so the rows have one scale: a suspicion.
    """
    held = nested and policy == "headroom"
    if policy == "backoff":
        policy = buoy.policy("backoff", growth_interval=15)
    elif not nested:  # other settings than in the chain, whose plan is remembered
        policy = buoy.policy("headroom", init_scale=2.0**9)
    tx, before = loss_scaled(optax.sgd(0.1), policy), CLIP
    if nested:
        tx, before = optax.chain(CLIP, tx), optax.identity()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recording = in_jax(tmp_path / "run.buoy", tx, before)
    assert bool(caught) == nested
    found = summary(sum_up(recording))
    if held:
        assert found.level == "look"
        return
    assert (found.level, found.headline) == ("trouble", HEADLINE)
    assert "loss_scaled(inner, max_norm=...)" in found.sentences[0]


def test_a_jax_run_at_one_scale_is_suspect(tmp_path):
    """The rows do not show what the gradients were before."""
    tx = loss_scaled(optax.sgd(0.1), buoy.Static(init_scale=2.0**16))
    found = summary(sum_up(in_jax(tmp_path / "run.buoy", tx, CLIP)))
    assert found.level == "look"
    assert "may be clipped while scaled" in found.headline


@pytest.mark.parametrize("policy", ["headroom", "backoff"])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_honest_jax_runs_are_healthy(max_norm, policy, tmp_path):
    tx = loss_scaled(optax.sgd(0.1), policy, max_norm=max_norm)
    recording = in_jax(tmp_path / "run.buoy", tx, optax.identity())
    assert summary(sum_up(recording)).level == "healthy"


def rows(scaled, scales, losses=None):
    """Make rows with these sizes of scaled gradients."""
    some = [
        Row(i, scale, True, norm=size / scale, loss=1.0 + i % 7, time=i)
        for i, (size, scale) in enumerate(zip(scaled, scales, strict=True))
    ]
    return summary(sum_up(Recording("run.buoy", {"ended": 1.0}, some))).headline


def test_norms_that_are_the_same_by_nature_are_not_suspect():
    """The same unscaled norm, one that is in use, or few that are alike."""
    moving = [2.0 ** (8 + i // 10) for i in range(60)]
    flat = [2.0**16] * 60
    spread = [1.0 + math.sin(i) / 2 for i in range(60)]
    assert "Healthy" in rows(moving, moving)  # norm 1 in every step
    assert "Healthy" in rows(flat, flat)
    assert "Healthy" in rows([8.0] * 60, [8.0] * 60)
    assert "Healthy" in rows(spread, flat)
    assert "Healthy" in rows([1.0] * 5 + spread[5:], moving)
    assert HEADLINE in rows([1.0] * 60, moving)
    assert HEADLINE in rows([0.1234] * 30 + spread[30:], moving)
    assert "may be clipped" in rows([0.5] * 60, flat)
    assert "Healthy" in rows([0.1234] * 60, flat)
