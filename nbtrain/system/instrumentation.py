"""Patches functions of other libraries, and acts when a module is imported.

Every patch of nbtrain is made here, so that `patches` can list them (`%nbtrain doctor` shows them)
and each can be undone. An owner may be named before it is imported: ``"torch:Tensor"`` is the class
`Tensor` of the module `torch`. Nothing here imports a library.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

Undo = Callable[[], None]
"""Undoes a patch, or cancels an action that has not run yet. A second call does nothing."""


_scopes: list[list[Undo]] = []
"""What to undo at the end of each `scope` that is open, the innermost last."""

_acting = threading.local()
"""`scopes`: instead of these, in a thread that acts after an import: see `when_imported`."""


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """Undo at the end what was patched, or is to happen after an import, since the beginning."""
    undos: list[Undo] = []
    _scopes.append(undos)
    try:
        yield
    finally:
        _scopes.remove(undos)
        for undo in reversed(undos):
            undo()


def undo_later(undo: Undo) -> None:
    """Have something else undone at the end of the `scope`; without one it stays."""
    for scope in _open_scopes()[-1:]:
        scope.append(undo)


def _open_scopes() -> list[list[Undo]]:
    found: list[list[Undo]] = getattr(_acting, "scopes", _scopes)
    return found


def patch(owner: Any, name: str, around: Callable[..., Any]) -> Undo:
    """Have calls of ``owner.name`` run ``around(original, *args, **kwargs)`` instead.

    `owner` is a module, a class, an object, or the name of one of the first two (see above). The
    arguments are those of the underlying function: a method's begin with `self`, a class method's
    with the class, and a property has `self` only. The same `around` on the same attribute counts
    once. An owner without the attribute is left alone: private names move between versions of a
    library, and no import may fail because of it.

    The detour takes about 200 ns for each call.
    """
    return _on(owner, name, around, _detour)


def replace(owner: Any, name: str, value: object) -> Undo:
    """Give ``owner.name`` another value."""
    return _on(owner, name, value, None)


class Patched(NamedTuple):
    """An attribute that is patched, and the module of nbtrain that did it."""

    owner: str
    name: str
    by: str


def patches() -> tuple[Patched, ...]:
    """Return what is patched in this process now, oldest first."""
    return tuple(Patched(_label(p.owner), p.name, p.by) for p in _patches if p.is_active)


_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def warn_where_users_call() -> None:
    """Let a warning about the caller of a patched function name the user's line, not the detour."""
    patch("warnings", "showwarning", _show_at_callers_line)


def _show_at_callers_line(
    original: Any, message: Any, category: Any, filename: str, lineno: int, *rest: Any, **named: Any
) -> None:
    path, line = filename, lineno
    frame = sys._getframe(2) if path.startswith(_PACKAGE) else None
    while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != (path, line):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame is not None:
        path, line = frame.f_code.co_filename, frame.f_lineno
    original(message, category, path, line, *rest, **named)


_Wrap = Callable[["_Patch", Any], Any]
"""Makes what replaces an original function, for a patch."""


def _detour(patched: _Patch, original: Any) -> Any:
    @functools.wraps(original)
    def detour(*args: Any, **kwargs: Any) -> Any:
        return patched.change(original, *args, **kwargs)

    return detour


def _call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


class _Patch:
    """An attribute that has another value."""

    def __init__(self, owner: Any, name: str, change: Any, by: str, wrap: _Wrap | None) -> None:
        self.owner, self.name, self.change, self.by = owner, name, change, by
        self.is_active = True
        self._before = _own(owner, name)
        self._value = change if wrap is None else self._wrapped(wrap)
        setattr(owner, name, self._value)

    def _wrapped(self, wrap: _Wrap) -> Any:
        if not isinstance(self.owner, type):  # a module may make its attributes when asked
            return wrap(self, getattr(self.owner, self.name))
        # As `inspect.getattr_static` does, which takes ten times as long.
        stored = next(
            (vars(c)[self.name] for c in self.owner.__mro__ if self.name in vars(c)), None
        )
        if isinstance(stored, (classmethod, staticmethod)):
            return type(stored)(wrap(self, stored.__func__))
        if isinstance(stored, property):
            return property(wrap(self, stored.fget), stored.fset, stored.fdel, stored.__doc__)
        return wrap(self, getattr(self.owner, self.name))

    def undo(self) -> None:
        """Take the patch off, or make it pass all calls on as long as another is on top of it."""
        if self.is_active:
            self.is_active, self.change = False, _call
            for patched in reversed(_patches.copy()):
                if not patched.is_active and _own(patched.owner, patched.name) is patched._value:
                    patched._restore()

    def _restore(self) -> None:
        _patches.remove(self)
        if self._before is _NOTHING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._before)


_NOTHING = object()
"""The value of an attribute that an owner only inherits."""

_patches: list[_Patch] = []


def _own(owner: Any, name: str) -> Any:
    return getattr(owner, "__dict__", {}).get(name, _NOTHING)


def _on(owner: Any, name: str, change: Any, wrap: _Wrap | None) -> Undo:
    """Patch an owner now, or when it is imported, for the module that asked for it."""
    by = str(sys._getframe(2).f_globals.get("__name__", "?"))
    if not isinstance(owner, str):
        return _make(owner, name, change, by, wrap)
    module_name, _, path = owner.partition(":")
    undos: list[Undo] = []

    def make(module: ModuleType) -> None:
        target = getattr(module, path, None) if path else module
        undos.append(_make(target, name, change, by, wrap))

    cancel = when_imported(module_name, make)

    def undo() -> None:
        cancel()
        for each in undos:
            each()

    return undo


def _make(owner: Any, name: str, change: Any, by: str, wrap: _Wrap | None) -> Undo:
    if owner is None or not hasattr(owner, name):
        return lambda: None
    for patched in _patches:
        same = patched.owner is owner and patched.name == name and patched.change == change
        if same and _own(owner, name) is patched._value:  # else the module was loaded again
            return patched.undo
    patched = _Patch(owner, name, change, by, wrap)
    _patches.append(patched)
    undo_later(patched.undo)
    return patched.undo


def _label(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    cls = owner if isinstance(owner, type) else type(owner)
    label = f"{cls.__module__}.{cls.__qualname__}"
    return label if owner is cls else f"{label}()"


def when_imported(name: str, action: Callable[[ModuleType], object]) -> Undo:
    """Run `action` on a module: now if it is imported, else right after its import.

    What it patches then is undone at the end of the scope in which this was asked for, and not of
    one that is open at the import. Returns a function that cancels the action, as long as it has
    not run.
    """
    if name in sys.modules:
        action(sys.modules[name])
        return lambda: None
    asked_in = _open_scopes()[-1:]

    def act(module: ModuleType) -> None:
        before, _acting.scopes = _open_scopes(), asked_in
        try:
            action(module)
        finally:
            _acting.scopes = before

    waiting = _finder.actions.setdefault(name, [])
    waiting.append(act)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)

    def cancel() -> None:
        if act in waiting:
            waiting.remove(act)
            _finder.forget(name)

    undo_later(cancel)
    return cancel


class _AfterImport:
    """Finds modules by the other finders, and runs actions once they are loaded.

    It is in `sys.meta_path` only while actions wait. It has no base class: `importlib.abc` takes
    5 ms to import.
    """

    def __init__(self) -> None:
        self.actions: dict[str, list[Callable[[ModuleType], object]]] = {}
        self._asking: set[str] = set()

    def forget(self, name: str) -> None:
        """Drop a module for which nothing waits."""
        if not self.actions.get(name):
            self.actions.pop(name, None)
        if not self.actions and self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name not in self.actions or name in self._asking:
            return None
        self._asking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.discard(name)
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            # Not when the spec is asked for: who asks may not import at all.
            def exec_module(module: ModuleType) -> None:
                execute(module)
                waiting = self.actions.get(name, [])
                while waiting:
                    waiting.pop(0)(module)
                self.forget(name)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _AfterImport()
