"""Spyder and qtconsole: Spyder's own kernel, and cells as both send them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.kernel import Notebook

CELL = "%%distributed -n 2\nprint('ready', flush=True)\nnbtrain.rank()"
HOW = "pip install -r tests/requirements/hosts.txt"


@pytest.mark.host(
    "Spyder",
    works="lines while it runs, then the summary, as text",
    tried="its real kernel (spyder-kernels)",
)
@pytest.mark.skipif(find_spec("spyder_kernels") is None, reason=f"needs spyder-kernels: {HOW}")
def test_spyder_shows_lines_and_the_summary(tmp_path: Path, run_root: Path) -> None:
    kernel = Notebook(run_root, tmp_path, launcher="spyder_kernels.console")
    kernel.metadata = {}
    try:
        kernel.run("%load_ext nbtrain\nimport nbtrain, time, torch")
        out = kernel.run(CELL)
        failed = kernel.run("%%distributed -n 2\n1 / nbtrain.rank()")
        stopped = kernel.run(
            "%%distributed -n 2\nprint('ready', flush=True)\ntime.sleep(60)", interrupt_on="ready"
        )
        after = kernel.value("nbtrain.last_run().state.status")
    finally:
        kernel.close()
    assert out.ename == "", out.traceback
    assert not out.displays
    assert "[ranks 0–1] ready" in out.stdout
    assert "succeeded" in out.stdout
    assert failed.ename == "ZeroDivisionError"
    assert stopped.ename == "KeyboardInterrupt"
    assert after == "interrupted"


QTCONSOLE = """
import sys, time
try:
    from qtpy.QtCore import QTimer
    from qtpy.QtWidgets import QApplication
except ImportError as error:
    sys.exit(f"no Qt here: {error}")
from qtconsole.manager import QtKernelManager
from qtconsole.rich_jupyter_widget import RichJupyterWidget

app = QApplication(sys.argv[:1])
manager = QtKernelManager(kernel_name="python3")
manager.start_kernel(extra_arguments=["--HistoryManager.enabled=False"])
client = manager.client()
client.start_channels()
widget = RichJupyterWidget()
widget.kernel_manager, widget.kernel_client = manager, client
cells = ["%load_ext nbtrain\\nimport nbtrain, torch", sys.argv[1]]
prompt, deadline = 1, time.monotonic() + 100

def look():
    global prompt
    text = widget._control.toPlainText()
    if f"In [{prompt}]:" in text and cells:
        prompt += 1
        widget.execute(cells.pop(0))
    elif f"In [{prompt}]:" in text or time.monotonic() > deadline:
        print(text, flush=True)
        timer.stop()
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        app.quit()

timer = QTimer()
timer.timeout.connect(look)
timer.start(50)
(getattr(app, "exec", None) or app.exec_)()
"""


@pytest.mark.host(
    "qtconsole",
    works="lines while it runs, then the summary, as text",
    tried="the real program, without a screen",
)
@pytest.mark.skipif(find_spec("qtconsole") is None, reason=f"needs qtconsole: {HOW}")
def test_qtconsole_shows_lines_and_the_summary(tmp_path: Path) -> None:
    variables = {"QT_QPA_PLATFORM": "offscreen", "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", QTCONSOLE, CELL],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )
    if "no Qt here" in done.stderr:
        pytest.skip(done.stderr)
    assert "[ranks 0–1] ready" in done.stdout, done.stderr
    assert "succeeded" in done.stdout
    assert "rank 0: starting" not in done.stdout
