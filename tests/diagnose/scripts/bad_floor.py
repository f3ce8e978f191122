"""A finite loss whose gradient is NaN at any scale."""

import torch

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for _ in range(20):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        out = model(torch.randn(16, 8)).float()
    distance = (out * 0.0).square().sum().sqrt()  # 0, and its gradient is 0 / 0
    scaler.scale(out.square().mean() + distance).backward()
    scaler.step(optimizer)
    scaler.update()
