"""Which modules a task needs: those that every node must have, and those beside the notebook."""

from __future__ import annotations

import dis
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ...names import names_read
from ...plan import Call, Cell

LOCAL_BYTES = 20 << 20
"""Of source files beside the notebook that travel with a run, at most."""

_SKIPPED = ("__pycache__", "node_modules", "site-packages", "venv", "env", "build", "dist")


def needed(task: Call | Cell) -> list[str]:
    """Return the packages and modules, by their first name, that a task's code and values need.

    Python's own are not among them, nor what only a library of those imports.
    """
    names = set(_modules(task)) - sys.stdlib_module_names
    return sorted(n for n in names if n.isidentifier() and n != "__main__" and n in _importable())


def _importable() -> set[str]:
    """What this process imported from a file: a module made in the notebook is packed by value."""
    found = {name.partition(".")[0] for name, m in list(sys.modules.items()) if _has_place(m)}
    return found - {"ipykernel_launcher"}


def _has_place(module: Any) -> bool:
    return getattr(module, "__spec__", None) is not None


def _modules(task: Call | Cell) -> Iterator[str]:
    """Yield the first names of modules that the task's code imports or its values come from."""
    if isinstance(task, Cell):
        code = compile(task.source, task.filename, "exec", _AWAIT | task.flags, True)
        yield from _imported(code)
        names = names_read(task.source, task.filename) | {p.name for p in task.parameters}
        waiting = [task.namespace[n] for n in names if n in task.namespace]
    else:
        waiting = [task.function, *task.args, *task.kwargs.values()]
    seen = set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) is ModuleType:
            yield value.__name__.partition(".")[0]
        elif type(value) is FunctionType and value.__module__ == "__main__":
            yield from _imported(value.__code__)
            known = value.__globals__
            waiting += [known[n] for n in _names(value.__code__) if n in known]
        else:
            home = value if isinstance(value, (type, FunctionType)) else type(value)
            yield str(getattr(home, "__module__", "") or "").partition(".")[0]


_AWAIT = 0x2000  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def _imported(code: CodeType) -> Iterator[str]:
    for part in _parts(code):
        for step in dis.get_instructions(part):
            if step.opname == "IMPORT_NAME":
                yield str(step.argval).partition(".")[0]


def _names(code: CodeType) -> set[str]:
    return {name for part in _parts(code) for name in part.co_names}


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


def beside(task: Call | Cell, folder: Path) -> bool:
    """Whether a task needs a module that lies in `folder`, the notebook's."""
    for name in needed(task):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and Path(file).is_relative_to(folder) and "site-packages" not in file:
            return True
        if any((folder / place).exists() for place in (f"{name}.py", f"{name}/__init__.py")):
            return True
    return False


def copy_sources(folder: Path, target: Path) -> int:
    """Copy the Python files below `folder`; return their bytes, which stay below `LOCAL_BYTES`."""
    size = 0
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in _SKIPPED and f[0] != ".")
        for name in sorted(files):
            path = Path(here, name)
            if path.suffix == ".py" and size + path.stat().st_size <= LOCAL_BYTES:
                size += path.stat().st_size
                place = target / path.relative_to(folder)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, place)
    return size
