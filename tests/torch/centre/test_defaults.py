"""What torch makes by default, a dtype or a device, is no business of a scaler."""

import ast
from pathlib import Path

import pytest
import torch

import buoy.torch
from buoy._backends import torch as backend

MAKERS = {"tensor", "full", "zeros", "ones", "empty", "arange", "rand", "randn"}


@pytest.fixture(params=["float64", "bfloat16", "meta"])
def default(request, monkeypatch):
    """Change a default for one test, and try the kernel afresh under it."""
    monkeypatch.setattr(backend, "_PASSED", {})
    if request.param == "meta":
        torch.set_default_device("meta")
    else:
        torch.set_default_dtype(getattr(torch, request.param))
    yield request.param
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", ["sgd", "fused sgd", "adamw", "fused adamw"])
@pytest.mark.parametrize("policy", [None, "headroom"])
@pytest.mark.parametrize("sync", ["auto", "never"])
def test_steps_do_not_depend_on_defaults(default, kind, policy, sync, loop):
    """The kernel passes its test, good steps are applied and a bad one is not."""
    scaler, weight, optimizer = loop(
        kind, torch.ones(3, dtype=torch.float32, device="cpu"), policy=policy, sync=sync
    )
    applied = []
    for step, bad in enumerate((False, True, False, False)):
        optimizer.zero_grad()
        scaler.scale(weight.square().sum()).backward()
        if bad:
            weight.grad[1] = torch.inf
        if step % 2:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        applied.append(scaler.last_step.applied)
        assert scaler._scale.dtype is torch.float32
    assert applied == [True, False, True, True]
    assert all(backend._PASSED.values())
    assert len(backend._PASSED) == 4


def test_every_tensor_is_made_with_its_dtype_and_its_device():
    """None of those that the paths above do not reach was forgotten."""
    room = Path(buoy.torch.__file__).parent
    bare = [
        f"{path.name}:{node.lineno}"
        for path in (*room.rglob("*.py"), *Path(backend.__file__).parent.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in MAKERS
        and not {"dtype", "device"} <= {word.arg for word in node.keywords}
    ]

    assert [] == bare
