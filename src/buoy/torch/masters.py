"""FP32 master weights for FP16 and BF16 parameters, whatever the optimizer.

The model and `param_groups` keep the parameters they have.  While the optimizer steps,
and only then, an FP32 master stands in each one's place, with an FP32 gradient; so the
update and the optimizer's state are FP32.  After the step masters are rounded into the
parameters.  To everyone else the optimizer looks as ever: schedulers, `zero_grad`,
`add_param_group`, `state[param]` and checkpoints, which hold one entry more.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from types import MethodType
from typing import Any

import torch

from buoy._backends import torch as backend
from buoy.torch import words
from buoy.torch.errors import OptionError
from buoy.torch.names import Names
from buoy.torch.rounding import HALVES, Rounding
from buoy.torch.swap import COUNT, Swap

__all__ = ["MasterWeights", "masters_of"]

_KEY = "master_param"  # in an optimizer's saved state, beside `exp_avg` and the like
_HERE = "_buoy_masters"


class MasterWeights(Swap):
    """Let an optimizer update FP16 and BF16 parameters in FP32.

    Args:
        optimizer: any of torch's or of your own; it is used as before.
        rounding: None keeps FP32 masters between steps.  "nearest" and "stochastic"
            keep none: each step computes in FP32 and rounds the result.
        model: where the names of parameters come from.
        seed: of the chance in "stochastic"; the same on every replica.

    Call it before `optimizer.load_state_dict`.

    Example:
        >>> layer = torch.nn.Linear(2, 1).bfloat16()
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
        >>> masters = MasterWeights(optimizer)
        >>> layer(torch.ones(4, 2).bfloat16()).sum().backward()
        >>> optimizer.step()
        >>> masters.of(layer.weight).dtype
        torch.float32
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rounding: Rounding | None = None,
        *,
        model: torch.nn.Module | None = None,
        seed: int = 0,
        names: Names | None = None,
    ) -> None:
        if rounding not in (None, "nearest", "stochastic"):
            message = (
                "`rounding` must be None (keep FP32 masters), 'nearest' or "
                f"'stochastic' (keep none), got {rounding!r}."
            )
            raise OptionError(message)
        super().__init__(optimizer, rounding, names or Names(model), seed)
        self._stepped = False
        self._refuse()
        self._all()
        self._take_over()

    def of(self, param: torch.Tensor) -> torch.Tensor | None:
        """Give the master of a parameter; None if it has none."""
        pair = self._pairs.get(id(param))
        return None if pair is None or self.rounding else pair.master

    @property
    def masters(self) -> list[torch.Tensor]:
        """The FP32 masters that are kept, in the order of the parameters."""
        return [] if self.rounding else [pair.master for pair in self._pairs.values()]

    def reread(self) -> None:
        """Take over parameters that were changed through `.data`.

        Changes made any other way are noticed at the next step by themselves.
        """
        for pair in self._pairs.values():
            pair.reconcile()

    # -- the optimizer's methods ------------------------------------------------------

    def _refuse(self) -> None:
        """Refuse an optimizer that has masters, or whose state has lost its bits."""
        if masters_of(self.optimizer) is not None:
            raise words.masters_twice()
        narrow = []
        for param, state in self.optimizer.state.items():
            halves = _in_half(state)
            if halves and state.get("step") == 0:  # as Adagrad begins
                state.update({name: value.float() for name, value in halves.items()})
            elif halves:
                narrow.append(param)
        if narrow:
            described = self._names.described(self.optimizer, narrow[:1])
            raise words.narrow_state(described[0])

    def _take_over(self) -> None:
        optimizer = self.optimizer
        optimizer.__dict__[_HERE] = self
        optimizer.register_state_dict_post_hook(self._add_masters)
        for name, method in (
            ("step", self._step),
            ("load_state_dict", self._load),
            ("zero_grad", self._zero_grad),
        ):
            optimizer.__dict__[name] = _in_place_of(
                getattr(optimizer, name), method, optimizer
            )

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args and callable(args[0]):
            args = (self._outside(args[0]), *args[1:])
        elif callable(kwargs.get("closure")):
            kwargs["closure"] = self._outside(kwargs["closure"])
        with self.swapped():
            result = step(*args, **kwargs)
            self._count()
        self._stepped = True
        return result

    def _outside(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        @wraps(closure)
        def evaluated() -> Any:
            with self.suspended():
                return closure()

        return evaluated

    def _count(self) -> None:
        """Count a step, unless it is seen that it was skipped inside the optimizer."""
        found = getattr(self.optimizer, "found_inf", None)
        if self.rounding != "stochastic" or (
            isinstance(found, torch.Tensor)
            and backend.in_host_memory(found)
            and backend.peek(found)
        ):
            return
        group = self.optimizer.param_groups[0]
        group[COUNT] = group.get(COUNT, 0) + 1

    def _zero_grad(self, zero: Callable[..., None], set_to_none: bool = True) -> None:
        zero(set_to_none=set_to_none)
        for pair in self._pairs.values():
            pair.narrow()

    def _add_masters(self, _: Any, saved: dict[str, Any]) -> None:
        """Save masters that differ from their parameters, beside the latters' state."""
        if self.rounding or not self._stepped:
            return
        for key, param in self._numbered(saved["param_groups"]):
            master = self.of(param)
            # One that never moved is not saved: alone it would look like a state to an
            # optimizer that has none for this parameter yet.
            if master is not None and not torch.equal(master, param.float()):
                state = saved["state"].get(key, {})
                saved["state"][key] = {**state, _KEY: master.detach()}

    def _load(self, load: Callable[..., None], state_dict: dict[str, Any]) -> None:
        """Load with masters in place, or torch would cast the state to FP16."""
        states = state_dict["state"]
        plain = {key: _without_master(state) for key, state in states.items()}
        with self.swapped():
            load({**state_dict, "state": plain})
        if self.rounding:
            return
        for key, param in self._numbered(state_dict["param_groups"]):
            kept = states.get(key, {}).get(_KEY)
            if id(param) in self._pairs:
                self._pairs[id(param)].load(kept)
                self._stepped = True

    def _numbered(self, groups: list[dict[str, Any]]) -> Iterator[tuple[Any, Any]]:
        for saved, group in zip(groups, self.optimizer.param_groups, strict=True):
            yield from zip(saved["params"], group["params"], strict=True)


def masters_of(optimizer: Any) -> MasterWeights | None:
    """Find what keeps an optimizer's masters, if anything does."""
    found: MasterWeights | None = getattr(optimizer, _HERE, None)
    return found


def _in_half(state: Any) -> dict[str, torch.Tensor]:
    if not isinstance(state, dict):
        return {}
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.dtype in HALVES
    }


def _without_master(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if name != _KEY}


def _in_place_of(old: Any, method: Callable[..., Any], owner: Any) -> MethodType:
    """Bind a method that is given the one it stands for; schedulers wrap it again."""

    @wraps(getattr(old, "__func__", old))
    def bound(_: Any, *args: Any, **kwargs: Any) -> Any:
        return method(old, *args, **kwargs)

    return MethodType(bound, owner)
