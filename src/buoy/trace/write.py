"""Write a trace to a file: one JSON document, or a line per step.

Version 1.  JSON has no inf and no NaN: they are written as strings.  A name that ends
in `.jsonl` asks for lines, `.gz` for compression.
"""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from buoy._core.replay.trace import Histogram, Trace
from buoy.trace.files import replace_file

__all__ = ["VERSION", "write"]

VERSION = 1


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write `trace` to `path`, completely or not at all.

    Example:
        >>> import tempfile, buoy.trace
        >>> trace = buoy.trace.synthetic("noise", steps=10)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     buoy.trace.write(trace, folder + "/run.trace.jsonl.gz")
        ...     buoy.trace.read(folder + "/run.trace.jsonl.gz") == trace
        True
    """
    import gzip  # noqa: PLC0415 - this and json are slow to import

    target = Path(path)
    suffixes = target.suffixes
    lines = _lines(trace) if ".jsonl" in suffixes else _document(trace)
    data = "".join(lines).encode()
    # No time in the header: equal traces make equal files.
    packed = gzip.compress(data, mtime=0) if ".gz" in suffixes else data
    replace_file(target, packed, "trace")


def _document(trace: Trace) -> Iterator[str]:
    document = _header(trace)
    document["amax_log2"] = list(map(_plain, trace.amax_log2))
    if trace.loss_log2 is not None:
        document["loss_log2"] = list(map(_plain, trace.loss_log2))
    for kind in ("weight_histograms", "activation_histograms"):
        document[kind] = [
            {"start": histogram.start, **_plain_counts(histogram)}
            for histogram in getattr(trace, kind)
        ]
    yield _json(document) + "\n"


def _lines(trace: Trace) -> Iterator[str]:
    yield _json(_header(trace)) + "\n"
    weights = _by_start(trace.weight_histograms)
    activations = _by_start(trace.activation_histograms)
    for step, amax in enumerate(trace.amax_log2):
        line: dict[str, Any] = {"amax_log2": _plain(amax)}
        if trace.loss_log2 is not None:
            line["loss_log2"] = _plain(trace.loss_log2[step])
        if step in weights:
            line["weight_histogram"] = weights[step]
        if step in activations:
            line["activation_histogram"] = activations[step]
        yield _json(line) + "\n"


def _header(trace: Trace) -> dict[str, Any]:
    return {
        "buoy_trace": VERSION,
        "name": trace.name,
        "max_log2": trace.max_log2,
        "zero_log2": trace.zero_log2,
    }


def _by_start(histograms: Sequence[Histogram]) -> dict[int, dict[str, Any]]:
    return {histogram.start: _plain_counts(histogram) for histogram in histograms}


def _plain_counts(histogram: Histogram) -> dict[str, Any]:
    return {"low": histogram.low, "counts": list(histogram.counts)}


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _json(document: dict[str, Any]) -> str:
    import json  # noqa: PLC0415

    return json.dumps(document, separators=(",", ":"), allow_nan=False)
