"""What to call a parameter: its name in the model, or its place in the optimizer."""

from collections.abc import Iterable
from typing import Any

import torch

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
        self.model = model
        self._named = None if named is None else list(named)

    @property
    def known(self) -> dict[int, str]:
        """Map each known parameter's id to its name, as the model is now."""
        pairs: Iterable[tuple[str, torch.Tensor]] = self._named or ()
        if self.model is not None:
            pairs = [*self.model.named_parameters(), *pairs]
        return {id(param): name for name, param in pairs}

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
