"""The recipes of docs/migrate/recipes.md, each with its library, in a process alone.

Each trains twice: on all batches, of which two overflow, and on the others only.
"""

import json
import sys
import types
import warnings
from pathlib import Path

import torch
from tiny import GOOD, STEPS, Net, adamw, batch, decay, distance, reference

import buoy
import buoy.torch

# At another scale other small gradients underflow in FP16.
START = {"policy": buoy.Static(init_scale=2.0**10), "device": "cpu"}


def loss_of(net, step):
    """Return the loss of a batch; libraries turn autocast off on a CPU."""
    with torch.autocast("cpu", torch.float16):
        return net(**batch(step))["loss"]


def timm(steps):
    """Call timm's scaler, which unscales, clips, steps and updates."""
    from timm.utils import ModelEmaV3, NativeScaler

    net = Net()
    optimizer, average = adamw(net), ModelEmaV3(net, decay=0.5)
    with buoy.torch.install(**START) as installed:
        loss_scaler = NativeScaler()
    (scaler,) = installed.scalers
    scaler.gate(scheduler := decay(optimizer))
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(net, step)
        loss_scaler(loss, optimizer, clip_grad=0.5, parameters=net.parameters())
        if scaler.last_step.applied:
            average.update(net)
    scaler.get_scale()  # carries the last update out, and with it the gates
    return net, average.module, scheduler.get_last_lr()


def fastai(steps):
    """Fit a learner in FP16; each `fit` creates a scaler."""
    import fastai.callback.fp16  # noqa: F401 (adds `to_fp16`)
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, step):
            return loss_of(self.net, int(step))

    rows = [(torch.tensor([step]), torch.zeros(1)) for step in steps]
    loader = torch.utils.data.DataLoader(rows, batch_size=None)
    learn = Learner(
        DataLoaders(loader, loader),
        Model(),
        loss_func=lambda loss, _: loss,
        opt_func=lambda params, **_: OptimWrapper(params, torch.optim.AdamW),
    ).to_fp16()
    with buoy.torch.install(**START), learn.no_bar(), learn.no_logging():
        learn.fit(1, lr=0.05, wd=0.01)
    return learn.model.net, learn.model.net, None


def ultralytics(steps):
    """Call the trainer's own step, with its average of the weights."""
    from ultralytics.engine.trainer import BaseTrainer
    from ultralytics.utils.torch_utils import ModelEMA

    net = Net()
    trainer = object.__new__(BaseTrainer)  # without data, which `train` needs
    trainer.device, trainer.model, trainer.optimizer = (
        torch.device("cpu"),
        net,
        adamw(net),
    )
    trainer.ema = ModelEMA(net, decay=0.5, tau=1.0)
    with buoy.torch.install(**START):
        trainer.scaler = torch.amp.GradScaler("cuda", enabled=True)

    def gate_the_average(trainer):  # on_train_start
        update = trainer.ema.update
        trainer.ema.update = lambda model: (
            update(model) if trainer.scaler.last_step.applied else None
        )

    gate_the_average(trainer)
    for step in steps:
        trainer.scaler.scale(loss_of(net, step)).backward()
        trainer.optimizer_step()
    return net, trainer.ema.ema, None


def diffusers(steps):
    """Train a U-Net as diffusers' scripts do, by Accelerate."""
    from accelerate import Accelerator
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel

    from buoy.integrations import accelerate as ours

    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    ours.use(accelerator, buoy.Static(init_scale=2.0**10))
    net = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    average, noises = EMAModel(net.parameters(), decay=0.5), DDPMScheduler(10)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    model, optimizer = accelerator.prepare(net, optimizer)
    scheduler = accelerator.prepare(decay(optimizer))
    for step in steps:
        source = torch.Generator().manual_seed(step)
        clean, noise = torch.randn(2, 4, 1, 8, 8, generator=source)
        times = torch.randint(0, 10, (4,), generator=source)
        with accelerator.accumulate(model):
            found = model(noises.add_noise(clean, noise, times), times).sample
            loss = torch.nn.functional.mse_loss(found.float(), noise)
            if batch(step)["bad"].any():
                loss = loss * torch.inf
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
            average.step(model.parameters())
    averaged = torch.nn.ParameterList(average.shadow_params)
    return net, averaged, scheduler.get_last_lr()


def verl(steps):
    """Make the calls of verl's FSDP engine; verl itself is not installed."""
    buoy.torch.install(**START)

    def build():  # `FSDPEngine._build_fsdp_module`
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(growth_interval=400)

    net = Net()
    scaler, optimizer = build(), adamw(net)
    engine = types.SimpleNamespace(lr_scheduler=decay(optimizer))
    scaler.gate(engine.lr_scheduler)
    for step in steps:
        optimizer.zero_grad()
        for part in range(2):  # micro-batches
            given = {key: value[2 * part :][:2] for key, value in batch(step).items()}
            with torch.autocast("cpu", torch.float16):
                loss = net(**given)["loss"] / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.5)
        scaler.step(optimizer)
        scaler.update()
    scaler.get_scale()
    return net, net, engine.lr_scheduler.get_last_lr()


def prepare():
    """Make torchvision importable: its package for CUDA lacks its operators here."""
    sys.path.append(str(Path(sys.prefix) / "vision"))
    for name in ("nms", "qnms"):
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", schema)


def main():
    """Train twice, and print what was found."""
    warnings.simplefilter("ignore")
    prepare()
    train = globals()[sys.argv[1]]
    (net, average, lr), (expected, other, rate) = train(range(STEPS)), train(GOOD)
    found = {
        "apart": distance(net, expected),
        "averages": distance(average, other),
        "lr": [lr, rate],
        "moved": distance(expected, type(expected)(**getattr(expected, "config", {}))),
    }
    if sys.argv[1] in ("timm", "verl"):
        found["plain"] = distance(net, reference(max_norm=0.5)[0])
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
