"""Loads modules anew in live ranks that the notebook has loaded anew.

``importlib.reload`` and IPython's ``%autoreload`` change a module in the kernel alone. Its
functions are sent by name, so live ranks would go on with their old code, for ever.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from ...system.source_files import is_library


class ReloadedModules:
    """Finds the user's modules that were loaded anew since a rank has heard of it."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._libraries: set[str] = set()
        self._marks = self._all_marks()
        self._sources: dict[int, dict[str, str]] = {rank: {} for rank in ranks}

    def take(self, rank: int) -> dict[str, str]:
        """Return what a rank is to load anew: sources by the names of modules."""
        marks = self._all_marks()
        for name, mark in marks.items():
            known = self._marks.get(name)
            if known is not None and not _are_same(mark, known):
                file = sys.modules[name].__file__ or ""
                linecache.checkcache(file)
                source = "".join(linecache.getlines(file))
                for waiting in self._sources.values():
                    waiting[name] = source
        self._marks = marks
        taken, self._sources[rank] = self._sources[rank], {}
        return taken

    def _all_marks(self) -> dict[str, list[Any]]:
        marks = {}
        for name, module in list(sys.modules.items()):
            if name not in self._libraries:
                file = vars(module).get("__file__") if type(module) is ModuleType else None
                if type(file) is str and not is_library(file) and name != "__main__":
                    marks[name] = _mark(module)
                else:
                    self._libraries.add(name)
        return marks


def _mark(module: ModuleType) -> list[Any]:
    """Return what a module is made of: its loading, and the code of its functions and methods.

    `importlib.reload` gives it a new specification. ``%autoreload`` (IPython 9) may change only the
    code of functions, in place. Functions that it got later, as by an import in a function, are
    not of its source: to load it anew for them would reset its variables.
    """
    values = list(vars(module).values())
    for cls in [value for value in values if isinstance(value, type)]:
        values += vars(cls).values() if cls.__module__ == module.__name__ else ()
    functions = [value for value in values if type(value) is FunctionType]
    own = [
        f for f in functions if f.__module__ == module.__name__ and "<locals>" not in f.__qualname__
    ]
    return [module.__spec__, *(function.__code__ for function in own)]


def _are_same(mark: list[Any], known: list[Any]) -> bool:
    return len(mark) == len(known) and all(a is b for a, b in zip(mark, known, strict=True))


def reload_modules(sources: Mapping[str, str]) -> None:
    """Run sources in their modules, where this process has them, and change what came of the old.

    Functions, classes and instances that others have already imported change, too, by the means of
    ``%autoreload``. The source comes with the message: a rank on another host may lack the file.
    """
    from IPython.extensions import autoreload

    superreload: Any = autoreload.superreload

    for name, source in sources.items():
        module = sys.modules.get(name)
        if module is None:
            continue
        before = {key: value for key, value in vars(module).items() if key.startswith("__")}
        code = compile(source, str(module.__file__), "exec")

        def run(module: ModuleType, before: Any = before, code: Any = code) -> ModuleType:
            vars(module).update(before)
            exec(code, vars(module))
            return module

        lines = source.splitlines(keepends=True)
        linecache.cache[str(module.__file__)] = len(source), None, lines, str(module.__file__)
        superreload(module, run, _old_objects)


_old_objects: dict[Any, Any] = {}
"""Weak references to what modules were made of before, as ``%autoreload`` keeps them."""
