"""TRL: SFT and GRPO end like a run that never saw the batches that overflow."""

import runpy
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tiny import distance
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import buoy
from buoy.integrations import transformers as ours

EXAMPLES = Path(__file__).parents[2] / "examples"
GRPO = runpy.run_path(str(EXAMPLES / "grpo_trl.py"))
STEPS, BAD = 5, (1, 3)
COMMON = {
    "max_grad_norm": 0.0,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "fp16": True,
    "disable_tqdm": True,
    "logging_steps": 1,
    "bf16": False,
}


class Conductor(TrainerCallback):
    """Seeds each step by its batch, and spoils the gradients of some."""

    def __init__(self, model, batches, bad=()):
        self.batches, self.bad, self.now = list(batches), bad, -1
        model.lm_head.weight.register_hook(self.spoil)

    def on_step_begin(self, args, state, control, **_):
        self.now = self.batches[state.global_step]
        torch.manual_seed(self.now)

    def spoil(self, grad):
        return grad * torch.inf if self.now in self.bad else None


def run_of(kind, batches, folder, bad=(), **options):
    """Train on the given batches; return the trainer, and the outcome."""
    tokenizer = GRPO["make_tokenizer"]()
    model = GRPO["make_model"](tokenizer)
    torch.manual_seed(1)
    words = ["sun moon", "rain sea wind", "snow", "night day sun", "wind sun moon sea"]
    if kind == "sft":
        rows = {"text": [words[step] for step in batches]}
        config, extra, trainer = SFTConfig, {}, SFTTrainer
        sizes = {"per_device_train_batch_size": 1}
    else:
        rows = {"prompt": [words[step] for step in batches]}
        config, trainer = GRPOConfig, GRPOTrainer
        extra = {"reward_funcs": GRPO["reward"]}
        sizes = {
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 4,
            "shuffle_dataset": False,
        }
    if kind == "sft":
        sizes["train_sampling_strategy"] = "sequential"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    made = trainer(
        model=model,
        args=config(str(folder), max_steps=len(batches), **sizes, **COMMON),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
        optimizers=(optimizer, scheduler),
        callbacks=[Conductor(model, batches, bad)],
        **extra,
    )
    scaler = ours.use(made, **options)
    made.train()
    return made, scaler, model, scheduler


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_weights_and_lr_do_not_see_skipped_steps(kind, tmp_path):
    """The same trainer, on the other batches alone, has the same weights and LR."""
    # At another scale other small gradients underflow in FP16.
    options = {"policy": buoy.Static(init_scale=2.0**10)}
    every = list(range(STEPS))
    trainer, scaler, model, scheduler = run_of(kind, every, tmp_path, BAD, **options)
    good = [step for step in every if step not in BAD]
    _, _, expected, other = run_of(kind, good, tmp_path, **options)

    assert distance(model, expected) == 0.0
    assert distance(model, GRPO["make_model"](GRPO["make_tokenizer"]())) > 1e-3
    assert scheduler.get_last_lr() == other.get_last_lr()
    assert scaler.get_scale() == 2.0**10
    logs = [one for one in trainer.state.log_history if "loss" in one]
    assert [one["buoy/skipped"] for one in logs] == [0.0, 1.0, 1.0, 2.0, 2.0]
