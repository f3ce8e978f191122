"""Parameters in half precision: refused, or given FP32 masters."""

from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary, ref

import torch

from buoy.torch import words
from buoy.torch.errors import OptionError
from buoy.torch.gather import Gathered, gather, owners, parameters_of
from buoy.torch.masters import MasterWeights, masters_of
from buoy.torch.names import Names
from buoy.torch.rounding import HALVES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Fp16Params", "Halves"]

Fp16Params = Literal["error", "master"]


class Halves:
    """What a scaler does about FP16 parameters, and which it has met in FP32."""

    def __init__(self, wanted: Fp16Params | None) -> None:
        if wanted not in (None, "error", "master"):
            message = (
                "`fp16_params` must be None (as torch: an error, unless the optimizer "
                "is fused), 'error' (always) or 'master' (keep FP32 copies and update "
                f"those), got {wanted!r}."
            )
            raise OptionError(message)
        self.wanted = wanted
        self._wide: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
        self._latest: Callable[[], Any] = bool  # refers to the optimizer met last

    def __reduce__(self) -> tuple[type["Halves"], tuple[Fp16Params | None]]:
        return Halves, (self.wanted,)

    def gather(self, optimizer: Any, names: Names, allow: bool = True) -> Gathered:
        """Find the gradients, in FP32 if there are masters; refuse what must not be."""
        masters = self.masters(optimizer, names)
        if masters is not None:
            masters.widen()
        found = gather(optimizer)
        if torch.float16 in [bucket.dtype for bucket in found.buckets]:
            self._refuse(optimizer, names, allow and self.wanted != "error")
        return found

    def masters(self, optimizer: Any, names: Names) -> MasterWeights | None:
        """Find an optimizer's masters, or make them if they are wanted."""
        self._meet(optimizer)
        found = masters_of(optimizer)
        if found is None and self.wanted == "master":
            found = self._attach(optimizer, names)
        return found

    def _attach(self, optimizer: Any, names: Names) -> MasterWeights | None:
        """Give an optimizer masters, if any of its parameters needs one."""
        halves = [p for p in parameters_of(optimizer) if p.dtype in HALVES]
        if not halves:
            return None
        self._refuse_drifted(optimizer, names, halves)
        return MasterWeights(optimizer, names=names)

    def _meet(self, optimizer: Any) -> None:
        """Note, once, which parameters are FP32 to begin with."""
        if self._latest() is optimizer:
            return
        try:
            if optimizer not in self._wide:
                self._wide[optimizer] = {
                    id(p) for p in parameters_of(optimizer) if p.dtype is torch.float32
                }
            self._latest = ref(optimizer)
        except TypeError:  # cannot be referred to: drift is not told from a choice
            return

    def _refuse(self, optimizer: Any, names: Names, allow: bool) -> None:
        halves = [
            param
            for param in owners(optimizer)
            if param.grad is not None and param.grad.dtype is torch.float16
        ]
        self._refuse_drifted(optimizer, names, halves)
        if not allow:
            raise words.fp16_gradients(names.described(optimizer, halves))

    def _refuse_drifted(
        self, optimizer: Any, names: Names, halves: list[torch.Tensor]
    ) -> None:
        wide = self._wide.get(optimizer, ()) if self._wide else ()
        drifted = [p for p in halves if id(p) in wide and p.dtype is not torch.float32]
        if drifted:
            raise words.drifted(names.described(optimizer, drifted), drifted[0].dtype)
