"""Quantisation tools that `make test-qat` installs; left out where they are absent."""

import importlib.util

_TOOLS = ("modelopt", "torchao")

collect_ignore_glob = [] if all(map(importlib.util.find_spec, _TOOLS)) else ["*.py"]
