"""Read a trace from a file: a recorded run, one JSON document or a line per step.

The file is data and nothing else: nothing in it is executed, its size is limited, and
whatever is wrong with it is said with its name.  `buoy.trace.write` has the format of
JSON, which may be compressed by gzip; `schema` has that of recorded runs.
"""

import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from buoy._core.errors import TraceError
from buoy._core.replay.trace import Histogram, Trace
from buoy.trace.files import check_readable
from buoy.trace.write import VERSION

__all__ = ["MOST_BYTES", "read"]

MOST_BYTES = 2**28  # unpacked: a few million steps
_MOST_VALUES = 2**25  # as Python's numbers they take ten times their text
_MOST_LISTS = 2**20
_MOST_BINADES = 4096  # float64 spans 2098

_SPECIAL = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


def read(path: str | os.PathLike[str]) -> Trace:
    """Read the trace in the file at `path`, or raise `TraceError`.

    Example:
        >>> read("no/such.trace.json")
        Traceback (most recent call last):
          ...
        buoy._core.errors.TraceError: There is no trace 'no/such.trace.json'. ...
    """
    where = os.fspath(path)
    data = _bytes(where)
    if data.startswith(b"SQLite format 3\0"):
        return _recorded(where)
    text = _text(where, data)
    head, _, rest = text.partition("\n")
    if rest.strip():
        header = _parsed(head)
        if isinstance(header, dict):
            return _from_lines(where, header, rest)
    document = _parsed(text)
    if document is None:
        message = (
            f"The trace {where!r} is not JSON, or is damaged. "
            "Read a file that `buoy.trace.write` has written."
        )
        raise TraceError(message)
    _check_version(where, document)
    return _from_document(where, document)


def _recorded(where: str) -> Trace:
    # Imported here: SQLite is slow to load.
    from buoy.trace.recording import load_sizes  # noqa: PLC0415
    from buoy.trace.replayable import replayable  # noqa: PLC0415

    return replayable(load_sizes(where))


def _bytes(where: str) -> bytes:
    """Read what is there, unpacked; of a database only its first bytes."""
    check_readable(where)
    try:
        with Path(where).open("rb") as file:
            head = file.read(16)
            if head == b"SQLite format 3\0":
                return head
            packed = head[:2] == b"\x1f\x8b"
            file.seek(0)
            return _unpacked(where, file) if packed else file.read(MOST_BYTES + 1)
    except OSError as error:
        reason = error.strerror or error
        message = f"Cannot read the trace {where!r}: {reason}. Check the file."
        raise TraceError(message) from error


def _unpacked(where: str, file: IO[bytes]) -> bytes:
    import gzip  # noqa: PLC0415 - slow to import
    import zlib  # noqa: PLC0415

    try:
        with gzip.open(file) as unpacked:
            return unpacked.read(MOST_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        message = (
            f"The compressed trace {where!r} is damaged: {error}. "
            "Write or copy it again."
        )
        raise TraceError(message) from error


def _text(where: str, data: bytes) -> str:
    if len(data) > MOST_BYTES:
        message = (
            f"The trace {where!r} is larger than {MOST_BYTES >> 20} MiB. "
            "Split it, or keep fewer histograms."
        )
        raise TraceError(message)
    if not data.strip():
        message = f"The trace {where!r} is empty. Record it again."
        raise TraceError(message)
    if data.count(b",") > _MOST_VALUES or data.count(b"[") > _MOST_LISTS:
        message = (
            f"The trace {where!r} holds more values or lists than any run writes. "
            "Split it, or keep fewer histograms."
        )
        raise TraceError(message)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _foreign(where) from error


def _parsed(text: str) -> Any:
    """Return what the JSON says, or None where it is not JSON."""
    import json  # noqa: PLC0415 - slow to import

    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _foreign(where: str) -> TraceError:
    return TraceError(
        f"The file {where!r} is not a Buoy trace: it has no `buoy_trace` version. "
        "Read a file that `buoy.trace.write` has written."
    )


def _check_version(where: str, document: object) -> None:
    version = document.get("buoy_trace") if isinstance(document, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise _foreign(where)
    if not 1 <= version <= VERSION:
        message = (
            f"The trace {where!r} is of version {version}; this Buoy reads up to "
            f"{VERSION}. Upgrade with `pip install -U buoy-amp`."
        )
        raise TraceError(message)


_LINE_HISTOGRAMS = ("weight_histogram", "activation_histogram")
_KEYS = {
    "buoy_trace", "amax_log2", "loss_log2", "weight_histograms",
    "activation_histograms", "max_log2", "zero_log2", "name",
}  # fmt: skip


def _from_document(where: str, document: dict[str, Any]) -> Trace:
    unknown = sorted(set(document) - _KEYS)
    if unknown:
        message = (
            f"The trace {where!r} has unknown keys {unknown!r:.80}. Write it again."
        )
        raise TraceError(message)
    loss = document.get("loss_log2")
    weights = _list(where, document, "weight_histograms")
    activations = _list(where, document, "activation_histograms")
    return _checked(
        where,
        lambda: Trace(
            amax_log2=_column(_list(where, document, "amax_log2")),
            loss_log2=None if loss is None else _column(_sequence(loss)),
            weight_histograms=[_histogram(h, h["start"]) for h in weights],
            activation_histograms=[_histogram(h, h["start"]) for h in activations],
            **_limits(document),
        ),
    )


def _from_lines(where: str, header: dict[str, Any], rest: str) -> Trace:
    _check_version(where, header)
    columns: dict[str, array[float]] = {
        "amax_log2": array("d"),
        "loss_log2": array("d"),
    }
    histograms: dict[str, list[Histogram]] = {key: [] for key in _LINE_HISTOGRAMS}

    def build() -> Trace:
        losses = None
        for step, line in enumerate(_lines(where, rest)):
            losses = "loss_log2" in line if step == 0 else losses
            columns["amax_log2"].append(_number(line["amax_log2"]))
            if losses:
                columns["loss_log2"].append(_number(line["loss_log2"]))
            for kind, found in histograms.items():
                if kind in line:
                    found.append(_histogram(line[kind], step))
        return Trace(
            amax_log2=columns["amax_log2"],
            loss_log2=columns["loss_log2"] if losses else None,
            weight_histograms=histograms["weight_histogram"],
            activation_histograms=histograms["activation_histogram"],
            **_limits(header),
        )

    return _checked(where, build)


def _lines(where: str, rest: str) -> Iterator[dict[str, Any]]:
    """Yield the lines, one in memory at a time."""
    at = 0
    number = 2
    while at < len(rest):
        end = rest.find("\n", at)
        text = rest[at:] if end < 0 else rest[at:end]
        if end < 0 and _parsed(text) is None:
            return  # the writer was killed within this line
        yield _line(where, number, text)
        if end < 0:
            return
        at = end + 1
        number += 1


def _line(where: str, number: int, text: str) -> dict[str, Any]:
    line = _parsed(text)
    if isinstance(line, dict):
        return line
    message = (
        f"Line {number} of the trace {where!r} is damaged: {text[:40]!r}. "
        "Remove it, or write the trace again."
    )
    raise TraceError(message)


def _list(where: str, document: dict[str, Any], key: str) -> list[Any]:
    value = document.get(key, [])
    if isinstance(value, list):
        return value
    message = f"The trace {where!r} is damaged: `{key}` must be a list. Write it again."
    raise TraceError(message)


def _sequence(value: object) -> list[Any]:
    if isinstance(value, list):
        return value
    message = f"a list was expected, got {value!r:.40}"
    raise TypeError(message)


def _checked(where: str, build: Callable[[], Trace]) -> Trace:
    try:
        return build()
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, TraceError) and where in str(error):
            raise
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        message = (
            f"The trace {where!r} is damaged: {reason.rstrip('.')}. Write it again."
        )
        raise TraceError(message) from error


def _limits(header: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: header[key] for key in ("max_log2", "zero_log2", "name") if key in header
    }


def _column(values: list[Any]) -> list[float]:
    return [v if type(v) is float else _number(v) for v in values]


def _number(value: object) -> float:
    if isinstance(value, str) and value in _SPECIAL:
        return _SPECIAL[value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    message = f"a number was expected, got {value!r:.40}"
    raise TypeError(message)


def _histogram(value: Any, start: Any) -> Histogram:
    low = value["low"]
    counts = value["counts"]
    if type(start) is not int or type(low) is not int:
        message = (
            f"a histogram's start and low must be whole, got {start!r:.40}, {low!r:.40}"
        )
        raise TypeError(message)
    if not isinstance(counts, list) or len(counts) > _MOST_BINADES:
        message = f"a histogram must be a list of at most {_MOST_BINADES} counts"
        raise ValueError(message)
    return Histogram(start, low, tuple(map(_count, counts)))


def _count(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    message = f"a count was expected, got {value!r:.40}"
    raise TypeError(message)
