"""A trainer class with hooks, arguments, and its own optimizer wrapper."""

import argparse
import sys
from pathlib import Path

import torch
from neighbour import Network  # stands beside this script


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.Adam(self.groups(lr))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 10)
        )

    def groups(self, lr):
        return [
            {"params": [p for p in self.model.parameters() if p.dim() > 1], "lr": lr},
            {
                "params": [p for p in self.model.parameters() if p.dim() < 2],
                "lr": lr / 2,
            },
        ]

    def training_step(self, batch):
        x, y = batch
        with torch.autocast("cpu", torch.float16):
            return torch.nn.functional.mse_loss(self.model(x).float(), y)

    def fit(self, batches):
        for batch in batches:
            loss = self.training_step(batch)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_value_(self.model.parameters(), 0.5)
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.scaler.get_scale() >= before:
                self.scheduler.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=25)
    args = parser.parse_args()
    assert Path(sys.argv[0]).name == "good_trainer.py"
    torch.manual_seed(0)
    data = [(torch.randn(16, 8), torch.randn(16, 1)) for _ in range(args.steps)]
    Trainer(Network(), args.lr).fit(data)
