"""Optimizers inside of others, and scalers built on ours: nobody is told in vain."""

import pytest
import torch
from foreign import Forwarding, ForwardingAll
from nets import loss_of, net, spoil, train

from buoy.torch import GradScaler

EVENTS = ["ok", "inf", "ok", "ok", "nan", "ok"]


class Hiding(ForwardingAll):
    """Steps what nobody can find."""

    def step(self):
        return self.ask("step")()


class Property(torch.optim.Optimizer):
    """An optimizer by its class, that answers with what the one inside says."""

    def __init__(self, optimizer):
        self.inner = optimizer

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)
    _step_supports_amp_scaling = property(lambda self: True)

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self):
        self.inner.zero_grad()


class Copying(Property):
    """Takes over the attributes of the one inside, as some wrappers do."""

    param_groups = state = None
    _step_supports_amp_scaling = None

    def __init__(self, optimizer):
        self.__dict__.update(optimizer.__dict__)
        self.inner = optimizer


class Several:
    """Steps two optimizers as if they were one."""

    _step_supports_amp_scaling = property(lambda self: True)

    def __init__(self, optimizer):
        params = optimizer.param_groups[0]["params"]
        kind, rest = type(optimizer), {"lr": 0.01, "fused": True}
        self.optimizers = [kind(params[:2], **rest), kind(params[2:], **rest)]

    @property
    def param_groups(self):
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self):
        return {k: v for one in self.optimizers for k, v in one.state.items()}

    def zero_grad(self):
        for one in self.optimizers:
            one.zero_grad()

    def step(self):
        for one in self.optimizers:
            one.step()


WRAPPERS = [Forwarding, ForwardingAll, Hiding, Property, Copying, Several]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("clip", [None, 0.1, 1e9])
def test_a_wrapped_fused_optimizer_steps_with_unscaled_gradients(wrapper, clip):
    """As if it were not wrapped; at a scale that would throw the weights far off."""
    results = []
    for wrap in (wrapper, lambda optimizer: optimizer):
        model = net()
        inner = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        optimizer = wrap(inner)
        scaler = GradScaler("cpu", init_scale=2.0**12, growth_interval=2)

        def clipped(scaler=scaler, optimizer=optimizer):
            if clip is not None:
                scaler.clip_grad_norm_(optimizer, clip)

        seen = train(scaler, model, optimizer, EVENTS, before_step=clipped)
        held = [*model.parameters(), *(p.grad for p in model.parameters())]
        held += [v for p in model.parameters() for v in optimizer.state[p].values()]
        results.append((seen, held))
        assert not hasattr(inner, "grad_scale")
        assert not hasattr(inner, "found_inf")
    (seen, wrapped), (other, bare) = results
    assert seen == other
    for p, q in zip(wrapped, bare, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_fused_optimizer_skips(wrapper):
    """Its weights and its state stay what they were."""
    model = net()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    optimizer, scaler = wrapper(inner), GradScaler("cpu", init_scale=64.0)
    train(scaler, model, optimizer, ["ok"])
    held = [p.detach().clone() for p in model.parameters()]
    steps = [optimizer.state[p]["step"].item() for p in model.parameters()]
    train(scaler, model, optimizer, ["inf", "nan"], start=1)
    assert not scaler.last_step.applied
    assert all(map(torch.equal, held, model.parameters()))
    assert steps == [optimizer.state[p]["step"].item() for p in model.parameters()]


@pytest.mark.parametrize("clip", [False, True])
def test_gradients_are_unscaled_if_one_of_several_inside_would_not_do_it(clip):
    """Then none of them gets a scale to divide by; clipping unscales at once."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = Several(torch.optim.SGD(params, lr=0.01))
    optimizer.optimizers[1] = torch.optim.SGD(params[2:], lr=0.01, fused=False)
    scaler = GradScaler("cpu", init_scale=2.0**12)
    scaler.scale(sum(param.sum() for param in params)).backward()
    if clip:
        scaler.clip_grad_norm_(optimizer, 1e9)
        assert all(torch.equal(param.grad, torch.ones(2)) for param in params)
    scaler.step(optimizer)
    for param in params:
        torch.testing.assert_close(param.detach(), torch.full((2,), 0.99))


def test_one_that_unscales_by_itself_is_told_even_if_it_holds_another():
    """It may read both itself: it gets unscaled gradients and the flag, as in torch."""
    told = []

    class Outer(torch.optim.Optimizer):
        _step_supports_amp_scaling = True

        def __init__(self, params):
            super().__init__(params, {})
            self.helper = torch.optim.AdamW(params, lr=0.01, fused=True)

        def step(self, closure=None):
            told.append((self.grad_scale, self.found_inf.item()))
            return self.helper.step()

    model = net()
    optimizer = Outer(list(model.parameters()))
    other = net()
    plain = torch.optim.AdamW(other.parameters(), lr=0.01, fused=True)
    for kind, each in ((model, optimizer), (other, plain)):
        train(GradScaler("cpu", init_scale=512.0), kind, each, ["ok", "inf", "ok"])
    assert told == [(None, 0.0), (None, 1.0), (None, 0.0)]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


class SelfUnscaling(torch.optim.Optimizer):
    """Divides by `grad_scale` without writing to `.grad`."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        if not self.found_inf:
            for param in self.param_groups[0]["params"]:
                param.sub_(0.1 * param.grad / self.grad_scale)


class Calls(GradScaler):
    """Overrides what libraries override."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    def _unscale_grads_(self, *args, **kwargs):
        self.calls += ["_unscale_grads_", *args[3:]]  # whether FP16 is allowed
        return super()._unscale_grads_(*args, **kwargs)

    def _check_inf_per_device(self, optimizer):
        self.calls.append("_check_inf_per_device")
        return super()._check_inf_per_device(optimizer)

    def _maybe_opt_step(self, *args, **kwargs):
        self.calls.append("_maybe_opt_step")
        return super()._maybe_opt_step(*args, **kwargs)

    def _get_scale_async(self):
        self.calls.append("_get_scale_async")
        return super()._get_scale_async()


class StockCalls(torch.amp.GradScaler):
    """Does the same to torch's."""

    __init__ = torch.amp.GradScaler.__init__
    calls = ()


for name in (
    "_unscale_grads_",
    "_check_inf_per_device",
    "_maybe_opt_step",
    "_get_scale_async",
):

    def _noted(self, *args, name=name, **kwargs):
        self.calls = [*self.calls, name, *args[3:]]
        return getattr(torch.amp.GradScaler, name)(self, *args, **kwargs)

    setattr(StockCalls, name, _noted)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("unscales", [True, False])
def test_what_a_subclass_overrides_is_called_as_in_torch(fused, unscales):
    """The private methods, and in the same order."""
    calls = []
    for kind in (Calls, StockCalls):
        model, scaler = net(), kind("cpu", init_scale=64.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)

        def before(scaler=scaler, optimizer=optimizer):
            if unscales:
                scaler.unscale_(optimizer)

        train(scaler, model, optimizer, ["ok", "inf"], before_step=before)
        calls.append(list(scaler.calls))
    assert calls[0] == calls[1]


@pytest.mark.parametrize("fused", [True, False])
def test_clipping_goes_through_an_overridden_unscale(fused):
    """Whoever looks at gradients in its own way does so for clipping, too."""
    model, scaler = net(), Calls("cpu", init_scale=64.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler.scale(loss_of(model, 0)).backward()
    wanted = torch.nn.utils.get_total_norm([p.grad / 64 for p in model.parameters()])
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    assert "_unscale_grads_" in scaler.calls
    torch.testing.assert_close(norm, wanted)


class OneElement(GradScaler):
    """Keeps its flags as vectors of one element, as torch's sharded scaler does."""

    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        flags = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for device in flags:
            flags[device] = flags[device].reshape(1)


@pytest.mark.parametrize("policy", [None, "headroom"])
@pytest.mark.parametrize("sync", ["auto", "never"])
def test_flags_may_be_vectors_of_one_element(policy, sync):
    """Whatever is computed from them."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = OneElement("cpu", policy=policy, init_scale=2.0**8, sync=sync)
    ran = []
    scaler.gate(lambda: ran.append(1))
    train(scaler, model, optimizer, EVENTS)
    assert len(ran) == EVENTS.count("ok")
    assert scaler.last_step.applied


def test_a_wrapper_may_change_what_it_holds():
    """Another optimizer inside it is found at its first step."""
    model = net()
    params = list(model.parameters())
    wrapper = Several(torch.optim.AdamW(params, lr=0.01, fused=True))
    scaler = GradScaler("cpu", init_scale=2.0**12)
    train(scaler, model, wrapper, ["ok"])
    wrapper.optimizers[0] = torch.optim.AdamW(params[:2], lr=0.01, fused=True)
    before = [param.detach().clone() for param in params]
    train(scaler, model, wrapper, ["ok"], start=1)
    for old, param in zip(before, params, strict=True):
        assert (old - param).abs().max() < 0.02


@pytest.mark.parametrize("fused", [True, False])
def test_a_flag_that_was_added_up_over_ranks_skips(fused, loop):
    """Torch's fused kernels skip only where the flag is exactly 1."""
    scaler, model, optimizer = loop(lr=0.1, fused=fused, init_scale=64.0)
    scaler.scale(loss_of(model, 0)).backward()
    spoil(model, "inf")
    scaler.unscale_(optimizer)
    for flag in scaler._per_optimizer_states[id(optimizer)][
        "found_inf_per_device"
    ].values():
        flag.fill_(2.0)
    scaler.step(optimizer)
    scaler.update()
    assert all(param.isfinite().all() for param in model.parameters())


class Itself(torch.optim.AdamW):
    """Looks like a wrapper, and wraps itself."""

    def __init__(self, params):
        super().__init__(params, lr=0.01, fused=True)
        self.base = self
        self.given = []

    def step(self, closure=None):
        """Note what it is given."""
        self.given.append((self.grad_scale.item(), self.found_inf.item()))
        return super().step(closure)


def test_an_optimizer_that_holds_itself_is_one():
    """It gets `grad_scale` and `found_inf` once, and gives them back."""
    models = net(), net()
    own = Itself(models[0].parameters())
    usual = torch.optim.AdamW(models[1].parameters(), lr=0.01, fused=True)
    scalers = [GradScaler("cpu", init_scale=64.0) for _ in models]
    seen = train(scalers[0], models[0], own, EVENTS)

    assert seen == train(scalers[1], models[1], usual, EVENTS)
    assert own.given[:3] == [(64.0, 0.0), (64.0, 1.0), (32.0, 0.0)]
    assert not {"grad_scale", "found_inf"} & vars(own).keys()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
