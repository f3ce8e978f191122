"""An average of the weights, dropout, and evaluation in between."""

import copy

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(50, 16),
    torch.nn.Dropout(0.1),
    torch.nn.Flatten(),
    torch.nn.Linear(64, 50),
)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
scaler = torch.amp.GradScaler("cpu")
for step in range(30):
    words = torch.randint(0, 50, (16, 4))
    optimizer.zero_grad(set_to_none=False)
    with torch.autocast("cpu", torch.float16):
        logits = model(words)
    loss = torch.nn.functional.cross_entropy(logits.float(), words[:, 0])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        for mean, now in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(now, 0.01)
    if step % 10 == 0:
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            average(words)
        model.train()
