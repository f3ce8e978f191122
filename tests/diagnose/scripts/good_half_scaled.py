"""A critic in FP32 without a scaler, a generator in FP16 with one."""

import torch
from torch import nn

torch.manual_seed(0)
make = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
judge = nn.Linear(8, 1)
opt_g = torch.optim.Adam(make.parameters(), lr=1e-3)
opt_d = torch.optim.Adam(judge.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for _ in range(12):
    opt_g.zero_grad()
    with torch.autocast("cpu", torch.float16):
        fake = make(torch.randn(16, 4))
    lean = scaler.scale(fake.float().square().mean() * 0.01)
    fool = scaler.scale(-judge(fake.float()).mean())
    (lean + fool).backward()
    scaler.unscale_(opt_g)
    nn.utils.clip_grad_norm_(make.parameters(), 1.0)
    scaler.step(opt_g)
    scaler.update()
    opt_d.zero_grad()
    loss = judge(fake.float().detach()).mean() - judge(torch.randn(16, 8)).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(judge.parameters(), 1.0)
    opt_d.step()
