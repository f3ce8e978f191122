"""State dicts, pickles and copies are torch's; so is a scaler that is off."""

import copy
import pickle

import pytest
import torch
from against import EVENTS, both
from nets import OPTIMIZERS, loss_of, net, train

from buoy.torch import GradScaler


def test_state_dicts_are_equal_and_load_both_ways():
    """The five keys, the same values, before and after first use."""
    for used in (False, True):
        for source, target in (both(init_scale=3.0), reversed(both(init_scale=3.0))):
            saved = type(source)(
                "cpu", 6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1
            )
            target._init_growth_tracker = 7
            if used:
                target.scale(torch.ones(1))
            target.load_state_dict(saved.state_dict())
            assert target.state_dict() == saved.state_dict()
            assert target._init_growth_tracker == 0
            assert target.get_growth_interval() == 1


def test_pickle_and_deepcopy_carry_the_state(loop):
    """A copy goes on exactly where the original stood."""
    scaler, model, optimizer = loop(lr=0.1, growth_interval=2)
    train(scaler, model, optimizer, ["ok", "inf", "ok"])
    pickled = pickle.loads(pickle.dumps(scaler))  # noqa: S301 - our own
    for other in (pickled, copy.deepcopy(scaler)):
        assert other._scale is None
        assert other.state_dict() == scaler.state_dict()
        train(other, model, optimizer, ["ok"])
        assert other.get_scale() == 65536.0


def test_copies_carry_attributes_of_others():
    """What a subclass or a library has set on a scaler."""
    scaler = GradScaler("cpu")
    scaler.tag = ["mine"]
    pickled = pickle.loads(pickle.dumps(scaler))  # noqa: S301 - our own
    assert pickled.tag == copy.deepcopy(scaler).tag == ["mine"]
    assert pickled._log is not scaler._log


@pytest.mark.parametrize("policy", ["backoff", "headroom", "lognormal", "deepspeed"])
@pytest.mark.parametrize("visible", [True, False])
def test_copies_carry_a_policys_state_too(policy, visible, monkeypatch, loop):
    """Wherever that state lies, on the host or on a device."""
    if not visible:
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda tensor: False)
    scaler, model, optimizer = loop("fused adamw", policy=policy)
    train(scaler, model, optimizer, EVENTS)
    other, twin = copy.deepcopy(scaler), copy.deepcopy(model)
    assert other.state_dict() == scaler.state_dict()
    second = OPTIMIZERS["fused adamw"](twin.parameters())
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(other, twin, second, EVENTS) == train(scaler, model, optimizer, EVENTS)


def test_disabled_does_nothing_and_says_so():
    """Every method is torch's no-op."""
    ours, stock = both(enabled=False)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for scaler in (ours, stock):
        loss = loss_of(model, 0)
        assert scaler.scale(loss) is loss
        assert scaler.unscale_(optimizer) is None
        assert scaler.step(optimizer) is None
        assert scaler.update() is None
        assert scaler.get_scale() == 1.0
        assert scaler.state_dict() == {}
        assert scaler.load_state_dict({}) is None
        assert scaler._get_growth_tracker() == 0
        assert not scaler.is_enabled()
        with pytest.raises(AttributeError):
            scaler.get_growth_factor()


def test_a_disabled_scaler_can_be_copied():
    """Off or on, a scaler is part of many a checkpoint; gates stay behind."""
    scaler = GradScaler("cpu", enabled=False)
    scaler.gate(lambda: None)
    weight = torch.nn.Parameter(torch.ones(1))
    other = pickle.loads(pickle.dumps(scaler))  # noqa: S301 - our own
    other.step(torch.optim.SGD([weight], lr=0.1))
    other.update()
    assert other.last_step.applied


def test_disabled_clipping_is_torchs(loop):
    """A loop written for Buoy runs with the scaler off."""
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    weight.grad = torch.tensor([3.0, 4.0])
    scaler, _, optimizer = loop("sgd", weight, lr=0.1, enabled=False)
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 5.0
    assert torch.allclose(weight.grad.norm(), torch.tensor(1.0))
    scaler.clip_grad_value_(optimizer, 0.1)
    assert weight.grad.max() <= 0.1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_disables_itself_with_torchs_warning():
    """The default device on a machine without one: a warning, and no scaling."""
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert not GradScaler().is_enabled()
