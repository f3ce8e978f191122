"""Every preset reproduces its peer: scale, decision, giving up; no tolerance."""

import math

import pytest

import buoy
from buoy._core.ops import PLAIN, single
from tests.golden import Golden, load


@pytest.mark.parametrize("preset", sorted(load()))
def test_preset_reproduces_its_peer_on_plain_numbers(preset: str) -> None:
    """On Python floats each recorded scale, decision and error comes out again."""
    wrong = [
        f"{trace.case} {trace.params}: {problem}"
        for trace in load()[preset]
        if (problem := difference(trace))
    ]

    assert [] == wrong


def difference(trace: Golden) -> str | None:
    """Replay one trace; say where it differs."""
    try:
        policy = trace.policy()
    except buoy.PolicyError:
        return None if trace.refused else "refused"
    if trace.refused:
        return "not refused"
    state = policy.init()
    if state.scale not in (trace.init, single(trace.init)):
        return f"starts at {state.scale}, not {trace.init}"
    scales, collapsed = [], None
    for index, finite in enumerate(trace.seen):
        seen = observed(trace, index, finite == "1", state.scale)
        try:
            state = policy.update(state, seen)
        except buoy.ScaleCollapsedError as error:
            state, collapsed = error.state, index
            if not trace.go_on:
                break
        scales.append(state.scale)
    if collapsed != trace.collapsed_at:
        return f"gave up at {collapsed}, not {trace.collapsed_at}"
    ends = trace.ends
    for step, end in enumerate(ends):
        if not same(scales[end], trace.scales[step]):
            return f"step {step}: {scales[end]}, not {trace.scales[step]}"
    finite = "".join(trace.seen[end] for end in ends)
    if trace.unchecked:  # Buoy skips what is not finite, whatever the peer does
        finite = "1" * len(ends)
    if finite != trace.applied[: len(ends)]:
        return "other decisions"
    return None


def observed(trace: Golden, index: int, finite: bool, scale: float) -> buoy.Seen:
    """Make what the survey would have shown at this step."""
    if trace.amax_log2 is None:
        return buoy.Seen(finite=finite)
    amax = trace.amax_log2[index]
    return buoy.Seen(
        finite=finite,
        amax_log2=amax if math.isnan(scale) else amax + PLAIN.log2(scale),
    )


def same(x: float, y: float) -> bool:
    """Compare exactly; NaN equals NaN."""
    return x == y or (math.isnan(x) and math.isnan(y))


def test_every_required_preset_has_traces() -> None:
    """No preset escapes the comparison."""
    required = set(
        "torch fsdp apex apex_fp16_utils axon bmtrain cerebras chainer colossalai "
        "deepspeed fairscale fairseq fairseq2 fastai flax guided_diffusion jaxamp jmp "
        "keras megatron metaseq mindspore mindspore_amp mindspore_cell mmcv mpx msamp "
        "mxnet nemo nnabla openseq2seq openseq2seq_logmax paddle paddle_op tf "
        "tf1_contrib tf_keras".split()
    )

    assert required <= set(load())
    assert sum(map(len, load().values())) >= 5_335


def test_the_comparison_can_fail() -> None:
    """A trace that is off by one bit in one scale is reported."""
    trace = load()["torch"][0]
    bent = [*trace.scales[:-1], math.nextafter(trace.scales[-1], math.inf)]
    broken = Golden(**{**vars(trace), "scales": bent})

    assert difference(trace) is None
    assert "step" in str(difference(broken))
