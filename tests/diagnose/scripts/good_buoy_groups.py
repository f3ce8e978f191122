"""Two losses with scales of their own on one model."""

import torch

from buoy.torch import GradScaler

torch.manual_seed(0)
body, policy, value = (
    torch.nn.Linear(8, 16),
    torch.nn.Linear(16, 4),
    torch.nn.Linear(16, 1),
)
model = torch.nn.ModuleList([body, policy, value])
optimizer = torch.optim.Adam(model.parameters())
scaler = GradScaler("cpu", init_scale=2.0**10)
for _ in range(8):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        hidden = body(torch.randn(16, 8)).relu()
        losses = {
            "policy": policy(hidden).float().logsumexp(-1).mean(),
            "value": value(hidden).float().square().mean(),
        }
    scaler.backward(losses, optimizer)
    scaler.step(optimizer)
    scaler.update()
