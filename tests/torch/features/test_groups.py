"""Several losses and optimizers: scales of their own, skipped alone or together."""

import copy
import json
import math
import pickle
import runpy
from collections import deque
from pathlib import Path

import pytest
import torch
from nets import OPTIMIZERS, loss_of, net, spoil
from no_host_reads import no_host_reads

from buoy import Verdict
from buoy._backends import torch as backend
from buoy.torch import (
    CallOrderError,
    DeviceModeError,
    GradScaler,
    OptionError,
)
from tests.pages import recipe


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


@pytest.mark.parametrize("both", [True, False])
def test_a_scale_set_by_hand_is_the_parents_own(both):
    """`update(new_scale)` leaves groups to their policies, whoever stepped."""
    pairs = two()
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    group = scaler.group("b", init_scale=2.0**4)
    idle = scaler.group("c", init_scale=2.0**2)
    if both:
        model, optimizer = pairs[0]
        scaler.scale(loss_of(model, 0)).backward()
        scaler.step(optimizer)
    else:
        scaler.scale(loss_of(pairs[0][0], 0))
    model, optimizer = pairs[1]
    group.scale(loss_of(model, 0)).backward()
    group.step(optimizer)

    scaler.update(2.0**7)

    assert 2.0**7 == scaler.get_scale()
    assert 2.0**5 == group.get_scale()  # one clean step
    assert 2.0**2 == idle.get_scale()


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


class Keeper(torch.optim.Optimizer):
    """Momentum, kept in containers of every kind, which grow."""

    def __init__(self, params):
        """Start with nothing."""
        super().__init__(params, {"lr": 0.1, "steps": 0})

    def step(self):
        """Step by the sum of all that is kept."""
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                kept = self.state[param]
                if not kept:
                    kept["list"] = [torch.zeros_like(param)]
                    kept["tuple"] = (torch.zeros_like(param), 1)
                    kept["deque"] = deque([torch.zeros_like(param)], maxlen=3)
                    kept["dict"] = {"of": {"list": [torch.zeros_like(param)]}}
                kept["list"][0].mul_(0.9).add_(param.grad)
                kept["list"].append(param.grad.clone())
                kept["tuple"][0].add_(param.grad)
                kept["deque"].append(param.grad.clone())
                kept["dict"]["of"]["list"][0].sub_(param.grad)
                kept["dict"][f"step {group['steps']}"] = param.grad.clone()
                with torch.no_grad():
                    param.sub_(kept["list"][0], alpha=group["lr"])


@pytest.mark.parametrize("partner", ["adamw", "fused adamw"])
def test_joint_restores_tensors_in_containers_of_a_state(partner):
    """Lists, tuples, deques and dicts, in place; and numbers in the settings."""
    first, (model, second) = net(), two(partner)[1]
    pairs = [(first, Keeper(first.parameters())), (model, second)]
    scaler = GradScaler("cpu", skip="joint", init_scale=4.0)
    iterate(scaler, pairs, 0, bad={1})  # the first step, without state
    assert {} == dict(pairs[0][1].state)
    assert 0 == pairs[0][1].param_groups[0]["steps"]
    iterate(scaler, pairs, 1)
    before, state = weights(pairs), pairs[0][1].state[first[0].weight]
    kept, held = copy.deepcopy(pairs[0][1].state_dict()), state["list"]

    iterate(scaler, pairs, 2, bad={1})

    assert all(map(torch.equal, before, weights(pairs)))
    assert str(kept) == str(pairs[0][1].state_dict())
    assert held is pairs[0][1].state[first[0].weight]["list"]


def test_containers_on_a_device_are_refused():
    """A skip that could not be undone without waiting; nothing was changed."""
    first, (model, second) = net(), two("sgd")[1]
    pairs = [(first, Keeper(first.parameters())), (model, second)]
    scaler = GradScaler("cpu", skip="joint", init_scale=4.0, sync="never")
    pairs[0][1].state[first[0].weight] = {"list": [torch.zeros(1)]}
    before = weights(pairs)

    with pytest.raises(DeviceModeError, match="keeps `list` as list"):
        iterate(scaler, pairs, 0)

    assert all(map(torch.equal, before, weights(pairs)))


class Own(torch.optim.AdamW):
    """Of a class whose state before the first step is unknown."""


@pytest.mark.parametrize("last", [False, True])
def test_a_joint_step_that_cannot_be_undone_is_not_applied_by_half(last, monkeypatch):
    """Where the host reads nothing; the partner is restored, too."""
    monkeypatch.setattr(backend, "in_host_memory", lambda tensor: False)
    pairs = list(two("fused adamw"))
    pairs[last] = pairs[last][0], Own(pairs[last][0].parameters(), fused=True)
    scaler = GradScaler("cpu", skip="joint", init_scale=4.0)
    before = weights(pairs)

    with pytest.raises(DeviceModeError, match="does not know what Own keeps"):
        iterate(scaler, pairs, 0)

    assert all(map(torch.equal, before, weights(pairs)))


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


def test_joint_restores_guarded_buffers_of_the_partner():
    """Also where the model was guarded before the groups were made."""
    norm = torch.nn.BatchNorm1d(6)
    guarded = torch.nn.Sequential(norm, net())
    pairs = [(guarded, OPTIMIZERS["sgd"](guarded.parameters())), two("sgd")[1]]
    scaler = GradScaler("cpu", skip="joint")
    scaler.guard(guarded)
    iterate(scaler, pairs, 0)
    iterate(scaler, pairs, 1, bad={1})

    assert 1 == norm.num_batches_tracked


def test_joint_waits_for_nobody():
    """With optimizers that take `found_inf` steps are taken back on the device."""
    pairs = two("fused adamw")
    scaler = GradScaler("cpu", skip="joint", init_scale=4.0)
    for step in range(4):
        iterate(scaler, pairs, step)
    before = weights(pairs)
    held = [v["step"] for _, o in pairs for v in o.state.values()]
    with no_host_reads(allowed=held):
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


def test_a_gate_of_a_scaler_that_steps_beside_its_groups_advances_once():
    """The scaler's own step and the group's are one iteration."""
    (model, optimizer), (other, second) = two("sgd")
    scaler, moved = GradScaler("cpu"), []
    scaler.gate(lambda: moved.append(1))
    group = scaler.group("other")
    scaler.scale(loss_of(model, 0)).backward()
    group.scale(loss_of(other, 0)).backward()
    scaler.step(optimizer)
    group.step(second)
    scaler.update()
    assert [1] == moved


# -- one gradient buffer: the recipe of docs/guides/several-losses.md ------------------


def losses_of(model, step):
    out = model(torch.ones(4, 6) * (step + 1))
    return {"policy": out.square().mean() * 1e-6, "value": out.sum()}


def added_up(kind="sgd", **options):
    """Set the recipe's function up for a network of these tests."""
    model, page = net(), recipe("guides/several-losses.md", "backward")
    page["model"] = model
    page["optimizer"] = OPTIMIZERS[kind](model.parameters())
    page["scaler"] = GradScaler("cpu", policy="none", **options)
    page["groups"] = {
        name: page["scaler"].group(name, policy="torch", init_scale=scale)
        for name, scale in (("policy", 2.0**20), ("value", 2.0**3))
    }
    return page


@pytest.mark.parametrize("kind", ["sgd", "adamw", "fused adamw"])
def test_gradients_of_two_groups_are_added_up_unscaled(kind):
    """The sum is the plain sum; powers of two change no bit of it."""
    page, twin = added_up(kind), net()
    model, optimizer, scaler = page["model"], page["optimizer"], page["scaler"]
    other = OPTIMIZERS[kind](twin.parameters())
    for step in range(4):
        twin.load_state_dict(model.state_dict())
        page["backward"](losses_of(model, step))
        other.zero_grad()
        for index, loss in enumerate(losses_of(twin, step).values()):
            loss.backward(retain_graph=not index)

        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        assert norm == torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        other.step()
        assert scaler.last_step.applied
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("kind", ["sgd", "fused adamw"])
@pytest.mark.parametrize("sync", ["auto", "never"])
def test_an_overflow_of_one_loss_skips_the_sum_and_lowers_its_own_scale(kind, sync):
    """The other scale stays, and the next batch is applied."""
    page = added_up(kind, sync=sync)
    model, optimizer, scaler = page["model"], page["optimizer"], page["scaler"]
    before = [param.detach().clone() for param in model.parameters()]
    for factor in (math.inf, 1.0):
        losses = losses_of(model, 0)
        losses["value"] = losses["value"] * factor
        page["backward"](losses)
        scaler.step(optimizer)
        scaler.update()

        same = all(map(torch.equal, before, model.parameters()))
        assert same == math.isinf(factor) != scaler.last_step.applied
    scales = {name: group.get_scale() for name, group in page["groups"].items()}
    assert {"policy": 2.0**20, "value": 2.0**2} == scales


def test_a_step_with_a_group_that_scaled_no_loss_is_refused(loop):
    """Its scale is not the one that the loss was multiplied by."""
    scaler, model, optimizer = loop()
    one, other = scaler.group("one"), scaler.group("other")
    one.scale(loss_of(model, 0)).backward()
    with pytest.raises(CallOrderError, match="Attempted step but _scale is None"):
        other.step(optimizer)

    for turn in (one, other):
        optimizer.zero_grad()
        turn.scale(loss_of(model, 1)).backward()
        turn.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    one.scale(loss_of(model, 2)).backward()
    with pytest.raises(CallOrderError, match="group that scaled the loss"):
        other.step(optimizer)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_generator_loss_through_the_critic_is_fine_in_every_step(set_to_none, loop):
    """Whichever way its gradients in the critic are cleared."""
    (critic, critics), _ = two("sgd")
    scaler, maker, makers = loop("sgd", torch.nn.Linear(6, 6))
    one, other = scaler.group("critic"), scaler.group("maker")
    for step in range(9):
        critics.zero_grad(set_to_none=set_to_none)
        one.scale(loss_of(critic, step)).backward()
        one.step(critics)
        makers.zero_grad(set_to_none=set_to_none)
        other.scale(critic(maker(torch.ones(2, 6))).mean()).backward()
        other.step(makers)
        scaler.update()

        assert scaler.last_step.applied


def test_a_generator_loss_through_the_critic_is_fine(loop):
    """Gradients that are cleared before they are used do not count as mixed."""
    (critic, critics), (maker, makers) = two("sgd")
    scaler, maker, makers = loop("sgd", torch.nn.Linear(6, 6))
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


def test_one_optimizer_may_take_turns_with_groups(loop):
    """Each turn with its own loss and its own scale, also long after the first."""
    scaler, model, optimizer = loop()
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


@pytest.mark.parametrize("own", [False, True])
def test_one_optimizer_may_take_turns_in_run(own, loop):
    """The function steps with the group that scaled the loss."""
    scaler, model, optimizer = loop()
    turns = [scaler.group("one"), scaler if own else scaler.group("two")]
    for number in range(8):
        turn = turns[number % 2]

        def step(turn=turn, number=number):
            optimizer.zero_grad()
            turn.scale(loss_of(model, number)).backward()
            turn.step(optimizer)
            scaler.update()

        scaler.run(step)
        assert turn.last_step.applied


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
    with pytest.raises(OptionError, match="once, after every optimizer"):
        other.group("a").update()


def test_disabled_groups_pass_everything_through():
    """The same loop without scaling."""
    pairs = two("sgd")
    scaler = GradScaler("cpu", enabled=False, skip="joint")
    iterate(scaler, pairs, 0, clip=1.0)

    assert 1.0 == scaler.group("a").get_scale()


# -- mistakes -------------------------------------------------------------------------


def test_mistakes_are_told():
    """Each with its cure."""
    scaler = GradScaler("cpu")
    group = scaler.group("a")
    with pytest.raises(OptionError, match=r"scaler\.group\('b'\)"):
        group.group("b")
    with pytest.raises(OptionError, match="with the first"):
        scaler.group("a", init_scale=2.0)
    with pytest.raises(OptionError, match=r"own sync.*may have its own init_scale"):
        scaler.group("c", sync="never")
    with pytest.raises(OptionError, match=r"scaler\.update\(\)"):
        group.update()
    with pytest.raises(OptionError, match=r"scaler\.run"):
        group.run(lambda: None)
    with pytest.raises(OptionError, match="'independent'.*'joint'"):
        GradScaler("cpu", skip="both")


def test_both_networks_of_the_example_take_the_same_number_of_steps():
    """Under joint, with overflows in either; apart, they differ."""
    path = Path(__file__).parents[3] / "examples" / "gan.py"
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


# -- what was looked at is what is applied ---------------------------------------------


def test_another_groups_backward_pass_between_clipping_and_step_is_refused(loop):
    """Also long after the first losses, whose graphs are looked at."""
    scaler, model, optimizer = loop()
    one, other = scaler.group("one"), scaler.group("other")
    for step in range(6):
        for turn in (one, other):
            optimizer.zero_grad()
            turn.scale(loss_of(model, step)).backward()
            turn.step(optimizer)
            scaler.update()
    optimizer.zero_grad()
    one.scale(loss_of(model, 6)).backward()
    one.clip_grad_norm_(optimizer, 1.0)
    other.scale(loss_of(model, 7)).backward()

    with pytest.raises(CallOrderError, match="another backward pass"):
        one.step(optimizer)


# -- updates and copies ---------------------------------------------------------------


def test_a_joint_update_without_a_step_is_refused_as_any_other():
    """With groups and without, before and after a loss was scaled."""
    for make in (lambda scaler: None, lambda scaler: scaler.group("a")):
        scaler = GradScaler("cpu", skip="joint")
        make(scaler)
        with pytest.raises(CallOrderError):
            scaler.update()
        scaler.scale(torch.ones((), requires_grad=True))
        with pytest.raises(CallOrderError, match="No inf checks were recorded"):
            scaler.update()


def test_a_new_scale_is_the_scalers_own():
    """The groups move by their own gradients; a bad one moves nothing."""
    pairs = two("sgd")
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(torch.ones((), requires_grad=True))
    for (model, optimizer), name in zip(pairs, "ab", strict=True):
        scaler.group(name).scale(loss_of(model, 0)).backward()
        scaler.group(name).step(optimizer)
    with pytest.raises(OptionError, match="new_scale"):
        scaler.update(-1.0)
    assert [8.0, 8.0] == [scaler.group(name).get_scale() for name in "ab"]
    scaler.update(32.0)

    assert 32.0 == scaler.get_scale()
    assert [16.0, 16.0] == [scaler.group(name).get_scale() for name in "ab"]


def pickled(scaler):
    return pickle.loads(pickle.dumps(scaler))  # noqa: S301 - our own


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies_have_the_groups_with_their_options(copied):
    """A group with another policy goes on with it, exactly."""
    pairs = two("sgd")
    scaler = GradScaler("cpu", growth_interval=2)
    scaler.group("a", policy="headroom")
    scaler.group("b", init_scale=4.0, min_scale=2.0)
    for step in range(3):
        iterate(scaler, pairs, step, bad={1} if step == 1 else ())
    other = copied(scaler)

    assert scaler.state_dict() == other.state_dict()
    for name in "ab":
        assert scaler.group(name).policy == other.group(name).policy
    twins = copy.deepcopy(pairs)
    for step in range(3, 6):
        iterate(scaler, pairs, step, bad={1} if step == 4 else ())
        iterate(other, twins, step, bad={1} if step == 4 else ())
    assert scaler.state_dict() == other.state_dict()


def test_a_scaler_is_not_copied_while_a_group_is_in_mid_iteration():
    """As torch says of a scaler alone."""
    (model, optimizer), _ = two("sgd")
    scaler = GradScaler("cpu")
    scaler.group("a").scale(loss_of(model, 0)).backward()
    scaler.group("a").step(optimizer)

    with pytest.raises(CallOrderError, match="may only be pickled"):
        copy.deepcopy(scaler)


class Counting(GradScaler):
    """Has a constructor and an attribute of its own."""

    def __init__(self, counted):
        super().__init__("cpu", growth_interval=3)
        self.counted = counted

    def _unscale_grads_(self, *args, **kwargs):
        self.counted.append(1)
        return super()._unscale_grads_(*args, **kwargs)


def test_groups_are_of_the_scalers_class():
    """Whatever its constructor takes."""
    counted = []
    (model, optimizer), _ = two("sgd")
    scaler = Counting(counted)
    group = scaler.group("a", init_scale=4.0)
    group.scale(loss_of(model, 0)).backward()
    group.step(optimizer)
    scaler.update()

    assert type(group) is Counting
    assert [1] == counted
    assert 3 == copy.deepcopy(scaler).group("a").get_growth_interval()
