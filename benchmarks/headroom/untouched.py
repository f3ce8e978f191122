"""Tasks recorded when every setting had its present value; looked at once."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.headroom.language import GPT, language
from benchmarks.headroom.tasks import field, mlp, task


@task("last_gpt")
def last_gpt():
    def batch():
        start = torch.randint(24, (8, 1))
        stride = torch.randint(1, 5, (8, 1))
        return (start + stride * torch.arange(17)) % 24

    net = GPT(24, 40, 16, depth=4)
    return [net], language(net, batch), 1e-3, 1000


@task("last_field_1e-4")
def last_field():
    return field(1e-4)


@task("last_flow")
def last_flow():
    net = mlp(3, 64, 64, 2, act=nn.SiLU)

    def loss(t):
        angle = 6.283 * torch.rand(128, 1)
        time = torch.rand(128, 1)
        data = torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(128, 2)
        noise = torch.randn(128, 2)
        out = net(torch.cat([time * data + (1 - time) * noise, time], 1))
        return F.mse_loss(out, data - noise)

    return [net], loss, 2e-3, 1500


@task("last_graph")
def last_graph():
    near = (torch.rand(60, 60) < 0.1).float()
    near = near / near.sum(1, keepdim=True).clamp(min=1)
    first = nn.Linear(8, 32)
    second = nn.Linear(32, 4)
    x = torch.randn(60, 8)
    y = torch.randint(4, (60,))

    def loss(t):
        keep = (torch.rand(60, 1) > 0.3).float()
        hidden = F.relu(near @ first(x * keep))
        return F.cross_entropy(near @ second(hidden), y)

    return [first, second], loss, 5e-3, 1500


@task("last_value")
def last_value():
    net = mlp(4, 48, 48, 3, act=nn.ReLU)
    slow = mlp(4, 48, 48, 3, act=nn.ReLU)

    def loss(t):
        if t % 100 == 0:
            slow.load_state_dict(net.state_dict())
        now = torch.randn(64, 4)
        action = torch.randint(3, (64,))
        after = now + 0.1 * torch.randn(64, 4)
        reward = now[:, 0] * (action - 1.0)
        goal = reward + 0.97 * slow(after).detach().amax(1)
        value = net(now).gather(1, action[:, None])[:, 0]
        return F.smooth_l1_loss(value, goal)

    return [net], loss, 1e-3, 1500


@task("last_unet")
def last_unet():
    down = nn.Conv1d(1, 12, 5, 2, 2)
    up = nn.ConvTranspose1d(12, 1, 4, 2, 1)
    mid = nn.Conv1d(12, 12, 3, 1, 1)

    def loss(t):
        phase = torch.rand(32, 1, 1) * 6
        clean = torch.sin(torch.linspace(0, 12, 64) + phase)
        noisy = clean + 0.3 * torch.randn(32, 1, 64)
        return F.l1_loss(up(F.gelu(mid(F.gelu(down(noisy))))), clean)

    return [down, mid, up], loss, 2e-3, 1500
