"""Reads a cell's source into a `Cell`, checks its parameters, and names its run."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable
from typing import Any

from ..errors import PlanError
from ..system.text import shorten
from .option_parser import call_with_rank
from .plan import Cell, Parameter, Task
from .secrets import mask_source
from .source_names import bound_names


def read_cell(source: str, filename: str, namespace: dict[str, Any], flags: int = 0) -> Cell:
    """Read a cell, and its training function if it ends in one. Runs nothing.

    Raises the cell's `SyntaxError`, and `PlanError` for an empty cell. `flags` are the compiler's.
    """
    tree = ast.parse(source, filename)
    # The parser does not find all errors ('return' outside a function); the compiler does.
    compile(tree, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | flags, dont_inherit=True)
    last = tree.body[-1] if tree.body else None
    if last is None:
        raise PlanError("the cell is empty, so there is nothing to run")
    if not isinstance(last, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return Cell(source, filename, namespace, flags=flags)
    return Cell(source, filename, namespace, last.name, _read_parameters(last.args), flags)


def _read_parameters(args: ast.arguments) -> tuple[Parameter, ...]:
    """Return the parameters of a function, each with the source of its default."""
    positional = [*args.posonlyargs, *args.args]
    required = len(positional) - len(args.defaults)
    defaults = [*[None] * required, *args.defaults, *args.kw_defaults]
    return tuple(
        Parameter(a.arg, ast.unparse(default) if default else None, a in args.posonlyargs)
        for a, default in zip([*positional, *args.kwonlyargs], defaults, strict=True)
    )


def check_parameters(cell: Cell) -> None:
    """Raise `PlanError` if parameters of the training function have neither value nor default.

    The error names all of them, and the notebook's variables with similar names. Nothing is raised
    for a function with a decorator, or after a star import: either may supply the values.
    """
    bound = bound_names(cell.source, cell.filename)
    if "*" in bound:  # the names of a star import are known only after it has run
        return
    # A decorator may supply arguments.
    if getattr(ast.parse(cell.source).body[-1], "decorator_list", ()):
        return
    known = bound | cell.namespace.keys()
    missing = [p.name for p in cell.parameters if p.default is None and p.name not in known]
    if not missing:
        return
    described = ", ".join(name_with_lookalikes(name, known) for name in missing)
    remedy = "Define it in a cell, or give the parameter a default."
    needed = [p.name for p in cell.parameters if p.default is None]
    if missing[0] == needed[0] and {*missing[1:]} <= {"world_size"}:
        call = call_with_rank(str(cell.function), needed)
        remedy += f" If it is the rank, as for mp.spawn, add `{call}` as the last line of the cell."
    raise PlanError(
        f"{cell.function}() needs a value for {described}: the notebook has no such variable, and "
        f"there is no default. {remedy}"
    )


def name_with_lookalikes(name: str, known: Iterable[str]) -> str:
    """Return a name for a message, followed by the known names that are similar."""
    public = {k.lower(): k for k in known if type(k) is str and not k.startswith("_")}
    alike = [public[k] for k in difflib.get_close_matches(name.lower(), public, n=3, cutoff=0.6)]
    return f"`{name}`" + (f" (there is {' and '.join(f'`{a}`' for a in alike)})" if alike else "")


def title(cell: Cell) -> str:
    """Return a title of the run: the function with its numbers, else a script or a line.

    Secrets in the line are masked; of a magic, only its name is in the title.
    """
    if cell.function is None:
        if script := _find_script(cell):
            return shorten(script, 60)
        first = _first_statement(cell.source)
        if magic := _MAGIC.match(first):  # its arguments may be secrets
            return f"{'!' if magic[1] == 'system' else '%'}{magic[2]}"
        return shorten(mask_source(first, until=1).partition("\n")[0].strip().rstrip(" :"), 60)
    parameters = (_describe_parameter(p, cell.namespace) for p in cell.parameters)
    return f"{cell.function}({', '.join(parameters)})"


def _first_statement(source: str) -> str:
    """Return the first statement that is neither import nor magic, else the first one.

    It is returned with all of its lines, except those of decorators. Raises `SyntaxError` if
    `source` is no Python, and `IndexError` if it has no statement.
    """
    lines = source.split("\n")  # not `splitlines`: ast counts lines by \n only
    skipped = ("import ", "from ", "get_ipython()")
    nodes = ast.parse(source).body
    texts = ["\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes]
    return next((text for text in texts if not text.startswith(skipped)), texts[0])


def number_of_untitled(task: Task, name: str) -> int | None:
    """Return a cell's number if its run is only named after a line of its source; else None.

    `name` is the name of the run. None also for a cell with a training function or a script.
    """
    if not isinstance(task, Cell) or task.function is not None or _find_script(task):
        return None
    return task.number if name == title(task) else None


_MAGIC = re.compile(r"\s*get_ipython\(\)\.(run_line_magic|system)\('(\w+)")

_RUN = re.compile(r"^get_ipython\(\)\.run_line_magic\('run', '(?:-\S+ (?:\d+ )?)*([^ '\"]+)")


def _find_script(cell: Cell) -> str:
    """Return the file's name of a cell that only runs a script (``%run train.py``), else "".

    Imports and comments may stand beside it.
    """
    lines = [line for line in cell.source.splitlines() if line.strip()]
    statements = [line for line in lines if not line.startswith(("import ", "from ", "#"))]
    found = _RUN.match(statements[0]) if len(statements) == 1 else None
    return found[1].rpartition("/")[2] if found else ""


def _describe_parameter(parameter: Parameter, namespace: dict[str, Any]) -> str:
    """Return a parameter for the run's title: ``lr=0.01`` for a short number, else ``lr``.

    Without a variable of the notebook, a default of at most 24 characters is shown unless it may be
    a secret.
    """
    name, text = parameter.name, parameter.default or ""
    if name in namespace:
        value = namespace[name]
        # Numbers only: a text may be a password, and a notebook's file contains the title.
        text = f"{value:.6g}" if isinstance(value, float) else ""
        if isinstance(value, int) and abs(value) < 10**15:
            text = repr(value)
    assignment = f"{name} = {text}"  # a default is any expression, and may contain a secret
    is_shown = 0 < len(text) <= 24 and mask_source(assignment) == assignment
    return f"{name}={text}" if is_shown else name
