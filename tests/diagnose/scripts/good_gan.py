"""Two networks, two optimizers, one scaler."""

import torch
from torch import nn

torch.manual_seed(0)
make = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
opt_g = torch.optim.Adam(make.parameters(), lr=1e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))
scaler = torch.amp.GradScaler("cpu")
right = nn.BCEWithLogitsLoss()
for _ in range(20):
    real, noise = torch.randn(16, 8) + 2, torch.randn(16, 4)
    opt_d.zero_grad()
    with torch.autocast("cpu", torch.float16):
        fake = make(noise)
        real_out, fake_out = judge(real), judge(fake.detach())
    loss_real = right(real_out.float(), torch.ones(16, 1))
    loss_fake = right(fake_out.float(), torch.zeros(16, 1))
    scaler.scale(loss_real + loss_fake).backward()
    scaler.step(opt_d)
    opt_g.zero_grad()
    with torch.autocast("cpu", torch.float16):
        out = judge(fake)
    scaler.scale(right(out.float(), torch.ones(16, 1))).backward()
    scaler.step(opt_g)
    scaler.update()
