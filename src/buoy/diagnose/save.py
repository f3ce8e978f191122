"""A batch on disk, with the random numbers it met and what was found about it.

Written by `torch.save` and read back with `weights_only=True`: a file from
elsewhere is data, and opening it executes nothing.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from buoy._core.errors import TraceError
from buoy.diagnose.culprit import Culprit
from buoy.diagnose.rehearse import RngState

__all__ = ["SavedBatch", "load_batch", "save_batch"]

_VERSION = 1


@dataclass(frozen=True, slots=True)
class SavedBatch:
    """What `load_batch` gives back.

    Example:
        >>> SavedBatch((1.0,), {}, None, step=3).batch
        (1.0,)
    """

    batch: tuple[Any, ...]
    rng: RngState
    culprit: Culprit | None
    step: int | None


def save_batch(
    path: str | Path,
    batch: tuple[Any, ...],
    *,
    rng: RngState,
    culprit: Culprit | None = None,
    step: int | None = None,
) -> None:
    """Write a batch to a file, making its folder.

    Example:
        >>> import tempfile
        >>> from buoy.diagnose import rng_state
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_batch(folder + "/bad/3.pt", ("text", 2), rng=rng_state(), step=3)
        ...     load_batch(folder + "/bad/3.pt").step
        3
    """
    document = {
        "buoy_batch": _VERSION,
        "batch": batch,
        "rng": _plain(rng),
        "culprit": None if culprit is None else asdict(culprit),
        "step": step,
    }
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.save(document, target)


def load_batch(path: str | Path) -> SavedBatch:
    """Read a batch that was saved, to run it again.

    Example:
        >>> import tempfile
        >>> from buoy.diagnose import rng_state
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_batch(folder + "/b.pt", (torch.ones(2),), rng=rng_state())
        ...     load_batch(folder + "/b.pt").batch
        (tensor([1., 1.]),)
    """
    try:
        document = torch.load(path, weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise TraceError(_foreign(path)) from error
    if not isinstance(document, dict) or document.get("buoy_batch") != _VERSION:
        raise TraceError(_foreign(path))
    culprit = document["culprit"]
    if culprit is not None:
        culprit = Culprit(**{**culprit, "poisoned": tuple(culprit["poisoned"])})
    return SavedBatch(
        document["batch"], _states(document["rng"]), culprit, document["step"]
    )


def _foreign(path: str | Path) -> str:
    return (
        f"{str(path)!r} is not a batch that this release of Buoy saved, or it holds "
        "objects that are not plain data. Batches of tensors, numbers, strings, lists, "
        "tuples and dicts can be saved and loaded."
    )


def _plain(rng: RngState) -> dict[str, Any]:
    """Write NumPy's array as a tensor, which loads without executing anything."""
    plain = dict(rng)
    if "numpy" in plain:
        kind, keys, *rest = plain["numpy"]
        plain["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    return plain


def _states(plain: dict[str, Any]) -> RngState:
    rng = dict(plain)
    if "numpy" in rng:
        kind, keys, *rest = rng["numpy"]
        rng["numpy"] = (kind, keys.numpy().astype("uint32"), *rest)
    return rng
