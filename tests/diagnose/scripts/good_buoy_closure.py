"""LBFGS through the scaler."""

import torch

from buoy.torch import GradScaler

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
scaler = GradScaler("cpu", init_scale=2.0**10)
x, y = torch.randn(64, 8), torch.randn(64, 1)


def closure():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        return torch.nn.functional.mse_loss(model(x).float(), y)


for _ in range(8):
    scaler.step(optimizer, closure)
    scaler.update()
