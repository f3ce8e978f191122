"""One thread, so that the suite is fair to its neighbours; helpers on the path."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from buoy.torch import GradScaler

sys.path.insert(0, str(Path(__file__).parent))
from nets import OPTIMIZERS, net

torch.set_num_threads(1)
collect_ignore = ["contract/apex_scripts"]  # they import apex, and are run without it


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class Loop(NamedTuple):
    """What a training loop consists of."""

    scaler: GradScaler
    model: Any  # a module, one parameter, or a list of them
    optimizer: torch.optim.Optimizer


@pytest.fixture(scope="session")
def loop() -> Callable[..., Loop]:
    """Make a loop: `scaler, model, optimizer = loop("adamw", init_scale=8.0)`.

    The kind is one of `nets.OPTIMIZERS`.  The model is `nets.net()`, or given as the
    second argument: a module, a list of parameters, one parameter, or a tensor to make
    one of.  `lr` and `fused` change the optimizer; all other options are the scaler's.
    """

    def made(
        kind: str = "sgd",
        model: Any = None,
        /,
        *,
        lr: float | None = None,
        fused: bool = False,
        **options: Any,
    ) -> Loop:
        if model is None:
            model = net()
        if isinstance(model, torch.Tensor) and not model.requires_grad:
            model = torch.nn.Parameter(model)
        optimizer = OPTIMIZERS[f"fused {kind}" if fused else kind](_parameters(model))
        if lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr
        return Loop(GradScaler("cpu", **options), model, optimizer)

    return made


def _parameters(model: Any) -> Iterable[torch.nn.Parameter]:
    if isinstance(model, torch.nn.Module):
        return model.parameters()
    return [model] if isinstance(model, torch.Tensor) else model
