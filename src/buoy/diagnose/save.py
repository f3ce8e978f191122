"""A batch on disk, with the random numbers it met and what was found about it.

Written by `torch.save` and read back with `weights_only=True`: a file from
elsewhere is data, and opening it executes nothing.
"""

import random
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from buoy._core.errors import OptionError, TraceError
from buoy.diagnose.culprit import Culprit
from buoy.diagnose.rehearse import RngState

__all__ = ["SavedBatch", "load_batch", "save_batch"]

T = TypeVar("T")

_VERSION = 1
_KEYS = 624  # words in the state of a Mersenne twister


@dataclass(frozen=True, slots=True)
class SavedBatch:
    """The result of `load_batch`.

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
    """Write a batch to a file; create its folder.

    Raises `OptionError` if the batch could not be loaded again.

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
    # Beside it first: a file that cannot be loaded never gets the name.
    with TemporaryDirectory(prefix=".buoy-", dir=target.parent) as folder:
        draft = Path(folder) / target.name
        try:
            torch.save(document, draft)
            torch.load(draft, map_location="meta", weights_only=True)
        except OSError:
            raise
        except Exception as error:
            message = f"The batch cannot be saved: {_PLAIN} {_first_line(error)}"
            raise OptionError(message) from error
        draft.replace(target)


def load_batch(path: str | Path) -> SavedBatch:
    """Read a saved batch, to run it again.

    Example:
        >>> import tempfile
        >>> from buoy.diagnose import rng_state
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_batch(folder + "/b.pt", (torch.ones(2),), rng=rng_state())
        ...     load_batch(folder + "/b.pt").batch
        (tensor([1., 1.]),)
    """
    if Path(path).exists() and not Path(path).is_file():
        message = f"{str(path)!r} is not a batch: it is not a regular file."
        raise TraceError(message)
    try:
        document = torch.load(path, weights_only=True)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        raise TraceError(_foreign(path, _first_line(error))) from error
    if not isinstance(document, dict) or document.get("buoy_batch") != _VERSION:
        raise TraceError(_foreign(path, "It has no entry `buoy_batch` of 1."))
    return SavedBatch(
        batch=_read(path, document, "batch", _batch),
        rng=_read(path, document, "rng", _states),
        culprit=_read(path, document, "culprit", _culprit),
        step=_read(path, document, "step", _step),
    )


def _read(
    path: str | Path, document: dict[str, Any], name: str, reader: Callable[[Any], T]
) -> T:
    """Read one entry; raise an error that names it if it is not what was saved."""
    if name not in document:
        raise TraceError(_foreign(path, f"It has no entry `{name}`."))
    try:
        return reader(document[name])
    except Exception as error:
        shown = textwrap.shorten(repr(document[name]), 80)
        what = f"Its entry `{name}` is damaged: {shown} ({_first_line(error)})"
        raise TraceError(_foreign(path, what)) from error


_PLAIN = (
    "Batches of tensors, numbers, strings, lists, tuples and dicts can be saved and "
    "loaded."
)


def _foreign(path: str | Path, why: str) -> str:
    return (
        f"{str(path)!r} is not a batch that this release of Buoy saved, or it holds "
        f"objects that are not plain data. {_PLAIN} {why}"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {textwrap.shorten(lines[0], 200)}"


def _batch(found: object) -> tuple[Any, ...]:
    if not isinstance(found, tuple):
        raise TypeError("it must be a tuple")
    return found


def _culprit(found: dict[str, Any] | None) -> Culprit | None:
    if found is None:
        return None
    culprit = Culprit(**{**found, "poisoned": tuple(found["poisoned"])})
    str(culprit)  # the words need numbers where numbers belong
    return culprit


def _step(found: object) -> int | None:
    if found is None or type(found) is int:
        return found
    raise TypeError("it must be a whole number or None")


def _plain(rng: RngState) -> dict[str, Any]:
    """Write NumPy's array as a tensor, which loads without executing anything."""
    plain = dict(rng)
    if "numpy" in plain:
        kind, keys, *rest = plain["numpy"]
        plain["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    return plain


def _states(plain: dict[str, Any]) -> RngState:
    """Read the states; each source of random numbers tries its own."""
    rng = dict(plain)
    random.Random().setstate(rng["python"])  # noqa: S311 - only tries the state
    torch.Generator().set_state(rng["torch"])
    for state in rng.get("cuda", ()):
        if state.dtype is not torch.uint8:
            raise TypeError("the state of a GPU's generator must be bytes")
    if "numpy" in rng:
        kind, keys, position, *rest = rng["numpy"]
        if not 0 <= position <= _KEYS:  # NumPy itself would read past the end
            raise ValueError("the position in NumPy's state is out of range")
        rng["numpy"] = (kind, keys.numpy().astype("uint32"), position, *rest)
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].RandomState().set_state(rng["numpy"])
    return rng
