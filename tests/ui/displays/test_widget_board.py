"""The board as widgets, through a real kernel."""

from __future__ import annotations

import pytest

from tests.support.kernel import Notebook

ASKS = """
import ipywidgets, nbtrain
from nbtrain.ui.displays import widget_board

make = ipywidgets.VBox

def asking(*args, **kwargs):  # as the thread of another run's board does, at a bad moment
    widget_board.listening_ids()
    return make(*args, **kwargs)

ipywidgets.VBox = asking
"""


@pytest.mark.timeout(120)
def test_a_board_that_is_being_made_is_no_trouble_to_another(notebook: Notebook) -> None:
    """'NoneType' object has no attribute 'model_id', in one of two background runs."""
    notebook.run(ASKS)
    notebook.run("run = nbtrain.launch(int, num_processes=1, view='none')")
    notebook.run("display = widget_board.WidgetDisplay(lambda ids: True, print, print)")
    out = notebook.run("display.update(run.state, run.state.created + 1)")
    assert not out.ename, out.traceback
    assert notebook.value("len(widget_board.listening_ids()) > 5")
    notebook.run("display.finish(run.state, run.state.created + 2)")
    assert notebook.value("widget_board.listening_ids()") == set()
