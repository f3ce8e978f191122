"""The tables of docs/guides/large-jobs.md are what the benchmark prints."""

from pathlib import Path

from benchmarks import scale_out

ROOT = Path(__file__).parents[3]


def test_the_documents_tables_are_printed(capsys, monkeypatch):
    """Line by line; of the simulation those of one rank and of 10,000."""
    monkeypatch.setattr(scale_out, "RANKS", [1, 10_000])
    scale_out.print_cost()
    scale_out.print_skips()
    written = (ROOT / "docs/guides/large-jobs.md").read_text().splitlines()

    for line in capsys.readouterr().out.splitlines():
        assert line in written
