"""A module that takes the logarithm of what may be negative."""

import torch


class Log(torch.nn.Module):
    def forward(self, x):
        return x.log()


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 4), Log(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for _ in range(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(16, 8)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
