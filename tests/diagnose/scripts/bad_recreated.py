"""Makes a new scaler in every step."""

import torch


def train_step(model, optimizer, x, y):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = torch.nn.functional.mse_loss(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(10):
    train_step(model, optimizer, torch.randn(16, 8), torch.randn(16, 1))
