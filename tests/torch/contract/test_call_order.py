"""Any order of calls: what torch refuses we refuse with its type, the rest is equal."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from nets import OPTIMIZERS, loss_of, net, spoil

from buoy.torch import CallOrderError, GradScaler

CALLS = [
    "scale", "backward", "backward", "inf", "unscale", "step", "step", "update",
    "update", "zero", "get", "state", "load", "interval", "factor", "new scale",
    "other step", "other unscale",
]  # fmt: skip

REFUSED = ("found gradients that have changed", "No loss was scaled since")


class Run:
    """One scaler with two models, driven by names of calls."""

    def __init__(self, kind, optimizer):
        self.models = net(1), net(2)
        self.optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in self.models]
        self.scaler = kind("cpu", init_scale=64.0, growth_interval=2)
        self.step = 0

    def call(self, name):
        """Make one call and return what it gave or raised."""
        try:
            return self._call(name)
        except (RuntimeError, AssertionError, ValueError, AttributeError) as error:
            return error

    def _call(self, name):
        self.step += 1
        scaler, (first, second) = self.scaler, self.optimizers
        loaded = {"scale": 16.0, "_growth_tracker": 1}
        calls = {
            "scale": lambda: scaler.scale(loss_of(self.models[0], self.step)).item(),
            "backward": self.backward,
            "inf": self.spoil,
            "unscale": lambda: scaler.unscale_(first),
            "other unscale": lambda: scaler.unscale_(second),
            "step": lambda: scaler.step(first),
            "other step": lambda: scaler.step(second),
            "update": scaler.update,
            "new scale": lambda: scaler.update(32.0),
            "zero": lambda: [optimizer.zero_grad() for optimizer in self.optimizers],
            "get": lambda: (scaler.get_scale(), scaler._get_growth_tracker()),
            "state": scaler.state_dict,
            "load": lambda: scaler.load_state_dict({**scaler.state_dict(), **loaded}),
            "interval": lambda: scaler.set_growth_interval(3),
            "factor": lambda: scaler.set_growth_factor(3.0),
        }
        return calls[name]()

    def backward(self):
        """Leave scaled gradients in both models."""
        for model in self.models:
            self.scaler.scale(loss_of(model, self.step)).backward()

    def spoil(self):
        """Write an inf into the first model's gradients, if there are any."""
        if self.models[0][0].weight.grad is not None:
            spoil(self.models[0], "inf", 0)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "fused adamw"])
@settings(max_examples=40, deadline=None)
@given(calls=st.lists(st.sampled_from(CALLS), max_size=25))
def test_any_order_of_calls_ends_as_with_torch(optimizer, calls):
    """Values, exceptions, weights and state after every call."""
    ours = Run(GradScaler, optimizer)
    stock = Run(torch.amp.GradScaler, optimizer)
    for name in calls:
        mine, theirs = ours.call(name), stock.call(name)
        if isinstance(mine, CallOrderError) and any(x in str(mine) for x in REFUSED):
            # Torch steps, with what a later backward pass has added times the scale,
            # or by gradients that an earlier scale has multiplied.
            assert "step" in name
            return
        if isinstance(theirs, AttributeError):
            # Torch trips over its own None: gradients that came after `unscale_`.
            assert isinstance(mine, CallOrderError)
            assert "No inf checks were recorded for this optimizer" in str(mine)
        elif isinstance(theirs, Exception):
            assert isinstance(mine, type(theirs)), (name, mine)
        else:
            assert repr(mine) == repr(theirs), name  # NaN may be among them
    assert ours.scaler.state_dict() == stock.scaler.state_dict()
    for left, right in zip(ours.models, stock.models, strict=True):
        for p, q in zip(left.parameters(), right.parameters(), strict=True):
            assert torch.equal(p.nan_to_num(7.0), q.nan_to_num(7.0))


def test_a_library_may_multiply_by_the_scale_itself(loop):
    """It creates the scale, and never calls `scale`: nothing is stale."""
    scaler, model, optimizer = loop(init_scale=64.0, growth_interval=2)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    for step in range(3):
        optimizer.zero_grad()
        (loss_of(model, step) * scaler.get_scale()).backward()
        scaler.step(optimizer)
        assert scaler.last_step.applied
        scaler.update()
    assert 128.0 == scaler.get_scale()

    optimizer.zero_grad()
    scaler.scale(loss_of(model, 3)).backward()
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(CallOrderError, match="No loss was scaled since"):
        scaler.step(optimizer)
