"""Patching a library, listing and undoing it; acting on a module when it is imported."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nbtrain.system.instrumentation import (
    Patched,
    patch,
    patches,
    replace,
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


def test_what_somebody_else_has_put_on_top_stays() -> None:
    class Owner(Base):
        pass

    undo = patch(Owner, "method", and_ten)
    patched: Any = Owner.method
    Owner.method = lambda self, x: patched(self, x) + 1  # type: ignore[assignment,misc]
    undo()
    assert Owner().method(1) == 3


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


def test_an_attribute_that_is_not_there_is_left_alone(unchanged: None) -> None:
    owner = SimpleNamespace()
    patch(owner, "moved", and_ten)()
    replace(owner, "moved", 1)()
    assert vars(owner) == {}
