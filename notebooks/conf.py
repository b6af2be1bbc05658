"""How Sphinx makes the site: ``python -m sphinx -W notebooks artifacts/site``."""

from __future__ import annotations

import nbtrain

project = "nbtrain"
author = "nbtrain contributors"
copyright = author
version = release = nbtrain.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["conf.py"]
nb_execution_mode = "off"  # outputs are those that are kept with the notebooks
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# The output of a run is text and HTML: a page shows the board.
nb_mime_priority_overrides = [("html", "text/html", 0)]

smartquotes = False  # a quoted value is one to copy, and `--` is the beginning of an option

html_theme = "furo"
html_title = "nbtrain"
html_copy_source = False
html_extra_path = ["llms.txt"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
