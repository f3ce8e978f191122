"""Buoy's own scaler, with its clipping, a gate, and another policy."""

import torch

from buoy.torch import GradScaler

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
scaler = GradScaler("cpu", policy="headroom", model=model)
scaler.gate(scheduler)
for _ in range(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(16, 16)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
