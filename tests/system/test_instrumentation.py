"""Patching a library, listing and undoing it; acting on a module when it is imported."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nbtrain.system.instrumentation import (
    Patched,
    fix_warning_lines,
    patch,
    patches,
    replace,
    scope,
    when_imported,
)

NAME = "colorsys"


@pytest.fixture(autouse=True)
def not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, NAME, raising=False)


def test_an_action_runs_once_when_its_module_is_imported() -> None:
    seen: list[ModuleType] = []
    before = list(sys.meta_path)
    when_imported(NAME, seen.append)
    assert seen == []
    assert importlib.util.find_spec(NAME) is not None  # asking is not importing
    assert seen == []
    module = __import__(NAME)
    assert seen == [module]
    assert sys.meta_path == before
    when_imported(NAME, seen.append)
    assert seen == [module, module]


def test_an_action_can_be_cancelled() -> None:
    seen: list[ModuleType] = []
    before = list(sys.meta_path)
    cancel = when_imported(NAME, seen.append)
    cancel()
    cancel()
    __import__(NAME)
    assert seen == []
    assert sys.meta_path == before


def test_a_module_that_is_not_there_is_still_not_there() -> None:
    cancel = when_imported("no_such_module_here", lambda _m: None)
    with pytest.raises(ModuleNotFoundError):
        __import__("no_such_module_here")
    cancel()


def test_two_actions_on_one_module_both_run() -> None:
    seen: list[int] = []
    when_imported(NAME, lambda _m: seen.append(1))
    when_imported(NAME, lambda _m: seen.append(2))
    __import__(NAME)
    assert sorted(seen) == [1, 2]


class Base:
    kind = "base"

    def method(self, x: int, y: int = 1) -> int:
        """Return a sum."""
        return x + y

    @classmethod
    def build(cls, x: int) -> tuple[str, int]:
        return cls.__name__, x

    @staticmethod
    def double(x: int) -> int:
        return 2 * x

    @property
    def value(self) -> int:
        return 7


class Derived(Base):
    pass


class OwnedByC(list):  # type: ignore[type-arg]
    """`append` is a method written in C, which this class inherits."""


def and_ten(original: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    return (*result, 10) if isinstance(result, tuple) else (result or 0) + 10


def patched_here() -> list[Patched]:
    """Return what this module has patched; an earlier test may have left torch patched."""
    return [patched for patched in patches() if patched.by == __name__]


@pytest.fixture
def unchanged() -> Any:
    """Every class is what it was when a test has undone its patches."""
    classes = (Base, Derived, OwnedByC)
    before = [dict(vars(cls)) for cls in classes]
    yield
    assert [dict(vars(cls)) for cls in classes] == before
    assert patched_here() == []


@pytest.mark.parametrize("owner", [Base, Derived])
@pytest.mark.parametrize(
    ("name", "call", "expected"),
    [
        ("method", lambda cls: cls().method(1, y=2), 13),
        ("build", lambda cls: cls.build(3), (..., 3, 10)),
        ("double", lambda cls: cls.double(4), 18),
        ("double", lambda cls: cls().double(4), 18),
        ("value", lambda cls: cls().value, 17),
    ],
)
def test_every_kind_of_attribute_can_be_patched_and_undone(
    owner: Any, name: str, call: Any, expected: Any, unchanged: None
) -> None:
    before = call(owner)
    undo = patch(owner, name, and_ten)
    if name == "build":
        expected = (owner.__name__, *expected[1:])
    assert call(owner) == expected
    if owner is Derived:
        assert call(Base) != expected
    undo()
    undo()
    assert call(owner) == before


def test_a_patched_function_looks_like_the_original(unchanged: None) -> None:
    undo = patch(Base, "method", and_ten)
    assert Base.method.__doc__ == "Return a sum."
    assert list(inspect.signature(Base.method).parameters) == ["self", "x", "y"]
    undo()


def test_objects_modules_and_functions_in_c_can_be_patched(unchanged: None) -> None:
    thing = Base()
    module = __import__(NAME)
    rgb = module.rgb_to_yiq
    undos = [
        patch(thing, "method", and_ten),
        patch(module, "rgb_to_yiq", and_ten),
        patch(OwnedByC, "append", and_ten),
    ]
    assert thing.method(1) == 12
    assert Base().method(1) == 2
    assert module.rgb_to_yiq(0, 0, 0) == (0.0, 0.0, 0.0, 10)
    items = OwnedByC()
    assert (items.append(5), items) == (10, [5])
    for undo in undos:
        undo()
    assert vars(thing) == {}
    assert module.rgb_to_yiq is rgb


def test_the_same_patch_twice_is_one(unchanged: None) -> None:
    undo, again = patch(Base, "method", and_ten), patch(Base, "method", and_ten)
    assert Base().method(1) == 12
    assert len(patched_here()) == 1
    again()
    assert Base().method(1) == 2
    undo()


def test_a_patch_below_another_one_passes_calls_on_once_it_is_undone(unchanged: None) -> None:
    def and_hundred(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) + 100

    below, above = patch(Base, "method", and_ten), patch(Base, "method", and_hundred)
    assert Base().method(1) == 112
    below()
    assert Base().method(1) == 102
    assert [p.name for p in patched_here()] == ["method"]
    above()


def test_what_somebody_else_has_put_on_top_stays() -> None:
    class Owner(Base):
        pass

    undo = patch(Owner, "method", and_ten)
    patched: Any = Owner.method
    Owner.method = lambda self, x: patched(self, x) + 1  # type: ignore[assignment,misc]
    undo()
    assert Owner().method(1) == 3


def test_attributes_are_replaced(unchanged: None) -> None:
    undo_kind = replace(Derived, "kind", "other")
    assert (Derived.kind, Base.kind) == ("other", "base")
    undo_kind()


def test_patches_are_listed_with_whoever_made_them(unchanged: None) -> None:
    thing = Base()
    undos = [
        patch(Base, "method", and_ten),
        replace(thing, "kind", "own"),
        patch(f"{NAME}", "rgb_to_yiq", and_ten),
    ]
    here = f"{__name__}.Base"
    listed = [
        Patched(here, "method", __name__),
        Patched(f"{here}()", "kind", __name__),
        Patched(NAME, "rgb_to_yiq", __name__),
    ]
    assert patched_here() == listed[:2]  # the module is not imported yet
    __import__(NAME)
    assert patched_here() == listed
    for undo in undos:
        undo()


def test_an_owner_is_patched_when_its_module_is_imported(unchanged: None) -> None:
    before = list(sys.meta_path)
    undo = patch("fractions:Fraction", "limit_denominator", and_ten)
    cancel = patch(f"{NAME}:Missing", "method", and_ten)
    cancelled = patch(NAME, "rgb_to_yiq", and_ten)
    cancelled()
    from fractions import Fraction

    module = __import__(NAME)
    assert Fraction(1, 2).limit_denominator() == Fraction(21, 2)
    assert module.rgb_to_yiq(0, 0, 0) == (0.0, 0.0, 0.0)
    cancel()
    undo()
    assert Fraction(1, 2).limit_denominator() == Fraction(1, 2)
    assert sys.meta_path == before


@pytest.mark.parametrize("is_asked_in_a_scope", [True, False])
def test_what_is_patched_after_an_import_belongs_to_where_it_was_asked_for(
    unchanged: None, is_asked_in_a_scope: bool
) -> None:
    with scope() if is_asked_in_a_scope else contextlib.nullcontext():
        undo = patch(NAME, "rgb_to_yiq", and_ten)
        with scope():
            module = __import__(NAME)
        assert hasattr(module.rgb_to_yiq, "__wrapped__")
    assert hasattr(module.rgb_to_yiq, "__wrapped__") is not is_asked_in_a_scope
    undo()
    assert not hasattr(module.rgb_to_yiq, "__wrapped__")


def test_what_an_import_asks_for_belongs_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("asks_later", "asked_later"):
        (tmp_path / f"{name}.py").write_text("def answer(): return 1")
    monkeypatch.syspath_prepend(tmp_path)
    undos: list[Callable[[], None]] = []
    when_imported("asks_later", lambda _m: undos.append(patch("asked_later", "answer", and_ten)))
    with scope():
        __import__("asks_later")
    module = __import__("asked_later")
    assert module.answer() == 11
    undos[0]()
    assert module.answer() == 1


def test_an_attribute_that_is_not_there_is_left_alone(unchanged: None) -> None:
    owner = SimpleNamespace()
    patch(owner, "moved", and_ten)()
    replace(owner, "moved", 1)()
    assert vars(owner) == {}


def test_an_attribute_that_a_module_makes_when_it_is_asked_can_be_patched() -> None:
    lazy = ModuleType("lazy")
    lazy.__getattr__ = lambda name: {"answer": lambda: 41}[name]  # type: ignore[method-assign]
    undo = patch(lazy, "answer", lambda original: original() + 1)
    assert lazy.answer() == 42
    undo()
    assert lazy.answer() == 41


def test_a_patch_is_made_again_where_the_attribute_was_replaced() -> None:
    def around(original: Callable[[], int]) -> int:
        return original() + 1

    module = ModuleType("loaded_twice")
    module.answer = lambda: 1  # type: ignore[attr-defined]
    first = patch(module, "answer", around)
    module.answer = lambda: 10  # type: ignore[attr-defined]
    second = patch(module, "answer", around)
    assert module.answer() == 11
    second()
    first()
    assert module.answer() == 10


def test_a_warning_may_be_shown_with_arguments_by_name() -> None:
    with scope():
        fix_warning_lines()
        with pytest.warns(UserWarning, match="old"):
            warnings.showwarning(
                message=UserWarning("old"), category=UserWarning, filename="x.py", lineno=1
            )
