"""Lists the modules that a task needs: those that every node must have, and local ones."""

from __future__ import annotations

import ast
import contextlib
import dis
import importlib.util
import io
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from ...planning import task_values
from ...planning.plan import Cell, Task

Fingerprint = tuple[tuple[str, int, int], ...]
"""Paths of files, and when each was written, in ns, and its size in bytes."""


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
    for reference in task_values.references(task):
        value = reference.value
        if type(value) is ModuleType:
            yield value.__name__.partition(".")[0]
        elif type(value) is FunctionType and task_values.is_pickled_by_value(value):
            yield from _iterate_imports(value.__code__)
        else:
            home = value if isinstance(value, (type, FunctionType)) else type(value)
            yield str(getattr(home, "__module__", "") or "").partition(".")[0]


def _iterate_imports(code: CodeType) -> Iterator[str]:
    """Yield the first names of modules that a code object, or one within it, imports."""
    for part in task_values.code_within(code):
        for step in dis.get_instructions(part):
            if step.opname == "IMPORT_NAME":
                yield str(step.argval).partition(".")[0]


def beside(task: Task, folder: Path) -> bool:
    """Whether a task needs a module that lies in `folder`, the notebook's."""
    for name in find_packages(task):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and Path(file).is_relative_to(folder) and "site-packages" not in file:
            return True
        # A folder needs no __init__.py.
        if (folder / f"{name}.py").exists() or any((folder / name).glob("*.py")):
            return True
    return False


def local_modules(folder: Path) -> list[Path]:
    """Return the modules and packages in `folder`, as Ray's ``py_modules`` takes them.

    Also a folder of Python files without ``__init__.py``, which Python imports as a package.
    """
    found = {*folder.glob("*.py"), *(path.parent for path in folder.glob("*/*.py"))}
    return sorted(path for path in found if path.stem.isidentifier())


def excludes(folder: Path) -> list[str]:
    """Return Ray's ``excludes``: all of the `local_modules` but Python files and their folders.

    The patterns are those of ``.gitignore``. None may match ``.``, the package itself, and each
    inner folder has its own, because Ray does not look into a folder that it leaves out.
    """
    places = {place for path in _files(folder) for place in path.parents}
    inner = [place.relative_to(folder).parts[1:] for place in places if folder in place.parents]
    return ["[!.]*", ".?*", "!*.py", *sorted("!/" + "/".join(parts) for parts in inner if parts)]


def fingerprint(folder: Path) -> Fingerprint:
    """Return what changes when a Python file of the `local_modules` does."""
    files = []
    for path in _files(folder):
        with contextlib.suppress(OSError):  # an editor's lock is a link to nowhere
            facts = path.stat()
            files.append((str(path), facts.st_mtime_ns, facts.st_size))
    return tuple(files)


def pack(folder: Path) -> bytes:
    """Return the Python files of the `local_modules` as a zip."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for path in _files(folder):
            with contextlib.suppress(OSError):  # as in `fingerprint`
                archive.write(path, path.relative_to(folder))
    return data.getvalue()


def _files(folder: Path) -> list[Path]:
    """Return the Python files of the `local_modules` that can be imported by their path."""
    files: list[Path] = []
    for module in local_modules(folder):
        files += [module] if module.is_file() else sorted(module.rglob("*.py"))
    return [f for f in files if all(map(str.isidentifier, f.parent.relative_to(folder).parts))]
