"""Scales the loss of a model that is FP32 throughout."""

import torch

torch.manual_seed(0)
net = torch.nn.Linear(8, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
for _ in range(8):
    opt.zero_grad()
    loss = (net(torch.randn(16, 8)) - 1.0).pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
