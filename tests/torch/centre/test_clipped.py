"""Clipping gradients that are still scaled is noticed; honest gradients never are."""

import copy
import warnings

import pytest
import torch
from nets import OPTIMIZERS, batch, loss_of, net

import buoy
from buoy.torch import BuoyWarning, GradScaler

SCALES = (2.0**-4, 1.0, 2.0**8, 2.0**16, 2.0**24)
RAISING = ("headroom", "lognormal", "loss_ahead")  # they follow the gradients' size


def at(name, scale):
    """Make a policy that starts at this scale; None if it cannot."""
    try:
        return buoy.policy(name, init_scale=scale)
    except buoy.PolicyError:
        return None


STARTS = [
    (name, scale)
    for name in buoy.policies()
    for scale in SCALES
    if at(name, scale) is not None
]


def by_norm(model, scaler=None):
    """Clip as torch does."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def by_value(model, scaler=None):
    """Clamp as torch does."""
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)


def by_hand(model, scaler=None):
    """Write clipping out, into new tensors."""
    norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
    for param in model.parameters():
        param.grad = param.grad * torch.clamp(1.0 / norm, max=1.0)


def train(scaler, change, steps, *, model=None, optimizer=None, same=False, loud=1e3):
    """Train, changing the scaled gradients; return steps with a warning, and scales."""
    model = model or net()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    told, scales = [], []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = loud * loss_of(model, 0 if same else step)
            scaler.scale(loss).backward()
            change(model, scaler)
            scaler.step(optimizer)
            scaler.update()
        assert all("clipped" in str(one.message) for one in caught)
        told += [step] * len(caught)
        scales.append(scaler.get_scale())
    return told, scales


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize(("name", "scale"), STARTS)
def test_every_policy_tells_once_from_every_first_scale(name, scale, same):
    """Where the threshold cannot be told from one in use, once the scale has moved."""
    told, _ = train(GradScaler("cpu", policy=at(name, scale)), by_norm, 12, same=same)
    if scale == 1.0 and name not in RAISING:
        assert told == []  # nothing is wrong yet
    else:
        assert len(told) == 1
        assert told[0] <= 8


@pytest.mark.parametrize("name", buoy.policies())
def test_every_policy_tells_with_its_own_first_scale(name):
    """Not at a constant scale of 1 or 4: a threshold of 1/4 would be as usual."""
    told, _ = train(GradScaler("cpu", policy=name), by_norm, 12)
    assert told == ([] if name in ("none", "metaseq") else [3])


@pytest.mark.parametrize("sync", ["auto", "never"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("change", [by_norm, by_value, by_hand])
def test_clipping_by_hand_is_told_in_the_third_step(change, kind, sync, loop):
    """With any optimizer, however it is clipped; new tensors in the fourth."""
    scaler, model, optimizer = loop(kind, sync=sync)
    told, _ = train(scaler, change, 8, model=model, optimizer=optimizer)
    assert told == [4 if change is by_hand else 3]


def test_a_threshold_at_scale_one_is_told_once_the_scale_has_moved():
    """Within 260 steps: after the first 16, four of each 256 steps are looked at."""
    scaler = GradScaler("cpu", init_scale=1.0, growth_interval=100)
    told, scales = train(scaler, by_norm, 260)
    assert told[0] <= 260
    assert scales[told[0] - 1] > 1.0
    assert len(told) == 1


def test_a_threshold_that_is_not_round_is_told_once_the_scale_has_moved():
    """Gradients could have been brought to this norm at this scale on purpose."""

    def change(model, scaler):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1234)

    assert train(GradScaler("cpu"), change, 12)[0] == []
    told, _ = train(GradScaler("cpu", growth_interval=4), change, 12)
    assert told == [5]


@pytest.mark.parametrize("start", [4, 100])
def test_clipping_that_begins_later_is_told(start):
    """For example after a warm-up without clipping."""
    steps = iter(range(10**6))

    def change(model, scaler):
        if next(steps) >= start:
            by_norm(model)

    told, _ = train(GradScaler("cpu"), change, 264, loud=1.0)
    assert told == [start + 3 if start < 10 else 258]


@pytest.mark.parametrize("set_to_none", [False, True])
def test_accumulated_gradients_are_watched_too(set_to_none, loop):
    """Several backward passes, then clipping."""
    scaler, model, optimizer = loop()

    def steps():
        for step in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            for part in range(3):
                scaler.scale(loss_of(model, 3 * step + part) / 3).backward()
            by_norm(model)
            scaler.step(optimizer)
            scaler.update()

    with pytest.warns(BuoyWarning, match="clipped"):
        steps()


# -- the scale -------------------------------------------------------------------------


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", RAISING)
@pytest.mark.parametrize("hidden", [False, True])
def test_a_policy_that_follows_the_gradients_stops_raising_the_scale(
    hidden, name, scale, same, monkeypatch
):
    """From the step that tells on, also where the host can read nothing."""
    if hidden:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    sync = "never" if hidden else "auto"
    scaler = GradScaler("cpu", policy=at(name, scale), sync=sync)
    told, scales = train(scaler, by_norm, 60, same=same)
    assert len(told) == 1
    held = scales[told[0] - 2 :]
    assert held == sorted(held, reverse=True)


@pytest.mark.parametrize("name", RAISING)
def test_overflows_still_lower_a_scale_that_does_not_rise(name):
    model, steps = net(), iter(range(100))

    def change(model, scaler):
        by_norm(model)
        if next(steps) == 10:
            next(model.parameters()).grad[0, 0] = torch.inf

    _, scales = train(GradScaler("cpu", policy=name), change, 20, model=model)
    assert scales[10] < scales[9]
    assert max(scales[11:]) <= scales[10]


@pytest.mark.parametrize("name", [None, "torch", "backoff", "deepspeed", "keras"])
def test_policies_that_measure_nothing_only_report(name):
    """Their scales are the same as without the mistake."""
    options = {"growth_interval": 3} if name in (None, "torch", "backoff") else {}
    policy = name and buoy.policy(name, **options)
    kept = options if name is None else {}
    scalers = [GradScaler("cpu", policy=policy, **kept) for _ in range(2)]
    wrong = train(scalers[0], by_norm, 30, loud=1.0)
    right = train(scalers[1], lambda *_: None, 30, loud=1.0)
    assert len(wrong[0]) == 1
    assert right == ([], wrong[1])


def test_scaling_goes_on_when_the_mistake_is_corrected():
    """A script that is corrected continues from its checkpoint, and may raise again."""
    wrong, scaler = (GradScaler("cpu", policy="headroom") for _ in range(2))
    _, scales = train(wrong, by_norm, 12)
    scaler.load_state_dict(wrong.state_dict())
    told, later = train(scaler, lambda *_: None, 60, loud=1e-9)
    assert told == []
    assert max(later) > scales[-1]


@pytest.mark.parametrize("at_step", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("name", RAISING)
def test_a_saved_state_resumes_exactly(name, at_step, loop):
    """Before it is told, and after."""
    scaler, model, optimizer = loop(policy=at(name, 64.0))

    def rest(scaler, model, optimizer):
        _, scales = train(scaler, by_norm, 30, model=model, optimizer=optimizer)
        return scales, [p.tolist() for p in model.parameters()]

    train(scaler, by_norm, at_step, model=model, optimizer=optimizer)
    saved = copy.deepcopy((scaler.state_dict(), model, optimizer.state_dict()))
    usual = rest(scaler, model, optimizer)

    again = GradScaler("cpu", policy=at(name, 64.0))
    again.load_state_dict(saved[0])
    other = torch.optim.SGD(saved[1].parameters(), lr=0.05)
    other.load_state_dict(saved[2])
    assert rest(again, saved[1], other) == usual


def test_torchs_rule_saves_torchs_five_entries_only():
    scaler = GradScaler("cpu")
    assert train(scaler, by_norm, 6)[0]
    assert scaler.state_dict().keys() == torch.amp.GradScaler("cpu").state_dict().keys()


@pytest.mark.parametrize(
    "bad", [3, {}, {"clipped": 1, "looks": []}, {"clipped": True, "looks": [["x"]]}]
)
def test_a_damaged_state_is_refused(bad):
    scaler = GradScaler("cpu", policy="headroom")
    train(scaler, by_norm, 6)
    state = copy.deepcopy(scaler.state_dict())
    state["buoy"]["parts"]["hints"] = bad
    with pytest.raises(buoy.torch.StateError, match="hints"):
        GradScaler("cpu", policy="headroom").load_state_dict(state)


# -- honest gradients ------------------------------------------------------------------


class Linear(torch.nn.Module):
    """Has the same gradient in every step, whose norm is a power of two."""

    def __init__(self, size=16):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return (self.weight * x).sum()


def after_unscale(model, scaler, optimizer):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clamp_after_unscale(model, scaler, optimizer):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)


def normalized_after_unscale(model, scaler, optimizer):
    scaler.unscale_(optimizer)
    for param in model.parameters():
        param.grad.div_(param.grad.norm() + 1e-12)


def buoys(model, scaler, optimizer):
    scaler.clip_grad_norm_(optimizer, 1.0)


def threshold_times_scale(model, scaler, optimizer):
    scale = scaler.get_scale()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 * scale)


def clamp_times_scale(model, scaler, optimizer):
    scale = scaler.get_scale()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.25 * scale)


def normalized_to_the_scale(model, scaler, optimizer):
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    for param in model.parameters():
        param.grad.mul_(2.0 * scaler.get_scale() / norm)


def averaged(model, scaler, optimizer):
    for param in model.parameters():
        param.grad.div_(8)


def averaged_over_tokens(model, scaler, optimizer):
    for param in model.parameters():
        param.grad.mul_(1 / 1000)


def masked(model, scaler, optimizer):
    for param in model.parameters():
        param.grad[::2] = 0.0


def high_threshold(model, scaler, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e30)


HONEST = [
    lambda *_: None,
    after_unscale,
    clamp_after_unscale,
    normalized_after_unscale,
    buoys,
    threshold_times_scale,
    clamp_times_scale,
    normalized_to_the_scale,
    averaged,
    averaged_over_tokens,
    masked,
    high_threshold,
]
LOSSES = {
    "regression": loss_of,
    "the same batch": lambda model, step: loss_of(model, 0),
    "signs": lambda model, step: (model(batch(step)[0]) - batch(step)[1]).abs().sum(),
    "constant": lambda model, step: model(torch.ones(16)),
    "constant, 2^-16": lambda model, step: model(torch.full((16,), 2.0**-16)),
    "constant, falling": lambda model, step: model(
        torch.full((16,), 0.01 / (step + 1))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, "headroom", "lognormal", "backoff"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("change", HONEST)
def test_honest_gradients_are_never_flagged(change, loss, policy):
    """Warnings are errors here: over optimizers, first scales, ways to clear."""
    for count, kind in enumerate(("sgd", "adam", "fused sgd")):
        for scale in (0.25, 1.0, 32.0, 2.0**16):
            model = Linear() if loss.startswith("constant") else net(count)
            optimizer = OPTIMIZERS[kind](model.parameters())
            scaler = (
                GradScaler("cpu", scale, growth_interval=6)
                if policy is None
                else GradScaler("cpu", policy=at(policy, scale))
            )
            for step in range(9):
                optimizer.zero_grad(set_to_none=bool(count % 2))
                scaler.scale(LOSSES[loss](model, step)).backward()
                change(model, scaler, optimizer)
                scaler.step(optimizer)
                scaler.update()
