"""A notebook's cells as statements: their text, the names they bind and read."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ...errors import PlanError
from ...planning.lint.source_index import is_function
from ...planning.source_names import bound_names, names_read, plainly_bound


@dataclass(frozen=True, eq=False)
class Statement:
    """One statement at a cell's top level, as it was written."""

    node: ast.stmt
    text: str
    cell: str
    """The cell's name for messages."""

    @cached_property
    def binds(self) -> frozenset[str]:
        """The names that the statement may bind; ``*`` for a star import."""
        return frozenset(bound_names(self.text))

    @cached_property
    def settles(self) -> frozenset[str]:
        """The names whose earlier values no longer matter after the statement."""
        if isinstance(self.node, ast.Import):  # `import a.b` adds to an `import a.c` of before
            return frozenset(alias.asname for alias in self.node.names if alias.asname)
        return frozenset(plainly_bound(self.node) - self.reads)

    @cached_property
    def reads(self) -> frozenset[str]:
        """The names that the statement reads, at once or later in a function's body."""
        return frozenset(names_read(self.text))

    @cached_property
    def reads_at_once(self) -> frozenset[str]:
        """The names of `reads` that must exist when the statement runs."""
        return frozenset(_at_once(self.node)) & self.reads

    @cached_property
    def of_ipython(self) -> bool:
        """Whether the statement contains a magic, a shell command or a help request."""
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

    def check(self) -> None:
        """Raise `PlanError` if only IPython can run it: a magic, or a top-level ``await``."""
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
    """Yield the names in a node outside of function bodies."""
    if isinstance(node, ast.Name):
        yield node.id
    late = node.body if is_function(node) else [node.body] if isinstance(node, ast.Lambda) else []
    for child in ast.iter_child_nodes(node):
        if child not in late:
            yield from _at_once(child)


def as_python(raw: str) -> str:
    """Return a cell's source with its IPython syntax as calls of ``get_ipython()``, line by line.

    ``%%time`` and ``%%capture`` are removed; a cell with another cell magic becomes empty.
    """
    from IPython.core.inputtransformer2 import TransformerManager

    head, _, rest = raw.lstrip("\n").partition("\n")
    if re.match(r"%%(time|capture)\b", head):
        raw = rest
    elif head.startswith("%%"):
        return ""
    raw = re.sub(r"(?m)^%time[ \t]+(?=\S)", "", raw)
    return str(TransformerManager().transform_cell(raw))  # type: ignore[no-untyped-call,unused-ignore]


def as_typed(line: str) -> str:
    """Return a magic or a shell command as it was typed."""
    for kind, mark in (("run_line_magic", "%"), ("system", "!"), ("getoutput", "!!")):
        match = re.fullmatch(rf"\s*get_ipython\(\)\.{kind}\((.*)\)\s*", line)
        try:
            parts = ast.literal_eval(f"({match[1]},)") if match else ()
        except (SyntaxError, ValueError):
            continue
        if parts:
            return mark + " ".join(parts).strip()
    return line


def read(source: str, cell: str) -> list[Statement]:
    """Split Python source into its statements, each with the comments right above and beside it.

    Raises `SyntaxError`.
    """
    lines = source.split("\n")  # as ast counts them
    nodes = ast.parse(source).body
    starts = [*map(first_line, nodes), len(lines) + 1]
    ends = [0, *(node.end_lineno or node.lineno for node in nodes)]
    statements = []
    for i, node in enumerate(nodes):
        start, end = starts[i], ends[i + 1]
        if start == ends[i] or starts[i + 1] == end:  # another statement on its line
            text = str(ast.get_source_segment(source, node))
        else:
            while start - 1 > ends[i] and lines[start - 2].startswith("#"):
                start -= 1
            text = "\n".join(lines[start - 1 : end]).rstrip()
        statements.append(Statement(node, text, cell))
    return statements


def read_earlier(cells: Iterable[tuple[str, str]]) -> list[Statement]:
    """Split earlier cells, each with its name, into statements; one that is not Python has none."""
    statements: list[Statement] = []
    for raw, cell in cells:
        with contextlib.suppress(SyntaxError, ValueError):
            statements += read(as_python(raw), cell)
    return statements


def first_line(node: ast.stmt) -> int:
    """Return where a statement begins, its decorators included."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def import_of(statement: Statement, names: frozenset[str] | set[str]) -> str:
    """Return an import statement reduced to the needed names."""
    node = statement.node
    assert isinstance(node, (ast.Import, ast.ImportFrom))
    wanted = {"*", *names}
    aliases = [a for a in node.names if (a.asname or a.name).partition(".")[0] in wanted]
    if len(aliases) == len(node.names):
        return statement.text
    if isinstance(node, ast.Import):
        return ast.unparse(ast.Import(aliases))
    return ast.unparse(ast.ImportFrom(node.module, aliases, node.level))
