"""Errors that IPython shows in a task, and does not raise: they end the rank, as any other does.

``%run script.py``, ``%%capture`` and ``get_ipython().run_cell(…)`` print the traceback of the code
that they run, and return. In a notebook, its reader sees that; a rank would end as a success.
"""

from __future__ import annotations

import sys
from typing import Any

from ...system.instrumentation import patch

_SHELL = "IPython.core.interactiveshell:InteractiveShell"


def install() -> None:
    """Raise in this process what IPython would show, until the patches' scope ends."""
    for name in ("showtraceback", "showsyntaxerror"):
        patch(_SHELL, name, _raise)
    patch(_SHELL, "run_cell", _run_cell)


def _raise(original: Any, shell: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise the error if IPython itself would show it; if the user's code calls this, show it."""
    error = sys.exc_info()[1]
    caller = sys._getframe(2).f_globals.get("__name__") or ""
    if error is not None and caller.startswith("IPython."):
        raise error
    return original(shell, *args, **kwargs)  # the user's own code shows what it has caught


def _run_cell(original: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)  # it catches everything, also what `_raise` raises
    result.raise_error()
    return result
