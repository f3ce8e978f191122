"""One training library under DDP on two ranks; the overflow is on rank 1 alone."""

import os
import sys
import tempfile
import warnings

import torch
from ranks import report
from tiny import GOOD, STEPS, Net, adamw, batch, decay, distance

START = {"init_scale": 2.0**10, "growth_interval": 3}
RANK = int(os.environ["RANK"])


def half(step, rank=RANK):
    """Return the samples of one rank."""
    given = {key: value[2 * rank :][:2] for key, value in batch(step).items()}
    given["bad"] &= rank == 1
    return given


def reference(max_norm):
    """Train on the good batches of both ranks, in a loop by hand with one scale."""
    model = Net()
    optimizer = adamw(model, fused=True)
    scheduler = decay(optimizer)
    for step in GOOD:
        optimizer.zero_grad()
        for rank in range(2):
            with torch.autocast("cpu", torch.float16):
                loss = model(**half(step, rank))["loss"]
            (loss * 2.0**10 / 2).backward()
        for param in model.parameters():
            param.grad /= 2.0**10
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
    return model, scheduler.get_last_lr()


def by_accelerate(max_norm):
    """Run Accelerate's documented loop."""
    from accelerate import Accelerator, DataLoaderConfiguration

    from buoy.integrations import accelerate as ours

    # Otherwise Accelerate steps schedules once per rank.
    config = DataLoaderConfiguration(split_batches=True)
    made = Accelerator(mixed_precision="fp16", cpu=True, dataloader_config=config)
    scaler = ours.use(made, **START)
    net = Net()
    model, optimizer = made.prepare(net, adamw(net, fused=True))
    scheduler = made.prepare(decay(optimizer))
    skipped = []
    for step in range(STEPS):
        made.backward(model(**half(step))["loss"])
        made.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped += [step] if made.optimizer_step_was_skipped else []
    wrapped = type(model).__name__
    return net, scheduler.get_last_lr(), skipped, scaler, wrapped


def by_transformers(max_norm):
    """Run a Trainer whose batches are dealt to the ranks in order."""
    from transformers import Trainer, TrainingArguments

    from buoy.integrations import transformers as ours

    net = Net()
    optimizer = adamw(net, fused=True)
    scheduler = decay(optimizer)
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        max_grad_norm=max_norm,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        use_cpu=True,
        disable_tqdm=True,
        fp16=True,
    )
    # Accelerate's batches go to the ranks in turn: first that of rank 0.
    rows = [
        {key: value[i] for key, value in half(step, rank).items()}
        for step in range(STEPS)
        for rank in range(2)
        for i in range(2)
    ]
    trainer = Trainer(
        net, arguments, train_dataset=rows, optimizers=(optimizer, scheduler)
    )
    scaler = ours.use(trainer, **START)
    trainer.train()
    logs = [one for one in trainer.state.log_history if "loss" in one]
    skipped = [step for step, one in enumerate(logs) if "grad_norm" not in one]
    wrapped = type(trainer.model_wrapped).__name__
    return net, scheduler.get_last_lr(), skipped, scaler, wrapped


def by_lightning(max_norm):
    """Run a Trainer with the strategy "ddp"."""
    from lightning.pytorch import LightningModule, Trainer

    from buoy.integrations.lightning import MixedPrecision

    skipped = []

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, step, index):
            return self.net(**half(step))["loss"]

        def configure_optimizers(self):
            optimizer = adamw(self.net, fused=True)
            schedule = {"scheduler": decay(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

        def on_train_batch_end(self, outputs, step, index):
            if not plugin.scaler.last_step.applied:
                skipped.append(step)

    plugin = MixedPrecision("16-mixed", "cpu", **START)
    module = Module()
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=max_norm,
        use_distributed_sampler=False,
        plugins=[plugin],
    )
    loader = torch.utils.data.DataLoader(range(STEPS), batch_size=None)
    wrapped = []
    module.on_train_start = lambda: wrapped.append(
        type(trainer.strategy.model).__name__
    )
    trainer.fit(module, loader)
    assert trainer.global_step == len(GOOD)
    lr = trainer.lr_scheduler_configs[0].scheduler.get_last_lr()
    return module.net, lr, skipped, plugin.scaler, wrapped[0]


def main():
    """Train, and compare with the reference."""
    warnings.simplefilter("ignore")
    by = {"accelerate": by_accelerate, "transformers": by_transformers}
    by["lightning"] = by_lightning
    net, lr, skipped, scaler, wrapped = by[sys.argv[2]](max_norm=0.5)
    expected, rate = reference(max_norm=0.5)
    report(
        {
            "apart": distance(net, expected),
            "moved": distance(net, Net()),
            "lr": [lr, rate],
            "skipped": skipped,
            "scale": scaler.get_scale(),
            "dtypes": [str(one) for one in net.dtypes],
            "wrapped": wrapped,
        }
    )


if __name__ == "__main__":
    main()
