"""How Sphinx makes the site: ``python -m sphinx -W notebooks artifacts/site``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import nbformat
from ipython_pygments_lexers import IPython3Lexer
from pygments.lexer import bygroups, using
from pygments.lexers import Python3Lexer
from pygments.token import Keyword, Operator, Text

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
nb_render_markdown_format = "myst"  # for tables that a cell displays
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
html_js_files = ["site.js"]
html_theme_options = {"navigation_with_keys": True}


class CellLexer(IPython3Lexer):
    """Colours a cell below nbtrain's magics as Python, as IPython's lexer does below its own."""

    below = bygroups(Text, Operator, Keyword, Text, using(Python3Lexer))
    tokens = {  # noqa: RUF012
        **IPython3Lexer.tokens,
        "root": [
            (r"(?s)(\s*)(%%)(distributed|rank|nbtrain)([^\n]*\n)(.*)", below),
            *IPython3Lexer.tokens["root"],
        ],
    }


def setup(app: Any) -> None:
    """Write the text of all pages into one file, for language models, and copy notebooks."""
    app.add_lexer("ipython3", CellLexer)
    app.connect("build-finished", _write_full_text)
    app.connect("build-finished", _copy_notebooks)


def _copy_notebooks(app: Any, error: Exception | None) -> None:
    """Put the notebooks that are run elsewhere beside their pages, which link to them."""
    if error is None:
        for name in ("kaggle.ipynb", "colab.ipynb"):
            shutil.copy(Path(app.srcdir) / name, app.outdir)


def _write_full_text(app: Any, error: Exception | None) -> None:
    if error is None:
        names = ["index", *(n for toc in app.env.toctree_includes.values() for n in toc)]
        texts = [_text(Path(app.env.doc2path(name))) for name in names]
        (Path(app.outdir) / "llms-full.txt").write_text("\n\n".join(texts))


def _text(page: Path) -> str:
    """Return the text of a page; of a notebook, without outputs."""
    if page.suffix != ".ipynb":
        return page.read_text()
    cells = nbformat.read(page, as_version=4).cells
    sources = [
        c.source if c.cell_type == "markdown" else f"```python\n{c.source}\n```" for c in cells
    ]
    return "\n\n".join(sources)
