"""A closure for LBFGS, in FP32, with the scaler off."""

import torch

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
scaler = torch.amp.GradScaler("cpu", enabled=False)
x, y = torch.randn(64, 8), torch.randn(64, 1)


def closure():
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    return loss


for _ in range(8):
    optimizer.step(closure)
    scaler.update()
