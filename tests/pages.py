"""Code of the documentation's pages, for tests of what its recipes do."""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def recipe(page: str, name: str) -> dict[str, Any]:
    """Run the block of a page that defines a function; return all that it defines."""
    blocks = BLOCK.findall((DOCS / page).read_text())
    (found,) = [block for block in blocks if f"def {name}(" in block]
    namespace: dict[str, Any] = {}
    exec(found, namespace)  # noqa: S102 - our own
    return namespace
