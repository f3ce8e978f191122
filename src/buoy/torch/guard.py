"""Buffers follow the weights: batch statistics of a skipped step do not count."""

from typing import Any

import torch

from buoy.torch import words_beyond as said
from buoy.torch.buffers import Buffers
from buoy.torch.gather import parameters_of
from buoy.torch.groups import Grouping
from buoy.torch.step import LastStep

__all__ = ["Guarding", "ModelGuard"]


class ModelGuard:
    """Copy a model's buffers before the first forward pass of an iteration."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._buffers = Buffers()  # as they were before the iteration
        self._micro = Buffers()  # as they were before the micro-batch
        self.in_window = False
        self._about: dict[int, bool] = {}
        modules = list(model.modules())
        self._handles = [model.register_forward_pre_hook(self._before_all)]
        self._handles += [
            module.register_forward_pre_hook(self._before_one)
            for module in modules[1:]
            if module._buffers
        ]

    def _before_all(self, module: torch.nn.Module, args: Any) -> None:
        del module, args
        if not torch.compiler.is_compiling():
            self._hold(*self.model.modules())

    def _before_one(self, module: torch.nn.Module, args: Any) -> None:
        del args
        if not torch.compiler.is_compiling():
            self._hold(module)

    def _hold(self, *modules: torch.nn.Module) -> None:
        self._buffers.hold(*modules)
        if self.in_window:
            self._micro.hold(*modules)

    def follows(self, optimizer: Any) -> bool:
        """Say whether an optimizer steps any of the model's parameters."""
        known = self._about.get(id(optimizer))
        if known is None:
            own = set(map(id, self.model.parameters()))
            known = any(id(param) in own for param in parameters_of(optimizer))
            self._about[id(optimizer)] = known
        return known

    def settle(self, reports: list[LastStep]) -> None:
        """End an iteration: put the buffers back if the model's step was skipped."""
        mine = [one for one in reports if self.follows(one._optimizer())] or reports
        outcomes = [report._applied for report in mine]
        if False in outcomes:
            self._buffers.put_back()
        elif None in outcomes:
            for report in mine:
                if report.found is not None:
                    self._buffers.put_back(report.found > 0)
        self._buffers.release()

    def drop(self, bad: bool | torch.Tensor) -> None:
        """End a micro-batch: put the buffers back if it was dropped."""
        if isinstance(bad, torch.Tensor):
            self._micro.put_back(bad > 0)
        elif bad:
            self._micro.put_back()
        self._micro.release()

    def remove(self) -> None:
        """Stop guarding."""
        for handle in self._handles:
            handle.remove()


class Guarding(Grouping):
    """Keep the guards, and settle them with each update."""

    _guards: list[ModelGuard]

    def guard(self, *models: torch.nn.Module) -> None:
        """Put the buffers of these models back whenever their step is skipped.

        Running statistics of batch normalisation, their counters and any other buffer:
        `update` restores them to what they were before the iteration's first forward
        pass.  With several optimizers a model follows those that hold its parameters.
        Nothing is read on the host; the price is one copy of the buffers that change.

        Example:
            >>> import buoy.torch
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
            >>> _ = model.append(torch.nn.BatchNorm1d(2))
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> scaler = buoy.torch.GradScaler("cpu")
            >>> scaler.guard(model)
            >>> loss = model(torch.randn(4, 2)).sum()
            >>> scaler.scale(loss * float("inf")).backward()
            >>> scaler.step(optimizer)
            >>> scaler.update()
            >>> model[1].num_batches_tracked.item()
            0
        """
        root: Any = self._root()
        for model in models:
            if not isinstance(model, torch.nn.Module):
                raise said.not_a_module(model)
            if self._enabled and all(model is not g.model for g in root._guards):
                root._guards.append(ModelGuard(model))

    def _decide_together(self) -> None:
        super()._decide_together()
        if self._guards:
            reports = self._stepped()
            for guard in self._guards:
                guard.settle(reports)
