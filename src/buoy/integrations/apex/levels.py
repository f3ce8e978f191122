"""apex's four levels and the settings that each stands for."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from buoy.torch import OptionError

__all__ = ["Level", "level"]


@dataclass(frozen=True, slots=True)
class Level:
    """One level, with what was given by hand in place."""

    opt_level: str
    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool
    loss_scale: float | str  # a number, or "dynamic"

    def __str__(self) -> str:
        settings = ", ".join(
            f"{field.name}={getattr(self, field.name)}" for field in fields(self)[1:]
        )
        return f"Optimization level {self.opt_level}: {settings}."


_LEVELS = {
    # cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, scale
    "O0": Level("O0", torch.float32, False, None, False, 1.0),
    "O1": Level("O1", None, True, None, False, "dynamic"),
    "O2": Level("O2", torch.float16, False, True, True, "dynamic"),
    "O3": Level("O3", torch.float16, False, False, False, 1.0),
}
_WORDS = {"True": True, "False": False, True: True, False: False}


def level(name: str, given: dict[str, Any]) -> Level:
    """Look a level up and change what was given; refuse what does not go together.

    Example:
        >>> level("O2", {"loss_scale": "128.0"}).loss_scale
        128.0
    """
    if name not in _LEVELS:
        message = (
            f"Unexpected optimization level {name!r}. Options are 'O0', 'O1', 'O2', "
            "'O3': the letter O, not the number zero."
        )
        raise OptionError(message)

    changed = {key: value for key, value in given.items() if value is not None}
    if name == "O1":
        _refuse_casts(changed)
    elif changed.get("patch_torch_functions"):
        message = (
            "`patch_torch_functions=True` belongs to opt_level 'O1'; with "
            f"{name!r} the model itself is cast. Leave it out, or choose 'O1'."
        )
        raise OptionError(message)

    kept = changed.get("keep_batchnorm_fp32", False)
    if kept not in _WORDS:
        message = (
            "`keep_batchnorm_fp32` must be a boolean, the string 'True' or 'False', or "
            f"None, got {kept!r}."
        )
        raise OptionError(message)
    if "keep_batchnorm_fp32" in changed:
        changed["keep_batchnorm_fp32"] = _WORDS[kept]
    if changed.get("loss_scale", "dynamic") != "dynamic":
        changed["loss_scale"] = float(changed["loss_scale"])
    return replace(_LEVELS[name], **changed)


def _refuse_casts(changed: dict[str, Any]) -> None:
    """Refuse what would cast the weights, which O1 leaves in FP32."""
    for key in ("cast_model_type", "keep_batchnorm_fp32", "master_weights"):
        value = changed.pop(key, False)
        if value is torch.float32 or value is False:
            continue
        message = (
            f"`{key}={value!r}` does not go with opt_level 'O1', which leaves the "
            "model's weights in FP32 and casts inside the forward pass. Leave it "
            "out, or choose 'O2' or 'O3'."
        )
        raise OptionError(message)
