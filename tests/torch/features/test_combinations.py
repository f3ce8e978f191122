"""Every two features together: docs/guides/combinations.md is made of what passes here.

One little training, in which some losses are infinite.  Whatever is switched on, the
weights end where a plain FP32 loop ends that leaves those losses out, gates count what
was applied, guarded buffers too, and the state goes through JSON.
"""

import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from buoy.torch import GradScaler, SpikeGuard, keep_fp32
from buoy.torch.features import record as recording

STEPS = 10
BAD = {2, 5}  # the steps whose loss is infinite
PARTNER_BAD = 7  # the step in which the other network of a joint pair fails
SPIKE = 8  # the step whose loss is far too large, where there is a guard
GUARD = SpikeGuard(warmup=3, least=50.0)

FEATURES = [
    "clip", "gate", "record", "headroom", "never", "fused", "group", "joint", "run",
    "guard", "spikes", "masters", "keep_fp32", "closure",
]  # fmt: skip

# Combinations that are refused, or make no sense, and why.
APART = {
    frozenset({"never", "fused"}): "a fused optimizer needs no `sync='never'`",
    frozenset({"closure", "spikes"}): "gradients exist only inside the step",
    frozenset({"closure", "never"}): (
        "an optimizer with a closure reads the loss on the host"
    ),
}  # fmt: skip


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    )


def optimizer_for(model, on):
    return torch.optim.Adam(model.parameters(), lr=1e-3, fused="fused" in on or None)


def loss_of(model, step, on=(), *, other=False):
    source = torch.Generator().manual_seed(100 * step + other)
    x, y = torch.randn(2, 16, 6, generator=source).unbind()
    dtype = next(model.parameters()).dtype
    out = model(x.to(dtype)).float()
    loss = nn.functional.mse_loss(out, y[:, :3])
    if "spikes" in on and step == SPIKE:
        loss = loss * 1e4
    return loss * (math.inf if step in BAD and not other else 1.0)


def plan(on):
    """List the steps that count."""
    missed = set(BAD)
    missed |= {PARTNER_BAD} if "joint" in on else set()
    missed |= {SPIKE} if "spikes" in on else set()
    return [step for step in range(STEPS) if step not in missed]


def reference(on):
    """Train plainly on what counts."""
    model = network(0)
    optimizer = optimizer_for(model, on)
    for step in plan(on):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if "clip" in on:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model


class Trained:
    """The same training with features switched on."""

    def __init__(self, on, path):
        self.on, self.counted = on, []
        self.model, self.other = network(0), network(1)
        if "masters" in on:
            self.model.half()
        self.optimizer = optimizer_for(self.model, on)
        self.others = optimizer_for(self.other, on)
        self.scaler = GradScaler(
            "cpu",
            policy="headroom" if "headroom" in on else None,
            sync="never" if "never" in on else "auto",
            skip="joint" if "joint" in on else "independent",
            spike_guard=GUARD if "spikes" in on else None,
            fp16_params="master" if "masters" in on else None,
            model=nn.ModuleList([self.model, self.other]),
            **({} if "headroom" in on else {"init_scale": 2.0**8}),
        )
        record = {"trace": path} if "record" in on else {}
        self.group = self.scaler
        if "group" in on:
            self.group = self.scaler.group("main", **record)
        elif record:
            recording.record(self.scaler, path)
        if "gate" in on:
            self.scaler.gate(lambda: self.counted.append(1), optimizer=self.optimizer)
        if "guard" in on:
            self.scaler.guard(self.model)
        if "keep_fp32" in on:
            keep_fp32(self.model, "3")

    def train(self):
        for step in range(STEPS):
            if {"closure", "run"} <= self.on:
                self.scaler.run(lambda s=step: self.closed(s))
            elif "closure" in self.on:
                self.closed(step)
            elif {"group", "run"} <= self.on:
                self.scaler.run(lambda s=step: self.whole(s))
            elif "run" in self.on:
                found = [self.others] if "joint" in self.on else []
                self.scaler.run(lambda s=step: self.backward(s), self.optimizer, *found)
            else:
                self.whole(step)
        return self

    def whole(self, step):
        self.optimizer.zero_grad()
        self.others.zero_grad()
        self.backward(step)
        self.group.step(self.optimizer)
        if "joint" in self.on:
            self.group.step(self.others)
        self.scaler.update()

    def closed(self, step):
        self.group.step(self.optimizer, lambda: self.evaluated(step))
        if "joint" in self.on:
            self.others.zero_grad()
            factor = math.inf if step == PARTNER_BAD else 1.0
            self.group.scale(loss_of(self.other, step, other=True) * factor).backward()
            self.group.step(self.others)
        self.scaler.update()

    def evaluated(self, step):
        self.optimizer.zero_grad()
        loss = loss_of(self.model, step, self.on)
        self.group.scale(loss).backward()
        if "clip" in self.on:
            self.group.clip_grad_norm_(self.optimizer, 0.5)
        return loss

    def backward(self, step):
        self.group.scale(loss_of(self.model, step, self.on)).backward()
        if "clip" in self.on:
            self.group.clip_grad_norm_(self.optimizer, 0.5)
        if "joint" in self.on:
            factor = math.inf if step == PARTNER_BAD else 1.0
            self.group.scale(loss_of(self.other, step, other=True) * factor).backward()


def pairs():
    for two in itertools.combinations(FEATURES, 2):
        if frozenset(two) not in APART:
            yield pytest.param(set(two), id="-".join(two))
    for one in FEATURES:
        yield pytest.param({one}, id=one)
    everything = set(FEATURES) - {"closure", "masters", "never", "keep_fp32"}
    yield pytest.param(everything, id="nearly all")


@pytest.mark.parametrize("on", list(pairs()))
def test_two_features_work_together(on, tmp_path):
    """The weights are those of a plain loop over what counted."""
    done = Trained(on, tmp_path / "run.buoy")
    done.train()
    wanted = reference(on)
    close = {"rtol": 1e-4, "atol": 1e-6}
    if on & {"masters"}:
        close = {"rtol": 5e-2, "atol": 5e-3}

    for (name, mine), theirs in zip(
        done.model.named_parameters(), wanted.parameters(), strict=True
    ):
        torch.testing.assert_close(mine.float(), theirs, **close, msg=name)
    if "gate" in on:
        assert len(plan(on)) == len(done.counted)
    if "guard" in on:
        assert len(plan(on)) == done.model[1].num_batches_tracked
    json.dumps(done.scaler.state_dict())


def test_the_table_in_the_docs_is_this_one():
    """The page names every feature, and every exception with its reason."""
    text = (Path(__file__).parents[3] / "docs/guides/combinations.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)

    assert sorted(FEATURES) == sorted(rows)
    for two, why in APART.items():
        assert any(
            all(f"`{one}`" in line for one in two) and why in line
            for line in text.splitlines()
        ), two
