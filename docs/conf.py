"""Sphinx builds the site from the pages beside this file: `make docs`."""

from buoy import __version__

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
