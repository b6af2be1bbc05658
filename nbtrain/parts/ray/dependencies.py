"""Lists the modules that a task needs: those that every node must have, and local ones."""

from __future__ import annotations

import ast
import contextlib
import dis
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from ...planning.plan import Cell, Task
from ...planning.task_values import code_within, is_pickled_by_value, references

LOCAL_BYTES = 20 << 20
"""Of source files beside the notebook that travel with a run, at most."""

_SKIPPED = ("__pycache__", "node_modules", "site-packages", "build", "dist")


def find_packages(task: Task) -> list[str]:
    """Return the packages and modules, by their first name, that a task's code and values need.

    Python's own are not among them, nor what only a library of those imports.
    """
    names = set(_modules(task)) - sys.stdlib_module_names - {"__main__", "ipykernel_launcher"}
    return sorted(n for n in names if n.isidentifier() and _comes_from_a_file(n))


def _comes_from_a_file(name: str) -> bool:
    """Whether a module is, or would be, imported: one made in the notebook is packed by value."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None) is not None
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec(name) is not None
    return False


def _modules(task: Task) -> Iterator[str]:
    """Yield the first names of modules that the task's code imports or its values come from."""
    if isinstance(task, Cell):
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | task.flags
        yield from _iterate_imports(
            compile(task.source, task.filename, "exec", flags, dont_inherit=True)
        )
    for reference in references(task):
        value = reference.value
        if type(value) is ModuleType:
            yield value.__name__.partition(".")[0]
        elif type(value) is FunctionType and is_pickled_by_value(value):
            yield from _iterate_imports(value.__code__)
        else:
            home = value if isinstance(value, (type, FunctionType)) else type(value)
            yield str(getattr(home, "__module__", "") or "").partition(".")[0]


def _iterate_imports(code: CodeType) -> Iterator[str]:
    for part in code_within(code):
        for step in dis.get_instructions(part):
            if step.opname == "IMPORT_NAME":
                yield str(step.argval).partition(".")[0]


def beside(task: Task, folder: Path) -> bool:
    """Whether a task needs a module that lies in `folder`, the notebook's."""
    for name in find_packages(task):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and Path(file).is_relative_to(folder) and "site-packages" not in file:
            return True
        if any((folder / place).exists() for place in (f"{name}.py", f"{name}/__init__.py")):
            return True
    return False


def copy_sources(folder: Path, target: Path) -> int:
    """Copy the Python files below `folder`; return their bytes, which stay below `LOCAL_BYTES`."""
    size = 0
    for path, facts in _sources(folder):
        with contextlib.suppress(OSError):  # it was deleted just now
            if size + facts.st_size <= LOCAL_BYTES:
                place = target / path.relative_to(folder)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, place)
                size += place.stat().st_size
    return size


def fingerprint(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return what changes when a Python file below `folder` does."""
    return tuple((str(p), facts.st_mtime_ns, facts.st_size) for p, facts in _sources(folder))


def _sources(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the Python files below a folder with their status, without libraries."""
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if not _is_skipped(Path(here, f)))
        for name in sorted(files):
            path = Path(here, name)
            with contextlib.suppress(OSError):  # an editor's lock is a link to nowhere
                if path.suffix == ".py":
                    yield path, path.stat()


def _is_skipped(folder: Path) -> bool:
    hidden = folder.name.startswith(".")
    return hidden or folder.name in _SKIPPED or (folder / "pyvenv.cfg").exists()
