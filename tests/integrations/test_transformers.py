"""Transformers' Trainer: it ends like one that never saw the batches that overflow."""

import math

import pytest
import torch
from tiny import BAD, GOOD, STEPS, Net, adamw, decay, distance, reference, samples
from transformers import Trainer, TrainingArguments
from transformers.optimization import get_constant_schedule

from buoy.integrations import transformers as ours
from buoy.torch import OptionError

START = {"init_scale": 2.0**10, "growth_interval": 3}


def trainer_of(net, folder, *, optimizers=None, precision="fp16", **arguments):
    """Make a Trainer on a CPU that takes the samples in order."""
    defaults = {
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "use_cpu": True,
        "disable_tqdm": True,
        **({precision: True} if precision else {}),
    }
    args = TrainingArguments(str(folder), **{**defaults, **arguments})
    optimizers = optimizers or (None, None)
    return Trainer(net, args, train_dataset=samples(), optimizers=optimizers)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_weights_lr_and_log_do_not_see_skipped_steps(fused, max_norm, tmp_path):
    """Clipped or not, fused or not."""
    net = Net()
    optimizer = adamw(net, fused=fused)
    scheduler = decay(optimizer)
    options = {"max_grad_norm": max_norm or 0.0}
    trainer = trainer_of(net, tmp_path, optimizers=(optimizer, scheduler), **options)
    scaler = ours.use(trainer, **START)
    trainer.train()

    expected, lr = reference(max_norm=max_norm, fused=fused)
    assert distance(net, expected) <= (1e-7 if fused and max_norm else 0.0)
    assert scheduler.get_last_lr() == [lr]
    assert net.dtypes == {torch.float16}
    logs = [one for one in trainer.state.log_history if "loss" in one]
    assert [one["buoy/skipped"] for one in logs] == [
        float(sum(bad <= step for bad in BAD)) for step in range(STEPS)
    ]
    for step, one in enumerate(logs):
        assert ("grad_norm" in one) == ("buoy/norm" in one) == (step not in BAD)
        if step not in BAD:
            assert one["grad_norm"] == pytest.approx(one["buoy/norm"], rel=1e-6)
        assert all(map(math.isfinite, one.values()))
    assert scaler.get_scale() > 0


def test_the_default_optimizer_is_fused_and_its_lr_is_right(tmp_path):
    """`adamw_torch_fused`, with a linear schedule: one step of it per update."""
    trainer = trainer_of(Net(), tmp_path)
    ours.use(trainer, **START)
    trainer.train()
    assert trainer.optimizer.param_groups[0]["fused"]
    assert trainer.lr_scheduler.last_epoch == len(GOOD)


def test_what_each_counter_counts(tmp_path):
    """Those of updates count applied steps; those of the data count all batches."""
    net = Net()
    optimizer = adamw(net)
    parts = optimizer, decay(optimizer)
    often = {"save_strategy": "steps", "save_steps": 4, "logging_steps": 3}
    trainer = trainer_of(net, tmp_path, optimizers=parts, **often)
    ours.use(trainer, **START)
    trainer.train()
    state = trainer.state
    assert {float(one["step"]) for one in optimizer.state.values()} == {len(GOOD)}
    assert trainer.lr_scheduler.last_epoch == len(GOOD)
    logs = [one for one in state.log_history if "loss" in one]
    assert logs[-1]["buoy/skipped"] == len(BAD)

    assert state.global_step == state.max_steps == STEPS
    assert state.epoch == 1.0
    assert [one["step"] for one in logs] == [3, 6, 9, 12]
    saved = sorted(int(one.name.split("-")[1]) for one in tmp_path.glob("checkpoint-*"))
    assert saved == [4, 8, 12]


def test_global_step_can_count_applied_steps(tmp_path):
    """Each multiple is logged and saved once; none is at a skipped step."""
    net = Net()
    often = {"save_strategy": "steps", "save_steps": 4, "logging_steps": 3}
    optimizer = adamw(net)
    parts = optimizer, decay(optimizer)
    trainer = trainer_of(net, tmp_path, optimizers=parts, **often)
    ours.use(trainer, count="applied", **START)
    trainer.train()
    state = trainer.state
    assert state.global_step == trainer.lr_scheduler.last_epoch == len(GOOD)
    assert distance(net, reference()[0]) == 0.0
    logs = [one["step"] for one in state.log_history if "loss" in one]
    assert logs == list(range(3, len(GOOD) + 1, 3))
    saved = sorted(int(one.name.split("-")[1]) for one in tmp_path.glob("checkpoint-*"))
    assert [one for one in saved if one % 4 == 0] == [4, 8][: len(GOOD) // 4]


def test_a_run_that_skips_every_step_ends_though_applied_steps_count(tmp_path):
    trainer = trainer_of(Net(), tmp_path, max_steps=5)
    trainer.train_dataset = [one for one in samples() if one["bad"]] * 20
    ours.use(trainer, count="applied", on_stuck=print, patience=3, **START)
    trainer.train()
    assert trainer.state.global_step == 5
    assert trainer.lr_scheduler.last_epoch == 0


def test_another_count_is_refused(tmp_path):
    with pytest.raises(OptionError, match="'applied' or 'attempted'"):
        ours.use(trainer_of(Net(), tmp_path), count="all")


def test_max_steps_is_reached_though_every_step_is_skipped(tmp_path):
    """It counts attempts."""
    net = Net()
    trainer = trainer_of(net, tmp_path, max_steps=5)
    trainer.train_dataset = [one for one in samples() if one["bad"]]
    ours.use(trainer, on_stuck=print, patience=3, **START)
    trainer.train()
    assert trainer.state.global_step == 5
    assert trainer.state.log_history[-2]["buoy/skipped"] == 5.0
    assert trainer.lr_scheduler.last_epoch == 0
    assert distance(net, Net()) == 0.0


@pytest.mark.parametrize("checkpoint", [4, 5, 8])
def test_a_resumed_run_sees_each_batch_once(checkpoint, tmp_path):
    """The Trainer computes its place in the data from `global_step` alone.

    4 and 8 are saved right after a skipped step.
    """

    class Watched(Net):
        def forward(self, x, y, bad, **rest):
            seen.append(x[0, 0].item())
            return super().forward(x, y, bad, **rest)

    def train(**resume):
        net = Watched()
        optimizer = adamw(net)
        trainer = trainer_of(
            net,
            tmp_path,
            optimizers=(optimizer, decay(optimizer)),
            save_strategy="steps",
            save_steps=1,
        )
        scaler = ours.use(trainer, **START)
        trainer.train(**resume)
        return net, trainer, scaler

    seen = []
    whole, straight, end = train()
    every, seen = seen, []
    folder = str(tmp_path / f"checkpoint-{checkpoint}")
    net, resumed, scaler = train(resume_from_checkpoint=folder)
    assert seen == every[checkpoint:]
    assert distance(net, whole) == 0.0
    assert scaler.state_dict() == end.state_dict()
    rates = [one.lr_scheduler.get_last_lr() for one in (resumed, straight)]
    assert rates[0] == rates[1]


def test_accumulation(tmp_path):
    """Windows of two: 2, 3 and 6, 7 overflow."""
    net = Net()
    optimizer = adamw(net)
    trainer = trainer_of(
        net,
        tmp_path,
        optimizers=(optimizer, decay(optimizer)),
        gradient_accumulation_steps=2,
        max_steps=STEPS // 2,
    )
    ours.use(trainer, **START)
    trainer.train()
    expected, _ = reference([0, 1, 4, 5, 8, 9, 10, 11], accumulate=2)
    assert distance(net, expected) == 0.0


@pytest.mark.parametrize("policy", [None, "headroom"])
def test_a_run_resumes_exactly(policy, tmp_path):
    """From a checkpoint of the middle."""
    options = START if policy is None else {"init_scale": 2.0**10}

    def begin():
        net = Net()
        optimizer = adamw(net)
        parts = optimizer, get_constant_schedule(optimizer)
        saving = {"save_strategy": "steps", "save_steps": 5}
        trainer = trainer_of(net, tmp_path, optimizers=parts, **saving)
        return trainer, ours.use(trainer, policy, **options), net

    trainer, scaler, whole = begin()
    trainer.train()
    end = scaler.state_dict()
    trainer, scaler, net = begin()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert distance(net, whole) == 0.0
    assert scaler.state_dict() == end


@pytest.mark.parametrize("precision", ["bf16", None])
def test_another_precision_turns_it_off(precision, tmp_path):
    """Without an error, and nothing is logged."""
    trainer = trainer_of(Net(), tmp_path, precision=precision, max_steps=2)
    assert ours.use(trainer, **START) is None
    trainer.train()
    assert not any("buoy/scale" in one for one in trainer.state.log_history)
