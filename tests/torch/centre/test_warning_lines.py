"""Every warning points at the line of the user's that called Buoy."""

import warnings

import pytest
import torch
from nets import batch, loss_of, net

from buoy.torch import GradScaler


def bf16():
    """Scale a loss that needs no scaling."""
    x, y = batch(0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.nn.functional.mse_loss(net()(x), y)
    GradScaler("cpu").scale(loss)


def inside_a_list():
    """Scale a loss without a graph, one call deeper."""
    GradScaler("cpu").scale([torch.ones(())])


def stuck(way):
    """Skip a step too many."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=way == "fused")
    scaler = GradScaler("cpu", patience=1)
    scaler.scale(weight.sum() * torch.inf).backward()
    if way == "clip":
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()


def clipped(way):
    """Clip what is still scaled."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        getattr(scaler, way)(optimizer)
        if way != "step":
            scaler.step(optimizer)
        scaler.update()


def takes_the_scaler():
    """Step an optimizer that wants the scaler itself."""

    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            """Do nothing."""

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Old([weight], lr=0.1)
    scaler = GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)


def other_policy():
    """Load what another policy saved."""
    saved = GradScaler("cpu", policy="headroom").state_dict()
    GradScaler("cpu", policy="keras").load_state_dict(saved)


CALLS = {
    "bf16": bf16,
    "no graph": inside_a_list,
    "stuck": lambda: stuck("step"),
    "stuck after clipping": lambda: stuck("clip"),
    "stuck, fused": lambda: stuck("fused"),
    "clipped, step": lambda: clipped("step"),
    "clipped, unscale": lambda: clipped("unscale_"),
    "passed itself": takes_the_scaler,
    "other policy": other_policy,
}


@pytest.mark.parametrize("call", CALLS)
def test_a_warning_names_the_line_that_called(call):
    """Not one inside of Buoy, which nobody can change."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CALLS[call]()
    assert [__file__] == [warning.filename for warning in caught]
