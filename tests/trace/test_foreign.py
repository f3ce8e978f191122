"""A file from somebody else is data: it is read as such, or refused with words."""

import shutil
import sqlite3
import zlib

import pytest

import buoy.trace
from buoy import TraceError
from buoy.trace import Counts, Recorder


@pytest.fixture
def path(tmp_path):
    """Make a sound file with a bit of everything."""
    path = tmp_path / "run.buoy"
    with Recorder(path) as recorder:
        for i in range(200):
            recorder.step(scale=2.0, applied=i % 7 > 0, norm=1.0, offenders=["w"])
        recorder.histograms(0, 2.0, {"w": Counts(-3, (1, 2), size=3)})
    return path


def spoiled(path, *statements):
    """Change a file by hand."""
    file = sqlite3.connect(path)
    for statement in statements:
        file.execute(*statement) if isinstance(statement, tuple) else file.execute(
            statement
        )
    file.commit()
    file.close()
    return path


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW extra AS SELECT 1",
        "CREATE TABLE extra (x)",
        "CREATE TRIGGER extra AFTER INSERT ON steps BEGIN SELECT 1; END",
        "CREATE INDEX extra ON steps (scale)",
        "ALTER TABLE steps ADD COLUMN more REAL GENERATED ALWAYS AS (abs(-1))",
        "DROP TABLE tensors",
    ],
)
def test_a_schema_that_is_not_ours_is_not_touched(path, statement):
    """Views, triggers and columns that compute are refused before anything is read."""
    with pytest.raises(TraceError, match="not a run recorded by Buoy"):
        buoy.trace.load(spoiled(path, statement))


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE steps SET scale = 'big'",
        "UPDATE steps SET scale = x'00'",
        "UPDATE steps SET applied = 7",
        "UPDATE steps SET norm = 'low' WHERE step = 9",
        "UPDATE steps SET verdict = 'because' WHERE step = 0",
        "UPDATE meta SET value = '{' WHERE key = 'format'",
        "UPDATE meta SET value = x'ff'",
        "UPDATE tensors SET name = x'ff'",
        "UPDATE tensors SET size = 'much'",
        "UPDATE tensors SET kind = 'other'",
        "UPDATE offenders SET tensor = 99 WHERE step = 0",
        "UPDATE histograms SET packed = x'00112233'",
        "UPDATE histograms SET packed = 'text'",
        "UPDATE histograms SET scale = 'text'",
        "DELETE FROM tensors",
    ],
)
def test_values_of_the_wrong_kind_are_refused(path, statement):
    """Whatever the table: a clear error, and no exception of another kind."""
    with pytest.raises(TraceError, match="damaged"):
        buoy.trace.load(spoiled(path, statement))


def test_a_bomb_does_not_go_off(path):
    """A few megabytes that unpack to half a gigabyte are refused unpacked."""
    worker = zlib.compressobj(1)
    million = b"\0" * 2**20
    bomb = b"".join(worker.compress(million) for _ in range(512)) + worker.flush()
    assert len(bomb) < 2**22
    with pytest.raises(TraceError, match="larger than any run"):
        buoy.trace.load(spoiled(path, ("UPDATE histograms SET packed = ?", (bomb,))))


def test_a_newer_version_says_how_to_read_it(path):
    """Upgrade, and not a word about damage."""
    with pytest.raises(TraceError, match="pip install -U buoy-amp"):
        buoy.trace.load(spoiled(path, "PRAGMA user_version = 99"))


def test_every_kind_of_foreign_file_is_refused(path, tmp_path):
    """Other databases, text, nothing, a folder."""
    other = tmp_path / "other.db"
    spoiled(other, "CREATE TABLE t (x)")
    (tmp_path / "text").write_text("SQLite format")
    (tmp_path / "empty").write_bytes(b"")
    for name in ("other.db", "text", "empty"):
        with pytest.raises(TraceError, match="not a run recorded by Buoy"):
            buoy.trace.load(tmp_path / name)
    with pytest.raises(TraceError, match="Cannot read"):
        buoy.trace.load(tmp_path)
    for reader in (buoy.trace.load, buoy.trace.read):
        with pytest.raises(TraceError):
            reader(other)


def test_damage_anywhere_is_an_error_of_ours_or_none(path, tmp_path):
    """Bytes overwritten at any place: a `TraceError`, or a file that still reads."""
    whole = path.read_bytes()
    seen = set()
    for at in range(0, len(whole), 97):
        damaged = tmp_path / "damaged.buoy"
        damaged.write_bytes(whole[:at] + b"\xff" * 16 + whole[at + 16 :])
        try:
            buoy.trace.load(damaged)
            seen.add("read")
        except TraceError:
            seen.add("refused")
    assert seen == {"read", "refused"}


def test_a_file_cut_short_is_refused(path, tmp_path):
    """Half a copy is not half a run."""
    whole = path.read_bytes()
    cut = tmp_path / "cut.buoy"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="damaged"):
        buoy.trace.load(cut)


def test_reading_changes_nothing(path, tmp_path):
    """Not a byte of the file, and nothing is left beside it."""
    copy = tmp_path / "copy" / "run.buoy"
    copy.parent.mkdir()
    shutil.copy(path, copy)
    buoy.trace.load(copy)
    assert copy.read_bytes() == path.read_bytes()
    assert [file.name for file in copy.parent.iterdir()] == ["run.buoy"]
