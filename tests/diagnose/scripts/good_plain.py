"""The loop of PyTorch's own documentation."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
for _epoch in range(3):
    for _ in range(10):
        optimizer.zero_grad()
        with torch.autocast(device_type="cpu", dtype=torch.float16):
            output = model(torch.randn(32, 16))
            loss = torch.nn.functional.cross_entropy(output, torch.randint(0, 4, (32,)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
