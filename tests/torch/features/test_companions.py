"""Each feature with each companion, bit for bit (docs/guides/combinations.md).

Every run takes six batches, the third of which makes the loss infinite: it must count
for nothing, whatever features are on.
"""

import math
from pathlib import Path

import pytest
import torch
from nets import batch

import buoy.trace
from buoy.torch import (
    CallOrderError,
    DeviceModeError,
    GradScaler,
    MasterWeights,
    SpikeGuard,
    keep_fp32,
)

pytestmark = pytest.mark.filterwarnings("ignore:The loss was computed in BF16")

BAD = 2
STEPS = 6
FEATURES = ["plain", "masters", "rounding", "closure", "keep_fp32"]
COMPANIONS = [
    "clip",
    "gate",
    "trace",
    "guard",
    "headroom",
    "group",
    "spikes",
    "joint",
    "run",
    "never",
]


class Case:
    """One model, one optimizer and one scaler with a feature on."""

    def __init__(self, feature, **options):
        torch.manual_seed(0)
        self.feature = feature
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Tanh(),
            torch.nn.Linear(8, 3),
        )
        dtypes = {"masters": torch.float16, "rounding": torch.bfloat16}
        self.dtype = dtypes.get(feature, torch.float32)
        self.model.to(self.dtype)
        if feature == "keep_fp32":
            keep_fp32(self.model, "3")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if feature == "rounding":
            MasterWeights(self.optimizer, rounding="stochastic")
        options = {"init_scale": 2.0**8, "model": self.model, **options}
        if feature == "masters":
            options["fp16_params"] = "master"
        self.root = self.scaler = GradScaler("cpu", **options)
        self.applied = []

    def loss(self, step, *, bad=None):
        x, y = batch(step)
        mixed = self.feature == "keep_fp32"
        with torch.autocast("cpu", torch.float16, enabled=mixed):
            output = self.model(x.to(self.dtype))
        loss = torch.nn.functional.mse_loss(output.float(), y)
        return loss * (math.inf if (step == BAD if bad is None else bad) else 1.0)

    def step(self, step, *, clip=None):
        """Take one step, with a closure if that is the feature."""

        def closure():
            self.optimizer.zero_grad()
            loss = self.loss(step)
            self.scaler.scale(loss).backward()
            if clip is not None:
                self.scaler.clip_grad_norm_(self.optimizer, clip)
            return loss

        if self.feature == "closure":
            self.scaler.step(self.optimizer, closure)
        else:
            closure()
            self.scaler.step(self.optimizer)

    def train(self, steps=range(STEPS), **options):
        for step in steps:
            self.step(step, **options)
            self.root.update()
            self.applied.append(self.root.last_step.applied)
        return self

    def numbers(self, *, buffers=False):
        """Everything that must not be touched by a skip."""
        held = [*self.model.parameters(), *(self.model.buffers() if buffers else ())]
        for state in self.optimizer.state_dict()["state"].values():
            held += [value for value in state.values() if torch.is_tensor(value)]
        return torch.cat([tensor.detach().double().flatten() for tensor in held])


def reference(feature, **options):
    """Train without a companion, on the good batches only."""
    case = Case(feature)
    return case.train([step for step in range(STEPS) if step != BAD], **options)


def same(one, other, **options):
    return torch.equal(one.numbers(**options), other.numbers(**options))


def try_clip(feature, _):
    case = Case(feature).train(clip=0.05)
    assert same(case, reference(feature, clip=0.05))
    assert not same(case, reference(feature))


def try_gate(feature, _):
    case, moved = Case(feature), []
    case.scaler.gate(lambda: moved.append(1))
    assert same(case.train(), reference(feature))
    assert len(moved) == sum(case.applied) == STEPS - 1


def try_trace(feature, path):
    case = Case(feature, trace=path / "run.buoy").train()
    case.scaler.trace.close()
    trace = buoy.trace.load(path / "run.buoy")
    assert len(trace.rows) == STEPS
    assert same(case, reference(feature))


def try_guard(feature, _):
    case = Case(feature)
    case.scaler.guard(case.model)
    assert same(case.train(), reference(feature), buffers=True)
    assert not same(Case(feature).train(), case, buffers=True)


def try_headroom(feature, _):
    case = Case(feature, policy="headroom", init_scale=2.0**16).train()
    assert case.applied == [step != BAD for step in range(STEPS)]
    close = torch.allclose(
        case.numbers(), reference(feature).numbers(), rtol=0.05, atol=5e-3
    )
    assert close


def try_group(feature, _):
    case = Case(feature)
    case.scaler = case.root.group("one")
    assert same(case.train(), reference(feature))
    assert case.scaler.get_scale() == 2.0**7
    assert case.root.get_scale() == 2.0**8


def try_spikes(feature, _):
    guard = SpikeGuard(warmup=2, threshold=2.0, least=3.0)
    case = Case(feature, spike_guard=guard, init_scale=4.0)
    if feature == "closure":
        with pytest.raises(CallOrderError, match="spike_guard"):
            case.train()
        return
    case.train()
    usual = case.loss
    case.loss = lambda step, **_: usual(step) * 1000.0
    before = case.numbers()
    case.train([STEPS])
    assert case.root.last_step.verdict == "spike"
    assert torch.equal(before, case.numbers())


def try_joint(feature, _):
    """A partner fails in another step, before or after this one has stepped."""
    for first in (True, False):
        case = Case(feature, skip="joint", model=None)
        partner = torch.nn.Parameter(torch.ones(3))
        other = torch.optim.SGD([partner], lr=0.1)

        def step_partner(step, *, case=case, partner=partner, other=other):
            other.zero_grad()
            factor = math.inf if step == 4 else 1.0
            case.scaler.scale(partner.sum() * factor).backward()
            case.scaler.step(other)

        for step in range(STEPS):
            if first:
                step_partner(step)
            case.step(step)
            if not first:
                step_partner(step)
            case.root.update()
        good = [step for step in range(STEPS) if step not in {BAD, 4}]
        assert same(case, Case(feature).train(good))
        assert torch.allclose(partner, torch.full((3,), 1.0 - 0.1 * len(good)))


def try_run(feature, _):
    """The first scale is far too high; no batch is lost to that."""
    case = Case(feature, init_scale=2.0**40)
    case.loss = lambda step, usual=case.loss: usual(step, bad=False)
    if feature in {
        "plain",
        "rounding",
        "closure",
    }:  # FP32's range: let the scale itself overflow
        case = Case(feature, init_scale=2.0**126, max_scale=2.0**127)
        case.loss = lambda step, usual=case.loss: usual(step, bad=False) * 1e4
    steps = []
    for step in range(4):

        def body(step=step):
            case.step(step)
            case.root.update()
            steps.append(step)

        case.root.run(body, retries=40)
        assert case.root.last_step.applied
    assert sorted(set(steps)) == [0, 1, 2, 3]
    assert len(steps) > 4


def try_never(feature, _):
    case = Case(feature, sync="never")
    if feature == "closure":
        with pytest.raises(DeviceModeError, match="closure"):
            case.train()
        return
    if feature == "rounding":  # a step that is put back has used up some chance
        before = case.train(range(BAD)).numbers()
        assert torch.equal(before, case.train([BAD]).numbers())
        return
    assert same(case.train(), reference(feature))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("companion", COMPANIONS)
def test_a_feature_goes_with_a_companion(feature, companion, tmp_path):
    """Or is refused in words, where it cannot."""
    globals()[f"try_{companion}"](feature, tmp_path)


def test_the_table_in_the_docs_is_this_test():
    """One row per companion, one column per feature."""
    text = (Path(__file__).parents[3] / "docs/guides/combinations.md").read_text()
    rows = [line.split("|")[1].strip() for line in text.splitlines() if "|" in line]
    for name in COMPANIONS:
        assert any(f"<!-- {name} -->" in row for row in rows), name
