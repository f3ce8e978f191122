"""Small trainings whose gradients are recorded: what they are is of no matter,
that they differ is.  Each gives its modules, the loss of step t, a rate, and steps.
"""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[int], Tensor]
Task = tuple[list[nn.Module], Loss, float, int]  # modules, loss(t), lr, steps

TASKS: dict[str, Callable[[], Task]] = {}


def task(name: str) -> Callable[[Callable[[], Task]], Callable[[], Task]]:
    """Register a task under its trace's name."""
    return lambda make: TASKS.setdefault(name, make)


def mlp(*widths: int, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Stack linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


@task("mlp_classify")
def mlp_classify() -> Task:
    net = mlp(32, 64, 64, 10, act=nn.ReLU)
    means = 0.7 * torch.randn(10, 32)

    def loss(t: int) -> Tensor:
        y = torch.randint(10, (64,))
        return F.cross_entropy(net(means[y] + torch.randn(64, 32)), y)

    return [net], loss, 1e-3, 3000


@task("mlp_regress_big")
def mlp_regress_big() -> Task:
    net = mlp(16, 64, 64, 1, act=nn.GELU)
    w = torch.randn(16, 1)

    def loss(t: int) -> Tensor:
        x = torch.randn(64, 16)
        return F.mse_loss(net(x), 100 * (x @ w) * torch.sin(x[:, :1]))

    return [net], loss, 3e-3, 3000


def field(unit: float) -> Task:
    net = mlp(4, 48, 48, 64)
    w1 = torch.randn(4, 32)
    phase = torch.randn(32)
    w2 = torch.randn(32, 64) / 5

    def loss(t: int) -> Tensor:
        x = torch.randn(128, 4)
        return F.mse_loss(net(x) * unit, unit * torch.sin(x @ w1 + phase) @ w2)

    return [net], loss, 3e-3, 2500


TASKS["field_1"] = lambda: field(1.0)
TASKS["field_1e-3"] = lambda: field(1e-3)
TASKS["field_1e-5"] = lambda: field(1e-5)


@task("feature_grid")
def feature_grid() -> Task:
    grid = nn.Embedding(32 * 32, 8)
    net = mlp(8, 32, 3, act=nn.ReLU)
    nn.init.normal_(grid.weight, std=1e-2)

    def loss(t: int) -> Tensor:
        xy = torch.rand(256, 2) * 30.99
        lo = xy.floor().long()
        frac = xy % 1
        feats = torch.zeros(256, 8)
        for dx in (0, 1):
            for dy in (0, 1):
                w = (frac - (1 - torch.tensor([dx, dy]))).abs().prod(1, keepdim=True)
                feats = feats + w * grid((lo[:, 0] + dx) * 32 + lo[:, 1] + dy)
        y = torch.stack([torch.sin(xy[:, 0]), torch.cos(xy[:, 1]), xy.prod(1) / 900], 1)
        return F.mse_loss(net(feats), y)

    return [grid, net], loss, 1e-2, 2500


@task("bandit")
def bandit() -> Task:
    net = mlp(8, 48, 48, 4)
    w = torch.randn(8, 4)

    def loss(t: int) -> Tensor:
        x = torch.randn(256, 8)
        pick = torch.distributions.Categorical(logits=net(x))
        action = pick.sample()
        reward = 1e-6 * (action == (x @ w).argmax(1))
        return -(pick.log_prob(action) * reward).mean()

    return [net], loss, 3e-3, 2000


@task("gru_recall")
def gru_recall() -> Task:
    embed = nn.Embedding(16, 24)
    gru = nn.GRU(24, 48, batch_first=True)
    head = nn.Linear(48, 16)

    def loss(t: int) -> Tensor:
        x = torch.randint(16, (32, 24))
        return F.cross_entropy(head(gru(embed(x))[0][:, -1]), x[:, 4])

    return [embed, gru, head], loss, 3e-3, 1500


@task("deep_narrow")
def deep_narrow() -> Task:
    net = mlp(8, *[16] * 20, 1)

    def loss(t: int) -> Tensor:
        x = torch.randn(64, 8)
        return F.mse_loss(net(x), torch.sin(x.sum(1, keepdim=True)))

    return [net], loss, 1e-3, 2500


@task("autoencoder")
def autoencoder() -> Task:
    net = mlp(64, 48, 6, 48, 64, act=nn.SiLU)
    basis = torch.randn(6, 64)

    def loss(t: int) -> Tensor:
        x = torch.sigmoid(torch.randn(64, 6) @ basis)
        return F.mse_loss(torch.sigmoid(net(x)), x)

    return [net], loss, 2e-3, 3000


@task("skipgram")
def skipgram() -> Task:
    words = nn.Embedding(1000, 16)
    contexts = nn.Embedding(1000, 16)
    rank = 1 / torch.arange(1.0, 1001)

    def loss(t: int) -> Tensor:
        w = torch.multinomial(rank, 128, replacement=True)
        c = (w * 7 + torch.randint(3, (128,))) % 1000
        noise = torch.multinomial(rank, 512, replacement=True).view(128, 4)
        pos = (words(w) * contexts(c)).sum(1)
        neg = (words(w)[:, None] * contexts(noise)).sum(2)
        return -(F.logsigmoid(pos).mean() + F.logsigmoid(-neg).mean())

    return [words, contexts], loss, 1e-2, 2500


@task("gan")
def gan() -> Task:
    make = mlp(4, 32, 32, 2, act=nn.ReLU)
    judge = mlp(2, 32, 32, 1, act=nn.ReLU)

    def loss(t: int) -> Tensor:
        fake = make(torch.randn(64, 4))
        real = torch.randn(64, 2).sign() + 0.1 * torch.randn(64, 2)
        make.requires_grad_(t % 2 == 1)
        judge.requires_grad_(t % 2 == 0)
        if t % 2:  # the generator's turn
            return F.softplus(-judge(make(torch.randn(64, 4)))).mean()
        return (F.softplus(judge(fake.detach())) + F.softplus(-judge(real))).mean()

    return [make, judge], loss, 1e-3, 3000


@task("convnet")
def convnet() -> Task:
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2),
        nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8),
    )  # fmt: skip
    proto = torch.randn(8, 1, 16, 16)

    def loss(t: int) -> Tensor:
        y = torch.randint(8, (32,))
        return F.cross_entropy(net(proto[y] + 1.5 * torch.randn(32, 1, 16, 16)), y)

    return [net], loss, 1e-3, 1500


@task("small_batch")
def small_batch() -> Task:
    net = mlp(16, 64, 64, 5, act=nn.ReLU)
    w = torch.randn(16, 5)

    def loss(t: int) -> Tensor:  # batch of 2: nearly solved, rare hard examples
        x = torch.randn(2, 16)
        return F.cross_entropy(net(x), (x @ w).argmax(1))

    return [net], loss, 1e-3, 4000


@task("warm_lr")
def warm_lr() -> Task:
    net = mlp(16, 64, 64, 64, 8, act=nn.ReLU)
    w = torch.randn(16, 8)

    def loss(t: int) -> Tensor:  # one epoch's fixed data: loss falls for ever
        torch.manual_seed(t % 16)
        x = torch.randn(32, 16)
        return F.mse_loss(net(x), torch.tanh(x @ w))

    return [net], loss, 2e-3, 4000


@task("bce512")
def bce512() -> Task:
    net = mlp(16, 32, 512)
    proto = torch.randn(512, 16)

    def loss(t: int) -> Tensor:
        y = torch.randint(512, (256,))
        x = proto[y] + 0.05 * torch.randn(256, 16)
        return F.binary_cross_entropy_with_logits(net(x), F.one_hot(y, 512).float())

    return [net], loss, 5e-3, 1000


@task("contrastive")
def contrastive() -> Task:
    left = mlp(32, 64, 16, act=nn.ReLU)
    right = mlp(32, 64, 16, act=nn.ReLU)
    a = torch.randn(8, 32)
    b = torch.randn(8, 32)

    def loss(t: int) -> Tensor:
        z = torch.randn(64, 8)
        u = F.normalize(left(z @ a), dim=1)
        v = F.normalize(right(z @ b), dim=1)
        return F.cross_entropy(u @ v.T / 0.07, torch.arange(64))

    return [left, right], loss, 1e-3, 2500


@task("deep_resmlp")
def deep_resmlp() -> Task:
    stem = nn.Linear(16, 32)
    head = nn.Linear(32, 4)
    blocks = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(32), mlp(32, 64, 32, act=nn.GELU)) for _ in range(8)
    )

    def loss(t: int) -> Tensor:
        x = torch.randn(64, 16)
        h = stem(x)
        for block in blocks:
            h = h + block(h)
        return F.cross_entropy(head(h), (x[:, :4] * x[:, 4:8]).argmax(1))

    return [stem, blocks, head], loss, 1e-3, 1500


@task("rnn_add")
def rnn_add() -> Task:
    rnn = nn.RNN(2, 48, batch_first=True)
    head = nn.Linear(48, 1)

    def loss(t: int) -> Tensor:
        x = torch.rand(32, 30, 2)
        mark = torch.zeros(32, 30).scatter_(
            1, torch.rand(32, 30).topk(2, 1).indices, 1.0
        )
        x = torch.stack([x[..., 0], mark], 2)
        return F.mse_loss(head(rnn(x)[0][:, -1])[:, 0], (x[..., 0] * mark).sum(1))

    return [rnn, head], loss, 1e-3, 1500


@task("conv_denoise")
def conv_denoise() -> Task:
    net = nn.Sequential(
        nn.Conv2d(1, 12, 3, 1, 1),
        nn.SiLU(),
        nn.Conv2d(12, 12, 3, 1, 1),
        nn.SiLU(),
        nn.Conv2d(12, 1, 3, 1, 1),
    )

    def loss(t: int) -> Tensor:
        x = F.interpolate(torch.randn(8, 1, 4, 4), (16, 16), mode="bilinear")
        return F.l1_loss(net(x + 0.3 * torch.randn_like(x)), x)

    return [net], loss, 2e-3, 1500


@task("heavy_tail")
def heavy_tail() -> Task:
    net = mlp(12, 48, 48, 1, act=nn.SiLU)
    w = torch.randn(12, 1)
    noise = torch.distributions.StudentT(1.5)

    def loss(t: int) -> Tensor:
        x = torch.randn(32, 12)
        return F.mse_loss(net(x), torch.tanh(x @ w) + 0.1 * noise.sample((32, 1)))

    return [net], loss, 1e-3, 3000


@task("actor_critic")
def actor_critic() -> Task:
    body = mlp(8, 48, 48)
    actor = nn.Linear(48, 4)
    critic = nn.Linear(48, 1)
    w = torch.randn(8, 4)

    def loss(t: int) -> Tensor:  # signed loss that crosses zero
        x = torch.randn(64, 8)
        h = torch.tanh(body(x))
        pick = torch.distributions.Categorical(logits=actor(h))
        action = pick.sample()
        reward = (action == (x @ w).argmax(1)).float() * 10
        gain = reward - critic(h)[:, 0]
        return (
            -(pick.log_prob(action) * gain.detach()).mean()
            + 0.5 * gain.square().mean()
            - 0.01 * pick.entropy().mean()
        )

    return [body, actor, critic], loss, 1e-3, 2500


@task("sum_loss")
def sum_loss() -> Task:
    net = mlp(16, 48, 48, 10, act=nn.ReLU)
    w = torch.randn(16, 10)

    def loss(t: int) -> Tensor:  # summed, not averaged, over a batch of changing size
        x = torch.randn(int(torch.randint(8, 129, ())), 16)
        return F.cross_entropy(net(x), (x @ w).argmax(1), reduction="sum")

    return [net], loss, 1e-3, 2500


def sigmoid_field(depth: int, width: int, lr: float) -> Task:
    net = mlp(8, *[width] * depth, 4, act=nn.Sigmoid)

    def loss(t: int) -> Tensor:
        x = torch.randn(64, 8)
        return F.mse_loss(net(x), torch.sin(x[:, :4] + x[:, 4:]))

    return [net], loss, lr, 2500


TASKS["deep_sigmoid"] = lambda: sigmoid_field(6, 32, 3e-3)


@task("sigmoid_ae")
def sigmoid_ae() -> Task:
    net = mlp(48, 32, 16, 8, 16, 32, 48, act=nn.Sigmoid)
    basis = torch.randn(5, 48)

    def loss(t: int) -> Tensor:
        x = torch.tanh(torch.randn(64, 5) @ basis)
        return F.smooth_l1_loss(net(x), x)

    return [net], loss, 3e-3, 2500


def recall(cell: type[nn.RNNBase], length: int, width: int) -> Task:
    embed = nn.Embedding(8, 16)
    rnn = cell(16, width, batch_first=True)
    head = nn.Linear(width, 8)

    def loss(t: int) -> Tensor:
        x = torch.randint(8, (16, length))
        return F.cross_entropy(head(rnn(embed(x))[0][:, -1]), x[:, -3])

    return [embed, rnn, head], loss, 2e-3, 1200


TASKS["rnn_long"] = lambda: recall(nn.RNN, 80, 32)
TASKS["gru_long"] = lambda: recall(nn.GRU, 60, 32)


@task("grid_levels")
def grid_levels() -> Task:
    sizes = (8, 32, 128)
    grids = [nn.Embedding(n * n, 2) for n in sizes]
    net = mlp(6, 32, 1, act=nn.ReLU)
    for grid in grids:
        nn.init.uniform_(grid.weight, -1e-4, 1e-4)

    def loss(t: int) -> Tensor:
        xy = torch.rand(512, 2)
        feats = []
        for n, grid in zip(sizes, grids, strict=True):
            at = xy * (n - 1.001)
            lo = at.floor().long()
            f = at % 1
            corner = lambda dx, dy: grid((lo[:, 0] + dx) * n + lo[:, 1] + dy)  # noqa: B023
            fx = f[:, :1]
            fy = f[:, 1:]
            feats.append(
                (1 - fx) * ((1 - fy) * corner(0, 0) + fy * corner(0, 1))
                + fx * ((1 - fy) * corner(1, 0) + fy * corner(1, 1))
            )
        y = torch.sin(12 * xy[:, :1]) * torch.cos(20 * xy[:, 1:]) + (
            xy.sum(1, keepdim=True) > 1
        )
        return F.mse_loss(net(torch.cat(feats, 1)), y)

    return [*grids, net], loss, 5e-3, 2000


@task("overfit")
def overfit() -> Task:
    net = mlp(16, 64, 64, 10, act=nn.ReLU)
    x = torch.randn(256, 16)
    y = torch.randint(10, (256,))

    def loss(t: int) -> Tensor:  # the loss falls towards zero, margins grow
        pick = torch.randint(256, (32,))
        return F.cross_entropy(net(x[pick]), y[pick])

    return [net], loss, 3e-3, 3000


@task("memorize")
def memorize() -> Task:
    net = mlp(12, 48, 48, 48, 1, act=nn.GELU)
    x = torch.randn(200, 12)
    y = (torch.rand(200, 1) > 0.5).float()

    def loss(t: int) -> Tensor:
        pick = torch.randint(200, (16,))
        return F.binary_cross_entropy_with_logits(net(x[pick]), y[pick])

    return [net], loss, 2e-3, 3000


@task("experts")
def experts() -> Task:
    gate = nn.Linear(16, 8)
    pool = nn.ModuleList(mlp(16, 24, 4, act=nn.GELU) for _ in range(8))
    w = torch.randn(8, 16, 4)

    def loss(t: int) -> Tensor:
        x = torch.randn(64, 16)
        p = torch.softmax(4 * gate(x), 1)
        out = sum(p[:, i : i + 1] * e(x) for i, e in enumerate(pool))
        return F.mse_loss(
            out, torch.einsum("bi,bio->bo", x, w[(x[:, 0] * 2).long() % 8])
        )

    return [gate, pool], loss, 3e-3, 2000
