"""Sphinx builds the site from the pages beside this file: `make docs`."""

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
