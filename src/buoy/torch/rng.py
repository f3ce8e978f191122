"""Every random generator in use, so that a batch can be run with the same noise."""

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["Randomness"]

_DEVICES = ("cuda", "xpu", "mps", "npu", "mtia")


class Randomness:
    """The state of torch's, Python's and NumPy's generators at one moment.

    Example:
        >>> kept = Randomness()
        >>> first = torch.rand(3)
        >>> kept.put_back()
        >>> torch.equal(first, torch.rand(3))
        True
    """

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        self._own = [(one, one.get_state()) for one in generators]
        self._cpu = torch.get_rng_state()
        self._devices = [(one, _states(one)) for one in _in_use()]
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def put_back(self) -> None:
        """Let every generator repeat what it has given since."""
        for generator, state in self._own:
            generator.set_state(state)
        torch.set_rng_state(self._cpu)
        for module, states in self._devices:
            if isinstance(states, list):
                module.set_rng_state_all(states)
            else:
                module.set_rng_state(states)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _in_use() -> list[Any]:
    """Give the modules of the accelerators that this process has started."""
    found = []
    for name in _DEVICES:
        module = getattr(torch, name, None)
        started = getattr(module, "is_initialized", None)
        if (name == "mps" and torch.backends.mps.is_available()) or (
            started is not None and started()
        ):
            found.append(module)
    return found


def _states(module: Any) -> Any:
    if hasattr(module, "get_rng_state_all"):
        return module.get_rng_state_all()
    return module.get_rng_state()
