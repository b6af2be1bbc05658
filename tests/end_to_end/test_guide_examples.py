"""The examples of the guides, as a reader runs them: what a page shows is what is printed."""

from __future__ import annotations

import re

import pytest

from tests.support.kernel import Notebook
from tests.support.paths import NOTEBOOKS

BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.S | re.M)
RUNS = re.compile(r'run\.compare\("#\d+"\)')
"""Names a run of the reader's."""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("page", ["how-it-works", "results"])
def test_a_guide_prints_what_it_shows(notebook: Notebook, page: str) -> None:
    printed = ""
    for language, text in BLOCK.findall((NOTEBOOKS / f"guides/{page}.md").read_text()):
        if language == "python":
            out = notebook.run(RUNS.sub("None", text), timeout=120)
            printed += f"{out.stdout}\n{out.ename}: {out.evalue}\n{out.traceback}"
            assert out.ename == ""
        elif language == "":
            shown, seen = (re.sub(r"In\[\d+\]|\s+", " ", t).split() for t in (text, printed))
            assert " ".join(shown) in " ".join(seen)
