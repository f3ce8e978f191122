"""What it takes to run a batch again: noise and buffers as they were, a lower scale."""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch

from buoy._backends import torch as backend
from buoy._core.state import Verdict
from buoy._core.verdicts import judge_losses
from buoy.torch import words_beyond as said
from buoy.torch.buffers import Buffers
from buoy.torch.lower import lower
from buoy.torch.rng import Randomness

if TYPE_CHECKING:
    from buoy.torch.guard import Guarding

__all__ = ["RETRIES", "Again", "objected"]

RETRIES = 6  # the scale falls by 1, 2, 4, ... binades: 63 in all
_CURABLE = frozenset({Verdict.SCALE_TOO_HIGH, Verdict.BAD_BATCH, Verdict.DIVERGENCE})


class Again:
    """The moment before a batch, and how often it may be returned to."""

    def __init__(
        self,
        scaler: "Guarding",
        *,
        modules: Iterable[torch.nn.Module] | None = None,
        retries: int = RETRIES,
        retry_on: Collection[Verdict | str] = (Verdict.SCALE_TOO_HIGH,),
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
            raise said.retries(retries)
        self._causes = _verdicts(retry_on)
        self._left, self.tries = retries, 0
        self._buffers = Buffers()
        for module in _modules(scaler, modules):
            self._buffers.hold(*module.modules())
        self._randomness = Randomness(generators)

    def allowed(self, scaler: "Guarding") -> bool:
        """Say whether an overflow of the losses scaled last can and may be cured."""
        losses = backend.read(list(scaler._losses)[-1:])
        history = backend.read(list(scaler._history))
        may = self.curable(judge_losses(losses, history))
        return not objected(scaler, objects=not may)

    def curable(self, verdict: Verdict) -> bool:
        """Say whether a lower scale may help, and is left to try."""
        return self._left > 0 and verdict in self._causes

    def restore(self, scalers: Iterable[Any], failed: float | None = None) -> None:
        """Go back to the moment; lower the scales that overflowed there."""
        for scaler in scalers:
            at = scaler.get_scale() if failed is None else failed
            if lower(scaler, at, self.tries) >= at:
                self._left = 0  # at the floor: nothing is left to try
        self._left -= 1
        self.tries += 1
        self._buffers.put_back()
        self._randomness.put_back()


def objected(scaler: Any, *, objects: bool) -> bool:
    """Say whether any rank objects to a re-run: all run again, or none."""
    if not scaler._ranks.groups():
        return objects
    mine = torch.full((), float(objects), dtype=torch.float32, device=scaler._home())
    return bool(backend.read([scaler._ranks.largest("again", mine)])[0])


def _verdicts(given: Collection[Verdict | str]) -> frozenset[Verdict]:
    try:
        causes = frozenset(map(Verdict, [given] if isinstance(given, str) else given))
    except ValueError as error:
        raise said.retry_on(given) from error
    if not causes <= _CURABLE:
        raise said.retry_on(given)
    return causes


def _modules(scaler: Any, given: Any) -> list[torch.nn.Module]:
    """Find the modules whose buffers a batch may change."""
    if isinstance(given, torch.nn.Module):
        return [given]
    if given is not None:
        return list(given)
    known = [guard.model for guard in scaler._root()._guards]
    if scaler._names.model is not None:
        known.append(scaler._names.model)
    if not known:
        raise said.run_without_model()
    return known
