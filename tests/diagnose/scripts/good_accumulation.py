"""Four micro-batches per step, clipping, an epoch-wise scheduler."""

import torch
from torch.amp import GradScaler, autocast

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
scaler = GradScaler("cpu")
for _epoch in range(3):
    for i in range(24):
        with autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(8, 16)).float().square().mean() / 4
        scaler.scale(loss).backward()
        if (i + 1) % 4 == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
    scheduler.step()
