"""Doing something to a module when it is imported, without importing it."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def when_imported(name: str, action: Callable[[ModuleType], object]) -> Callable[[], None]:
    """Run `action` on a module: now if it is imported, else right after it is.

    Returns a function that takes the wish back, as long as it has not come true.
    """
    if name in sys.modules:
        action(sys.modules[name])
        return lambda: None
    finder = _AfterImport(name, action)
    sys.meta_path.insert(0, finder)

    def cancel() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    return cancel


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module by the other finders, and runs an action once it is loaded."""

    def __init__(self, name: str, action: Callable[[ModuleType], object]) -> None:
        self._name, self._action = name, action
        self._asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            # Not when the spec is asked for: who asks may not import at all.
            def exec_module(module: ModuleType) -> None:
                execute(module)
                with contextlib.suppress(ValueError):  # taken back meanwhile, or by another thread
                    sys.meta_path.remove(self)
                    self._action(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
