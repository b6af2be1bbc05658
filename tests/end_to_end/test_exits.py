"""Where a rank left its process, in the words of the exception that the notebook raises."""

from __future__ import annotations

import sys

import pytest

from nbtrain.errors import RankDied
from tests.support.cells import the_last_run
from tests.support.kernel import Notebook
from tests.support.runs import launch


def leaves_by_a_library() -> None:
    sys.exit("these words")


def test_words_are_kept() -> None:
    with pytest.raises(RankDied, match=r"sys.exit\('these words'\) at test_exits.py, line \d+"):
        launch(leaves_by_a_library, n=1)
    run = the_last_run()
    assert run.logs(0) == "these words"


@pytest.mark.part("live")
def test_the_cell_of_an_exit_is_named_where_the_rank_does_not_have_it(notebook: Notebook) -> None:
    notebook.run("import sys\ndef leaves():\n    sys.exit(3)")
    number = notebook.value("len(In) - 2")
    out = notebook.run("nbtrain.launch(leaves, num_processes=1, engine='spawn')")
    if notebook.value("hasattr(get_ipython().compile, '_filename_map')"):  # not IPython 7
        assert f"(sys.exit(3) at In[{number}], line 3)" in out.evalue
    assert not notebook.run("%nbtrain start -n 1").ename
    try:
        out = notebook.run("%%distributed\nimport sys\nsys.exit(4)")
        number = notebook.value("len(In) - 2")
        assert out.evalue == f"sys.exit(4) at In[{number}], line 3, which does not end live ranks"
    finally:
        notebook.run("%nbtrain stop")
