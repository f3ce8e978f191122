"""Methods that pass on to another part, and what they return."""

import math

import pytest
import torch
from nets import loss_of, net

import buoy.torch
from buoy.diagnose import Doctor
from buoy.torch import BuoyWarning, CallOrderError, GradScaler, OptionError
from buoy.torch.distributed import different_states
from buoy.torch.options import checked_clip


def test_a_loss_function_keeps_its_value_and_scales_what_flows_back(loop):
    """As a pipeline's schedule calls it; then the step is as usual."""
    model, other = net(), net()
    scaler, _, optimizer = loop("sgd", model, lr=0.1, init_scale=8.0)
    loss_fn = scaler.loss_fn(lambda step: loss_of(model, step))
    loss = loss_fn(0)
    loss.backward()
    loss_of(other, 0).backward()
    assert loss.item() == loss_of(other, 0).item()
    assert torch.equal(model[0].weight.grad, other[0].weight.grad * 8.0)
    scaler.step(optimizer)
    assert scaler.last_step.applied
    assert torch.equal(model[0].weight.grad, other[0].weight.grad)


def test_a_disabled_scaler_returns_a_loss_function_as_it_is():
    """There is nothing to scale."""
    assert GradScaler("cpu", enabled=False).loss_fn(loss_of) is loss_of


def test_the_tools_around_it_are_at_hand():
    """`doctor` and `measure_underflow` return what their guides say."""
    model = net()
    scaler = GradScaler("cpu", init_scale=8.0)
    assert isinstance(scaler.doctor(), Doctor)
    found = scaler.measure_underflow(lambda: loss_of(model, 0), model=model)
    assert found is not None


def test_the_module_lists_what_it_exports():
    """Also what it imports only when it is asked for."""
    assert set(buoy.torch.__all__) <= set(dir(buoy.torch))
    for name in buoy.torch.__all__:
        assert getattr(buoy.torch, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = buoy.torch.no_such_name


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("look", ["unscale_", "clip_grad_norm_"])
def test_parameters_are_watched_only_if_another_pass_may_come(look, fused, loop):
    """One loss: no hook.  Two: the pass of the second is noticed."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    params[1].requires_grad_(False)
    scaler, _, optimizer = loop("sgd", params, lr=0.1, fused=fused)
    more = () if look == "unscale_" else (1.0,)

    scaler.scale(params[0].sum()).backward()
    getattr(scaler, look)(optimizer, *more)
    assert not params[0]._post_accumulate_grad_hooks
    scaler.step(optimizer)
    scaler.update()

    optimizer.zero_grad()
    first, second = scaler.scale([params[0].sum(), params[0].square().sum()])
    first.backward()
    getattr(scaler, look)(optimizer, *more)
    assert len(params[0]._post_accumulate_grad_hooks) == 1
    second.backward()
    with pytest.raises(CallOrderError, match="another backward pass"):
        scaler.step(optimizer)
    scaler.update()
    assert not params[0]._post_accumulate_grad_hooks


def test_a_gradient_replaced_by_hand_while_watched_is_the_user_s(loop):
    """Only a backward pass makes it another one."""
    scaler, param, optimizer = loop("sgd", torch.ones(2), lr=0.5)
    first, _ = scaler.scale([param.sum(), param.square().sum()])
    first.backward()
    scaler.unscale_(optimizer)
    param.grad = param.grad * 2.0
    scaler.step(optimizer)
    assert torch.equal(param, torch.zeros(2))


def test_the_norm_of_a_step_is_that_before_any_clipping(loop):
    """However often it was clipped, after `unscale_` or without."""
    for unscaled in (False, True):
        scaler, param, optimizer = loop("sgd", torch.tensor([3.0, 4.0]), lr=0.1)
        scaler.scale(param.square().sum()).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        norms = [scaler.clip_grad_norm_(optimizer, bound).item() for bound in (5, 2, 3)]
        assert norms == pytest.approx([10.0, 5.0, 2.0])
        scaler.step(optimizer)
        assert scaler.last_step.norm == pytest.approx(10.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(
    ("exponent", "fits"), [(-100, (1, 1)), (-120, (1, 0)), (-140, (0, 0))]
)
def test_a_multiplier_that_float32_cannot_hold(
    exponent, fits, fused, hidden, monkeypatch, loop
):
    """Clip factor / scale, 2^-16 less: written if the host can tell, else skipped."""
    if hidden:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    scaler, param, optimizer = loop(
        "sgd", torch.ones(4), lr=1.0, fused=fused, init_scale=2.0**16
    )
    scaler.scale(param.sum()).backward()
    scaler.clip_grad_norm_(optimizer, 2.0 * 2.0**exponent)
    scaler.step(optimizer)
    assert scaler.last_step.applied is (not hidden or bool(fits[fused]))
    scaler.update()


class Taking(torch.optim.Optimizer):
    """Takes the scaler itself, and unscales nowhere that anybody could see."""

    _step_supports_amp_scaling = True

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None, *, grad_scaler=None):
        grad_scaler._check_inf_per_device(self)
        return 7


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself")
def test_an_optimizer_that_takes_the_scaler_returns_and_hides():
    """Its result is that of `step`, whether its gradients were unscaled or not."""
    for unscaled in (False, True):
        param = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        optimizer, scaler = Taking([param]), GradScaler("cpu")
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(param.square().sum()).backward()
            if unscaled:
                scaler.unscale_(optimizer)
            assert scaler.step(optimizer) == 7
            assert scaler.last_step.applied
            scaler.update()


class TakingByProperty(Taking):
    """Declares its support as wrappers do, and wraps nothing."""

    _step_supports_amp_scaling = property(lambda self: True)


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself")
def test_an_optimizer_that_takes_the_scaler_gets_it_however_it_declares_that():
    """Its `step` has the argument."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = TakingByProperty([param]), GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    assert scaler.step(optimizer) == 7


def test_a_disabled_scaler_returns_what_the_optimizer_does():
    """And forgets a norm that no step used."""
    param = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = torch.optim.SGD([param], lr=0.0)
    usual = optimizer.step
    optimizer.step = lambda: (usual(), 7)[1]
    scaler = GradScaler("cpu", enabled=False)
    scaler.scale(param.sum() * 100.0).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(param.square().sum()).backward()
    assert scaler.step(optimizer) == 7
    last = scaler.last_step
    assert (last.norm, last.scale, last.next_scale, last.applied) == (None, 1, 1, True)


class OwnCheck(GradScaler):
    """A library that unscales in its own way, and calls nothing of ours for it."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        self.asked = allow_fp16
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad.mul_(inv_scale)
                found_inf.copy_(
                    torch.maximum(found_inf, (~param.grad.isfinite()).any())
                )
        return {found_inf.device: found_inf}


@pytest.mark.parametrize("fused", [False, True])
def test_a_library_s_own_check_is_watched_all_the_same(fused):
    """A pass after it is refused; only a check allows FP16 gradients."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.5, fused=fused)
    scaler = OwnCheck("cpu", init_scale=4.0)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert scaler.asked is fused
    assert torch.equal(param, torch.full((2,), 0.5))
    scaler.update()

    optimizer.zero_grad()
    first, second = scaler.scale([param.sum(), param.square().sum()])
    first.backward()
    scaler.unscale_(optimizer)
    assert scaler.asked is False
    second.backward()
    with pytest.raises(CallOrderError, match="another backward pass"):
        scaler.step(optimizer)


def test_gradients_from_before_loading_are_refused(loop):
    """They were multiplied by the scale of another run."""
    scaler, param, optimizer = loop("sgd", torch.ones(2), lr=0.5)
    scaler.scale(param.sum()).backward()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    with pytest.raises(CallOrderError, match="No loss was scaled since"):
        scaler.step(optimizer)


def test_what_is_off_is_nothing():
    """No guard, no recorder, no step yet."""
    scaler = GradScaler("cpu")
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    assert (scaler.spikes, scaler.trace, scaler.last_step) == (0, None, None)
    assert scaler.last_step_of(optimizer) is None


@pytest.mark.parametrize("order", [0.0, -math.inf, math.nan, "two", None])
@pytest.mark.parametrize("ranks", [False, True])
def test_norms_of_ranks_have_parts(order, ranks):
    """Counts and smallest elements cannot be put together; other orders can."""
    if order in (0.0, -math.inf) and not ranks:
        assert checked_clip(1, order, ranks=ranks) == (1.0, order)
    else:
        with pytest.raises(OptionError, match="norm_type"):
            checked_clip(1.0, order, ranks=ranks)
    for usual in (-1.0, 0.5, 1.0, 2, math.inf):
        assert checked_clip(0.5, usual, ranks=ranks) == (0.5, usual)


def test_a_value_to_clip_by_is_read_wherever_it_is(monkeypatch, loop):
    """Clamping by a negative one would set every gradient to it."""
    monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    scaler, param, optimizer = loop("sgd", torch.tensor([3.0, 0.2]), lr=0.1)
    scaler.scale(param.square().sum()).backward()
    with pytest.raises(OptionError, match="clip_value"):
        scaler.clip_grad_value_(optimizer, torch.tensor(-1.0))
    scaler.clip_grad_value_(optimizer, torch.tensor(1.0))
    torch.testing.assert_close(param.grad, torch.tensor([1.0, 0.4]))


@pytest.mark.parametrize("device", ["nonsense", "", 65536.0, None])
def test_a_device_that_torch_does_not_know_is_refused(device):
    """The first argument is the device, other than in torch.cuda.amp."""
    with pytest.raises(OptionError, match="`device`"):
        GradScaler(device)


@pytest.mark.parametrize("stepped", [False, True])
def test_a_gate_that_never_opens_is_told_once_at_the_tenth_update(stepped):
    """Unless its optimizer has ever stepped: then it may come back."""
    param = torch.nn.Parameter(torch.ones(2))
    own, other = (torch.optim.SGD([param], lr=0.1) for _ in range(2))
    scaler = GradScaler("cpu")
    scaler.gate(torch.optim.lr_scheduler.ConstantLR(own))

    def iterate(optimizer):
        optimizer.zero_grad()
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    if stepped:
        iterate(own)
    for _ in range(9):
        iterate(other)
    if stepped:
        iterate(other)
    else:
        with pytest.warns(BuoyWarning, match="never steps"):
            iterate(other)
    for _ in range(12):
        iterate(other)


@pytest.mark.parametrize(
    ("method", "word"), [("step", "scheduler.step(loss)"), ("update", "average.update")]
)
def test_a_gate_that_needs_an_argument_says_how_to_pass_it(method, word):
    """In the words of what it probably is."""

    def advance(self, loss):
        """Need an argument."""

    advance.__name__ = method
    thing = type("Thing", (), {method: advance})()
    with pytest.raises(OptionError) as caught:
        GradScaler("cpu").gate(thing)
    assert word in str(caught.value)


@pytest.mark.parametrize(("count", "shown"), [(1, 1), (8, 8), (9, 8), (12, 8)])
def test_ranks_that_differ_are_named_up_to_eight(count, shown):
    """Beside the majority; the error holds all of them."""
    held = dict.fromkeys(range(20), (64.0, 7, 3))
    odd = list(range(4, 4 + count)) if count <= 8 else list(range(count))
    held |= {rank: (32.0 + rank, 6, 0) for rank in odd}
    error = different_states(held)
    text = str(error)
    for place, rank in enumerate(odd):
        named = f"rank {rank} has scale {32 + rank} after 6 updates (0 clean steps)"
        assert (named in text) is (place < shown)
    assert f"the other {20 - count} of 20 have scale 64 after 7 updates" in text
    assert ("more ranks differ" in text) is (count > shown)
    assert count <= shown or f"; {count - shown} more ranks differ" in text
    assert error.held == held


@pytest.mark.parametrize("fused", [False, True])
def test_norms_in_turn_are_each_of_what_the_others_left(fused, loop):
    """Of order 2, of the largest, and of order 2 once more."""
    scaler, param, optimizer = loop(
        "sgd", torch.tensor([3.0, 4.0]), lr=0.1, fused=fused
    )
    scaler.scale(param.square().sum()).backward()
    found = [
        scaler.clip_grad_norm_(optimizer, bound, order).item()
        for bound, order in ((5.0, 2.0), (2.0, math.inf), (1.0, 2.0))
    ]
    assert found == pytest.approx([10.0, 4.0, 2.5])


def test_the_groups_of_offenders_are_known_without_their_names():
    """In whichever order the two are read."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": [param]} for param in params], lr=0.1)
    scaler = GradScaler("cpu")
    scaler.scale(sum(param.sum() for param in params)).backward()
    params[1].grad[0] = math.inf
    scaler.step(optimizer)
    assert scaler.last_step.groups == (1,)


class Claiming:
    """Declares support for an optimizer inside that has none."""

    _step_supports_amp_scaling = property(lambda self: True)

    def __init__(self, optimizer):
        self.inner = optimizer

    def __getattr__(self, name):
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class ClaimingOwnStep(Claiming):
    """Has a `step` of its own."""

    def step(self):
        return self.inner.step()


@pytest.mark.parametrize("wrapper", [Claiming, ClaimingOwnStep])
def test_a_wrapper_that_claims_too_much_gets_unscaled_gradients(wrapper):
    """Nobody inside would divide them."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = wrapper(torch.optim.SGD([param], lr=0.5))
    scaler = GradScaler("cpu", init_scale=64.0)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(param, torch.full((2,), 0.5))


def test_a_state_without_a_turn_starts_at_the_first():
    """Its other entries are whole."""
    scaler = GradScaler("cpu", policy="backoff")
    state = scaler.state_dict()
    del state["buoy"]["turn"]
    scaler.load_state_dict(state)
    assert scaler.state_dict()["buoy"]["turn"] == 0
