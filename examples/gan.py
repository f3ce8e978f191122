"""A GAN in FP16: two networks, a scale each, and as many steps of one as of the other.

    python examples/gan.py [STEPS]

Critic and generator have gradients of different size, so each gets a scale of its own
(`scaler.group`).  With `skip="joint"` an overflow in one keeps both from stepping: the
balance between them is what makes a GAN train.  With `skip="independent"` they drift
apart, step by step; the last lines show it.
"""

import sys

import torch
from torch import nn

from buoy.torch import GradScaler

NOISE = 4  # random numbers that the generator starts from
WIDTH = 32
BATCH = 64


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Make a small network."""
    return nn.Sequential(
        nn.Linear(inputs, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, outputs)
    )


def real(source: torch.Generator) -> torch.Tensor:
    """Draw points of a ring."""
    angle = torch.rand(BATCH, generator=source) * 2 * torch.pi
    return torch.stack([angle.cos(), angle.sin()], 1)


def train(steps: int, skip: str) -> tuple[int, int, GradScaler]:
    """Train; return how often the critic and the generator stepped."""
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(1)
    critic = network(2, 1)
    maker = network(NOISE, 2)
    critics = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    makers = torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.9))
    # Both start too high and try to grow often, so that there is something to see.
    scaler = GradScaler("cpu", skip=skip, growth_interval=25)  # type: ignore[arg-type]
    for_critic = scaler.group("critic", init_scale=2.0**22)
    for_maker = scaler.group("maker", init_scale=2.0**30)
    counts = {"critic": 0, "maker": 0}
    scaler.gate(lambda: _count(counts, "critic"), optimizer=critics)
    scaler.gate(lambda: _count(counts, "maker"), optimizer=makers)
    score = nn.functional.binary_cross_entropy_with_logits
    is_real = torch.ones(BATCH, 1)
    is_fake = torch.zeros(BATCH, 1)
    for _ in range(steps):
        noise = torch.randn(BATCH, NOISE, generator=source)
        critics.zero_grad()
        with torch.autocast("cpu", torch.float16):
            fake = maker(noise)
            of_real = critic(real(source))
            of_fake = critic(fake.detach())
        loss = score(of_real.float(), is_real) + score(of_fake.float(), is_fake)
        for_critic.scale(loss).backward()
        for_critic.clip_grad_norm_(critics, 1.0)
        for_critic.step(critics)

        makers.zero_grad()
        with torch.autocast("cpu", torch.float16):
            of_fake = critic(fake)
        for_maker.scale(score(of_fake.float(), is_real)).backward()
        for_maker.step(makers)
        scaler.update()
    return counts["critic"], counts["maker"], scaler


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] += 1


def main() -> None:
    """Train both ways and compare the counts."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    for skip in ("joint", "independent"):
        critic, maker, scaler = train(steps, skip)
        scales = {name: scaler.group(name).get_scale() for name in ("critic", "maker")}
        print(f"skip={skip!r}: critic {critic} steps, generator {maker}, {scales}")


if __name__ == "__main__":
    main()
