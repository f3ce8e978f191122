"""Let FP32 masters stand in the places of an optimizer's half-precision parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from buoy.torch import words
from buoy.torch.names import Names
from buoy.torch.pairs import Pair
from buoy.torch.rounding import HALVES, Rounding, write

__all__ = ["COUNT", "Swap"]

COUNT = "rounded_steps"  # in the first parameter group: chance goes on from there


class Swap:
    """The pairs of one optimizer, swapped in and out."""

    def __init__(
        self, optimizer: Any, rounding: Rounding | None, names: Names, seed: int
    ) -> None:
        self.optimizer, self.rounding = optimizer, rounding
        self._names, self._seed = names, seed
        self._pairs: dict[int, Pair] = {}
        self._owners: dict[int, Pair] = {}  # by their masters
        self._wide: set[int] = set()  # parameters that were met in FP32
        self._inside = False
        self._generators: dict[torch.device, torch.Generator] = {}

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Let masters stand in the parameters' places, and round them back at the end.

        Within another such block this does nothing.
        """
        if self._inside:
            yield
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Put the parameters back for a while, so that the model can be evaluated."""
        self._leave()
        try:
            yield
        finally:
            self._enter()

    def widen(self) -> None:
        """Make the parameters' gradients FP32, so that they can be unscaled."""
        for pair in self._all():
            pair.widen()

    def _all(self) -> list[Pair]:
        """Pair every parameter that needs a master; refuse those that drifted."""
        found, drifted = [], []
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if id(param) in self._pairs:
                    found.append(self._pairs[id(param)])
                elif param.dtype not in HALVES:
                    self._wide.add(id(param))
                elif id(param) in self._wide:
                    drifted.append(param)
                elif param.requires_grad or param.grad is not None:
                    found.append(self._pair(param))
        if drifted:
            described = self._names.described(self.optimizer, drifted)
            raise words.drifted(described, drifted[0].dtype)
        return found

    def _pair(self, param: torch.Tensor) -> Pair:
        pair = self._pairs[id(param)] = Pair(param, keep=self.rounding is None)
        self._owners[id(pair.master)] = pair
        return pair

    @torch.no_grad()
    def _enter(self) -> None:
        pairs = iter(self._all())
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            params = group["params"]  # in place: LBFGS has the list as well
            for i, param in enumerate(params):
                if id(param) in self._pairs:
                    pair = next(pairs)
                    params[i] = pair.begin()
                    if param in state:
                        state[pair.master] = state.pop(param)
        self._inside = True

    @torch.no_grad()
    def _leave(self) -> None:
        state, pairs = self.optimizer.state, []
        for group in self.optimizer.param_groups:
            params = group["params"]
            for i, master in enumerate(params):
                pair = self._owners.get(id(master))
                if pair is not None:
                    params[i] = pair.param
                    pairs.append(pair)
                    if master in state:
                        state[pair.param] = state.pop(master)
        self._inside = False
        params = [pair.param for pair in pairs]
        masters: list[torch.Tensor] = [pair.master for pair in pairs]
        write(params, masters, self.rounding or "nearest", self._chance(params))
        for pair in pairs:
            pair.end()

    def _chance(self, params: list[torch.Tensor]) -> dict[torch.device, Any]:
        """Start chance from the seed and the count of steps: the same on any rank."""
        if self.rounding != "stochastic":
            return {}
        count = self.optimizer.param_groups[0].get(COUNT, 0)
        for device in {param.device for param in params}:
            if device not in self._generators:
                self._generators[device] = torch.Generator(device)
            self._generators[device].manual_seed((self._seed << 32) + count)
        return self._generators
