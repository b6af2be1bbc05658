"""Finds out whose a source file is: the user's, a package's, Python's or nbtrain's."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from .text import shorten

PACKAGE = Path(__file__).parents[1]
"""The folder of nbtrain itself."""

RANK_BODY = (str(PACKAGE / "worker" / "main.py"), str(PACKAGE / "worker" / "task_runner.py"))
"""The files that call the user's task: what is above them in a stack is the launcher's."""

_OWN = str(PACKAGE) + os.sep
_CALL = re.compile(r'  File "([^"]+)", line \d+ in ')
_LIBRARIES = tuple(
    {
        sysconfig.get_path(name) + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if sysconfig.get_path(name)
    }
)
# A stack may be of another host or another Python, whose folders this one does not know.
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+t?/|^<frozen ")


def is_own(filename: str) -> bool:
    """Whether a source file is one of nbtrain."""
    return filename.startswith(_OWN)


def is_library(filename: str) -> bool:
    """Whether a source file is one of an installed package, of Python or of nbtrain.

    A name like ``<string>`` counts as the user's: code that a cell gave to `exec` has one.
    """
    normal = filename.replace(os.sep, "/")
    return (
        _INSTALLED.search(normal) is not None or filename.startswith(_LIBRARIES) or is_own(filename)
    )


def without_launcher(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines of output without nbtrain's calls in the stacks that `faulthandler` lists.

    Below the call of the user's task are those of the launcher, and in a forked rank the kernel's.
    """
    is_below = False
    for line in lines:
        call = _CALL.match(line)
        is_below = call is not None and (is_below or call[1] in RANK_BODY)
        if not is_below and not (call is not None and is_own(call[1])):
            yield line


_recorded: Callable[[], Mapping[str, str]] = dict


def use_recorded_cells(names: Callable[[], Mapping[str, str]]) -> None:
    """Have `cell_name` ask for names by files: this process may lack the notebook's cells."""
    global _recorded
    _recorded = names


def cell_name(filename: str) -> str | None:
    """Return ``In[3]`` for the file name of a cell."""
    number = cell_numbers().get(filename)
    return _recorded().get(filename) if number is None else f"In[{number}]"


def short_name(filename: str) -> str:
    """Return a cell's name, or the last part of a file's."""
    return cell_name(filename) or os.path.basename(filename)


def cell_numbers() -> Mapping[str, int]:
    """Return the numbers of cells by the names of their files, as IPython 8 and 9 keep them."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    numbers: Mapping[str, int] = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return numbers


def source_line(filename: str, line: int) -> str:
    """Return a line of a source, a cell's too, as it is shown in a message."""
    return shorten(linecache.getline(filename, line).strip(), 80)
