"""Experts of which most have nothing to do, and a low-rank part that starts at 0."""

import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        busy = self.experts[0](x)
        idle = sum(expert(x) * 0.0 for expert in self.experts[1:2])
        return self.head((busy + idle).relu() + self.up(self.down(x)))


torch.manual_seed(0)
model = Experts()
optimizer = torch.optim.AdamW([p for n, p in model.named_parameters()], lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for _ in range(20):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(32, 8)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
