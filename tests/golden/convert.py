"""Turn the recorded traces of existing scalers into the compact form that tests read.

    python tests/golden/convert.py FOLDER_OF_JSONL_FILES

One gzip file of JSON lines results, a line a trace:

    preset, params   which preset, with the peer's own parameters
    case             what the recording probed
    seen             a character an attempt, 1 = finite, as the peer's scaler saw it
    attempts         attempts per update, where not always 1 (nnabla retries)
    amax_log2        log2 of the largest unscaled gradient, for scalers that look at it
    scales           run-length pairs of the scale after each update
    applied          a character an update, 1 = the step was applied
    collapsed_at     the update at which the scaler gave up, if it did
    go_on            the recording went on after that
    refused          the peer's constructor refused the parameters
    checkpoint       what the peer's saved state held at the end

What the scaler saw is what the recording injected, unless the recording itself says
otherwise: a scale beyond the format's range overflows by nature (`found_inf_differs`,
or a step that was not taken).  Left out: OpenSeq2Seq's racy recordings (`as_is`).
"""

import gzip
import json
import math
import sys
from pathlib import Path

from buoy._core.ops import single

PRESET_OF = {
    "apex_amp_LossScaler": "apex",
    "apex_fp16_utils_DynamicLossScaler": "apex_fp16_utils",
    "axon_LossScale_dynamic": "axon",
    "bmtrain_OptimManager": "bmtrain",
    "cerebras_pytorch_GradScaler": "cerebras",
    "chainer_Optimizer_loss_scaling": "chainer",
    "colossalai_DynamicGradScaler": "colossalai",
    "deepspeed_DynamicLossScaler": "deepspeed",
    "deepspeed_FP16_Optimizer_e2e": "deepspeed",
    "deepspeed_ZeRO_fp16_e2e": "deepspeed",
    "fairscale_DynamicLossScaler": "fairscale",
    "fairscale_ShardedGradScaler": "fairscale_sharded",
    "fairseq2_StandardFloat16LossScaler": "fairseq2",
    "fairseq_DynamicLossScaler": "fairseq",
    "fastai_NonNativeMixedPrecision": "fastai",
    "flax_DynamicScale": "flax",
    "guided_diffusion_MixedPrecisionTrainer": "guided_diffusion",
    "jaxamp_DynamicScalerState": "jaxamp",
    "jmp_DynamicLossScale": "jmp",
    "keras3_LossScaleOptimizer_jax": "keras",
    "keras3_LossScaleOptimizer_torch": "keras",
    "megatron_core_DynamicGradScaler": "megatron",
    "metaseq_DynamicLossScaler": "metaseq",
    "mindspore_DynamicLossScaleManager": "mindspore",
    "mindspore_DynamicLossScaleUpdateCell": "mindspore_cell",
    "mindspore_DynamicLossScaler": "mindspore_amp",
    "mmcv_LossScaler": "mmcv",
    "mpx_DynamicLossScaling": "mpx",
    "msamp_FP8Optimizer_update_scale": "msamp",
    "mxnet_amp_LossScaler": "mxnet",
    "nemo_GradScaler": "nemo",
    "nnabla_DynamicLossScalingUpdater": "nnabla",
    "openseq2seq_BackoffScaler": "openseq2seq",
    "openseq2seq_LogMaxScaler": "openseq2seq_logmax",
    "paddle_GradScaler_dygraph": "paddle",
    "paddle_update_loss_scaling_op": "paddle_op",
    "tf1_contrib_ExponentialUpdateLossScaleManager": "tf1_contrib",
    "tf_DynamicLossScale": "tf",
    "tf_keras2_LossScaleOptimizer": "tf_keras",
    "torch_amp_GradScaler": "torch",
    "torch_fsdp_ShardedGradScaler": "fsdp",
}

# Here "stepped" was recorded as "the variable moved", which a scale of inf prevents.
MOVED_IS_NOT_APPLIED = {"keras", "paddle", "tf_keras"}


def expand(pairs: list) -> list[float]:
    """Undo the run-length coding."""
    return [float(value) for value, count in pairs for _ in range(count)]


def convert(preset: str, trace: dict) -> dict:
    """Convert one trace."""
    row = {"preset": preset, "params": trace["params"], "case": trace["case"]}
    if "constructor_error" in trace:
        return row | {"refused": True}
    row["scales"] = trace["scale_after"]
    row["init"] = trace["init"]
    if preset == "nnabla":
        row |= attempts(trace)
    elif preset == "openseq2seq_logmax":
        row |= magnitudes(trace)
    else:
        row |= events(preset, trace)
    if "error" in trace:
        row["collapsed_at"] = trace["error"]["index"]
        row["go_on"] = trace.get("group") == "min_continue_after_error"
    if "final_checkpoint" in trace:
        row["checkpoint"] = trace["final_checkpoint"]
    return row


def events(preset: str, trace: dict) -> dict:
    """Read the events of a scaler that acts on overflows."""
    overflow = [event in ("1", 1) for event in trace["events"]]
    stepped = trace["stepped"]
    for index, found in trace.get("found_inf_differs", {}).items():
        overflow[int(index)] = bool(found)
    if "found_inf_differs" not in trace and preset not in MOVED_IS_NOT_APPLIED:
        overflow[: len(stepped)] = [step == "0" for step in stepped]
    seen = "".join("0" if event else "1" for event in overflow)
    if preset in MOVED_IS_NOT_APPLIED and trace["params"].get("dynamic", True):
        stepped = seen
    return {"seen": seen, "applied": stepped}


def attempts(trace: dict) -> dict:
    """Read nnabla's events: overflowing attempts inside one update, at most 101."""
    before = [float(trace["init"]), *expand(trace["scale_after"])]
    seen, counts = "", []
    for scale, event in zip(before, trace["events"], strict=False):
        bad = min(max(int(event), int(single(scale) == math.inf)), 101)
        tries = "0" * bad + ("1" if bad <= 100 else "")
        seen += tries
        counts.append(len(tries))
    return {"seen": seen, "attempts": counts, "applied": trace["stepped"]}


def magnitudes(trace: dict) -> dict:
    """Read LogMax's events: the largest gradient."""
    sizes = [single(float(event)) for event in trace["events"]]
    logs = [math.log2(size) if 0 < size < math.inf else -math.inf for size in sizes]
    seen = "".join("1" if math.isfinite(size) else "0" for size in sizes)
    logs = [value if math.isfinite(value) else "-inf" for value in logs]
    return {"seen": seen, "applied": trace["stepped"], "amax_log2": logs}


def main(folder: Path) -> None:
    """Convert every file into one."""
    rows = []
    for name, preset in PRESET_OF.items():
        lines = (folder / f"{name}.jsonl").read_text().splitlines()[1:]
        traces = [json.loads(line) for line in lines]
        rows += [
            json.dumps(convert(preset, trace), separators=(",", ":"))
            for trace in traces
            if trace["params"].get("ordering") != "as_is"
        ]
    target = Path(__file__).with_name("peers.jsonl.gz")
    with gzip.GzipFile(target, "wb", compresslevel=9, mtime=0) as file:
        file.write("\n".join(rows).encode() + b"\n")
    print(f"{len(rows)} traces, {target.stat().st_size / 1e6:.2f} MB in {target.name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
