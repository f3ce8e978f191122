"""DDP in FP16 under Ray Train: the scaler of a plain torch loop, unchanged.

pip install 'buoy-amp[torch]' 'ray[train]'
python examples/ray_train.py
"""

import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import distributed as dist
from torch import nn

from buoy.torch import GradScaler


def train(config: dict[str, Any]) -> None:
    """Train on one worker; Ray has set torch.distributed up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = GradScaler("cpu", init_scale=config["init_scale"])

    source = torch.Generator().manual_seed(dist.get_rank())
    for step in range(config["steps"]):
        x = torch.randn(32, 16, generator=source)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = model(x)
        loss = nn.functional.mse_loss(output.float(), x[:, :4])
        scaler.scale(loss).backward()
        if step == config["overflow_at"] and dist.get_rank() == 1:
            next(model.parameters()).grad[0, 0] = torch.inf  # on one worker alone
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    _report(model, scaler, loss.item())


def _report(model: nn.Module, scaler: GradScaler, loss: float) -> None:
    """Tell Ray how it went; the scaler's state belongs into the checkpoint."""
    scales = [0.0] * dist.get_world_size()
    dist.all_gather_object(scales, scaler.get_scale())
    last = scaler.last_step
    metrics = {"loss": loss, "scales": scales, "applied": last and last.applied}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "scaler": scaler.state_dict()}
            torch.save(state, Path(folder) / "state.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


def main() -> None:
    """Run two workers on this machine's CPU."""
    ray.init(num_cpus=2, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"init_scale": 2.0**16, "steps": 10, "overflow_at": 9},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        )
        result = trainer.fit()
    metrics = result.metrics or {}
    print(f"applied: {metrics['applied']}, one scale: {set(metrics['scales'])}")
    ray.shutdown()


if __name__ == "__main__":
    main()
