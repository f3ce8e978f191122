"""FSDP2 in FP16 on several processes: nothing about the scaler changes.

torchrun --nproc-per-node 2 examples/torchrun.py

On GPUs: "cuda" and "nccl" for "cpu" and "gloo", and one process per GPU.
"""

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from buoy.torch import GradScaler


def main() -> None:
    """Train a small network, sharded over all ranks."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    size = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)), mp_policy=half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = GradScaler("cpu", init_scale=2.0**20)  # far too high: see it come down

    source = torch.Generator().manual_seed(rank)  # every rank has its own data
    for step in range(30):
        x = torch.randn(32, 16, generator=source)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), x[:, :4])
        scaler.scale(loss).backward()
        norm = scaler.clip_grad_norm_(optimizer, 1.0)  # of the whole model
        scaler.step(optimizer)
        scaler.update()
        if rank == 0 and (step % 10 == 9 or scaler.last_step.skipped):
            print(
                f"step {step:2}: loss {loss.item():.3f}, norm {norm.item():.3f}, "
                f"scale {scaler.last_step.scale:g}, {scaler.last_step.verdict.value}"
            )

    scales = [0.0] * size
    dist.all_gather_object(scales, scaler.get_scale())
    if rank == 0:
        print(f"{size} ranks end at one scale: {sorted(set(scales))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
