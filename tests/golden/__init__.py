"""The golden traces, recorded from the real scalers, as records."""

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

import buoy

FILE = Path(__file__).with_name("peers.jsonl.gz")


@dataclass(frozen=True)
class Golden:
    """One recorded trace."""

    preset: str
    params: dict[str, Any]
    case: str
    init: float = 0.0
    seen: str = ""
    scales: list[float] = field(default_factory=list)
    applied: str = ""
    attempts: list[int] | None = None
    amax_log2: list[float] | None = None
    collapsed_at: int | None = None
    go_on: bool = False
    refused: bool = False
    checkpoint: dict[str, Any] | None = None

    @property
    def ends(self) -> list[int]:
        """Index of the attempt that ends each update that has a recorded scale."""
        counts = self.attempts or [1] * len(self.seen)
        return [total - 1 for total in accumulate(counts)][: len(self.scales)]

    @property
    def unchecked(self) -> bool:
        """Whether the peer applies every step, as some do with a fixed scale."""
        fixed_apex = self.preset == "apex" and "loss_scale" in self.params
        fixed_keras = self.preset == "tf_keras" and not self.params.get("dynamic", True)
        return fixed_apex or fixed_keras

    def policy(self) -> buoy.Policy:
        """Make the preset with the peer's own parameters."""
        return buoy.policy(self.preset, **self.params)


EVERYDAY = ("torch", "apex", "keras")  # whose traces `make test` runs on arrays


def presets() -> list[Any]:
    """List the presets; all but a few belong to the long samples."""
    return [
        name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.long)
        for name in sorted(load())
    ]


@cache
def load() -> dict[str, list[Golden]]:
    """Read the traces, by preset."""
    found: dict[str, list[Golden]] = defaultdict(list)
    with gzip.open(FILE, "rt") as file:
        for line in file:
            row = json.loads(line)
            row["scales"] = [
                float(scale)
                for scale, count in row.get("scales", [])
                for _ in range(count)
            ]
            if "amax_log2" in row:
                row["amax_log2"] = [float(value) for value in row["amax_log2"]]
            row["init"] = float(row.get("init", 0.0))
            found[row["preset"]].append(Golden(**row))
    return dict(found)
