"""Two models, two optimizers and three losses in the style of apex's DCGAN example."""

import argparse

import torch
from apex import amp


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--spoil", type=int, default=-1)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)

    generator = torch.nn.Sequential(
        torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
    )
    critic = torch.nn.Sequential(
        torch.nn.Linear(2, 16), torch.nn.LeakyReLU(0.2), torch.nn.Linear(16, 1)
    )
    criterion = torch.nn.BCEWithLogitsLoss()
    critic_optimizer = torch.optim.Adam(
        critic.parameters(), lr=2e-3, betas=(0.5, 0.999)
    )
    generator_optimizer = torch.optim.Adam(
        generator.parameters(), lr=2e-3, betas=(0.5, 0.999)
    )
    [critic, generator], [critic_optimizer, generator_optimizer] = amp.initialize(
        [critic, generator],
        [critic_optimizer, generator_optimizer],
        opt_level=args.opt_level,
        num_losses=3,
        verbosity=0,
    )

    history = []
    for step in range(args.steps):
        real = torch.randn(16, 2) * 0.3 + torch.tensor([1.0, -1.0])
        noise = torch.randn(16, 4)

        critic.zero_grad()
        real_loss = criterion(critic(real), torch.ones(16, 1))
        if step == args.spoil:
            real_loss = real_loss * float("nan")
        with amp.scale_loss(real_loss, critic_optimizer, loss_id=0) as real_scaled:
            real_scaled.backward()
        fake = generator(noise)
        fake_loss = criterion(critic(fake.detach()), torch.zeros(16, 1))
        with amp.scale_loss(fake_loss, critic_optimizer, loss_id=1) as fake_scaled:
            fake_scaled.backward()
        critic_optimizer.step()

        generator.zero_grad()
        fooled_loss = criterion(critic(fake), torch.ones(16, 1))
        with amp.scale_loss(
            fooled_loss, generator_optimizer, loss_id=2
        ) as fooled_scaled:
            fooled_scaled.backward()
        generator_optimizer.step()
        history.append((real_loss.item() + fake_loss.item(), fooled_loss.item()))
    return critic, generator, critic_optimizer, history


if __name__ == "__main__":
    main()
