"""What a recorded run looks like as an SQLite file, to the letter.

A file is only read if its schema is this, word for word: views, triggers and columns
that compute something cannot hide in a file from elsewhere.
"""

__all__ = ["APPLICATION", "MAGIC", "TABLES", "VERSION"]

MAGIC = b"SQLite format 3\0"  # how every such file begins
APPLICATION = 0x42554F59  # "BUOY", in the file's header
VERSION = 1

TABLES = {
    "meta": """\
CREATE TABLE meta (
  key TEXT PRIMARY KEY,
  value TEXT NOT NULL  -- JSON
) WITHOUT ROWID""",
    "steps": """\
CREATE TABLE steps (
  step INTEGER PRIMARY KEY,
  time REAL NOT NULL,      -- seconds since 1970
  scale REAL NOT NULL,
  applied INTEGER NOT NULL,
  verdict TEXT,            -- why it was skipped
  norm REAL,               -- unscaled; 'nan' where it is none
  amax REAL,               -- unscaled
  headroom REAL,           -- bits between the largest scaled gradient and the maximum
  loss REAL                -- unscaled
)""",
    "offenders": """\
CREATE TABLE offenders (
  step INTEGER NOT NULL,
  tensor INTEGER NOT NULL,
  PRIMARY KEY (step, tensor)
) WITHOUT ROWID""",
    "tensors": """\
CREATE TABLE tensors (
  tensor INTEGER PRIMARY KEY,
  name TEXT NOT NULL,
  size INTEGER NOT NULL,   -- elements
  kind TEXT NOT NULL       -- weight or activation
)""",
    "histograms": """\
CREATE TABLE histograms (
  step INTEGER PRIMARY KEY,
  scale REAL NOT NULL,
  packed BLOB NOT NULL     -- of the scaled gradients; see buoy/trace/counts.py
)""",
}
