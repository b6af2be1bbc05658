"""Reloads modules in live ranks that the notebook has reloaded, and follows its `sys.path`.

``importlib.reload`` and IPython's ``%autoreload`` change a module only in the kernel. Its functions
are sent by name, so live ranks would always run their old code.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

from ...system.source_files import is_library

_AUTORELOAD = "IPython.extensions.autoreload"


class _Mark(NamedTuple):
    """A module at one moment: its loading, and its file."""

    spec: Any
    """What the module was loaded by. `importlib.reload` makes a new one."""
    stat: tuple[int, int]
    """When the file that it was loaded from was written, and its size."""


class ReloadedModules:
    """Finds the user's modules that were reloaded since a rank was notified."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._libraries: set[str] = set()
        self._marks: dict[str, _Mark] = {}
        self._sources: dict[int, dict[str, str]] = {rank: {} for rank in ranks}
        self._look()

    def take(self, rank: int) -> dict[str, str]:
        """Return what a rank must reload, once: the sources by the names of modules.

        Empty if nothing was reloaded since the last call for this rank.
        """
        for name, source in self._look().items():
            for waiting in self._sources.values():
                waiting[name] = source
        taken, self._sources[rank] = self._sources[rank], {}
        return taken

    def _look(self) -> dict[str, str]:
        """Return the sources of the user's modules that were reloaded since the last call."""
        found = {}
        for name, module in list(sys.modules.items()):
            if name in self._libraries:
                continue
            file = vars(module).get("__file__") if type(module) is ModuleType else None
            if type(file) is not str or is_library(file) or name == "__main__":
                self._libraries.add(name)
                continue
            mark, known = _mark(module, file), self._marks.get(name)
            if known is not None and _is_reloaded(mark, known):
                linecache.checkcache(file)
                source = "".join(linecache.getlines(file))
                try:
                    compile(source, file, "exec")
                except SyntaxError:  # it is being edited: check again later
                    continue
                found[name] = source
            elif known is not None:  # a file may be written long before it is loaded
                mark = mark._replace(stat=known.stat)
            self._marks[name] = mark
        return found


def import_path() -> list[str]:
    """Return the entries of `sys.path` that Python uses, independent of the working folder."""
    return [each and os.path.abspath(each) for each in sys.path if isinstance(each, str)]


def extend_path(entries: Iterable[str]) -> None:
    """Add the entries of another process's `sys.path` that this one lacks, in their order.

    A new entry is put behind the one that it follows there. Entries of this process stay.
    """
    position = 0
    for entry in entries:
        if entry in sys.path:
            position = sys.path.index(entry) + 1
        else:
            sys.path.insert(position, entry)
            position += 1


def _mark(module: ModuleType, file: str) -> _Mark:
    """Return what a module is now."""
    stat = (0, 0)
    with contextlib.suppress(OSError):  # it was deleted
        facts = os.stat(file)
        stat = (facts.st_mtime_ns, facts.st_size)
    return _Mark(vars(module).get("__spec__"), stat)


def _is_reloaded(mark: _Mark, known: _Mark) -> bool:
    """Whether a module was loaded again from a file that has changed.

    ``%autoreload`` (IPython 9) changes a module in place, before the cell. Then a changed file is
    enough.
    """
    is_new = mark.spec is not known.spec or _AUTORELOAD in sys.modules
    return is_new and mark.stat != known.stat


def reload_modules(sources: dict[str, str]) -> None:
    """Run new sources in the modules of this process, and update the objects of the old code.

    Each module that has run is removed from `sources`, and so is one that this process has not
    imported. What a module raises is raised: it and those after it stay. Variables of a module
    stay. The updates need IPython's ``%autoreload``.
    """
    if not sources:
        return
    superreload = _superreload()
    for name, source in list(sources.items()):
        module = sys.modules.get(name)
        if module is None:
            del sources[name]
            continue
        before = dict(vars(module))
        code = compile(source, str(module.__file__), "exec")

        def run(module: ModuleType, before: Any = before, code: Any = code) -> ModuleType:
            vars(module).update(before)
            exec(code, vars(module))
            return module

        lines = source.splitlines(keepends=True)
        linecache.cache[str(module.__file__)] = len(source), None, lines, str(module.__file__)
        superreload(module, run, _old_objects)
        del sources[name]


def _superreload() -> Any:
    """Return IPython's function that reloads a module; without it, only the module changes.

    IPython 7's cannot be imported on Python 3.12: it needs the module `imp`.
    """
    try:
        from IPython.extensions import autoreload
    except ImportError:
        return lambda module, reload, _old: reload(module)
    return autoreload.superreload  # type: ignore[attr-defined, unused-ignore]


_old_objects: dict[Any, Any] = {}
"""Weak references to what modules were made of before, as ``%autoreload`` keeps them."""
