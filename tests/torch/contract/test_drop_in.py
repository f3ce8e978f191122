"""With default arguments everything equals torch.amp.GradScaler, bit for bit."""

import copy
import inspect
import math

import hypothesis.strategies as st
import pytest
import torch
from against import EVENTS, Stock, both
from hypothesis import given, settings
from nets import OPTIMIZERS, batch, loss_of, net, spoil, train

from buoy.torch import GradScaler


def assert_same_training(ours, stock):
    """Compare models and optimizer states exactly."""
    for p, q in zip(ours[0].parameters(), stock[0].parameters(), strict=True):
        assert torch.equal(p, q)
        mine, theirs = ours[1].state[p], stock[1].state[q]
        for name in theirs:
            assert torch.equal(
                torch.as_tensor(mine[name]), torch.as_tensor(theirs[name])
            )


def test_is_a_subclass_with_torchs_arguments_first():
    """Trainers' type checks accept it, and positional arguments mean the same."""
    assert issubclass(GradScaler, Stock)
    mine = list(inspect.signature(GradScaler).parameters.values())
    theirs = list(inspect.signature(Stock).parameters.values())
    for ours, stock in zip(mine, theirs, strict=False):
        assert (ours.name, ours.default) == (stock.name, stock.default)
    assert all(p.kind is p.KEYWORD_ONLY for p in mine[len(theirs) :])


def test_has_every_attribute_of_torchs():
    """Whatever torch's instance has, ours has, of the same type."""
    ours, stock = both()
    for scaler in (ours, stock):
        scaler.scale(torch.ones((), requires_grad=True))
    for name, value in vars(stock).items():
        assert type(getattr(ours, name)) is type(value), name
    for name in dir(stock):
        assert hasattr(ours, name), name


@pytest.mark.parametrize("kind", [k for k in OPTIMIZERS if k != "fused momentum"])
def test_training_equals_torchs(kind):
    """Weights, state, scale and counter are torch's after every step."""
    results = []
    for scaler in both(init_scale=2.0**10, growth_interval=3):
        model = net()
        optimizer = OPTIMIZERS[kind](model.parameters())
        results.append((model, optimizer, train(scaler, model, optimizer, EVENTS)))
    assert results[0][2] == results[1][2]
    assert_same_training(results[0], results[1])


@pytest.mark.parametrize("kind", ["momentum", "adamw", "fused adamw"])
def test_training_by_hand_unscaled_and_clipped_equals_torchs(kind):
    """`unscale_`, torch's clipping, `step`: the documented way gives torch's bits."""
    results = []
    for scaler in both(init_scale=2.0**10, growth_interval=3):
        model = net()
        optimizer = OPTIMIZERS[kind](model.parameters())

        def clip(scaler=scaler, model=model, optimizer=optimizer):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        steps = train(scaler, model, optimizer, EVENTS, before_step=clip)
        results.append((model, optimizer, steps))
    assert results[0][2] == results[1][2]
    assert_same_training(results[0], results[1])


@settings(max_examples=150, deadline=None)
@given(
    events=st.lists(st.booleans(), max_size=60),
    init=st.floats(2.0**-10, 2.0**40, width=32),
    growth=st.floats(1.01, 20.0),
    backoff=st.floats(0.05, 0.99),
    interval=st.integers(1, 9),
    changes=st.dictionaries(st.integers(0, 59), st.integers(1, 9), max_size=3),
)
def test_any_trajectory_within_the_bounds_equals_torchs(
    events, init, growth, backoff, interval, changes
):
    """Whatever factors, intervals and changes of the interval: the same floats."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scalers = both(
        init_scale=init,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
    )
    for step, finite in enumerate(events):
        for scaler in scalers:
            if step in changes:
                scaler.set_growth_interval(changes[step])
            scaler.scale(torch.ones((), requires_grad=True))
            weight.grad = torch.tensor([1.0 if finite else float("inf")])
            scaler.step(optimizer)
            scaler.update()
        ours, stock = scalers
        if stock.get_scale() < 2.0**-24:
            return  # below our floor torch is wrong
        assert ours.state_dict() == stock.state_dict()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(), (1,), (2, 2)])
def test_scale_keeps_torchs_dtypes_and_shapes(dtype, shape):
    """Type promotion of the product is torch's."""
    value = torch.ones(shape, dtype=dtype, requires_grad=True)
    ours, stock = (scaler.scale(value) for scaler in both(init_scale=8.0))
    assert ours.dtype == stock.dtype
    assert torch.equal(ours, stock)


def test_scale_takes_nested_iterables():
    """Lists stay lists, tuples tuples, anything else an iterator."""
    ours, _ = both(init_scale=8.0)
    one = torch.ones((), requires_grad=True)
    nested = ours.scale([one, (one, [one]), (x for x in (one, one))])
    assert type(nested) is list
    assert type(nested[1]) is tuple
    assert nested[1][1][0].item() == 8.0
    assert [x.item() for x in nested[2]] == [8.0, 8.0]


def test_unscale_grads_is_torchs_contract():
    """Libraries call `_unscale_grads_` with their own factor and flag."""
    mixed = [
        torch.full((4, 4), 4.0),
        torch.full((4, 4), 4.0)[:, :2],
        torch.full((4, 4), 4.0).t(),
        torch.full((4,), 4.0, dtype=torch.float16),
        torch.full((4,), 4.0, dtype=torch.bfloat16),
    ]
    for bad in range(-1, len(mixed)):
        params = [torch.empty_like(g) for g in mixed]
        for i, (param, grad) in enumerate(zip(params, mixed, strict=True)):
            param.grad = grad.clone()
            if i == bad:
                param.grad[(-1,) * grad.dim()] = float("inf")
        optimizer = torch.optim.SGD(params, lr=1.0)
        flags = GradScaler("cpu")._unscale_grads_(
            optimizer, torch.full((1,), 0.25), torch.full((1,), 0.0), True
        )
        assert sum(flag.item() for flag in flags.values()) == (bad >= 0)
        if bad < 0:
            assert all(torch.equal(p.grad, torch.ones_like(p)) for p in params)


def test_sparse_gradients_are_unscaled_and_checked():
    """Values are unscaled in place; FP16 duplicates that overflow once added count."""
    where = torch.tensor([[0, 1, 1], [2, 0, 2]])
    for values, flag in (([16.0, 32.0, 64.0], 0.0), ([16.0, 32.0, float("nan")], 1.0)):
        param = torch.zeros(2, 3, requires_grad=True)
        param.grad = torch.sparse_coo_tensor(
            where, torch.tensor(values), (2, 3), check_invariants=True
        )
        dense = param.grad.to_dense()
        optimizer = torch.optim.SGD([param], lr=1.0)
        found = GradScaler("cpu")._unscale_grads_(
            optimizer, torch.full((1,), 0.25), torch.zeros(1), False
        )
        assert found[torch.device("cpu")].item() == flag
        if not flag:
            assert torch.equal(param.grad.to_dense(), dense / 4)
    param = torch.zeros(2, 3, dtype=torch.float16, requires_grad=True)
    twice = torch.tensor([[0, 1, 0], [2, 0, 2]])
    high = torch.tensor([64000.0, 32.0, 64000.0], dtype=torch.float16)
    param.grad = torch.sparse_coo_tensor(twice, high, (2, 3), check_invariants=True)
    found = GradScaler("cpu")._unscale_grads_(
        torch.optim.SGD([param], lr=1.0), torch.ones(1), torch.zeros(1), True
    )
    assert found[torch.device("cpu")].item() == 1.0


def test_the_scale_does_not_grow_to_inf():
    """At float32's top torch keeps the scale; so do we."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for scaler in both(init_scale=1e38, growth_factor=16.0, growth_interval=1):
        scaler.scale(torch.ones((), requires_grad=True))
        weight.grad = torch.ones(1)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == pytest.approx(1e38)
    with torch.no_grad():
        assert torch.isfinite(scaler._scale)


def test_fused_contract_passes_tensors_or_the_scaler_itself():
    """Optimizers that know of scaling get `grad_scale` and `found_inf`, or us."""
    seen = {}

    class Aware(torch.optim.Optimizer):
        _step_supports_amp_scaling = True

        def __init__(self, params):
            super().__init__(params, {})

    class TakesTensors(Aware):
        def step(self, closure=None):
            seen["scale"], seen["found"] = self.grad_scale, self.found_inf
            return 7.0

    class TakesScaler(Aware):
        def step(self, closure=None, *, grad_scaler=None):
            seen["scaler"] = grad_scaler
            grad_scaler._check_inf_per_device(self)

    weight = torch.nn.Parameter(torch.ones(2))
    first, second = TakesScaler([weight]), TakesTensors([weight])
    scaler = GradScaler("cpu", init_scale=2.0)
    scaler.scale(weight.sum()).backward()
    with pytest.warns(FutureWarning, match="stop passing itself"):
        scaler.step(first)
    assert scaler.step(second) == 7.0
    scaler.update()
    assert seen["scaler"] is scaler
    assert (seen["scale"].item(), seen["found"].item()) == (2.0, 0.0)
    assert not hasattr(second, "grad_scale")
    assert not hasattr(second, "found_inf")


def test_fused_grad_scale_set_by_the_user_multiplies():
    """A `grad_scale` that is already there is part of the product, as in torch."""
    for scaler in both(init_scale=4.0):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
        optimizer.grad_scale = torch.tensor(2.0)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight.detach(), torch.full((2,), 0.5))


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_spoilt_after_unscale_are_the_users_own(fused, loop):
    """After `unscale_` they belong to the caller: torch does not look again."""
    scaler, weight, optimizer = loop("adamw", torch.ones(2), lr=0.1, fused=fused)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    weight.grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert not torch.isfinite(weight).any()


def test_two_optimizers_and_losses_step_on_their_own():
    """One overflows and is skipped, the other steps; the scale falls once for both."""
    outcomes = []
    for scaler in both():
        models = [net(1), net(2)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        before = [copy.deepcopy(m.state_dict()) for m in models]
        losses = [loss_of(models[0], 0), loss_of(models[1], 0)]
        scaler.scale(losses[0]).backward()
        scaler.scale(losses[1] + losses[0].detach()).backward()
        models[1][0].weight.grad[0, 0] = float("inf")
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        moved = [
            any(not torch.equal(was[n], p) for n, p in model.state_dict().items())
            for was, model in zip(before, models, strict=True)
        ]
        outcomes.append((moved, scaler.get_scale()))
    assert outcomes[0] == outcomes[1] == ([True, False], 32768.0)


def test_gradient_penalty_and_accumulation_equal_torchs():
    """Double backward through a scaled loss, two micro-batches per step."""
    results = []
    for scaler in both(init_scale=128.0, growth_interval=2):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            for micro in range(2):
                loss = loss_of(model, 2 * step + micro)
                scaled = torch.autograd.grad(
                    scaler.scale(loss), model.parameters(), create_graph=True
                )
                inverse = 1.0 / scaler.get_scale()
                penalty = sum((g * inverse).pow(2).sum() for g in scaled)
                scaler.scale((loss + penalty) / 2).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append((model, optimizer, scaler.state_dict()))
    assert results[0][2] == results[1][2]
    assert_same_training(results[0], results[1])


def test_lazy_initialisation_is_there_for_resuming_libraries():
    """Accelerate's FSDP2 resume calls it before any loss is scaled."""
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    assert (scaler._scale.item(), scaler._growth_tracker.item()) == (4.0, 0)
    assert (scaler._scale.dtype, scaler._growth_tracker.dtype) == (
        torch.float32,
        torch.int32,
    )
    assert scaler._get_scale_async() is scaler._scale
    with pytest.raises(AssertionError):
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))


def test_foreign_writes_to_the_scale_are_followed():
    """Code that writes into `_scale` itself is believed, as with torch."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for scaler in both(growth_interval=3):
        train(scaler, model, optimizer, ["ok"])
        scaler._scale.fill_(64.0)
        scaler._growth_tracker.fill_(2)
        assert train(scaler, model, optimizer, ["ok", "inf"]) == [(128.0, 0), (64.0, 0)]


def test_new_scale_by_hand():
    """A float or a one-element tensor sets the scale and keeps the counter."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for scaler in both():
        train(scaler, model, optimizer, ["ok"])
        for value in (3.0, torch.tensor(5.0)):
            scaler.scale(loss_of(model, 0)).backward()
            scaler.step(optimizer)
            scaler.update(value)
            assert scaler.get_scale() == float(value)
            assert scaler._get_growth_tracker() == 1
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones((), requires_grad=True))
    scaler.update(8)
    assert scaler.get_scale() == 8.0


def test_autocast_fp16_end_to_end_equals_torchs():
    """A real FP16 forward and backward pass, with its natural overflows."""
    results = []
    for scaler in both(growth_interval=4, init_scale=2.0**20):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scales = []
        for step in range(16):
            optimizer.zero_grad()
            x, y = batch(step)
            with torch.autocast("cpu", torch.float16):
                loss = torch.nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        results.append((model, optimizer, scales))
    assert results[0][2] == results[1][2]
    assert min(results[0][2]) < 2.0**20
    assert_same_training(results[0], results[1])


def test_a_loss_may_be_scaled_inside_a_function_transform():
    """Once there is a scale; and what is skipped later is judged all the same."""
    for kind in (GradScaler, torch.amp.GradScaler):
        model, scaler = net(), kind("cpu", init_scale=8.0)
        with torch.no_grad():
            scaler.scale(torch.ones(()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(2, 6)

        def loss(params, model=model, scaler=scaler, x=x):
            return scaler.scale(torch.func.functional_call(model, params, (x,)).sum())

        scales = []
        for event in ("ok", "inf", "ok"):
            held = {name: p.detach() for name, p in model.named_parameters()}
            found = torch.func.grad(loss)(held)
            for name, param in model.named_parameters():
                param.grad = found[name].detach().clone()
            spoil(model, event)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == [8.0, 4.0, 4.0]
        each = torch.func.vmap(lambda v, scaler=scaler: scaler.scale(v.sum()))
        assert each(torch.ones(4, 3)).tolist() == [12.0] * 4


def test_losses_may_lie_on_several_devices(loop):
    """One of which keeps nothing: what is skipped is judged by the others."""
    weight = torch.nn.Parameter(torch.ones(2))
    other = torch.nn.Parameter(torch.ones(2, device="meta"))
    scaler, _, optimizer = loop("sgd", weight, lr=0.1, init_scale=8.0)
    for bad in (None, math.inf, math.nan):
        optimizer.zero_grad()
        first, (second,) = scaler.scale((weight.sum(), [other.sum()]))
        assert second.is_meta
        first.backward()
        if bad is not None:
            weight.grad[0] = bad
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0
    assert scaler.last_step.verdict == "scale_too_high"


@pytest.mark.parametrize("flags", [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("kind", ["sgd", "fused sgd"])
@pytest.mark.parametrize("sync", ["auto", "never"])
def test_one_overflow_on_any_device_skips_the_step_on_all(flags, kind, sync):
    """Sharded scalers return one flag per device, by the method that they override."""

    class Sharded(GradScaler):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            found = torch.device("cpu"), torch.device("cpu", 1)
            return dict(zip(found, map(torch.tensor, flags), strict=True))

    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = Sharded("cpu", init_scale=8.0, sync=sync)
    before = [param.detach().clone() for param in model.parameters()]
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)
    scaler.update()

    finite = not any(flags)
    assert finite == scaler.last_step.applied
    assert (8.0 if finite else 4.0) == scaler.get_scale()
    for held, param in zip(before, model.parameters(), strict=True):
        assert finite != torch.equal(held, param)


def test_a_scale_made_while_evaluating_goes_on_in_training():
    """In torch's inference mode tensors are made that cannot be written to later."""
    model = net()
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    with torch.inference_mode():
        assert scaler.scale(torch.ones(())) == 8.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = train(scaler, model, optimizer, ["ok", "inf"])
    assert [scale for scale, _ in seen] == [16.0, 8.0]
