"""DeepSpeed's engine on two ranks; run by torchrun.

The overflow is on rank 1 alone.
"""

import os
import tempfile
import warnings

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import deepspeed.ops
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from ranks import report
from tiny import GOOD, STEPS, Net, batch, distance, reference

from buoy._core.codec import encode
from buoy.integrations import accelerate
from buoy.integrations import deepspeed as ours
from buoy.torch import OptionError

START = {"init_scale": 2.0**8, "growth_interval": 2}


def engine_of(stage, mode, clip=0.0, **more):
    """Make an engine with AdamW and a schedule per step."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": clip,
        **more,
    }
    if mode == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    elif mode == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "float16"}
    elif mode == "bf16":
        config["bf16"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    return engine, net


def train(engine, mode, steps):
    """Run DeepSpeed's documented loop; return what is logged of each step."""
    rank, found = torch.distributed.get_rank(), []
    accumulate = engine.gradient_accumulation_steps()
    for step in steps:
        for part in torch.arange(4)[2 * rank :][:2].chunk(accumulate):
            given = {key: value[part] for key, value in batch(step).items()}
            given["bad"] &= rank == 1
            if mode != "autocast":
                given["x"] = given["x"].to(engine.module.first.weight.dtype)
            engine.backward(engine(**given)["loss"])
            engine.step()
        found.append(ours.metrics(engine))
    return found


def apart(net, other):
    """Return the largest difference of two models, whose weights may be sharded."""
    both = [*net.parameters(), *other.parameters()]
    with deepspeed.zero.GatheredParameters(both):
        return distance(net, other)


def skips(stage, mode, clip, accumulate=1):
    """Train with and without the bad batches."""
    windows = {"gradient_accumulation_steps": accumulate}
    engine, net = engine_of(stage, mode, clip, **windows)
    ours.use(engine, "torch", **START)
    logs = train(engine, mode, range(STEPS))
    other, expected = engine_of(stage, mode, clip, **windows)
    ours.use(other, "static", init_scale=2.0**8)
    train(other, mode, GOOD)
    plain, lr = reference(scale=2.0**8, max_norm=clip or None)
    return {
        "apart": apart(net, expected),
        "plain": apart(net, plain),
        "moved": apart(net, Net()),
        "lr": [engine.get_lr(), other.get_lr(), [lr]],
        "skipped": engine.skipped_steps,
        "logs": logs,
        "dtypes": [str(one) for one in net.dtypes],
    }


def resume(stage, mode):
    """Save in the middle, after an overflow; load into another engine."""
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    engine, whole = engine_of(stage, mode)
    scaler = ours.use(engine, "torch", **START)
    train(engine, mode, range(5))
    engine.save_checkpoint(folder[0])
    train(engine, mode, range(5, STEPS))
    again, net = engine_of(stage, mode)
    restored = ours.use(again, "backoff")
    again.load_checkpoint(folder[0])
    train(again, mode, range(5, STEPS))
    return {
        "apart": apart(net, whole),
        "same": again.optimizer.loss_scaler is restored,
        "states": [scaler.__getstate__(), restored.__getstate__()],
    }


def stock(stage):
    """Load a checkpoint of DeepSpeed without Buoy."""
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    engine, _ = engine_of(stage, "fp16")
    engine.optimizer.loss_scaler.cur_scale = 2.0**5
    train(engine, "fp16", range(2))
    engine.save_checkpoint(folder[0])
    again, _ = engine_of(stage, "fp16")
    scaler = ours.use(again, "torch", **START)
    again.load_checkpoint(folder[0])
    return {"scale": scaler.cur_scale, "same": again.optimizer.loss_scaler is scaler}


def prepared():
    """Train by Accelerate, whose `prepare` returns the engine."""
    refused = ""
    accelerator = Accelerator(
        mixed_precision="fp16",
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_clipping=0.5),
    )
    try:
        accelerate.use(accelerator, "torch", **START)
    except OptionError as error:
        refused = str(error)
    # Without a GPU, Accelerate takes itself for the only process under DeepSpeed.
    accelerator.state.num_processes = torch.distributed.get_world_size()
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    config["train_micro_batch_size_per_gpu"] = 2
    config["zero_allow_untested_optimizer"] = True
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    engine, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    ours.use(engine, "torch", **START)
    rank, skipped = torch.distributed.get_rank(), []
    for step in range(STEPS):
        given = {key: value[2 * rank :][:2] for key, value in batch(step).items()}
        given["bad"] &= rank == 1
        given["x"] = given["x"].half()
        accelerator.backward(engine(**given)["loss"])
        accelerator.clip_grad_norm_(engine.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped += [step] if accelerator.optimizer_step_was_skipped else []
    other, expected = engine_of(2, "fp16", 0.5)
    ours.use(other, "static", init_scale=2.0**8)
    train(other, "fp16", GOOD)
    return {
        "apart": apart(net, expected),
        "moved": apart(net, Net()),
        "lr": [engine.get_lr(), other.get_lr()],
        "skipped": skipped,
        "refused": refused,
        "logged": sorted(ours.metrics(engine)),
    }


def others():
    """Make engines of other configurations."""
    refused = {}
    for name, stage in (("headroom", 1), ("lognormal", 3), ("torch", 0)):
        try:
            ours.use(engine_of(stage, "fp16")[0], name)
        except OptionError as error:
            refused[name] = str(error)
    static, _ = engine_of(1, None, fp16={"enabled": True, "loss_scale": 64.0})
    bf16, _ = engine_of(1, "bf16")
    train(bf16, "bf16", [0])
    plain, at_zero = engine_of(1, "fp16")[0], engine_of(0, None)[0]
    names = "loss_scaler dynamic_loss_scale torch_autocast_gradscaler"
    return {
        "missing": [
            name
            for name in (*names.split(), "check_grad_overflow", "load_state_dict")
            if not hasattr(plain.optimizer, name)
        ],
        "called": sorted(
            name
            for name in ("scale_loss", "update_scale", "loss_scale", "cur_scale")
            if hasattr(plain.optimizer.loss_scaler, name)
        ),
        "z0": at_zero.torch_autocast_z0_gradscaler,
        "refused": refused,
        "static": ours.use(static).cur_scale,
        "default": encode(ours.use(engine_of(1, "fp16")[0]).policy),
        "bf16": [ours.use(bf16, "torch"), ours.metrics(bf16)],
    }


def main():
    """Run all cases."""
    warnings.simplefilter("ignore")
    # Otherwise DeepSpeed compiles it at the first use.  A build that was interrupted
    # leaves a lock, on which every later process waits.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    # DeepSpeed refuses FP16 on a CPU.
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    found = {"stock 1": stock(1), "stock 3": stock(3), "others": others()}
    found["accelerate"] = prepared()
    # FP16 first: `torch_autocast` stays on for all later engines of a process.
    for mode in ("fp16", "autocast"):
        for stage in (1, 2, 3):
            for clip in (0.0, 0.5):
                found[f"skips {stage} {mode} {clip}"] = skips(stage, mode, clip)
            found[f"resume {stage} {mode}"] = resume(stage, mode)
        found[f"accumulated {mode}"] = skips(2, mode, 0.5, accumulate=2)
    found["skips 0 autocast 0.5"] = skips(0, "autocast", 0.5)
    report(found)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
