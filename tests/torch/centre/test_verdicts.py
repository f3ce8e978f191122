"""Each verdict, forced with a small network; and the log, one line per episode."""

import logging
import math

import pytest
import torch
from nets import OPTIMIZERS, batch, loss_of, net, spoil, train

from buoy import NoScaling, Verdict
from buoy._backends import torch as backend
from buoy.torch import CallOrderError, GradScaler, StuckWarning

KINDS = pytest.mark.parametrize("kind", ["adamw", "fused adamw"])


def started(kind, **options):
    """A network some clean steps into its training."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = GradScaler("cpu", model=model, **options)
    train(scaler, model, optimizer, ["ok"] * 8)
    return scaler, model, optimizer


@KINDS
def test_scale_too_high(kind, loop):
    """FP16 autocast with a scale beyond its range: normal, and named so."""
    scaler, model, optimizer = loop(kind, init_scale=2.0**40)
    x, y = batch(0)
    with torch.autocast("cpu", torch.float16):
        loss = torch.nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.verdict is Verdict.SCALE_TOO_HIGH


@KINDS
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_forward_nonfinite(kind, value):
    """The loss is already non-finite: no scale can help."""
    scaler, model, optimizer = started(kind)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 9) * float(value)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.verdict is Verdict.FORWARD_NONFINITE


@KINDS
def test_poisoned_weights(kind):
    """A weight is NaN already: everything after it must be."""
    scaler, model, optimizer = started(kind)
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    train(scaler, model, optimizer, ["ok"])
    assert scaler.last_step.verdict is Verdict.POISONED


@KINDS
def test_poisoned_state(kind):
    """An optimizer's moment is inf already, though the weights look fine."""
    scaler, model, optimizer = started(kind)
    optimizer.state[model[0].weight]["exp_avg"][0, 0] = float("inf")
    train(scaler, model, optimizer, ["inf"])
    assert scaler.last_step.verdict is Verdict.POISONED


@KINDS
@pytest.mark.parametrize("set_to_none", [True, False, None])
def test_stale_grads(kind, set_to_none):
    """Gradients that are never cleared stay non-finite; cleared ones are not blamed."""
    scaler, model, optimizer = started(kind)
    for _ in range(2):
        if set_to_none is not None:
            optimizer.zero_grad(set_to_none=set_to_none)
        scaler.scale(loss_of(model, 9)).backward()
        if set_to_none is not None or scaler.last_step.applied:
            spoil(model, "inf")
        scaler.step(optimizer)
        scaler.update()
    expected = Verdict.STALE_GRADS if set_to_none is None else Verdict.SCALE_TOO_HIGH
    assert scaler.last_step.verdict is expected


@KINDS
def test_bad_batch(kind):
    """One batch whose loss stands out by orders of magnitude."""
    scaler, model, optimizer = started(kind)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 9) * 1e6).backward()
    spoil(model, "inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.verdict is Verdict.BAD_BATCH


@KINDS
def test_divergence(kind):
    """The loss climbs and climbs until the gradients overflow."""
    scaler, model, optimizer = started(kind)
    for factor in (2.0, 5.0, 20.0, 80.0, 400.0):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 9) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 9) * 5000.0).backward()
    spoil(model, "inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.verdict is Verdict.DIVERGENCE


def test_no_grads():
    """Nothing to step by: torch's exception, and a verdict."""
    scaler, model, optimizer = started("adamw")
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 9))
    with pytest.raises(CallOrderError):
        scaler.step(optimizer)
    last = scaler.last_step
    assert last.verdict is Verdict.NO_GRADS
    assert not last.applied
    scaler.scale(loss_of(model, 9)).backward()
    spoil(model, "inf")
    assert last.offenders == ()  # what is in `.grad` now came later


def test_every_verdict_is_explained():
    """The words exist for all of them."""
    from buoy._core.verdicts import VERDICTS

    assert set(Verdict) == {one for one in VERDICTS if VERDICTS[one].text}


@KINDS
def test_one_line_for_the_warm_up(kind, caplog, loop):
    """Seven lost steps at the start are one line, and called normal."""
    scaler, model, optimizer = loop(kind)
    with caplog.at_level(logging.INFO, "buoy.torch"):
        train(scaler, model, optimizer, ["inf"] * 7 + ["ok"] * 30)
    assert [record.getMessage() for record in caplog.records] == [
        "warm-up: 7 skipped, settled at 2^9: normal"
    ]
    assert caplog.records[0].levelno == logging.INFO


def test_one_line_per_episode_and_never_one_per_step(caplog, loop):
    """Skips that keep coming add up into few lines."""
    scaler, model, optimizer = loop(lr=0.01, on_stuck=lambda stuck: None)
    with caplog.at_level(logging.INFO, "buoy.torch"):
        train(scaler, model, optimizer, ["ok"] * 5 + ["inf", "ok"] * 100)
    assert 1 <= len(caplog.records) <= 12
    told = [r.getMessage() for r in caplog.records]
    assert all(line.startswith("overflow") for line in told)


def test_an_abnormal_episode_is_a_warning_with_the_reason(caplog):
    """A loss that was NaN is told louder, and why."""
    scaler, model, optimizer = started("adamw")
    with caplog.at_level(logging.INFO, "buoy.torch"):
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, 9) * float("nan")).backward()
            scaler.step(optimizer)
            scaler.update()
        train(scaler, model, optimizer, ["ok"])
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    assert "before it was scaled" in caplog.records[0].getMessage()


def test_a_clean_run_says_nothing(caplog):
    """No skip, no line."""
    with caplog.at_level(logging.DEBUG, "buoy"):
        started("adamw")
    assert caplog.records == []


def test_a_kept_report_is_judged_even_after_its_scaler_is_gone(loop):
    """From its own losses: with no others to compare with, no batch is blamed."""
    for factor, expected in (
        (1.0, "scale_too_high"),
        (float("nan"), "forward_nonfinite"),
    ):
        scaler, model, optimizer = loop("fused adamw")
        scaler.scale(loss_of(model, 0) * factor).backward()
        spoil(model, "inf")
        scaler.step(optimizer)
        kept = scaler.last_step
        del scaler
        assert kept.verdict == expected


ODD = {
    "fp8": lambda x: x.to(torch.float8_e4m3fn),
    "complex": lambda x: x.to(torch.complex64),
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("spoilt", [None, *ODD])
def test_state_of_any_kind_is_looked_at(spoilt, loop):
    """A diagnosis never ends the training, and finds the poison in each of them."""
    scaler, model, optimizer = loop(lr=0.1)
    train(scaler, model, optimizer, ["ok"])
    held = {"count": 3, "meta": torch.zeros(2, device="meta")}
    for name, make in ODD.items():
        held[name] = make(torch.full((2, 2), torch.nan if name == spoilt else 1.0))
    optimizer.state[model[0].weight] = held
    train(scaler, model, optimizer, ["inf"])
    expected = Verdict.SCALE_TOO_HIGH if spoilt is None else Verdict.POISONED
    assert scaler.last_step.verdict is expected


def test_state_that_is_no_dict_is_left_alone():
    """A wrapper may call anything its `state`."""
    model = net()

    class Wrapper:
        state = "ready"

        def __init__(self, optimizer):
            self.param_groups, self.step = optimizer.param_groups, optimizer.step

    scaler = GradScaler("cpu")
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler.scale(loss_of(model, 0)).backward()
    spoil(model, "inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.verdict is Verdict.SCALE_TOO_HIGH


def test_poison_is_found_after_an_episode_of_other_skips():
    """Weights that were fine when the scale was too high are looked at again."""
    scaler, model, optimizer = started("adamw")
    train(scaler, model, optimizer, ["inf"] * 5 + ["ok"])
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    train(scaler, model, optimizer, ["ok"] * 2)
    assert scaler.last_step.verdict is Verdict.POISONED


def test_the_policy_of_a_scaler_that_is_off():
    """None is needed, and that is a policy."""
    assert GradScaler("cpu", enabled=False).policy == NoScaling()


@KINDS
@pytest.mark.parametrize("cleared", [True, False])
def test_gradients_that_the_user_keeps_are_not_stale(kind, cleared):
    """What counts is whether they still are a parameter's, not whether they exist."""
    scaler, model, optimizer = started(kind)
    held = []
    for _ in range(2):
        if cleared:
            optimizer.zero_grad()
        scaler.scale(loss_of(model, 9)).backward()
        if cleared or scaler.last_step.applied:
            spoil(model, "inf")
        held += [p.grad for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
    expected = Verdict.SCALE_TOO_HIGH if cleared else Verdict.STALE_GRADS
    assert scaler.last_step.verdict is expected


def test_several_losses_are_compared_with_as_many(loop):
    """A large loss beside a small one is not an outlier for that."""
    scaler, param, optimizer = loop("sgd", torch.ones(2), lr=1e-4)
    for turn in range(10):
        optimizer.zero_grad()
        scaler.scale(param.sum() * 50).backward()
        scaler.scale(param.sum() * 0.05).backward()
        if turn == 9:
            param.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    assert scaler.last_step.verdict is Verdict.SCALE_TOO_HIGH


@pytest.mark.parametrize("bad", [None, float("inf")])
def test_a_step_read_late_does_not_tell_of_the_next_batch(bad, loop):
    """Once other gradients lie there, what was not measured is not known."""
    scaler, param, optimizer = loop("sgd", torch.ones(2), lr=0.1, sync="never")
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    step = scaler.last_step
    optimizer.zero_grad()
    scaler.scale(param.sum() * 7).backward()
    if bad is not None:
        param.grad[0] = bad
    assert step.norm is None
    assert step.offenders == ()


def lose(scaler, optimizer, param, finish, turns):
    """Compute a NaN loss again and again."""
    for _ in range(turns):
        optimizer.zero_grad()
        scaler.scale(param.sum() * float("nan")).backward()
        finish(optimizer)
        scaler.update()


def test_gradients_that_were_found_bad_and_left_alone_are_told_of(loop):
    """Whoever looks, and does not step, is warned all the same."""
    scaler, param, optimizer = loop("sgd", torch.ones(2), lr=0.1, patience=5)
    moved = []
    scaler.gate(lambda: moved.append(1))
    with pytest.warns(StuckWarning, match="5 steps in a row"):
        lose(scaler, optimizer, param, scaler.unscale_, 6)
    assert [] == moved


def one_step(scaler, optimizer, param, factor):
    """All of a step but its update."""
    optimizer.zero_grad()
    scaler.scale(param.sum() * factor).backward()
    scaler.step(optimizer)


@pytest.mark.parametrize("kind", ["fused adamw"])
def test_what_is_heard_late_has_its_own_verdict(kind, monkeypatch, loop):
    """Flags that travel by themselves bring along whether the loss was finite."""
    monkeypatch.setattr(backend, "in_host_memory", lambda tensor: False)
    scaler, param, optimizer = loop(kind, torch.ones(2), patience=4)
    # Flags travel four at a time: the fourth loss that is lost is heard of at step 8.
    for factor in (1.0, *[float("nan")] * 4, 1.0, 1.0):
        one_step(scaler, optimizer, param, factor)
        scaler.update()
    one_step(scaler, optimizer, param, 1.0)
    with pytest.warns(StuckWarning, match="forward_nonfinite"):
        scaler.update()  # by now the step at hand is a healthy one
    assert param.isfinite().all()


def test_one_of_two_optimizers_without_gradients_is_not_stuck():
    """The norm of all of them counts."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([param], lr=0.1) for param in params]
    scaler = GradScaler("cpu", patience=3, on_stuck="raise")
    for _ in range(5):
        for factor, param, optimizer in zip((1, 0), params, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(param.sum() * factor).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("held", [lambda x: [x], lambda x: {"inside": (x,)}])
def test_poison_inside_lists_and_dicts_of_an_optimizers_state_is_found(held):
    """As optimizers with factored or quantized moments keep it."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.state[param]["moments"] = held(torch.full((2,), torch.nan))
    scaler = GradScaler("cpu")
    scaler.scale(param.sum() * torch.inf).backward()
    scaler.step(optimizer)
    assert scaler.last_step.verdict.value == "poisoned"


def test_a_norm_that_overflows_over_finite_gradients_is_no_offender(loop):
    """The norms show both, the gradients which of them is not finite."""
    large, bad = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    names = [("large", large), ("bad", bad)]
    scaler, _, optimizer = loop(
        "sgd", [large, bad], lr=0.1, init_scale=1.0, named_parameters=names
    )
    scaler.scale(large.sum() + bad.sum()).backward()
    large.grad.fill_(1e30)
    bad.grad[0] = torch.inf
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.offenders == ("bad",)


def test_the_losses_of_an_abandoned_iteration_do_not_count(loop):
    """Loading a state begins anew."""
    scaler, model, optimizer = loop("sgd", torch.nn.Linear(2, 1), lr=0.1)
    state = scaler.state_dict()
    scaler.scale(model(torch.full((1, 2), math.nan)).sum())

    scaler.load_state_dict(state)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    model.weight.grad[0, 0] = math.inf
    scaler.step(optimizer)

    assert Verdict.SCALE_TOO_HIGH is scaler.last_step.verdict
