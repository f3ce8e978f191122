"""FP16 parameters with FP32 masters."""

import torch

from buoy.torch import GradScaler

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
).half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = GradScaler("cpu", fp16_params="master", init_scale=2.0**10)
for _ in range(12):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 8).half()).float().square().mean()
    scaler.scale(loss).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
