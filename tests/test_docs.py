"""The documents tell the truth: every Python block in them runs as it stands.

An `output` block after a Python block holds what that prints; `...` stands for text
that is left out.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"^```python\n(.*?)^```$(?:\n+(?:[^`\n]+\n+)?```output\n(.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
IMPORTED = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCKS = {  # the same block on two pages is run once
    shown: f"{path.relative_to(ROOT).with_suffix('')}-{index}"
    for path in PAGES
    for index, shown in enumerate(BLOCK.findall(path.read_text()))
}


@pytest.mark.slow
@pytest.mark.parametrize(("block", "output"), BLOCKS, ids=BLOCKS.values())
def test_examples_in_the_documents_run(block, output, tmp_path):
    """Typed literally into a fresh interpreter, an example prints what is shown."""
    for name in IMPORTED.findall(block):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", block],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )

    assert 0 == done.returncode, done.stderr
    printed = " ".join(f"{done.stdout} {done.stderr}".split())
    for part in output.split("..."):
        assert " ".join(part.split()) in printed


def test_every_output_block_belongs_to_an_example():
    """None is left unchecked because of what stands between the two."""
    for path in PAGES:
        text = path.read_text()
        shown = sum(1 for _, output in BLOCK.findall(text) if output)
        assert text.count("```output") == shown, path
