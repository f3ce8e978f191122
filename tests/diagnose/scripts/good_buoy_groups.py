"""Two losses with scales of their own on one model."""

import torch

from buoy.torch import GradScaler

torch.manual_seed(0)
body, policy, value = (
    torch.nn.Linear(8, 16),
    torch.nn.Linear(16, 4),
    torch.nn.Linear(16, 1),
)
model = torch.nn.ModuleList([body, policy, value])
optimizer = torch.optim.Adam(model.parameters())
scaler = GradScaler("cpu", policy="none")
groups = {
    name: scaler.group(name, policy="torch", init_scale=2.0**10)
    for name in ("policy", "value")
}
for _ in range(8):
    with torch.autocast("cpu", torch.float16):
        hidden = body(torch.randn(16, 8)).relu()
        losses = {
            "policy": policy(hidden).float().logsumexp(-1).mean(),
            "value": value(hidden).float().square().mean(),
        }
    total = {}
    for name, loss in losses.items():
        optimizer.zero_grad()
        groups[name].scale(loss).backward(retain_graph=True)
        groups[name].unscale_(optimizer)
        for param in model.parameters():
            if param.grad is not None:
                total[param] = total.get(param, 0) + param.grad
    for param, grad in total.items():
        param.grad = grad
    scaler.scale(sum(losses.values()))
    scaler.step(optimizer)
    scaler.update()
