"""Patches functions of other libraries, and runs actions when a module is imported.

All patches of nbtrain are made here, so that `patches` can list them (for `%nbtrain doctor`) and
each can be undone. The owner may be a name of something that is not imported yet:
``"torch:Tensor"`` is the class `Tensor` of the module `torch`. This module imports no library.
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
"""Undoes a patch, or cancels an action that has not run. A second call does nothing."""


_scopes: list[list[Undo]] = []
"""What to undo at the end of each open `scope`, the innermost last."""

_acting = threading.local()
"""Its `scopes` replace these in a thread that runs an action: see `when_imported`."""


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """Undo at the end all patches, and cancel all actions, that were made in the body."""
    undos: list[Undo] = []
    _scopes.append(undos)
    try:
        yield
    finally:
        _scopes.remove(undos)
        for undo in reversed(undos):
            undo()


def collect_undos(action: Callable[[], object], undos: list[Undo]) -> None:
    """Run `action`, and add to `undos` what undoes its patches. No `scope` undoes them.

    Other threads may patch at that time: only what this thread does is added.
    """
    before, _acting.scopes = _open_scopes(), [undos]
    try:
        action()
    finally:
        _acting.scopes = before


def undo_later(undo: Undo) -> None:
    """Call `undo` at the end of the current `scope`; without a scope, never."""
    for scope in _open_scopes()[-1:]:
        scope.append(undo)


def _open_scopes() -> list[list[Undo]]:
    found: list[list[Undo]] = getattr(_acting, "scopes", _scopes)
    return found


def patch(owner: Any, name: str, around: Callable[..., Any]) -> Undo:
    """Replace ``owner.name`` by a function that calls ``around(original, *args, **kwargs)``.

    Returns a function that undoes the patch; the end of the current `scope` undoes it as well.
    `owner` is a module, a class, an object, or the name of a module or class (see above), which is
    patched once it is imported. The arguments are those of the underlying function: for a method
    they begin with `self`, for a class method with the class, and a property has only `self`.

    The same `around` on the same attribute is applied once. If the owner lacks the attribute,
    nothing is patched, because private names change between versions and must not make an import
    fail. A patched call takes about 200 ns more.
    """
    return _on(owner, name, around, _detour)


def replace(owner: Any, name: str, value: object) -> Undo:
    """Set ``owner.name`` to a value, as a patch."""
    return _on(owner, name, value, None)


class Patched(NamedTuple):
    """An attribute that is patched, and the module of nbtrain that did it."""

    owner: str
    name: str
    by: str


def patches() -> tuple[Patched, ...]:
    """Return the current patches of this process, oldest first."""
    return tuple(Patched(_label(p.owner), p.name, p.by) for p in _patches if p.is_active)


_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def fix_warning_lines() -> None:
    """Make warnings about the caller of a patched function show the user's line."""
    patch("warnings", "showwarning", _show_user_line)


def _show_user_line(
    original: Any, message: Any, category: Any, filename: str, lineno: int, *rest: Any, **named: Any
) -> None:
    """Show a warning at the user's line, if it would be shown at a line of nbtrain."""
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
"""Makes the function that replaces an original one, for a patch."""


def _detour(patched: _Patch, original: Any) -> Any:
    """Return a function that calls `change` with the original function before the arguments."""

    @functools.wraps(original)
    def detour(*args: Any, **kwargs: Any) -> Any:
        return patched.change(original, *args, **kwargs)

    return detour


def _call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


class _Patch:
    """A changed attribute."""

    def __init__(self, owner: Any, name: str, change: Any, by: str, wrap: _Wrap | None) -> None:
        self.owner, self.name, self.change, self.by = owner, name, change, by
        self.is_active = True
        self._before = _own(owner, name)
        self._value = change if wrap is None else self._wrap_stored(wrap)
        setattr(owner, name, self._value)

    def _wrap_stored(self, wrap: _Wrap) -> Any:
        """Return what replaces the attribute: a property stays a property."""
        if not isinstance(self.owner, type):  # a module may create attributes on access
            return wrap(self, getattr(self.owner, self.name))
        # Like `inspect.getattr_static`, which takes ten times as long.
        stored = next(
            (vars(c)[self.name] for c in self.owner.__mro__ if self.name in vars(c)), None
        )
        if isinstance(stored, (classmethod, staticmethod)):
            return type(stored)(wrap(self, stored.__func__))
        if isinstance(stored, property):
            return property(wrap(self, stored.fget), stored.fset, stored.fdel, stored.__doc__)
        return wrap(self, getattr(self.owner, self.name))

    def undo(self) -> None:
        """Remove the patch, or, while a later patch is on top of it, make it do nothing."""
        if self.is_active:
            self.is_active, self.change = False, _call
            for patched in reversed(_patches.copy()):
                if not patched.is_active and _own(patched.owner, patched.name) is patched._value:
                    patched._restore()

    def _restore(self) -> None:
        """Give the owner back what it had before the patch."""
        _patches.remove(self)
        if self._before is _NOTHING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._before)


_NOTHING = object()
"""The value of an attribute that the owner inherits."""

_patches: list[_Patch] = []


def _own(owner: Any, name: str) -> Any:
    return getattr(owner, "__dict__", {}).get(name, _NOTHING)


def _on(owner: Any, name: str, change: Any, wrap: _Wrap | None) -> Undo:
    """Patch an owner now, or when it is imported; return what undoes or cancels the patch.

    `patches` lists it as made by the module that called `patch` or `replace`.
    """
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
    """Patch an attribute, unless `change` patches it already; return what undoes the patch.

    Does not patch a missing attribute, or an owner of None. The end of the scope also undoes it.
    """
    if owner is None or not hasattr(owner, name):
        return lambda: None
    for patched in _patches:
        same = patched.owner is owner and patched.name == name and patched.change == change
        if same and _own(owner, name) is patched._value:  # otherwise the module was reloaded
            return patched.undo
    patched = _Patch(owner, name, change, by, wrap)
    _patches.append(patched)
    undo_later(patched.undo)
    return patched.undo


def _label(owner: Any) -> str:
    """Return the name of a patched module, class or object, for people."""
    if isinstance(owner, ModuleType):
        return owner.__name__
    cls = owner if isinstance(owner, type) else type(owner)
    label = f"{cls.__module__}.{cls.__qualname__}"
    return label if owner is cls else f"{label}()"


def when_imported(name: str, action: Callable[[ModuleType], object]) -> Undo:
    """Run `action` on a module: now if it is imported, otherwise right after its import.

    Patches of the action belong to the current scope, and not to the scope that is open at the
    import. Returns a function that cancels the action if it has not run.
    """
    if name in sys.modules:
        action(sys.modules[name])
        return lambda: None
    own_scopes = _open_scopes()[-1:]

    def act(module: ModuleType) -> None:
        before, _acting.scopes = _open_scopes(), own_scopes
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
    """Finds modules through the other finders, and runs the actions after they are loaded.

    It is in `sys.meta_path` only while actions wait. It has no base class, because importing
    `importlib.abc` takes 5 ms.
    """

    def __init__(self) -> None:
        self.actions: dict[str, list[Callable[[ModuleType], object]]] = {}
        self._searching: set[str] = set()

    def forget(self, name: str) -> None:
        """Stop waiting for a module that has no actions left.

        Without a module to wait for, the finder is removed from `sys.meta_path`.
        """
        if not self.actions.get(name):
            self.actions.pop(name, None)
        if not self.actions and self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        """Find a module that actions wait for, and have its loader call them after the import."""
        if name not in self.actions or name in self._searching:
            return None
        self._searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching.discard(name)
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            # Not in `find_spec`, which does not have to lead to an import.
            def exec_module(module: ModuleType) -> None:
                execute(module)
                waiting = self.actions.get(name, [])
                while waiting:
                    waiting.pop(0)(module)
                self.forget(name)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _AfterImport()
