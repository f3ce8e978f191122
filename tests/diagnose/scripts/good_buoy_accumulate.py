"""Bad micro-batches are dropped: the recipe of the page on accumulation."""

import math

import torch

from buoy.torch import GradScaler

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = GradScaler("cpu", init_scale=2.0**10)
whole = GradScaler("cpu", policy="none")
for _ in range(8):
    total, good = {}, 0
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(8, 8)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = scaler.clip_grad_norm_(optimizer, math.inf)
        scaler.update()
        if norm.isfinite():
            good += 1
            for param in model.parameters():
                total[param] = total.get(param, 0) + param.grad
    for param, grad in total.items():
        param.grad = grad / good
    whole.scale(loss)
    whole.clip_grad_norm_(optimizer, 1.0)
    whole.step(optimizer)
    whole.update()
