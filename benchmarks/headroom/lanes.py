"""Replay a policy over all traces and regimes at once, one NumPy lane for each run.

A policy's rule runs on arrays as it runs on numbers.  A step overflows when log2 amax
+ log2 scale > log2 65504; shares of gradients below a cut come from the histograms.
"""

import math
from functools import cache
from typing import Any

import numpy as np

import buoy
from benchmarks.headroom.compare import LIMIT, SMALL, ZERO, Shares, load
from benchmarks.headroom.regimes import REGIMES, shifts
from buoy._core.state import map_state
from buoy._core.step import schedule


class Arrays:
    """The five functions of a rule on float64 arrays."""

    where = staticmethod(np.where)
    floor = staticmethod(np.floor)

    @staticmethod
    def log2(x: Any, /) -> Any:
        """Binary logarithm."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log2(x)

    @staticmethod
    def exp2(x: Any, /) -> Any:
        """Power of two; exact, as only whole numbers are given."""
        return np.ldexp(1.0, np.asarray(x).astype(int))

    @staticmethod
    def cast(x: Any, precision: str, /) -> Any:
        """Round to float32, in float64."""
        with np.errstate(over="ignore"):
            return np.asarray(x).astype(precision).astype(float)


ARRAYS = Arrays()


def started(policy: buoy.Policy, lanes: int) -> Any:
    """Return the policy's first state, for so many lanes."""
    return map_state(lambda x: np.full(lanes, float(x)), policy.init())


class Tables:
    """The shares of gradients below a cut, of many traces."""

    def __init__(self, shares: list[Shares]) -> None:
        blocks = max(one.below.shape[0] for one in shares)
        bins = max(one.below.shape[1] for one in shares)
        self.below = np.ones((len(shares), blocks, bins + 1))
        self.low = np.array([one.low for one in shares])
        self.block = shares[0].block
        for table, one in zip(self.below, shares, strict=True):
            rows, columns = one.below.shape
            table[:rows, :columns] = one.below

    def at(self, lanes: np.ndarray, step: int, cuts: np.ndarray) -> np.ndarray:
        """Return the share below 2^cut at a step; even in |g| within a binade."""
        whole = np.floor(cuts)
        last = self.below.shape[2] - 1
        i = np.clip(whole - self.low[lanes], -1, last).astype(int)
        part = np.where(i < 0, 0, np.exp2(cuts - whole) - 1)
        row = min(step // self.block, self.below.shape[1] - 1)
        below = self.below[lanes, row, np.clip(i, 0, None)]
        above = self.below[lanes, row, np.clip(i + 1, 0, last)]
        return below + part * (above - below)


class Runs:
    """Every trace in every regime."""

    def __init__(self, names: tuple[str, ...], regimes: tuple[str, ...]) -> None:
        traces = [load(name) for name in names]
        self.shape = (len(names), len(regimes))
        self.trace = np.repeat(np.arange(len(names)), len(regimes))
        self.length = np.repeat([len(trace.amax) for trace in traces], len(regimes))
        size = (self.length.max(), len(self.trace))
        self.shift, self.sizes, self.losses = np.zeros((3, *size))
        for lane in range(size[1]):
            which, regime = divmod(lane, len(regimes))
            n = self.length[lane]
            shift = shifts(regimes[regime], names[which], n)
            self.shift[:n, lane] = shift
            self.sizes[:n, lane] = traces[which].amax + shift
            self.losses[:n, lane] = traces[which].loss
        self.weights = Tables([trace.weights for trace in traces])
        self.activations = Tables([trace.activations for trace in traces])

    def grid(
        self, policy: buoy.Policy, loss: str, *, clips: bool = False
    ) -> np.ndarray:
        """Return [trace, regime, (skips per 1000, % weights lost, % activations)]."""
        wants = policy.wants
        wanted = schedule(policy.wants, clips=clips)
        shown = self.losses + (self.shift if loss == "moves" else 0)
        state = started(policy, len(self.trace))
        found = np.zeros((3, len(self.trace)))
        for step, (sizes, shift) in enumerate(zip(self.sizes, self.shift, strict=True)):
            live = step < self.length
            if "loss" in wants and loss != "unseen":
                state = policy.foresee(state, np.exp2(shown[step]), ops=ARRAYS)
            k = np.log2(state.scale)
            finite = sizes + k <= LIMIT
            zero = ZERO - k - shift
            due = {name for name, one in wanted.items() if one.due(step)}
            share = None
            if "underflow" in due:
                gone = self.weights.at(self.trace, step, zero)
                small = self.weights.at(self.trace, step, zero + SMALL - ZERO)
                share = (small - gone) / np.maximum(1 - gone, 1e-9)
            lost = (
                ~finite,
                self.weights.at(self.trace, step, zero),
                self.activations.at(self.trace, step, zero),
            )
            found += np.where(live, lost, 0.0)
            amax = None
            if "amax_log2" in due:
                amax = np.where(finite, sizes + k, math.inf)
            seen = buoy.Seen(finite, amax, share)
            state = policy.update(state, seen, ops=ARRAYS)
        rates = (found / self.length * [[1000], [100], [100]]).T
        return rates.reshape(*self.shape, 3)


@cache
def runs(names: tuple[str, ...]) -> Runs:
    """Load the runs of these traces, once."""
    return Runs(names, tuple(REGIMES))


def grid(
    policy: buoy.Policy, names: tuple[str, ...], loss: str, *, clips: bool = False
) -> np.ndarray:
    """Run everything: [trace, regime, (skips, weights, activations)]."""
    return runs(names).grid(policy, loss, clips=clips)
