"""Re-runs a batch that overflowed, and guards the buffers."""

import torch

from buoy.torch import GradScaler

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 16),
    torch.nn.BatchNorm1d(16),
    torch.nn.Dropout(0.1),
    torch.nn.Linear(16, 1),
)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
scaler = GradScaler("cpu", model=model, init_scale=2.0**22)
scaler.guard(model)
for _ in range(12):
    x = torch.randn(16, 8)

    def step():
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()  # noqa: B023
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)

    scaler.run(step, optimizer)
    if scaler.last_step.applied:
        scheduler.step()
