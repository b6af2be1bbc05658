"""Finds out whether a source file belongs to the user, a package, Python or nbtrain."""

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
"""The folder of nbtrain."""

RANK_BODY = (str(PACKAGE / "worker" / "main.py"), str(PACKAGE / "worker" / "task_runner.py"))
"""The files that call the user's task: the frames that called them belong to the launcher."""

_OWN = str(PACKAGE) + os.sep
_CALL = re.compile(r'  File "([^"]+)", line \d+ in ')
_LIBRARIES = tuple(
    {
        sysconfig.get_path(name) + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if sysconfig.get_path(name)
    }
)
# A stack may come from another host or another Python with other folders.
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+t?/|^<frozen ")


def is_own(filename: str) -> bool:
    """Whether a source file belongs to nbtrain."""
    return filename.startswith(_OWN)


def is_library(filename: str) -> bool:
    """Whether a source file belongs to an installed package, to Python or to nbtrain.

    A name like ``<string>`` counts as the user's, because `exec` in a cell has one.
    """
    normal = filename.replace(os.sep, "/")
    return (
        _INSTALLED.search(normal) is not None or filename.startswith(_LIBRARIES) or is_own(filename)
    )


def strip_launcher_frames(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines of output without nbtrain's frames in stacks of `faulthandler`.

    After the user's task, such a stack lists the launcher, and in a forked rank the kernel.
    """
    is_below = False
    for line in lines:
        call = _CALL.match(line)
        is_below = call is not None and (is_below or call[1] in RANK_BODY)
        if not is_below and not (call is not None and is_own(call[1])):
            yield line


_cell_names: Callable[[], Mapping[str, str]] = dict


def use_cell_names(names: Callable[[], Mapping[str, str]]) -> None:
    """Make `cell_name` use these names by files, in a process without the notebook's cells."""
    global _cell_names  # a process shows the cells of one notebook
    _cell_names = names


def cell_name(filename: str) -> str | None:
    """Return ``In[3]`` for the file name of a cell."""
    number = cell_numbers().get(filename)
    return _cell_names().get(filename) if number is None else f"In[{number}]"


def short_name(filename: str) -> str:
    """Return a cell's name, or a file's name without its folder."""
    return cell_name(filename) or os.path.basename(filename)


def cell_numbers() -> Mapping[str, int]:
    """Return the numbers of cells by their file names, from IPython 8 and 9."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    numbers: Mapping[str, int] = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return numbers


def source_line(filename: str, line: int) -> str:
    """Return a source line of a file or a cell, shortened for a message."""
    return shorten(linecache.getline(filename, line).strip(), 80)
