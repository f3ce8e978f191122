"""Scales although autocast is BF16."""

import torch
from torch.amp import GradScaler as Scaler

torch.manual_seed(0)
net = torch.nn.Linear(8, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = Scaler(device="cpu")
for _ in range(8):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(torch.randn(16, 8))
        loss = torch.nn.functional.cross_entropy(out, torch.randint(0, 4, (16,)))
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
