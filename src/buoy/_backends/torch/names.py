"""Names of parameters for messages: from the model, or the index in the optimizer."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from buoy._core.errors import OptionError

__all__ = ["Names"]

Pair = tuple[str, torch.Tensor]


class Names:
    """Names of parameters, looked up only when a message needs one.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> Names(layer).of(None, [layer.bias])
        ('bias',)
    """

    def __init__(
        self, model: torch.nn.Module | None = None, named: Iterable[Pair] | None = None
    ) -> None:
        self.model = _module(model)
        self._named = [] if named is None else _pairs(named)

    def _all(self) -> list[Pair]:
        model = () if self.model is None else self.model.named_parameters()
        return [*model, *self._named]

    @property
    def known(self) -> dict[int, str]:
        """Map the id of each named parameter to its name, as the model is now."""
        return {id(param): name for name, param in self._all()}

    def looks_like(self, params: list[torch.Tensor]) -> bool:
        """Return whether the model trains as many parameters, of the same shapes."""
        own = Counter(param.shape for _, param in self._all() if param.requires_grad)
        given = Counter(param.shape for param in params if param.requires_grad)
        return bool(own) and own == given

    def of(self, optimizer: Any, params: list[torch.Tensor]) -> tuple[str, ...]:
        """Return the names of these parameters, in order."""
        known = {**_places(optimizer), **self.known}
        return tuple(known.get(id(param), "an unnamed parameter") for param in params)

    def described(self, optimizer: Any, params: list[torch.Tensor]) -> tuple[str, ...]:
        """Return the names of these parameters with the classes of their modules."""
        kinds = {
            id(param): f" ({type(module).__name__})"
            for module in (() if self.model is None else self.model.modules())
            for param in module.parameters(recurse=False)
        }
        return tuple(
            f"`{name}`{kinds.get(id(param), '')}"
            for name, param in zip(self.of(optimizer, params), params, strict=True)
        )


def _module(model: Any) -> torch.nn.Module | None:
    if model is None or isinstance(model, torch.nn.Module):
        return model
    raise OptionError(
        f"`model` must be a torch.nn.Module, got {type(model).__name__}. Pass the "
        "model itself, or names: `named_parameters=model.named_parameters()`."
    )


def _pairs(named: Any) -> list[Pair]:
    """Check the pairs now: names are read only after a step has failed."""
    found = list(named) if isinstance(named, Iterable) else [named]
    for pair in found:
        match pair:
            case (str(), torch.Tensor()):
                continue
        raise OptionError(
            "`named_parameters` must yield pairs of a name and a parameter, as "
            f"`model.named_parameters()` does; got {type(named).__name__} with "
            f"{pair!r:.60}. Of a dict pass its `.items()`."
        )
    return found


def _places(optimizer: Any) -> dict[int, str]:
    places = {}
    for g, group in enumerate(getattr(optimizer, "param_groups", ())):
        params = group["params"]
        for i, param in enumerate(params):
            shape = "x".join(map(str, param.shape)) or "scalar"
            places[id(param)] = f"param_groups[{g}]['params'][{i}] ({shape})"
        # torch >= 2.6 keeps the names that an optimizer was built with.
        given = group.get("param_names") or ()
        places.update(zip(map(id, params), given, strict=False))
    return places
