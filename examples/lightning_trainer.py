"""FP16 with Lightning: a small classifier, recorded.

    python examples/lightning_trainer.py      # needs lightning
    buoy report lightning.buoy                # what the scale did, and why

The lines marked (1) to (3) are all that Buoy needs.  The rest is Lightning as usual: a
fused optimizer, a schedule per step, clipping, an average of the weights.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn

from buoy.integrations.lightning import LogScale, MixedPrecision


class Classifier(LightningModule):
    """Which quarter of a circle does a noisy point belong to?"""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 4))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the loss; compute it in float32."""
        del index
        points, labels = batch
        loss = nn.functional.cross_entropy(self.net(points).float(), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> dict:
        """Make the optimizer, and a schedule that counts steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 100)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def main() -> None:
    """Train, and print what became of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--policy", default="headroom")
    parser.add_argument("--precision", default="16-mixed", help="or bf16-mixed")
    chosen = parser.parse_args()

    torch.manual_seed(0)
    points = torch.randn(4096, 2)
    labels = (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long()
    data = torch.utils.data.TensorDataset(points + 0.1 * torch.randn(4096, 2), labels)

    # (1) The plugin replaces `precision="16-mixed"`.  Further arguments are those of
    # `buoy.torch.GradScaler`.  With "bf16-mixed" it turns scaling off.
    plugin = MixedPrecision(
        chosen.precision, policy=chosen.policy, trace="lightning.buoy"
    )
    module = Classifier()
    trainer = Trainer(
        plugins=[plugin],  # (2)
        callbacks=[LogScale(), WeightAveraging()],  # (3) logs buoy/scale, ...
        max_steps=chosen.steps,  # applied steps: skipped ones are not counted
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, 64, shuffle=True))

    found = trainer.callback_metrics
    print(f"{trainer.global_step} steps, loss {found['loss']:.2f}")
    if plugin.scaler is not None:
        trace = plugin.scaler.trace
        trace.close()
        scale = found["buoy/scale"]
        skipped = found["buoy/skipped"]
        print(f"scale {scale:g}, {skipped:.0f} steps skipped; trace: {trace.path}")
        print(f"Look at `buoy report {trace.path}`: did the scale settle, and are")
        print("gradients lost at the bottom of the format?")


if __name__ == "__main__":
    main()
