"""verl's FSDP engine on two ranks, with FSDP2; run by torchrun.

The overflow is on rank 1 alone.
"""

import contextlib
import math
import runpy
import sys
import warnings
from pathlib import Path

import torch
from verl.plugin.platform import PlatformBase, set_platform

warnings.simplefilter("ignore")


class Cpu(PlatformBase):
    """A platform of verl; it has none for a CPU."""

    device_name, vendor_name, device_module = "cpu", "cpu", torch.cpu

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def communication_backend_name(self):
        return "gloo"

    def get_device_capability(self, device_index=0):
        return None, None

    def nvtx_range(self, msg):
        return contextlib.nullcontext()

    def _nothing(self, *_):
        pass

    set_device = synchronize = manual_seed = manual_seed_all = _nothing
    set_allocator_settings = empty_cache = profiler_start = profiler_stop = _nothing
    visible_devices_envvar = ray_resource_name = ray_noset_envvars = _nothing
    is_ipc_supported = cudart = _nothing


set_platform(Cpu())  # before the engine is imported

from ranks import report  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from tiny import BAD, GOOD, STEPS, distance  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.workers.config import (  # noqa: E402
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine.fsdp.transformer_impl import (  # noqa: E402
    FSDPEngineWithLMHead,
)

import buoy  # noqa: E402
import buoy.torch  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
GRPO = runpy.run_path(str(EXAMPLES / "grpo_trl.py"))
TOKENIZER = GRPO["make_tokenizer"]()


class Engine(FSDPEngineWithLMHead):
    """verl's engine with a model that is made here."""

    def _build_module(self):
        return GRPO["make_model"](TOKENIZER)


def engine_of(dtype, lora=0):
    """Build an engine for a folder that has the model's configuration."""
    model = HFModelConfig(
        path=sys.argv[1],
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "eager"},
        lora_rank=lora,
        target_modules=["q_proj", "v_proj"],
    )
    torch.manual_seed(0)  # of the adapters
    engine = Engine(
        model,
        FSDPEngineConfig(
            strategy="fsdp2",
            mixed_precision={"param_dtype": dtype},
            use_torch_compile=False,
        ),
        FSDPOptimizerConfig(
            lr=0.01, clip_grad=0.5, total_training_steps=STEPS, lr_warmup_steps=STEPS
        ),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def gate_the_schedule(engine):
    """Keep the LR after a skipped step; the recipe of docs/migrate/recipes.md."""
    step = engine.lr_scheduler_step
    engine.lr_scheduler_step = lambda: (
        step()
        if engine.scaler.last_step.applied
        else engine.lr_scheduler.get_last_lr()[0]
    )


def batch(step):
    """Make the batch of this rank: two micro-batches of two sequences."""
    rank = torch.distributed.get_rank()
    source = torch.Generator().manual_seed(100 + 2 * step + rank)
    sizes = [6, 5, 7, 4]
    ids = [torch.randint(3, len(TOKENIZER), (n,), generator=source) for n in sizes]

    def nested(rows):
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    given = TensorDict(
        {
            "input_ids": nested(ids),
            "position_ids": nested([torch.arange(n) for n in sizes]),
            "loss_mask": nested([torch.ones(n) for n in sizes]),
        },
        batch_size=[len(sizes)],
    )
    tensordict_utils.assign_non_tensor(
        given,
        use_remove_padding=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        temperature=1.0,
    )
    return given


def train(engine, steps):
    """Train as verl's workers do; return the norms that they log."""
    norms = []
    for step in steps:
        bad = step in BAD and torch.distributed.get_rank() == 1

        def loss_of(model_output, data, dp_group=None, bad=bad):
            likely = model_output["log_probs"].values()
            if bad:
                likely.register_hook(lambda grad: grad * torch.inf)
            return -likely.mean(), {}

        with engine.train_mode():
            found = engine.train_batch(batch(step), loss_of)
            engine.lr_scheduler_step()
        norms.append(found["metrics"]["grad_norm"])
    return norms


def whole(engine):
    """Return the weights that are trained, gathered."""
    params = [one for one in engine.module.parameters() if one.requires_grad]
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in params]
    return torch.nn.ParameterList([one.detach() for one in full])


def run(lora=0):
    """Train with and without the bad batches."""
    engine, other = (engine_of("fp16", lora) for _ in range(2))
    began, dtypes = whole(engine), set()
    engine.module.get_output_embeddings().register_forward_hook(
        lambda _, __, out: dtypes.add(str(out.dtype))
    )
    for one in (engine, other):
        gate_the_schedule(one)
    norms = train(engine, range(STEPS))
    train(other, GOOD)
    return {
        "apart": distance(whole(engine), whole(other)),
        "moved": distance(whole(engine), began),
        "lr": [one.lr_scheduler.get_last_lr() for one in (engine, other)],
        "skipped": [i for i, norm in enumerate(norms) if not math.isfinite(norm)],
        "ours": isinstance(engine.scaler, buoy.torch.GradScaler),
        "scale": engine.scaler.get_scale(),
        "dtypes": sorted(dtypes),
        "module": type(engine.module).__name__,
        "steps": sorted({float(s["step"]) for s in engine.optimizer.state.values()}),
    }


def main():
    """Run all cases."""
    torch.distributed.init_process_group("gloo")
    if torch.distributed.get_rank() == 0:
        GRPO["make_model"](TOKENIZER).save_pretrained(sys.argv[1])
        TOKENIZER.save_pretrained(sys.argv[1])
    torch.distributed.barrier()
    # At another scale other small gradients underflow in FP16.
    buoy.torch.install(policy=buoy.Static(init_scale=2.0**10), device="cpu")
    report(
        {
            "whole model": run(),
            "lora": run(lora=2),
            "bf16": engine_of("bf16").scaler,
        }
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
