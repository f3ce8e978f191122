"""FP16 models that are trained through FP32 masters, and the same by hand."""

import pytest
import torch
from nets import OPTIMIZERS, batch, net, spoil

from buoy.torch import (
    GradScaler,
)

MORE = {
    **OPTIMIZERS,
    "foreach adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}
EVERY = pytest.mark.parametrize("kind", list(MORE))


def loss_of(model, step):
    """Compute a step's loss in the dtype of the model."""
    dtype = next(model.parameters()).dtype
    x, y = (part.to(dtype) for part in batch(step % 7))
    return torch.nn.functional.mse_loss(model(x).float(), y.float())


def train(scaler, model, optimizer, steps, *, start=0, clip=None, events=()):
    """Train on a few batches over and over; return the losses."""
    losses = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss).backward()
        if step in events:
            spoil(model, "inf")
        if clip is not None:
            scaler.clip_grad_norm_(optimizer, clip)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def made(kind, *, seed=0, **options):
    """Make an FP16 model, its optimizer and a scaler that keeps masters."""
    model = net(seed).half()
    optimizer = MORE[kind](model.parameters())
    options = {"init_scale": 2.0**10, "fp16_params": "master", **options}
    return model, optimizer, GradScaler("cpu", model=model, **options)


def by_hand(kind, steps, clip=None):
    """Keep masters as one would without Buoy: a second list of parameters."""
    model = net().half()
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = MORE[kind](masters)
    for step in range(steps):
        model.zero_grad()
        (loss_of(model, step) * 2.0**10).backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad = param.grad.float() / 2.0**10
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master)
    return model, masters, optimizer


def equal(ones, others):
    """Say whether two lists of tensors are equal, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


def weights(model):
    """Copy the parameters of a model."""
    return [param.detach().clone() for param in model.parameters()]
