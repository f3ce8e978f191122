"""The trainings of the demo: small, real, of different kinds, and the same every time.

Each has a network, a loss that is computed in FP32 from the network's output, and a
figure by which to judge the result.  Batches come from a separate generator, so
that every column of a comparison sees the same ones.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from buoy.demo.text import Letters

__all__ = ["WORKLOADS", "Forward", "Task", "Workload"]

Forward = Callable[[Tensor], Tensor]  # the network, in whatever precision; gives FP32


@dataclass(frozen=True, slots=True)
class Task:
    """A network to train, the loss of a step, and the figure it is judged by."""

    net: nn.Module
    loss: Callable[[int, Forward], Tensor]
    score: Callable[[Forward], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training, as it is listed and explained."""

    name: str
    title: str
    words: str
    metric: str
    higher: bool  # is better
    lr: float
    steps: int
    precision: Literal["fp16", "emulated"] = "fp16"
    make: Callable[[torch.Generator, int], Task]  # of so many steps


def mlp(*widths: int) -> nn.Sequential:
    """Stack linear layers with tanh between them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def field(
    source: torch.Generator, unit: float, factor: Callable[[int], float] = lambda _: 1.0
) -> Task:
    """Learn a smooth field with 64 components, given in some physical unit.

    Step by step, `factor` multiplies the loss.
    """
    w1 = torch.randn(4, 32, generator=source) / 2
    phase = torch.randn(32, generator=source)
    w2 = torch.randn(32, 64, generator=source) / 5
    net = mlp(4, 48, 48, 64)

    def truth(x: Tensor) -> Tensor:
        return unit * torch.sin(x @ w1 + phase) @ w2

    def loss(step: int, forward: Forward) -> Tensor:
        x = torch.randn(128, 4, generator=source)
        return factor(step) * functional.mse_loss(forward(x) * unit, truth(x))

    def score(forward: Forward) -> float:
        x = torch.randn(2048, 4, generator=_for_the_score())
        y = truth(x) / unit
        unexplained = (forward(x) - y).square().sum() / (y - y.mean(0)).square().sum()
        return 1.0 - unexplained.item()

    return Task(net, loss, score)


def bandit(source: torch.Generator) -> Task:
    """Learn by REINFORCE which of four levers pays, a millionth at a time."""
    w = torch.randn(8, 4, generator=source)
    net = mlp(8, 48, 48, 4)

    def loss(step: int, forward: Forward) -> Tensor:
        del step
        x = torch.randn(256, 8, generator=source)
        logits = forward(x)
        action = torch.multinomial(logits.detach().softmax(1), 1, generator=source)
        reward = 1e-6 * (action[:, 0] == (x @ w).argmax(1))
        chosen = logits.log_softmax(1).gather(1, action)[:, 0]
        return -(chosen * reward).mean()

    def score(forward: Forward) -> float:
        x = torch.randn(4096, 8, generator=_for_the_score())
        return (forward(x).argmax(1) == (x @ w).argmax(1)).float().mean().item()

    return Task(net, loss, score)


def tags(source: torch.Generator) -> Task:
    """Give each point its tags, of 512 that are rare: one in four thousand."""
    w = torch.randn(16, 512, generator=source)
    w = w / w.norm(dim=0)
    net = mlp(16, 32, 512)

    def batch(size: int, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 16, generator=drawn)
        return x, (x @ w > 3.5).float()

    def loss(step: int, forward: Forward) -> Tensor:
        del step
        x, y = batch(256, source)
        return functional.binary_cross_entropy_with_logits(forward(x), y)

    def score(forward: Forward) -> float:
        x, y = batch(4096, _for_the_score())
        return functional.binary_cross_entropy_with_logits(forward(x), y).item()

    return Task(net, loss, score)


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention over the letters so far, then the perceptron."""
        rows, length, width = x.shape
        parts = self.mix(self.norms[0](x)).view(rows, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        result: Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return result


class Transformer(nn.Module):
    """Predict the next letter from those before it."""

    def __init__(self, letters: int, width: int, length: int, depth: int) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters)

    def forward(self, x: Tensor) -> Tensor:
        """Return a logit for every letter at every place."""
        places = self.place.weight[: x.shape[1]]
        result: Tensor = self.head(self.norm(self.blocks(self.letter(x) + places)))
        return result


def letters(source: torch.Generator) -> Task:
    """Learn to write like the sonnets that come with Buoy, letter by letter."""
    text = Letters.bundled()
    length = 32
    net = Transformer(len(text.alphabet), width=32, length=length, depth=2)

    def loss_of(rows: Tensor, forward: Forward) -> Tensor:
        logits = forward(rows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    def loss(step: int, forward: Forward) -> Tensor:
        del step
        return loss_of(text.rows(16, length + 1, source), forward)

    def score(forward: Forward) -> float:
        rows = text.held_out(64, length + 1, _for_the_score())
        return loss_of(rows, forward).item()

    return Task(net, loss, score)


def _for_the_score() -> torch.Generator:
    """Make the generator of the data that a result is judged on: always the same."""
    return torch.Generator().manual_seed(1)


def halfway(steps: int, factor: float) -> Callable[[int], float]:
    """Multiply the loss by a factor from the middle of the training on."""
    return lambda step: factor if 2 * step >= steps else 1.0


def _field(unit: str, in_words: str) -> Workload:
    return Workload(
        name=f"field-{unit}",
        title=f"Field, unit {unit}",
        words=in_words,
        metric="R^2",
        higher=True,
        lr=3e-3,
        steps=800,
        make=lambda source, _: field(source, float(unit)),
    )


def _jump(way: str, unit: float, steps: int, in_words: str) -> Workload:
    factor = 1e3 if way == "up" else 1e-3
    return Workload(
        name=f"jump-{way}",
        title=f"Loss jumps {way} 1000-fold",
        words=in_words,
        metric="R^2",
        higher=True,
        lr=3e-3,
        steps=steps,
        make=lambda source, count: field(source, unit, halfway(count, factor)),
    )


_ALL = (
    _field("1", "Targets around 1, as textbooks have them: any moderate scale trains."),
    _field(
        "1e-3",
        "The same field in a unit a thousand times larger, so that squared errors are "
        "a million times smaller: without scaling every gradient is zero.",
    ),
    _field(
        "1e-5",
        "Squared errors of 1e-10: a scale of 2^16 is far too low, and torch's rule "
        "doubles it only every 2000 clean steps.",
    ),
    _jump(
        "down",
        1e-3,
        800,
        "The field at unit 1e-3, its loss divided by 1000 halfway, as when a weight in "
        "front of it changes: the right scale is 2^10 times higher at once. Torch's "
        "stays where it was, and learning stops.",
    ),
    _jump(
        "up",
        1.0,
        400,
        "The field at unit 1, its loss multiplied by 1000 halfway: the right scale is "
        "2^10 times lower at once. Torch finds out by losing steps, Buoy by looking at "
        "the loss.",
    ),
    Workload(
        name="bandit",
        title="Bandit, rewards of 1e-6",
        words="Reinforcement learning (REINFORCE) with tiny rewards.",
        metric="accuracy",
        higher=True,
        lr=3e-3,
        steps=600,
        make=lambda source, _: bandit(source),
    ),
    Workload(
        name="bce",
        title="512 rare tags",
        words="Binary cross-entropy averaged over 512 tags and 256 rows: each gradient "
        "is divided by 131072 first.",
        metric="loss",
        higher=False,
        lr=5e-3,
        steps=300,
        precision="emulated",
        make=lambda source, _: tags(source),
    ),
    Workload(
        name="letters",
        title="Character transformer",
        words="A small language model: here scaling makes no difference, as long as "
        "the scale is not far too high. Many ordinary networks are like this.",
        metric="loss",
        higher=False,
        lr=2e-3,
        steps=200,
        precision="emulated",
        make=lambda source, _: letters(source),
    ),
)

WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _ALL}
"""All trainings, by name, in the order of the page."""
