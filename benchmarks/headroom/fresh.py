"""Tasks that were recorded after every setting had been chosen."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.headroom.language import GPT, language
from benchmarks.headroom.tasks import field, mlp, task


@task("fresh_gpt")
def a():
    table = torch.softmax(3 * torch.randn(40, 40), 1)

    def batch():
        x = [torch.randint(40, (8,))]
        for _ in range(20):
            x.append(torch.multinomial(table[x[-1]], 1)[:, 0])
        return torch.stack(x, 1)

    net = GPT(40, 32, 20, depth=3)
    return [net], language(net, batch), 2e-3, 1200


@task("fresh_gpt_wide")
def b():
    def batch():
        x = torch.randint(16, (8, 12))
        return torch.cat([x, x.flip(1)[:, :9]], 1)

    net = GPT(16, 64, 20, depth=1)
    return [net], language(net, batch), 3e-3, 1200


@task("fresh_quantile")
def c():
    net = mlp(6, 64, 64, 9, act=nn.SiLU)
    q = torch.linspace(0.1, 0.9, 9)

    def loss(t):
        x = torch.randn(64, 6)
        y = x[:, :1] * x[:, 1:2] + torch.randn(64, 1) * x[:, 2:3].exp()
        d = y - net(x)
        return torch.maximum(q * d, (q - 1) * d).mean()

    return [net], loss, 2e-3, 2000


@task("fresh_physics")
def d():
    net = mlp(2, 32, 32, 32, 1)

    def loss(t):
        x = torch.rand(64, 2, requires_grad=True)
        u = net(x)
        (g,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return ((g[:, 0] - 0.1 * g[:, 1]) ** 2).mean() * 1e3 + (
            (u[:, 0] - torch.sin(6 * x[:, 1])) ** 2
        ).mean() * 1e-2

    return [net], loss, 2e-3, 1500


@task("fresh_field_1e-2")
def e():
    return field(1e-2)


@task("fresh_conv")
def f():
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 16, 10),
    )
    P = torch.randn(10, 1, 14, 14)

    def loss(t):
        y = torch.randint(10, (24,))
        return F.cross_entropy(net(P[y] + 0.7 * torch.randn(24, 1, 14, 14)), y)

    return [net], loss, 1e-3, 1500


@task("fresh_rank")
def g():
    emb = nn.Embedding(500, 16)
    net = mlp(32, 32, 1, act=nn.ReLU)
    z = torch.randn(500, 4)

    def loss(t):
        i, j, k = torch.randint(500, (3, 64))
        s = lambda a, b: net(torch.cat([emb(a), emb(b)], 1))
        sign = torch.sign((z[i] * z[j]).sum(1) - (z[i] * z[k]).sum(1))
        return F.softplus(-sign * (s(i, j) - s(i, k))[:, 0]).mean()

    return [emb, net], loss, 3e-3, 2000


@task("fresh_gru")
def h():
    cell = nn.GRU(8, 40, batch_first=True)
    head = nn.Linear(40, 8)

    def loss(t):
        x = torch.randint(8, (16, 30))
        o, _ = cell(F.one_hot(x, 8).float())
        return F.cross_entropy(head(o[:, 5:]).transpose(1, 2), x[:, :-5])

    return [cell, head], loss, 3e-3, 1000
