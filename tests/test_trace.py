"""Traces: what they hold, how files are read and written, what synthetic ones do."""

import gzip
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import buoy
import buoy.trace
from buoy.trace import Histogram, Trace

DAMAGED = {
    "truncated document": '{"buoy_trace": 1, "amax_log2": [1.0, 2.0',
    "no steps": '{"buoy_trace": 1, "amax_log2": []}',
    "no column": '{"buoy_trace": 1}',
    "column is a number": '{"buoy_trace": 1, "amax_log2": 3}',
    "step is a word": '{"buoy_trace": 1, "amax_log2": [1.0, "two"]}',
    "step is true": '{"buoy_trace": 1, "amax_log2": [1.0, true]}',
    "step is null": '{"buoy_trace": 1, "amax_log2": [null]}',
    "loss is a number": '{"buoy_trace": 1, "amax_log2": [1], "loss_log2": 4}',
    "loss too short": '{"buoy_trace": 1, "amax_log2": [1, 2], "loss_log2": [1]}',
    "limit is a word": '{"buoy_trace": 1, "amax_log2": [1], "max_log2": "x"}',
    "histogram without counts": (
        '{"buoy_trace": 1, "amax_log2": [1], '
        '"weight_histograms": [{"start": 0, "low": 1}]}'
    ),
    "histogram is a number": (
        '{"buoy_trace": 1, "amax_log2": [1], "weight_histograms": [7]}'
    ),
    "negative count": (
        '{"buoy_trace": 1, "amax_log2": [1], '
        '"weight_histograms": [{"start": 0, "low": 1, "counts": [-1, 2]}]}'
    ),
    "histogram of zeros": (
        '{"buoy_trace": 1, "amax_log2": [1], '
        '"weight_histograms": [{"start": 0, "low": 1, "counts": [0]}]}'
    ),
    "counts are no list": (
        '{"buoy_trace": 1, "amax_log2": [1], '
        '"weight_histograms": [{"start": 0, "low": 1, "counts": 3}]}'
    ),
    "count is a word": (
        '{"buoy_trace": 1, "amax_log2": [1], '
        '"weight_histograms": [{"start": 0, "low": 1, "counts": ["x"]}]}'
    ),
    "low is not whole": (
        '{"buoy_trace": 1, "amax_log2": [1], '
        '"weight_histograms": [{"start": 0, "low": 0.5, "counts": [1]}]}'
    ),
    "histograms out of order": (
        '{"buoy_trace": 1, "amax_log2": [1], "weight_histograms": ['
        '{"start": 5, "low": 0, "counts": [1]}, {"start": 5, "low": 0, "counts": [1]}]}'
    ),
    "absurdly deep": "[" * 100_000,
    "absurdly long number": '{"buoy_trace": 1, "amax_log2": [' + "9" * 5000 + "]}",
    "line in the middle": (
        '{"buoy_trace": 1}\n{"amax_log2": 1}\n{"am\n{"amax_log2": 1}\n'
    ),
    "line without amax": '{"buoy_trace": 1}\n{"amax_log2": 1}\n{"loss_log2": 1}\n',
    "line is a list": '{"buoy_trace": 1}\n[1]\n{"amax_log2": 1}\n',
}

sizes = st.one_of(st.floats(-150.0, 150.0), st.sampled_from([math.inf, -math.inf]))


@pytest.fixture(params=["run.json", "run.json.gz", "run.jsonl", "run.jsonl.gz"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Name a file of each kind."""
    return tmp_path / str(request.param)


def test_written_traces_are_read_back_the_same(path: Path) -> None:
    """Every field survives the file, at values other than its default."""
    trace = Trace(
        amax_log2=(1.5, -math.inf, math.inf, -3.25),
        loss_log2=(0.1, 0.2, math.inf, -math.inf),
        weight_histograms=(Histogram(0, -30, (1, 2)), Histogram(2, -31, (5,))),
        activation_histograms=(Histogram(1, 4, (0, 7)),),
        max_log2=8.5,
        zero_log2=-9.5,
        name="a run\nof two lines",
    )
    buoy.trace.write(trace, path)
    assert buoy.trace.read(path) == trace


@settings(max_examples=30)
@given(amax=st.lists(sizes, min_size=1), loss=st.booleans(), lines=st.booleans())
def test_any_sizes_survive_the_file(
    tmp_path_factory: pytest.TempPathFactory,
    amax: list[float],
    loss: bool,
    lines: bool,
) -> None:
    """Reading undoes writing, infinities included."""
    trace = Trace(amax_log2=amax, loss_log2=amax if loss else None)
    path = tmp_path_factory.mktemp("trace") / ("t.jsonl" if lines else "t.json")
    buoy.trace.write(trace, path)
    assert buoy.trace.read(str(path)) == trace


def test_files_hold_strict_json_even_for_nan(path: Path) -> None:
    """JSON has no NaN: the file says it in a string, and it is read as one."""
    buoy.trace.write(Trace(amax_log2=(math.nan, 1.0)), path)
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()

    def refuse(token: str) -> None:
        raise AssertionError(token)

    for line in text.splitlines():
        json.loads(line, parse_constant=refuse)
    assert math.isnan(buoy.trace.read(path).amax_log2[0])


def test_equal_traces_make_equal_files(tmp_path: Path) -> None:
    """No clock and no name gets into the file."""
    trace = buoy.trace.synthetic("noise", steps=20)
    for name in ("a.json.gz", "b.json.gz"):
        buoy.trace.write(trace, tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (
        tmp_path / "b.json.gz"
    ).read_bytes()


def test_a_killed_writer_costs_the_last_line_only(tmp_path: Path) -> None:
    """Lines up to the one that was cut off are read."""
    path = tmp_path / "run.jsonl"
    buoy.trace.write(Trace(amax_log2=(1.0, 2.0, 3.0)), path)
    path.write_text(path.read_text()[:-6])
    assert buoy.trace.read(path).amax_log2 == (1.0, 2.0)


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_files_say_their_name_and_the_fault(what: str, tmp_path: Path) -> None:
    """Whatever is wrong with the content, it is a `TraceError` that names the file."""
    path = tmp_path / "broken.json"
    path.write_text(DAMAGED[what])
    with pytest.raises(buoy.TraceError, match=r"broken\.json") as caught:
        buoy.trace.read(path)
    assert str(caught.value).endswith(".")
    assert len(str(caught.value)) < 400 + len(str(path))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"\x89PNG\r\n\x1a\n\xff", "not a Buoy trace"),
        (b'{"some": "json"}', "not a Buoy trace"),
        (b"[1, 2, 3]", "not a Buoy trace"),
        (b'{"buoy_trace": true, "amax_log2": [1]}', "not a Buoy trace"),
        (b'{"buoy_trace": 2, "amax_log2": [1]}', "version 2.*pip install -U"),
        (b"import os; os.abort()", "not JSON"),
        (gzip.compress(b'{"buoy_trace": 1}', mtime=0)[:-9], "compressed.*damaged"),
        (b"\x1f\x8bgarbage", "compressed.*damaged"),
    ],
)
def test_foreign_empty_and_newer_files_are_told_apart(
    data: bytes, said: str, tmp_path: Path
) -> None:
    """The message says which of these it is, and what to do."""
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(buoy.TraceError, match=said):
        buoy.trace.read(path)


def test_missing_files_and_folders_are_trace_errors(tmp_path: Path) -> None:
    """What cannot be opened is said with its name."""
    with pytest.raises(buoy.TraceError, match=r"There is no trace .*nowhere"):
        buoy.trace.read(tmp_path / "nowhere")
    with pytest.raises(buoy.TraceError, match="Cannot read"):
        buoy.trace.read(tmp_path)
    with pytest.raises(buoy.TraceError, match="Cannot write"):
        buoy.trace.write(Trace(amax_log2=(1.0,)), tmp_path / "no" / "folder.json")


def test_a_small_file_that_unpacks_to_a_huge_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is on what comes out, and reading stops there."""
    monkeypatch.setattr(sys.modules["buoy.trace.read"], "MOST_BYTES", 2**16)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * 2**20, mtime=0))
    with pytest.raises(buoy.TraceError, match="is larger than"):
        buoy.trace.read(path)


def test_histograms_interpolate_inside_a_binade() -> None:
    """Shares are exact at powers of two and rise evenly in log2 between them."""
    histogram = Histogram(0, -4, (1, 0, 3))
    found = [
        histogram.below(x) for x in (-9.0, -4.0, -3.5, -3.0, -2.5, -1.5, -1.0, 9.0)
    ]
    assert found == [0.0, 0.0, 0.125, 0.25, 0.25, 0.625, 1.0, 1.0]


@pytest.mark.parametrize("kind", buoy.trace.KINDS)
def test_synthetic_traces_depend_on_their_arguments_alone(kind: str) -> None:
    """The same seed gives the same trace; another gives another; all are whole."""
    trace = buoy.trace.synthetic(kind, steps=500, seed=3)
    assert trace == buoy.trace.synthetic(kind, steps=500, seed=3)
    assert trace != buoy.trace.synthetic(kind, steps=500, seed=4)
    assert len(trace) == 500
    assert trace.loss_log2 is not None
    assert trace.has_histograms
    assert all(map(math.isfinite, trace.amax_log2))


@pytest.mark.parametrize("kind", buoy.trace.KINDS)
def test_synthetic_traces_may_be_a_single_step(kind: str) -> None:
    """No kind needs a minimum of steps."""
    assert len(buoy.trace.synthetic(kind, steps=1)) == 1


def test_unknown_kinds_and_lengths_are_refused_with_what_there_is() -> None:
    """The message lists the kinds."""
    with pytest.raises(buoy.TraceError, match=r"'wobble'.*stationary.*jumps"):
        buoy.trace.synthetic("wobble")
    with pytest.raises(buoy.TraceError, match="from 1 to"):
        buoy.trace.synthetic("noise", steps=0)


def test_the_head_of_a_trace_is_a_trace() -> None:
    """Cutting keeps what belongs to the first steps and drops the rest."""
    trace = Trace(
        amax_log2=(1.0, 2.0, 3.0),
        loss_log2=(4.0, 5.0, 6.0),
        weight_histograms=(Histogram(0, 0, (1,)), Histogram(2, 1, (1,))),
    )
    head = trace.head(2)
    assert head.amax_log2 == (1.0, 2.0)
    assert head.loss_log2 == (4.0, 5.0)
    assert head.weight_histograms == (Histogram(0, 0, (1,)),)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"amax_log2": ("one",)}, "one number per step"),
        ({"amax_log2": (1e300,)}, "holds logarithms to base 2"),
        ({"zero_log2": 16.0, "max_log2": 16.0}, "`zero_log2` must be below `max_log2`"),
        ({"name": 3}, "`name` must be a string, got 3"),
        ({"weight_histograms": (7,)}, "must hold histograms only"),
        (
            {"weight_histograms": (Histogram(-1, 0, (1,)),)},
            "must start at step 0 or later, got -1",
        ),
    ],
)
def test_a_trace_that_makes_no_sense_is_refused(
    fields: dict[str, Any], said: str
) -> None:
    """The message names the field and what it holds."""
    with pytest.raises(buoy.TraceError, match=said):
        Trace(**{"amax_log2": (1.0,), **fields})


def test_a_histogram_begins_at_whole_numbers() -> None:
    """Its step and its lowest binade are counted."""
    with pytest.raises(buoy.TraceError, match="must be whole numbers, got 0 and 0.5"):
        Histogram(0, 0.5, (1,))  # type: ignore[arg-type]


def test_a_file_with_keys_of_nobody_is_refused(tmp_path: Path) -> None:
    """They may be a misspelling of one that counts."""
    path = tmp_path / "run.json"
    path.write_text('{"buoy_trace": 1, "amax_log2": [1], "los_log2": [1]}')
    with pytest.raises(buoy.TraceError, match="unknown keys.*los_log2"):
        buoy.trace.read(path)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="of Linux")
@pytest.mark.parametrize("reader", [buoy.trace.read, buoy.trace.load])
def test_a_file_that_opens_and_cannot_be_read_is_a_trace_error(reader: Any) -> None:
    """As on a disk that fails; the reason is the system's."""
    with pytest.raises(buoy.TraceError, match="Cannot read the trace .* error"):
        reader("/proc/self/mem")
