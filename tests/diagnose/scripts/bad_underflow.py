"""A loss so small that most of its gradients are lost at this scale."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
for _ in range(20):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = 1e-6 * (model(torch.randn(16, 32)).float() - 1.0).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
