"""The recipes of docs/migrate/recipes.md, each with its library, in a process alone.

Each trains twice: on all batches, of which two overflow, and on the others only.
"""

import copy
import json
import sys
import warnings
from pathlib import Path

import torch
from tiny import BAD, GOOD, STEPS, Net, adamw, batch, decay, distance, reference

import buoy
import buoy.torch

# These are compared with a loop by hand, too: the norm that they clip to.
PLAIN = {"timm": 0.5, "ignite": None}
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
    return net, average.module, scheduler.get_last_lr(), Net()


def ignite(steps):
    """Run the engine of `create_supervised_trainer`, with a gated schedule."""
    from ignite.engine import create_supervised_trainer

    net = Net()
    optimizer = adamw(net)
    with buoy.torch.install(**START) as installed:
        trainer = create_supervised_trainer(
            net,
            optimizer,
            loss_fn=lambda loss, _: loss,
            amp_mode="amp",
            scaler=True,
            model_fn=lambda net, step: loss_of(net, int(step)),
        )
    (scaler,) = installed.scalers
    scaler.gate(scheduler := decay(optimizer))
    trainer.run([(torch.tensor(step), torch.zeros(1)) for step in steps])
    scaler.get_scale()  # carries the last update out, and with it the gates
    return net, net, scheduler.get_last_lr(), Net()


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
    return learn.model.net, learn.model.net, None, Net()


def ultralytics(steps):
    """Train a small detector; batches that are left out are seen and not applied."""
    import cv2
    import numpy as np
    from ultralytics import YOLO
    from ultralytics.models.yolo.detect import DetectionTrainer

    root = Path.cwd()
    source = np.random.default_rng(0)
    for kind, count in (("train", STEPS), ("val", 2)):
        for part in ("images", "labels"):
            (root / part / kind).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            image = np.zeros((32, 32, 3), np.uint8)
            x, y = source.integers(4, 20, 2)
            image[y : y + 8, x : x + 8] = 255
            cv2.imwrite(str(root / "images" / kind / f"{index}.png"), image)
            label = f"0 {(x + 4) / 32} {(y + 4) / 32} 0.25 0.25"
            (root / "labels" / kind / f"{index}.txt").write_text(label)
    data = f"path: {root}\ntrain: images/train\nval: images/val\nnames: [box]\n"
    (root / "data.yaml").write_text(data)
    layers = "".join(f"  - [-1, 1, Conv, [{c}, 3, 2]]\n" for c in (8, 8, 16, 16))
    net = f"nc: 1\nbackbone:\n{layers}head:\n  - [[2, 3], 1, Detect, [nc]]\n"
    (root / "tiny.yaml").write_text(net)
    dtypes, began = set(), []

    class Trainer(DetectionTrainer):
        calls = 0

        def optimizer_step(self):
            self.calls += 1
            if self.calls - 1 in steps:
                super().optimizer_step()
            else:
                self.optimizer.zero_grad()

        def validate(self):  # torchvision's operators are missing here
            return {}, 0.0

        def final_eval(self):
            pass

        def read_results_csv(self):  # needs polars
            return {}

    def gate_the_average(trainer):
        update = trainer.ema.update
        trainer.ema.update = lambda net: (
            update(net) if trainer.scaler.last_step.applied else None
        )

    def spoil(trainer):
        began.append(copy.deepcopy(trainer.model))
        # On a CPU, the trainer turns its autocast off, and its scaler.
        in_fp16 = torch.autocast("cpu", torch.float16)(trainer.model.forward)
        trainer.model.forward = in_fp16
        first = trainer.model.model[0].conv
        first.register_forward_hook(lambda _, __, out: dtypes.add(out.dtype))
        first.weight.register_hook(
            lambda grad: grad * torch.inf if trainer.calls in BAD else None
        )

    model = YOLO("tiny.yaml", verbose=False)
    model.add_callback("on_train_start", gate_the_average)
    model.add_callback("on_train_start", spoil)
    with buoy.torch.install(**START, enabled=True):
        model.train(
            trainer=Trainer,
            data="data.yaml",
            epochs=2,
            imgsz=32,
            batch=2,
            nbs=2,
            device="cpu",
            workers=0,
            plots=False,
            save=False,
            val=False,
            project=str(root / "runs"),
            exist_ok=True,
        )
    assert model.trainer.calls == STEPS
    assert dtypes == {torch.float16}
    average = model.trainer.ema
    assert average.updates == len(GOOD)
    saved = torch.load(model.trainer.last, weights_only=False)
    assert saved["scaler"]["scale"] == 2.0**10
    lr = model.trainer.scheduler.get_last_lr()
    return model.trainer.model, average.ema, lr, began[0]


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
    began = copy.deepcopy(net)
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
    return net, averaged, scheduler.get_last_lr(), began


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
    net, average, lr, began = train(range(STEPS))
    expected, other, rate, _ = train(GOOD)
    found = {
        "apart": distance(net, expected),
        "averages": distance(average, other),
        "lr": [lr, rate],
        "moved": distance(net, began),
    }
    if sys.argv[1] in PLAIN:
        expected, _ = reference(max_norm=PLAIN[sys.argv[1]])
        found["plain"] = distance(net, expected)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
