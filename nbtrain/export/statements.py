"""A notebook's cells as statements: the text of each, what it binds, what it reads."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import PlanError
from ..lint.facts import is_function
from ..names import bound_names, names_read, plainly_bound


@dataclass(frozen=True, eq=False)
class Statement:
    """One statement at a cell's top level, as it was written; `cell` says where."""

    node: ast.stmt
    text: str
    cell: str

    @cached_property
    def binds(self) -> frozenset[str]:
        """The names it may bind; ``*`` for a star import."""
        return frozenset(bound_names(self.text))

    @cached_property
    def settles(self) -> frozenset[str]:
        """The names that hold nothing of before, once it ran."""
        if isinstance(self.node, ast.Import):  # `import a.b` adds to an `import a.c` of before
            return frozenset(alias.asname for alias in self.node.names if alias.asname)
        return frozenset(plainly_bound(self.node) - self.reads)

    @cached_property
    def reads(self) -> frozenset[str]:
        """The names it takes from around it, then or, in a function's body, later."""
        return frozenset(names_read(self.text))

    @cached_property
    def reads_at_once(self) -> frozenset[str]:
        """Those of them that have to exist when it runs."""
        return frozenset(_at_once(self.node)) & self.reads

    @cached_property
    def of_ipython(self) -> bool:
        """Whether it is, or has in it, a magic, a shell command or a question."""
        return any(isinstance(n, ast.Name) and n.id == "get_ipython" for n in ast.walk(self.node))

    @property
    def is_import(self) -> bool:
        return isinstance(self.node, (ast.Import, ast.ImportFrom))

    @property
    def is_future(self) -> bool:
        return isinstance(self.node, ast.ImportFrom) and self.node.module == "__future__"

    @property
    def is_definition(self) -> bool:
        return is_function(self.node) or isinstance(self.node, ast.ClassDef)

    def refuse_what_no_script_can(self) -> None:
        """Raise `PlanError` for a magic that the script would need, or a top-level ``await``."""
        lines = self.text.strip().split("\n")
        if self.of_ipython:
            shown = next(as_typed(line).strip() for line in lines if "get_ipython" in line)
            raise PlanError(
                f"{self.cell}: the script would need a magic or a shell command, which only "
                f"IPython can run: {shown!r}"
            )
        shown = lines[-1].strip()
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile(self.text, self.cell, "exec", flags, dont_inherit=True)
        if code.co_flags & inspect.CO_COROUTINE:
            raise PlanError(
                f"{self.cell}: a script has no event loop for a top-level `await`; put it into "
                f"an `async def`: {shown!r}"
            )


def _at_once(node: ast.AST) -> Iterator[str]:
    """Yield the names in a node but for those in bodies of functions."""
    stack = [node]
    while stack:
        one = stack.pop()
        if isinstance(one, ast.Name):
            yield one.id
        for name, value in ast.iter_fields(one):
            if name == "body" and (is_function(one) or isinstance(one, ast.Lambda)):
                continue
            stack += [v for v in (value if isinstance(value, list) else [value]) if _is_node(v)]


def _is_node(value: object) -> bool:
    return isinstance(value, ast.AST)


def as_python(raw: str) -> str:
    """Return a cell's source with its IPython syntax as calls of ``get_ipython()``, line by line.

    ``%%time`` and ``%%capture`` are left off; another cell magic leaves nothing.
    """
    from IPython.core.inputtransformer2 import TransformerManager

    head, _, rest = raw.lstrip("\n").partition("\n")
    if re.match(r"%%(time|capture)\b", head):
        raw = rest
    elif head.startswith("%%"):
        return ""
    raw = re.sub(r"(?m)^%time[ \t]+(?=\S)", "", raw)
    manager: Any = TransformerManager
    return str(manager().transform_cell(raw))


def as_typed(line: str) -> str:
    """Return a magic or a shell command as the notebook had it."""
    for kind, mark in (("run_line_magic", "%"), ("system", "!"), ("getoutput", "!!")):
        found = re.fullmatch(rf"\s*get_ipython\(\)\.{kind}\((.*)\)\s*", line)
        try:
            words = ast.literal_eval(f"({found[1]},)") if found else ()
        except (SyntaxError, ValueError):
            continue
        if words:
            return mark + " ".join(words).strip()
    return line


def read(source: str, cell: str) -> list[Statement]:
    """Split Python source into its statements. Raises `SyntaxError`."""
    lines = source.split("\n")  # as ast counts them
    body = ast.parse(source).body
    return [
        Statement(node, _text(node, body[i - 1] if i else None, body[i + 1 : i + 2], lines), cell)
        for i, node in enumerate(body)
    ]


def read_earlier(raw: str, cell: str) -> list[Statement]:
    """Read a cell that ran before. One that no Python can read has nothing to give."""
    try:
        return read(as_python(raw), cell)
    except (SyntaxError, ValueError):
        return []


def first_line(node: ast.stmt) -> int:
    """Return where a statement begins, its decorators included."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def _text(
    node: ast.stmt, before: ast.stmt | None, after: Sequence[ast.stmt], lines: list[str]
) -> str:
    """Return a statement as written, with the comments right above it and beside it."""
    start, end = first_line(node), node.end_lineno or node.lineno
    alone = before is None or (before.end_lineno or 0) < start
    if not alone or (after and first_line(after[0]) == end):  # others on its line
        return str(ast.get_source_segment("\n".join(lines), node))
    top = start
    while top > 1 and lines[top - 2].startswith("#") and (not before or top - 1 > _end(before)):
        top -= 1
    return "\n".join(lines[top - 1 : end]).rstrip()


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def import_of(statement: Statement, names: frozenset[str] | set[str]) -> str:
    """Return an import statement with no more than the names that are needed."""
    node = statement.node
    assert isinstance(node, (ast.Import, ast.ImportFrom))
    wanted = {"*", *names}
    kept = [a for a in node.names if (a.asname or a.name).partition(".")[0] in wanted]
    if len(kept) == len(node.names):
        return statement.text
    if isinstance(node, ast.Import):
        return ast.unparse(ast.Import(kept))
    return ast.unparse(ast.ImportFrom(node.module, kept, node.level))
