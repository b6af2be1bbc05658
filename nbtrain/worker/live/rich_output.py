"""Figures, tables and other rich displays of a live rank, on their way to the notebook."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from ...planning.plan import Cell, Task
from ...system.instrumentation import replace
from ...system.text import format_bytes
from ...tracking import clock
from ...tracking import events as ev
from ...transport import result_pickler
from .. import api
from ..task_runner import run_task

LARGEST = 900_000
"""Bytes of one display that are sent; of a larger one, only its text."""

MOST = 50
"""Displays of one task and rank that are sent."""

LIGHT = 1 << 20
"""Bytes up to which the value of a cell's last expression is sent beside what it looks like."""

_KINDS = ("text/html", "image/png", "image/svg+xml", "image/jpeg", "text/latex", "text/markdown")


class RichOutput:
    """Sends what a task of this process displays. Made anew for each task, within its scope."""

    def __init__(self) -> None:
        self._count = 0

    def install(self) -> None:
        """Have ``display(x)``, ``plt.show()`` and the like send what they show."""
        shell = _shell()
        if shell is not None:
            replace(shell.display_pub, "publish", self._publish)

    def run(self, task: Task) -> Any:
        """Run a task; the value of a cell's last expression is displayed, and returned if light."""
        value = run_task(task)
        if isinstance(task, Cell) and value is not None:
            self._show(value)
            value = _light(value) if task.function is None else value
        with contextlib.suppress(Exception):  # figures that were drawn and not shown
            sys.modules["matplotlib_inline.backend_inline"].flush_figures()
        return value

    def _show(self, value: Any) -> None:
        """Display a value as a cell shows its last one."""
        shell = _shell()
        data = None
        with contextlib.suppress(Exception):  # a repr of the user's own
            if shell is not None:
                data = shell.display_formatter.format(value)[0]
            else:
                from IPython.core import formatters

                formatter: Any = formatters.DisplayFormatter()
                data = formatter.format(value)[0]
        self._publish(data or {"text/plain": repr(value)})

    def _publish(self, data: Any = None, *_args: Any, **_kwargs: Any) -> None:
        reporter = api.active
        if reporter is None or not isinstance(data, dict) or self._count > MOST:
            return
        self._count += 1
        bundle = {k: v for k, v in data.items() if k in (*_KINDS, "text/plain") and type(v) is str}
        if self._count > MOST:
            bundle = {"text/plain": f"… more than {MOST} displays: the rest is not shown"}
        size = sum(map(len, bundle.values()))
        if size > LARGEST:
            text = bundle.get("text/plain", "")[: LARGEST // 2]
            bundle = {"text/plain": f"{text} ({format_bytes(size)} are too much to display)"}
        if bundle:
            reporter.writer.write(ev.Displayed(clock.now(), reporter.rank, bundle))


def _light(value: Any) -> Any:
    """Return a value that is small enough to be sent, else None."""
    try:
        result_pickler.dumps(value, limit=LIGHT)
    except Exception:  # too large, or any reducer of any class
        return None
    return value


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
