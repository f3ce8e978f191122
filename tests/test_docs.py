"""The documents tell the truth: every Python block in them runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)
BLOCKS = {  # the same block on two pages is run once
    block: f"{path.relative_to(ROOT).with_suffix('')}-{index}"
    for path in PAGES
    if path.name != "CONTRIBUTING.md"  # its blocks are excerpts
    for index, block in enumerate(BLOCK.findall(path.read_text()))
}


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=BLOCKS.values())
def test_examples_in_the_documents_run(block, tmp_path):
    """Typed literally into a fresh interpreter, an example does not fail."""
    if "torch" in block:
        pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", block],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )

    assert 0 == done.returncode, done.stderr


def test_links_between_the_documents_lead_somewhere():
    """No document points at a file that is not there."""
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), (path.name, target)
