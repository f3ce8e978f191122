"""Sphinx builds the site from the pages in this folder: `make docs`."""

import re
from types import SimpleNamespace

from sphinx.ext.autodoc.mock import mock

from buoy import __version__

# These are large, and the reference needs only our docstrings.
with mock(["keras", "tensorflow", "lightning"]):
    import keras
    import tensorflow as tf

    keras.saving = SimpleNamespace(
        register_keras_serializable=lambda **_: lambda decorated: decorated
    )
    tf.autograph = SimpleNamespace(
        experimental=SimpleNamespace(do_not_convert=lambda decorated: decorated)
    )
    import buoy.integrations.lightning
    import buoy.keras
    import buoy.tensorflow  # noqa: F401

project = "Buoy"
author = "The Buoy authors"
project_copyright = "The Buoy authors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_design",
]
html_theme = "furo"
html_title = f"Buoy {__version__}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
exclude_patterns = ["_build"]
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
default_role = "code"  # `name` in a docstring is code, as in Markdown

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
pygments_style = "tango"  # colours added and removed lines of a diff
pygments_dark_style = "monokai"

# Called by other parts of Buoy, not by users.
INTERNAL = {
    "GradScaler": {"join_hook"},
    "Installation": {"apply", "arguments", "replaces"},
    "LastStep": {
        "find_offenders", "has_unscaled", "is_unchanged", "judged", "multiplied_by",
        "skip_with_others",
    },
    "MasterWeights": {"swapped", "widen"},
    "Recorder": {"attach", "complain"},
}  # fmt: skip


def leave_out(_app, _kind, name, member, skip, _options):  # noqa: ANN001, ANN201
    """Leave out internal methods, and the fields of tuples, which have no text."""
    owner, _, method = getattr(member, "__qualname__", name).rpartition(".")
    alias = str(getattr(member, "__doc__", "")).startswith("Alias for field number")
    return True if alias or method in INTERNAL.get(owner, ()) else skip


def link_pages(_app, _kind, _name, _member, _options, lines):  # noqa: ANN001, ANN201
    """Turn `docs/guides/retry.md` in a docstring into a link to that page."""
    lines[:] = [re.sub(r"docs/([\w/-]+)\.md", r":doc:`/\1`", line) for line in lines]


def setup(app):  # noqa: ANN001, ANN201
    """Connect these functions; Sphinx calls this."""
    app.connect("autodoc-skip-member", leave_out)
    app.connect("autodoc-process-docstring", link_pages)
