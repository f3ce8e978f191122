"""Several losses and optimizers: scales of their own, skipped alone or together."""

import copy
import json
import math
import pickle
import runpy
from pathlib import Path

import pytest
import torch
from nets import OPTIMIZERS, loss_of, net, spoil
from no_host_reads import no_host_reads

from buoy import Verdict
from buoy.torch import GradScaler, GroupError, MixedScalesError, OptionError


def two(kind="adamw"):
    """Make two networks with an optimizer each."""
    one, other = net(0), net(1)
    return (
        (one, OPTIMIZERS[kind](one.parameters())),
        (other, OPTIMIZERS[kind](other.parameters())),
    )


def iterate(scaler, pairs, step, bad=(), *, names=("a", "b"), clip=None):
    """One iteration: each network in its group, backward and step in turn."""
    for index, ((model, optimizer), name) in enumerate(zip(pairs, names, strict=True)):
        group = scaler.group(name)
        optimizer.zero_grad()
        loss = loss_of(model, step) * (math.inf if index in bad else 1.0)
        group.scale(loss).backward()
        if clip is not None:
            group.clip_grad_norm_(optimizer, clip)
        group.step(optimizer)
    scaler.update()


def weights(pairs):
    return [p.detach().clone() for model, _ in pairs for p in model.parameters()]


def test_each_group_has_its_own_scale():
    """An overflow in one lowers that one alone, and one update moves all."""
    pairs = two()
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scaler.group("b", init_scale=2.0**4)

    iterate(scaler, pairs, 0, bad={0})
    iterate(scaler, pairs, 1)
    iterate(scaler, pairs, 2)

    assert 2.0**10 == scaler.get_scale()
    assert 2.0**10 == scaler.group("a").get_scale()  # down, two clean steps, up again
    assert 2.0**5 == scaler.group("b").get_scale()


def test_groups_train_as_scalers_of_their_own_would():
    """Bit for bit, with clipping."""
    pairs, twins = two(), two()
    scaler = GradScaler("cpu", growth_interval=3)
    alone = [GradScaler("cpu", growth_interval=3) for _ in twins]
    for step in range(8):
        bad = {step % 2} if step in {2, 5} else set()
        iterate(scaler, pairs, step, bad, clip=1.0)
        for index, ((model, optimizer), own) in enumerate(
            zip(twins, alone, strict=True)
        ):
            optimizer.zero_grad()
            factor = math.inf if index in bad else 1.0
            own.scale(loss_of(model, step) * factor).backward()
            own.clip_grad_norm_(optimizer, 1.0)
            own.step(optimizer)
            own.update()

    for mine, theirs in zip(weights(pairs), weights(twins), strict=True):
        assert torch.equal(mine, theirs)
    for name, own in zip("ab", alone, strict=True):
        assert own.state_dict() == scaler.group(name).state_dict()


def test_only_those_that_stepped_move():
    """A critic that steps five times as often grows five times as fast."""
    pairs = two()
    scaler = GradScaler("cpu", init_scale=2.0, growth_interval=1)
    for step in range(5):
        iterate(scaler, pairs[:1], step, names=("a",))
    iterate(scaler, pairs[1:], 5, names=("b",))

    assert 2.0**6 == scaler.group("a").get_scale()
    assert 2.0**2 == scaler.group("b").get_scale()


@pytest.mark.parametrize("kind", ["adamw", "fused adamw", "momentum", "fused momentum"])
@pytest.mark.parametrize("sync", ["auto", "never"])
@pytest.mark.parametrize("failing", [0, 1])
def test_joint_means_all_or_none(kind, sync, failing):
    """Whichever fails, weights, state and counters of both stay as they were."""
    pairs = two(kind)
    scaler = GradScaler("cpu", skip="joint", sync=sync, init_scale=4.0)
    iterate(scaler, pairs, 0, bad={failing})  # the very first step, without state
    iterate(scaler, pairs, 1)
    before = weights(pairs)
    states = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in pairs]

    iterate(scaler, pairs, 2, bad={failing})

    for mine, theirs in zip(before, weights(pairs), strict=True):
        assert torch.equal(mine, theirs)
    for state, (_, optimizer) in zip(states, pairs, strict=True):
        assert str(state) == str(optimizer.state_dict())
    reports = [scaler.last_step_of(optimizer) for _, optimizer in pairs]
    assert [False, False] == [report.applied for report in reports]
    scales = [scaler.group(name).get_scale() for name in "ab"]
    assert {1.0, 4.0} == set(scales)  # two overflows in one, none in the other
    assert 1.0 == scales[failing]


def test_a_joint_run_ends_like_one_without_those_batches():
    """Promise 3, for two networks."""
    pairs, twins = two(), two()
    scaler, plain = GradScaler("cpu", skip="joint"), GradScaler("cpu", skip="joint")
    for step in range(10):
        bad = {(step // 3) % 2} if step % 3 == 0 else set()
        iterate(scaler, pairs, step, bad)
        if not bad:
            iterate(plain, twins, step)

    for mine, theirs in zip(weights(pairs), weights(twins), strict=True):
        assert torch.equal(mine, theirs)


def test_the_partner_says_whose_fault_it_was():
    """Verdict and culprits are those of the one that failed."""
    pairs = two("sgd")
    scaler = GradScaler("cpu", skip="joint")
    iterate(scaler, pairs, 0, bad={1})

    first, second = (scaler.last_step_of(optimizer) for _, optimizer in pairs)
    assert Verdict.FORWARD_NONFINITE == first.verdict == second.verdict
    assert second.offenders == first.offenders != ()


def test_joint_waits_for_nobody():
    """With optimizers that take `found_inf` steps are taken back on the device."""
    pairs = two("fused adamw")
    scaler = GradScaler("cpu", skip="joint", init_scale=4.0)
    for step in range(4):  # groups look at where gradients come from, at first
        iterate(scaler, pairs, step)
    before = weights(pairs)
    held = [v["step"] for _, o in pairs for v in o.state.values()]
    with no_host_reads(hidden=True, allowed=held):
        iterate(scaler, pairs, 4, bad={1})

    for mine, theirs in zip(before, weights(pairs), strict=True):
        assert torch.equal(mine, theirs)
    assert not scaler.last_step.applied


def test_gates_follow_all_groups():
    """A counter on the parent counts the iterations in which all stepped."""
    pairs, moved = two("sgd"), []
    scaler = GradScaler("cpu")
    scaler.gate(lambda: moved.append(1))
    scaler.gate(lambda: moved.append("b"), optimizer=pairs[1][1])
    iterate(scaler, pairs, 0)
    iterate(scaler, pairs, 1, bad={0})

    assert [1, "b", "b"] == moved


# -- one gradient buffer --------------------------------------------------------------


def losses_of(model, step):
    out = model(torch.ones(4, 6) * (step + 1))
    return {"small": out.square().mean() * 1e-6, "large": out.sum()}


@pytest.mark.parametrize("kind", ["sgd", "adamw", "fused adamw"])
def test_losses_of_two_groups_meet_unscaled(kind):
    """The sum is the plain sum; powers of two change no bit of it."""
    model, twin = net(), net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    other = OPTIMIZERS[kind](twin.parameters())
    scaler = GradScaler("cpu")
    scaler.group("small", init_scale=2.0**20)
    scaler.group("large", init_scale=2.0**3)
    for step in range(4):
        optimizer.zero_grad()
        scaler.backward(losses_of(model, step), optimizer)
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        other.zero_grad()
        for index, loss in enumerate(losses_of(twin, step).values()):
            loss.backward(retain_graph=not index)
        wanted = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        other.step()

        assert wanted == norm
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_only_the_loss_that_overflowed_pays():
    """The step is skipped, one scale falls, the other and the parent's stay."""
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scaler = GradScaler("cpu", init_scale=8.0)
    before = [param.detach().clone() for param in model.parameters()]
    losses = losses_of(model, 0)
    losses["large"] = losses["large"] * math.inf
    scaler.backward(losses, optimizer)
    scaler.step(optimizer)
    scaler.update()

    assert not scaler.last_step.applied
    assert 4.0 == scaler.group("large").get_scale()
    assert 8.0 == scaler.group("small").get_scale() == scaler.get_scale()
    for mine, theirs in zip(before, model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("policy", [None, "headroom"])
def test_sums_of_different_scales_are_refused(policy):
    """With the way to do it."""
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = GradScaler("cpu", policy=policy)
    one, two_ = scaler.group("one"), scaler.group("two")
    one.scale(loss_of(model, 0)).backward()
    two_.scale(loss_of(model, 1)).backward()

    with pytest.raises(MixedScalesError, match=r"scaler\.backward"):
        two_.step(optimizer)


def test_a_step_with_the_wrong_group_is_refused():
    """Its scale is not the one that the loss was multiplied by."""
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = GradScaler("cpu")
    scaler.group("one").scale(loss_of(model, 0)).backward()
    scaler.scale(torch.ones((), requires_grad=True))

    with pytest.raises(MixedScalesError, match="group that scaled its loss"):
        scaler.step(optimizer)


def test_a_generator_loss_through_the_critic_is_fine():
    """Gradients that are cleared before they are used do not count as mixed."""
    (critic, critics), (maker, makers) = two("sgd")
    maker = torch.nn.Linear(6, 6)
    makers = OPTIMIZERS["sgd"](maker.parameters())
    scaler = GradScaler("cpu")
    one, other = scaler.group("critic"), scaler.group("maker")
    for step in range(4):
        critics.zero_grad()
        one.scale(loss_of(critic, step)).backward()
        one.step(critics)
        makers.zero_grad()
        other.scale(critic(maker(torch.ones(2, 6))).mean()).backward()
        other.step(makers)
        scaler.update()

    assert scaler.last_step.applied


def test_one_optimizer_may_take_turns_with_groups():
    """Each turn with its own loss and its own scale, also long after the first."""
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = GradScaler("cpu")
    group = None
    for step in range(12):
        if step > 5:
            group = scaler.group("late")
        turn = scaler if group is None or step % 2 else group
        optimizer.zero_grad()
        turn.scale(loss_of(model, step)).backward()
        turn.step(optimizer)
        scaler.update()

        assert scaler.last_step.applied


# -- state ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, "headroom"])
@pytest.mark.parametrize("early", [False, True])
def test_all_groups_are_in_the_state(policy, early):
    """Resumed exactly, whether the groups were made before or after loading."""
    pairs = two()
    interval = {} if policy else {"growth_interval": 2}
    scaler = GradScaler("cpu", policy=policy, **interval)
    scaler.group("b", init_scale=2.0**4)
    for step in range(5):
        iterate(scaler, pairs, step, bad={0} if step == 2 else ())
    saved = json.loads(json.dumps(scaler.state_dict()))
    twins = copy.deepcopy(pairs[0]), copy.deepcopy(pairs[1])
    resumed = GradScaler("cpu", policy=policy, **interval)
    if early:
        resumed.group("a")
        resumed.group("b", init_scale=2.0**4)
    resumed.load_state_dict(saved)
    if not early:
        assert saved == resumed.state_dict()
        resumed.group("b", init_scale=2.0**4)

    for step in range(5, 9):
        iterate(scaler, pairs, step, bad={1} if step == 6 else ())
        iterate(resumed, twins, step, bad={1} if step == 6 else ())

    assert scaler.state_dict() == resumed.state_dict()
    torch.amp.GradScaler("cpu").load_state_dict(saved)


def test_a_group_may_follow_another_policy():
    """What the parent was given for its own rule is not pressed onto it."""
    scaler = GradScaler("cpu", growth_interval=3, init_scale=4.0)

    assert "Headroom" in repr(scaler.group("b", policy="headroom").policy)
    assert 3 == scaler.group("a").policy.growth_interval


def test_a_pickled_scaler_keeps_its_groups():
    """And they still know whose they are."""
    scaler = GradScaler("cpu", skip="joint")
    pairs = two("sgd")
    iterate(scaler, pairs, 0)
    other = pickle.loads(pickle.dumps(scaler))  # noqa: S301 - our own

    iterate(other, pairs, 1, bad={1})

    assert scaler.group("b").get_scale() == 2 * other.group("b").get_scale()
    with pytest.raises(GroupError, match="once, after every optimizer"):
        other.group("a").update()


def test_disabled_groups_pass_everything_through():
    """The same loop without scaling."""
    pairs = two("sgd")
    scaler = GradScaler("cpu", enabled=False, skip="joint")
    iterate(scaler, pairs, 0, clip=1.0)
    optimizer = pairs[0][1]
    scaler.backward(losses_of(pairs[0][0], 0), optimizer)

    assert 1.0 == scaler.group("a").get_scale()


# -- mistakes -------------------------------------------------------------------------


def test_mistakes_are_told():
    """Each with its cure."""
    scaler = GradScaler("cpu")
    group = scaler.group("a")
    with pytest.raises(GroupError, match=r"scaler\.group\('b'\)"):
        group.group("b")
    with pytest.raises(GroupError, match="with the first"):
        scaler.group("a", init_scale=2.0)
    with pytest.raises(GroupError, match=r"own sync.*may differ in init_scale"):
        scaler.group("c", sync="never")
    with pytest.raises(GroupError, match=r"scaler\.update\(\)"):
        group.update()
    with pytest.raises(GroupError, match=r"scaler\.run"):
        group.run(lambda: None)
    with pytest.raises(GroupError, match="loss_p"):
        scaler.backward({})
    with pytest.raises(OptionError, match="'independent'.*'joint'"):
        GradScaler("cpu", skip="both")


def test_both_networks_of_the_example_take_the_same_number_of_steps():
    """Under joint, with overflows in either; apart, they differ."""
    path = Path(__file__).parents[2] / "examples" / "gan.py"
    gan = runpy.run_path(str(path))
    critic, maker, scaler = gan["train"](60, "joint")
    alone = gan["train"](60, "independent")

    assert critic == maker
    assert 0 < critic < 60
    assert alone[0] != alone[1]
    assert scaler.group("critic").get_scale() != scaler.group("maker").get_scale()


@pytest.mark.parametrize("fused", [False, True])
def test_joint_steps_are_taken_back_whatever_is_added_meanwhile(fused):
    """A parameter group that joins between step and update, and several failures."""
    models = [net(seed) for seed in range(3)]
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused) for model in models
    ]
    scaler = GradScaler("cpu", skip="joint")
    before = [p.detach().clone() for model in models for p in model.parameters()]
    scaler.scale(sum(loss_of(model, 0) for model in models)).backward()
    spoil(models[1], "inf")
    spoil(models[2], "nan")
    for optimizer in optimizers:
        scaler.step(optimizer)
    optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    scaler.update()
    after = [p.detach() for model in models for p in model.parameters()]
    assert all(map(torch.equal, before, after))
    assert scaler.last_step_of(optimizers[0]).partner
