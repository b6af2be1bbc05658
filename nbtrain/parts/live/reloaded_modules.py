"""Reloads modules in live ranks that the notebook has reloaded.

``importlib.reload`` and IPython's ``%autoreload`` change a module only in the kernel. Its functions
are sent by name, so live ranks would always run their old code.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from ...planning.task_values import is_class, module_of
from ...system.source_files import is_library


class _Mark(NamedTuple):
    """A module at one moment: its loading, the code of its functions, and its file."""

    spec: Any
    codes: list[Any]
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
        """Return what a rank must reload: the sources by the names of modules."""
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


def _mark(module: ModuleType, file: str) -> _Mark:
    """Return what a module is now.

    `importlib.reload` gives it a new specification. ``%autoreload`` (IPython 9) may change only the
    code of functions, in place. Functions that it got later, as by an import in a function, are
    not of its source.
    """
    values = list(vars(module).values())
    # Without calling `__class__` of a proxy.
    for cls in [value for value in values if is_class(value)]:
        values += vars(cls).values() if module_of(cls) == module.__name__ else ()
    functions = [value for value in values if type(value) is FunctionType]
    own = [f for f in functions if f.__module__ == module.__name__]
    stat = (0, 0)
    with contextlib.suppress(OSError):  # it was deleted
        stat = (os.stat(file).st_mtime_ns, os.stat(file).st_size)
    return _Mark(
        vars(module).get("__spec__"),
        [f.__code__ for f in own if "<locals>" not in f.__qualname__],
        stat,
    )


def _is_reloaded(mark: _Mark, known: _Mark) -> bool:
    """Whether a module has new code from a file that has changed.

    A function that was replaced in memory is no reason to reset the module's variables.
    """
    before = set(map(id, known.codes))
    is_new = mark.spec is not known.spec or any(id(code) not in before for code in mark.codes)
    return is_new and mark.stat != known.stat


def reload_modules(sources: dict[str, str]) -> None:
    """Run sources in their modules, where this process has them, and change what came of the old.

    What was run is taken out of `sources`; what raises stays there, for the next time. A module's
    variables stay, as by `importlib.reload`.

    Functions, classes and instances that others have already imported change, too, by the means of
    ``%autoreload``. The source comes with the message: a rank on another host may lack the file.
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
