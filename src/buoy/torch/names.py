"""What to call a parameter: its name in the model, or its place in the optimizer."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from buoy.torch.errors import OptionError

__all__ = ["Names"]


class Names:
    """Names of parameters, looked up only when one has to be named.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> Names(layer).of(None, [layer.bias])
        ('bias',)
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        named: Iterable[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        self.model = None if model is None else _module(model)
        self._named = None if named is None else _pairs(named)

    @property
    def known(self) -> dict[int, str]:
        """Map each known parameter's id to its name, as the model is now."""
        pairs: Iterable[tuple[str, torch.Tensor]] = self._named or ()
        if self.model is not None:
            pairs = [*self.model.named_parameters(), *pairs]
        return {id(param): name for name, param in pairs}

    def looks_like(self, params: list[torch.Tensor]) -> bool:
        """Say whether these could be the model's as it was: as many, of such shapes."""
        pairs = list(self._named or ())
        if self.model is not None:
            pairs += self.model.named_parameters()
        shapes = Counter(param.shape for param in params)
        return shapes in (
            Counter(param.shape for _, param in pairs),
            Counter(param.shape for _, param in pairs if param.requires_grad),
        )

    def of(self, optimizer: Any, params: list[torch.Tensor]) -> tuple[str, ...]:
        """Name these parameters, in their order."""
        known = {**_places(optimizer), **self.known}
        return tuple(known.get(id(param), "an unnamed parameter") for param in params)

    def described(self, optimizer: Any, params: list[torch.Tensor]) -> tuple[str, ...]:
        """Name these parameters, and the kind of module that each belongs to."""
        kinds = {}
        if self.model is not None:
            for module in self.model.modules():
                for param in module.parameters(recurse=False):
                    kinds[id(param)] = f" ({type(module).__name__})"
        names = self.of(optimizer, params)
        return tuple(
            f"`{name}`{kinds.get(id(param), '')}"
            for name, param in zip(names, params, strict=True)
        )


def _module(model: Any) -> torch.nn.Module:
    if isinstance(model, torch.nn.Module):
        return model
    message = (
        f"`model` must be a torch.nn.Module, got {type(model).__name__}. Pass the "
        "model itself; pairs of names and parameters are given as "
        "`named_parameters=model.named_parameters()`."
    )
    raise OptionError(message)


def _pairs(named: Any) -> list[tuple[str, torch.Tensor]]:
    """Make sure now that there are names: they are needed only when all else fails."""
    found = list(named) if isinstance(named, Iterable) else [named]
    for pair in found:
        whole = isinstance(pair, (tuple, list)) and len(pair) == len(("name", "param"))
        if not (whole and isinstance(pair[0], str) and torch.is_tensor(pair[1])):
            message = (
                "`named_parameters` must give pairs of a name and a parameter, as "
                f"`model.named_parameters()` does; got {type(named).__name__} with "
                f"{pair!r:.60}. Of a dict pass its `.items()`."
            )
            raise OptionError(message)
    return found


def _places(optimizer: Any) -> dict[int, str]:
    places = {}
    for g, group in enumerate(getattr(optimizer, "param_groups", ())):
        # torch >= 2.6 keeps the names that an optimizer was built with.
        names = group.get("param_names") or ()
        for i, param in enumerate(group["params"]):
            shape = "x".join(map(str, param.shape)) or "scalar"
            place = f"param_groups[{g}]['params'][{i}] ({shape})"
            places[id(param)] = names[i] if i < len(names) else place
    return places
