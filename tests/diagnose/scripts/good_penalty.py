"""A gradient penalty, as PyTorch's documentation writes it."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for _ in range(15):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = torch.nn.functional.mse_loss(
            model(torch.randn(16, 8)).float(), torch.ones(16, 1)
        )
    grads = torch.autograd.grad(
        scaler.scale(loss), model.parameters(), create_graph=True
    )
    inverse = 1.0 / scaler.get_scale()
    with torch.autocast("cpu", torch.float16):
        norm = sum((g * inverse).pow(2).sum() for g in grads).sqrt()
        loss = loss + norm
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
