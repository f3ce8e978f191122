"""BF16 without a scaler, and a per-step scheduler."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)
)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
for _ in range(30):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(16, 16)).float().square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
