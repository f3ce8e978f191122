"""How losses are used: scaled or not, in which dtypes, with which gradients."""

from collections import deque
from typing import NamedTuple

import torch
from torch.autograd.graph import Node
from torch.optim import Optimizer

from buoy._backends.torch.clipped import ClippedWhileScaled
from buoy._backends.torch.gradients import parameters_of
from buoy._backends.torch.graph import graph_of
from buoy._core.clipped import ENOUGH
from buoy.diagnose.doctor.facts import Facts
from buoy.diagnose.doctor.gradients import Looks, Marks
from buoy.diagnose.doctor.modules import Modules
from buoy.diagnose.doctor.patches import place

__all__ = ["Losses"]

_EVERY = 5  # scaled losses between two looks at the gradients
_GRAPHS = 8  # of scaled losses that are remembered until backward
_NEAR = 64  # nodes of a graph among which a sum of scaled losses shows itself


class _Scaled(NamedTuple):
    """A loss that was scaled."""

    node: Node  # of its graph
    reached: list[torch.Tensor]  # the parameters that it depends on


class Losses:
    """Follows each loss to the parameters whose gradients it makes."""

    def __init__(self, facts: Facts) -> None:
        self.marks = Marks()
        self.modules = Modules()
        self._facts = facts
        self._looks = Looks()
        self._clipping = ClippedWhileScaled()
        self._graphs: dict[int, Node] = {}  # of losses that were scaled, by id
        self._latest: _Scaled | None = None

    def scaled(self, result: torch.Tensor, loss: torch.Tensor, scale: float) -> None:
        """Note that a loss was scaled."""
        self._facts.scaled_at = place()
        self._clipping.loss_scaled(result)
        self._check(loss)
        if loss.grad_fn is None or result.grad_fn is None:
            return
        reached, dtypes = graph_of(loss)
        _count(self._facts.scaled_losses, dtypes)
        self.marks.reach(reached)
        self.marks.put(reached, "scaled", scale)
        self._graphs[id(result.grad_fn)] = result.grad_fn
        while len(self._graphs) > _GRAPHS:
            oldest = next(iter(self._graphs))
            del self._graphs[oldest]
        self._latest = _Scaled(result.grad_fn, reached)

    def _check(self, loss: torch.Tensor) -> None:
        self._facts.losses += 1
        if not torch.isfinite(loss.detach()).all():
            self._facts.nonfinite_losses += 1
            self._facts.nonfinite_at = self._facts.nonfinite_at or place()
            self.modules.look_closely()

    def before_backward(self, roots: list[torch.Tensor]) -> None:
        """Note what the pass starts from, if no scaler has seen it."""
        for root in roots:
            if root.grad_fn is not None and not self._is_scaled(root.grad_fn):
                self._unscaled(root)

    def _is_scaled(self, start: Node) -> bool:
        """Return whether this is a scaled loss, or made of some, and forget those."""
        found = False
        queue = deque([start])
        seen = {id(start)}
        while queue and len(seen) < _NEAR:
            node = queue.popleft()
            if self._graphs.pop(id(node), None) is not None:
                found = True
                continue
            following = [n for n, _ in node.next_functions if n is not None]
            queue += [n for n in following if id(n) not in seen]
            seen.update(map(id, following))
        return found

    def _unscaled(self, root: torch.Tensor) -> None:
        reached, dtypes = graph_of(root)
        self.marks.reach(reached)
        self.marks.put(reached, "plain")
        self._check(root)
        _count(self._facts.plain_losses, dtypes)
        if torch.float16 in dtypes:
            self._facts.backward_at = place()

    def after_backward(self, roots: list[torch.Tensor]) -> None:
        """Look at the scaled gradients of an FP16 loss, now and then."""
        latest = self._latest
        self._latest = None
        turn = sum(self._facts.scaled_losses.values())
        due = "float16" in self._facts.scaled_losses and turn % _EVERY == 1
        if latest is None or not due:
            return
        if any(root.grad_fn is latest.node for root in roots):
            self._looks.take(latest.reached, turn)

    def clipped(self, params: list[torch.Tensor]) -> None:
        """Note that gradients are clipped."""
        if self.marks.any(params, "scaled"):
            self._facts.clipped_scaled += 1
            self._facts.clipped_scale = self.marks.scale_of(params)
            self._facts.clipped_at = place()

    def before_unscaling(
        self, optimizer: Optimizer, scale: torch.Tensor | None
    ) -> None:
        """Look whether scaled gradients were clipped by a function that is not torch's.

        Or by torch's, imported before it was watched.
        """
        if scale is None or not self.marks.any(parameters_of(optimizer), "scaled"):
            return
        found = self._clipping.look(optimizer, scale)
        if found is not None and not self._facts.clipped_scaled:
            self._facts.clipped_scaled = ENOUGH
            self._facts.clipped_scale = found
            self._facts.clipped_at = place()

    def conclude(self, held: set[int]) -> None:
        """Put names to what was found."""
        name_of = self.modules.name_of
        self._facts.unheld = [
            name_of(p) for key, p in self.marks.reached.items() if key not in held
        ]
        self._facts.nonfinite_module = self.modules.first_nonfinite
        self._facts.underflow = {name_of(p): s for p, s in self._looks.shares()}


def _count(losses: dict[str, int], dtypes: set[torch.dtype]) -> None:
    """Count a loss under the narrowest dtype in its graph."""
    name = "float32"
    for narrow in (torch.float16, torch.bfloat16):
        if narrow in dtypes:
            name = str(narrow).rpartition(".")[2]
            break
    losses[name] = losses.get(name, 0) + 1
