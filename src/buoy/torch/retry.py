"""Run the same batch again, lower, instead of losing it to too high a scale."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from buoy._backends import torch as backend
from buoy._core.policies.static import NoScaling, Static
from buoy.torch import survey
from buoy.torch import words_beyond as said
from buoy.torch.accumulate import Accumulating
from buoy.torch.again import Again, objected
from buoy.torch.gather import gather, parameters_of
from buoy.torch.governed import Governed
from buoy.torch.lower import fitting, set_scale
from buoy.torch.step import LastStep

__all__ = ["Retrying"]

_R = TypeVar("_R")


class Retrying(Accumulating):
    """Run steps as functions."""

    def run(self, step_fn: Callable[[], _R], *optimizers: Any, **options: Any) -> _R:
        """Run a step; if its scale was too high, run it again, lower, to the end.

        `step_fn` computes the loss, scales it and runs it backward, and may clip;
        gradients are cleared before it, stepping and updating follow it.  Without
        `optimizers` it does those itself, as the body of any loop.  Before a re-run
        random generators (torch's on every device, Python's, NumPy's) and the buffers
        of the modules are put back, so that dropout and statistics repeat.  What no
        scale can cure is not run again: it comes back as a skip, see `last_step`.

        Args:
            step_fn: the step; its result is returned.
            optimizers: what to step after it.
            options: `modules`, whose buffers to put back (the scaler's `model` and
                guarded ones if not given; `()` for none); `retries`, 6 if not given;
                `retry_on`, verdicts to run again for; `generators`, further ones.

        Example:
            >>> import buoy.torch
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = torch.optim.SGD([weight], lr=0.1)
            >>> scaler = buoy.torch.GradScaler("cpu")
            >>> def step():
            ...     loss = weight.half().sum()  # its gradient fits up to 2^15
            ...     scaler.scale(loss.float()).backward()
            ...     return loss.item()
            >>> scaler.run(step, optimizer, modules=())
            2.0
            >>> scaler.last_step.applied, scaler.last_step.scale
            (True, 32768.0)
        """
        if not self._enabled:
            return self._run_once(step_fn, optimizers)
        if self._parent is not None:
            raise said.group_run(self._name)
        if self._mid_iteration():
            raise said.run_mid_iteration()
        again = Again(self, **options)
        start = {member: member._rule.known(member) for member in self._members()}
        while True:
            before = dict(self._reports)
            result = self._run_once(step_fn, optimizers)
            new = [r for k, r in self._reports.items() if before.get(k) is not r]
            if not new:
                raise said.run_without_step()
            if not self._again(again, new):
                self._come_back(again, new, start)
                return result

    def _run_once(self, step_fn: Callable[[], _R], optimizers: tuple[Any, ...]) -> _R:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        result = step_fn()
        for optimizer in optimizers:
            self._stepper(optimizer).step(optimizer)
        if optimizers if not self._enabled else self._mid_iteration():
            self.update()
        return result

    def _mid_iteration(self) -> bool:
        return any(member._per_optimizer_states for member in self._members())

    def _stepper(self, optimizer: Any) -> Any:
        """Find the group whose loss this optimizer's gradients come from."""
        if not self._groups or not self._enabled:
            return self
        if "combined" in self._per_optimizer_states.get(id(optimizer), {}):
            return self
        for member in self._groups.values():
            if id(optimizer) in member._per_optimizer_states:
                return member
        for member in self._groups.values():
            if id(optimizer) in member._reports:
                return member
        names = self._origins.of(parameters_of(optimizer)) if self._origins else set()
        return self._groups.get(names.pop(), self) if len(names) == 1 else self

    def _again(self, again: Again, new: list[LastStep]) -> bool:
        """Prepare a re-run, if there is to be one."""
        missed = [report for report in new if not report.applied]
        if not missed:
            return False
        curable = all(again.curable(report.verdict) for report in missed)
        if objected(missed[0]._scaler(), objects=not curable):
            return False
        if len(missed) < len(new):
            self._guide.say("half a step", said.HALF_A_STEP)
            return False
        for report in missed:
            optimizer = report._optimizer()
            if optimizer is not None:
                optimizer.zero_grad(set_to_none=True)
        guilty = [report for report in missed if not report.partner]
        scalers = {id(one): one for r in guilty if (one := r._scaler()) is not None}
        again.restore(scalers.values(), max(report.scale for report in guilty))
        return True

    def _come_back(
        self, again: Again, new: list[LastStep], start: dict[Any, float | None]
    ) -> None:
        """After a steep descent go up to where gradients fit; static scales stay."""
        if not again.tries:
            return
        for report in new:
            scaler: Any = report._scaler()
            if scaler is None or not report.applied:
                continue
            rule = scaler._rule
            if isinstance(rule, Governed) and isinstance(rule.rule, Static | NoScaling):
                held = start.get(scaler)
                if held is not None:
                    set_scale(scaler, held)
            elif again.tries > 1:
                self._fit(scaler, report, again.tries)

    def _fit(self, scaler: Any, report: LastStep, tries: int) -> None:
        optimizer = report._optimizer()
        with torch.no_grad():
            gathered = gather(optimizer)
            one = torch.ones((), dtype=torch.float32, device=scaler._home())
            amax = survey.largest(gathered, one).amax if gathered.grads else one * 0
            if amax is not None and scaler._ranks.groups():
                amax = scaler._ranks.largest("fit", amax)
        size = backend.read([amax])[0] if amax is not None else math.nan
        times = report.multiplied_by()
        if times is None:
            return  # how large they are without the scale is not known
        size /= times
        best = fitting(size, math.ldexp(report.scale, 2 ** (tries - 1)))
        if best is not None and best > scaler.get_scale():
            set_scale(scaler, best)
