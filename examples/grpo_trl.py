"""FP16 GRPO with TRL: a tiny language model, made here, learns to answer with "sun".

    python examples/grpo_trl.py            # needs transformers, accelerate and trl
    buoy report grpo.buoy                  # what the scale did, and why

`use` is all that Buoy needs.  Skipped steps do not advance the learning rate; the log
has `buoy/scale`, `buoy/skipped` and `buoy/norm`; the run is recorded in `grpo.buoy`.
On a CPU, too, the model is trained in FP16, if slowly.
"""

import argparse
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from buoy.integrations import transformers as buoy_transformers

WORDS = "what shines by day night sun moon rain snow wind sea".split()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of a dozen words."""
    names = ["<pad>", "<eos>", "<unk>", *WORDS]
    vocabulary = {word: index for index, word in enumerate(names)}
    words = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=words, padding_side="left", **special
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> LlamaForCausalLM:
    """Make a language model of some thousand parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def reward(completions: list[str], **_: Any) -> list[float]:
    """Reward answers by the share of the word "sun"."""
    words = [completion.split() for completion in completions]
    return [answer.count("sun") / max(len(answer), 1) for answer in words]


def main() -> None:
    """Train and print what became of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--policy", default="headroom")
    parser.add_argument("--trace", default="grpo.buoy")
    parser.add_argument("--bf16", action="store_true", help="BF16: no scaling needed")
    chosen = parser.parse_args()

    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    prompts = Dataset.from_dict({"prompt": ["what shines by day", "what shines"] * 64})
    arguments = GRPOConfig(
        output_dir="grpo",
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=6,
        max_steps=chosen.steps,
        learning_rate=1e-2,
        logging_steps=5,
        disable_tqdm=True,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        fp16=not chosen.bf16,
        bf16=chosen.bf16,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=prompts,
        processing_class=tokenizer,
    )
    scaler = buoy_transformers.use(trainer, policy=chosen.policy, trace=chosen.trace)
    trainer.train()
    rewards = [one["reward"] for one in trainer.state.log_history if "reward" in one]
    print(f"reward: {rewards[0]:.2f} at first, {rewards[-1]:.2f} at last")
    if scaler is not None:
        scaler.trace.close()
        print(f"scale: {scaler.get_scale():g}; trace: {scaler.trace.path}")


if __name__ == "__main__":
    main()
