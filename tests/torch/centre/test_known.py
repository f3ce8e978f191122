"""What the host knows it never reads again; what it does not know stays unread."""

import pytest
import torch
from nets import OPTIMIZERS, loss_of, net, spoil
from no_host_reads import no_host_reads

from buoy.torch import GradScaler

EVENTS = ["ok", "inf", "ok", "ok", "ok", "nan", "ok"]
SET = {2: 256.0, 4: torch.tensor(512.0)}  # by `update`, after these steps


def iterate(scaler, models, optimizers, step, event, *, clip=False):
    """Make one iteration; only the last optimizer's gradients are spoiled."""
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
    spoil(models[-1], event)
    for optimizer in optimizers:
        if clip:
            scaler.clip_grad_norm_(optimizer, 0.5)
        scaler.step(optimizer)


@pytest.mark.parametrize(
    ("kind", "count", "hidden"),
    [
        ("sgd", 1, False),
        ("sgd", 2, False),
        ("fused adamw", 1, False),
        ("fused adamw", 2, False),
        ("sgd", 1, True),
    ],
)
@pytest.mark.parametrize("policy", [None, "backoff", "lognormal"])
@pytest.mark.parametrize("clip", [False, True])
def test_a_step_that_is_over_is_known(kind, policy, clip, count, hidden, monkeypatch):
    """On a CPU always; elsewhere if the one read of an unfused optimizer was made."""
    if hidden:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    models = [net(seed) for seed in range(count)]
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model in models]
    scaler = GradScaler("cpu", policy=policy)
    scales = []
    for step, event in enumerate(EVENTS[:4] if hidden else EVENTS):
        iterate(scaler, models, optimizers, step, event, clip=clip)
        scaler.update(SET.get(step))
        with no_host_reads():
            last = scaler.last_step
            assert last.applied == (event == "ok")
            assert event != "ok" or last.verdict == "applied"
            scales.append((last.scale, last.next_scale))
        assert last.next_scale == scaler.get_scale()
    assert [after for _, after in scales[:-1]] == [before for before, _ in scales[1:]]
    assert scales[2][1] == 256.0


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("count", [1, 2])
def test_scales_that_are_set_are_those_of_torch(kind, count):
    """By a number or a tensor, between steps that overflow and steps that do not."""
    found = []
    for make in (GradScaler, torch.amp.GradScaler):
        models = [net(seed) for seed in range(count)]
        optimizers = [OPTIMIZERS[kind](model.parameters()) for model in models]
        scaler = make("cpu", init_scale=64.0, growth_interval=2)
        seen = []
        for step, event in enumerate(EVENTS):
            iterate(scaler, models, optimizers, step, event)
            scaler.update(SET.get(step))
            seen.append((scaler.get_scale(), scaler._get_growth_tracker()))
        found.append((seen, [one.state_dict() for one in optimizers]))
    assert found[0][0] == found[1][0]
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        assert ours["param_groups"] == theirs["param_groups"]
        for number, state in theirs["state"].items():
            assert state.keys() == ours["state"][number].keys()
            for name, value in state.items():
                torch.testing.assert_close(ours["state"][number][name], value)


@pytest.mark.parametrize("policy", ["backoff"])
@pytest.mark.parametrize("kind", ["sgd", "fused adamw"])
def test_a_scale_that_does_not_move_is_not_written(policy, kind, loop):
    """Nor is it looked at again, by anybody who watches the tensor."""
    scaler, model, optimizer = loop(kind, policy=policy)
    versions = []
    for step, event in enumerate(["ok", "ok", "inf", "ok", "ok"]):
        iterate(scaler, [model], [optimizer], step, event)
        scaler.update()
        versions.append(scaler._scale._version)
    assert versions[0] == versions[1] < versions[2] == versions[3] == versions[4]
