"""Windows of micro-batches, each checked."""

import torch

from buoy.torch import GradScaler

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = GradScaler("cpu", init_scale=2.0**10)
for _ in range(8):
    with scaler.accumulate(4, optimizer) as window:
        for _ in range(4):
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(8, 8)).float().square().mean()
            window.backward(loss / 4)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
