"""Runs FP16 autocast without a scaler."""

import torch

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
opt = torch.optim.AdamW(net.parameters())
scaler = torch.amp.GradScaler("cpu", enabled=False)
for _ in range(8):
    with torch.autocast("cpu", torch.float16):
        loss = net(torch.randn(16, 8)).float().abs().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad(set_to_none=False)
