"""What parts may import is listed, and those of nbtrain import little else of the core."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import nbtrain
from nbtrain import part, part_api

PACKAGE = Path(nbtrain.__file__).parent

MAX_MODULES = 12
"""Modules of the core that a part imports past `part_api`."""


def test_every_name_can_be_imported_and_is_what_editors_see() -> None:
    for name in part_api.__all__:
        assert getattr(part_api, name) is not None
    assert sorted(part_api.__all__) == sorted(part_api._MODULES)
    seen: dict[str, str] = {}
    for node in ast.walk(ast.parse(Path(part_api.__file__).read_text())):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            imports = [each for each in node.body if isinstance(each, ast.ImportFrom)]
            seen = {a.name: each.module or "" for each in imports for a in each.names}
    assert seen == part_api._MODULES
    with pytest.raises(AttributeError, match="has no Supervisor: parts may use"):
        importlib.import_module("nbtrain.part_api").__getattr__("Supervisor")


def _imported_modules(path: Path) -> set[str]:
    """Return the modules of the core that a file of a part imports, without `part_api`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            inner = [folder / alias.name for alias in node.names]
            are_modules = [each.is_dir() or each.with_suffix(".py").exists() for each in inner]
            found |= {
                str((each if is_module else folder).relative_to(PACKAGE))
                for each, is_module in zip(inner, are_modules, strict=True)
            }
    return {name for name in found if not name.startswith("parts") and name != "part_api"}


@pytest.mark.parametrize("name", part.TABLE)
def test_a_part_imports_few_modules_of_the_core(name: str) -> None:
    files = (PACKAGE / "parts" / name).rglob("*.py")
    modules = set().union(*map(_imported_modules, files))
    assert len(modules) <= MAX_MODULES, sorted(modules)
