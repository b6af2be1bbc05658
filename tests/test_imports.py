"""Doing something to a module when it is imported."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from nbtrain.imports import when_imported

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


def test_a_wish_can_be_taken_back() -> None:
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


def test_two_wishes_for_one_module_both_come_true() -> None:
    seen: list[int] = []
    when_imported(NAME, lambda _m: seen.append(1))
    when_imported(NAME, lambda _m: seen.append(2))
    __import__(NAME)
    assert sorted(seen) == [1, 2]
