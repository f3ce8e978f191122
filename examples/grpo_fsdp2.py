"""FP16 GRPO by hand with FSDP2: a tiny language model learns to say "sun".

    torchrun --nproc-per-node 2 examples/grpo_fsdp2.py

It needs only torch and the extra `report`.  On GPUs write "cuda" and "nccl" for "cpu"
and "gloo", and start one process per GPU.  Rank 0 records the run in `grpo.buoy` and
writes `grpo.html`.

In a loop of your own, copy the lines marked (1) to (5).
"""

import argparse

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import buoy.report
from buoy.torch import GradScaler

WORDS = "what shines by day night sun moon rain snow wind sea".split()
# "what shines by day", "what shines by night"
PROMPTS = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]])
LENGTH = 6  # words of an answer
GROUP = 16  # answers per prompt, on each rank
WIDTH = 32
HEADS = 2


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add what this block computes to x, of [batch, words, WIDTH]."""
        batch, words, _ = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, words, 3, HEADS, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, words, WIDTH))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """A language model of a dozen words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), WIDTH)
        self.places = nn.Embedding(PROMPTS.shape[1] + LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, len(WORDS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities of the next word, in float32."""
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        logits: Tensor = self.head(self.blocks(x))
        return logits.float().log_softmax(-1)  # FP16 would round what RL compares


@torch.no_grad()
def answer(model: Model, prompts: Tensor, source: torch.Generator) -> Tensor:
    """Append sampled words to each prompt."""
    for _ in range(LENGTH):
        likely = model(prompts)[:, -1].exp()
        prompts = torch.cat([prompts, likely.multinomial(1, generator=source)], 1)
    return prompts


def chosen(model: Model, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each word of the answers, and the mean entropy."""
    likely = model(tokens[:, :-1])[:, -LENGTH:]
    words = tokens[:, -LENGTH:, None]
    entropy = -(likely.exp() * likely).sum(2).mean()
    return likely.gather(2, words).squeeze(2), entropy


def reward(tokens: Tensor) -> Tensor:
    """Reward answers by the share of the word "sun"."""
    return (tokens[:, -LENGTH:] == WORDS.index("sun")).float().mean(1)


def main() -> None:
    """Train, and say what to look at."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)  # the same weights on every rank
    model = Model()
    # (1) Parameters are sharded in FP32 and gathered in FP16; gradients are reduced in
    # FP32, which costs bandwidth but cannot overflow while ranks are added up.
    half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=half)
    fully_shard(model, mesh=mesh, mp_policy=half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 2 * rounds)

    # (2) `headroom` finds a fitting scale after the first step: RL has few steps.  The
    # gate advances the schedule with applied steps only.  All ranks take one decision.
    scaler = GradScaler("cpu", policy="headroom", model=model, trace="grpo.buoy")
    scaler.gate(schedule)

    source = torch.Generator().manual_seed(rank)  # every rank samples its own answers
    for turn in range(rounds):
        tokens = answer(model, PROMPTS.repeat_interleave(GROUP, 0), source)
        rewards = reward(tokens)
        groups = rewards.view(-1, GROUP)  # GRPO compares the answers to one prompt
        spread = groups.std(1, keepdim=True) + 1e-4
        advantages = ((groups - groups.mean(1, keepdim=True)) / spread).view(-1, 1)
        with torch.no_grad():
            before, _ = chosen(model, tokens)
        for _ in range(2):  # two steps on the same answers
            now, entropy = chosen(model, tokens)
            ratio = (now - before).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = -gain.mean() - 0.02 * entropy  # keeps exploring
            optimizer.zero_grad()
            scaler.scale(loss).backward()  # (3)
            scaler.clip_grad_norm_(optimizer, 1.0)  # (4) by the norm of the whole model
            scaler.step(optimizer)  # (5) skipped on all ranks if one overflows
            scaler.update()
        mean = rewards.mean()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        if rank == 0 and (turn % 5 == 4 or turn == 0):
            scale = scaler.last_step.scale
            print(f"round {turn + 1:2}: reward {mean:.2f}, scale {scale:g}")

    if rank == 0:
        scaler.trace.close()
        buoy.report.write([scaler.trace.path], "grpo.html")
        print(
            f"The run: {scaler.trace.path}; its report: grpo.html. Look there at:\n"
            "  - the scale: it rises as the gradients shrink;\n"
            "  - skipped steps: each one wastes a round of answers;\n"
            "  - where the gradients lie: none should be below the format's smallest\n"
            "    number. The gradients shrink with the advantages."
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
