"""Clips gradients that are still multiplied by the scale."""

import torch
from torch.amp import GradScaler, autocast
from torch.nn.utils import clip_grad_norm_

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = GradScaler("cpu")
for _ in range(12):
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        loss = torch.nn.functional.mse_loss(model(x).float(), y)
    scaler.scale(loss).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
