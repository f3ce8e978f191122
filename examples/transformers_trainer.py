"""FP16 with Transformers' Trainer: a tiny language model learns to count, recorded.

    python examples/transformers_trainer.py   # needs transformers and accelerate
    buoy report transformers.buoy             # what the scale did, and why

`use` between the constructor and `train` is all that Buoy needs.  Skipped steps do not
advance the learning rate; the log has `buoy/scale`, `buoy/skipped` and `buoy/norm`.  On
a CPU, too, the model is trained in FP16.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from buoy.integrations import transformers as buoy_transformers

WORDS = 32
LENGTH = 16  # words of a row


def make_model() -> LlamaForCausalLM:
    """Make a language model of some thousand parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def make_data() -> list[dict[str, torch.Tensor]]:
    """Count upwards from every number."""
    rows = [(start + torch.arange(LENGTH)) % WORDS for start in range(WORDS)]
    return [{"input_ids": row, "labels": row} for row in rows * 8]


def main() -> None:
    """Train, and print what became of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--policy", default="headroom")
    parser.add_argument("--bf16", action="store_true", help="BF16: no scaling needed")
    chosen = parser.parse_args()

    arguments = TrainingArguments(
        output_dir="transformers",
        per_device_train_batch_size=8,
        max_steps=chosen.steps,
        learning_rate=1e-2,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        fp16=not chosen.bf16,
        bf16=chosen.bf16,
    )
    trainer = Trainer(make_model(), arguments, train_dataset=make_data())
    # Further arguments are those of `buoy.torch.GradScaler`.  With `bf16=True` this
    # returns None and changes nothing.
    scaler = buoy_transformers.use(
        trainer, policy=chosen.policy, trace="transformers.buoy"
    )
    trainer.train()

    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    print(f"loss: {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
    if scaler is not None:
        scaler.trace.close()
        print(f"scale: {scaler.get_scale():g}; trace: {scaler.trace.path}")
        print(f"Look at `buoy report {scaler.trace.path}`: did the scale settle, and")
        print("are gradients lost at the bottom of the format?")


if __name__ == "__main__":
    main()
