"""Which cell initialised an accelerator: the guard's question, asked around every cell.

A marker between the top-level statements of a cell tells the statement too, whatever library it
called. A cell is watched by IPython's events and by its parser, which is given back by `stop`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
from dataclasses import dataclass, field
from typing import Any

from . import gate, guard

_MARK = "__nbtrain_look__"
_LOAD = ast.Load()


@dataclass
class _Running:
    """A cell while it runs: its text as typed, its number, and where its statements begin.

    `lines` are those of the statements that could initialise something, in the source as the
    shell parsed it (`parsed`); `at` is the place, among these, of the one under way.
    """

    raw: str
    number: int | None = None
    parsed: str = ""
    lines: list[int] = field(default_factory=list)
    at: int = 0

    def look(self) -> list[guard.Touch]:
        if not self.lines:
            return guard.look(self.number)
        line = self.lines[min(self.at, len(self.lines) - 1)]
        # IPython strips leading blank lines before it parses; people count them.
        typed, parsed = self.raw.splitlines(), self.parsed.splitlines()
        skipped = len(typed) - len(self.raw.lstrip("\n").splitlines())
        if len(typed) - skipped != len(parsed):  # a magic over several lines has become one
            return guard.look(self.number, line, _text(parsed, line))
        return guard.look(self.number, line + skipped, _text(typed, line + skipped))


class Blame:
    """Watches the cells of one shell.

    `mode` is 'warn' (say it at once), 'block' (keep it from happening) or 'off' (only remember).
    """

    def __init__(self, shell: Any) -> None:
        self.mode = "warn"
        self._shell = shell
        self._parse: Any = shell.compile.ast_parse
        self._expecting = False
        self._stack: list[_Running] = []  # a cell may run another one

    def start(self) -> None:
        """Watch from the next cell on."""
        guard.look()
        guard.keep_checks_harmless()
        gate.open_()
        self._shell.events.register("pre_run_cell", self._before)
        self._shell.events.register("post_run_cell", self._after)
        self._parse = self._shell.compile.ast_parse
        self._shell.compile.ast_parse = self._parse_with_marks
        # Among the builtins, where no %reset reaches it.
        setattr(builtins, _MARK, self._between)

    def stop(self) -> None:
        """Leave the shell and the environment as they were before `start`."""
        guard.restore_checks()
        gate.close()
        with contextlib.suppress(ValueError):
            self._shell.events.unregister("pre_run_cell", self._before)
            self._shell.events.unregister("post_run_cell", self._after)
        if vars(self._shell.compile).get("ast_parse") == self._parse_with_marks:
            del self._shell.compile.ast_parse
        # Not deleted: the rest of this very cell may hold marks.
        setattr(builtins, _MARK, _nothing)

    def set_mode(self, mode: str) -> None:
        """Change the mode: 'warn', 'block' or 'off'."""
        self.mode = mode
        gate.block(mode == "block")

    def _before(self, info: Any) -> None:
        self._tell(guard.look())  # by a thread or a callback, between two cells
        self._expecting = True
        self._stack.append(_Running(info.raw_cell or ""))

    def _parse_with_marks(self, *args: Any, **kwargs: Any) -> ast.Module:
        """Parse as the shell does, and put looks between a cell's statements.

        Only the first tree after `_before` is a cell; later ones are what ``%timeit`` times. The
        documented way, an AST transformer, has IPython visit every node of every cell, which takes
        longer than all the rest. Seen in IPython 7.34 to 9.18.
        """
        tree: ast.Module = self._parse(*args, **kwargs)
        if not (self._expecting and self._stack and tree.body):
            return tree
        self._expecting = False
        cell = self._stack[-1]
        cell.number = max(1, len(self._shell.history_manager.input_hist_parsed) - 1)
        cell.parsed = str(args[0]) if args else ""
        if len(tree.body) == 1:
            cell.lines = [tree.body[0].lineno]
        # Another extension's transformers must find the statements where they look for them.
        elif self._can_be_marked(tree):
            tree.body, cell.lines = _with_marks(tree.body)
        return tree

    def _can_be_marked(self, tree: ast.Module) -> bool:
        """Whether a cell means the same with its statements in blocks.

        Not where another extension's transformers look for them, where each expression is
        displayed, or where a top-level ``global`` would come too late.
        """
        shell = self._shell
        if shell.ast_transformers or shell.ast_node_interactivity == "all":
            return False
        return not any(type(statement) is ast.Global for statement in tree.body)

    def _between(self) -> None:
        """The statement under way has ended, the next one begins."""
        if self._stack:
            cell = self._stack[-1]
            if guard.has_news():
                self._tell(cell.look())
            cell.at += 1

    def _after(self, _result: Any) -> None:
        self._expecting = False
        if self._stack:
            cell = self._stack.pop()
            if guard.has_news():
                self._tell(cell.look())

    def _tell(self, touches: list[guard.Touch]) -> None:
        for touch in touches if self.mode != "off" else ():
            place = touch.where if touch.cell is not None else "something between two cells"
            print(
                f"nbtrain: {place} initialised {touch.what}. Ranks can no longer be forked from "
                "this kernel to use it: keep that inside the training function and restart, or "
                "launch with --engine spawn."
            )


def _with_marks(statements: list[ast.stmt]) -> tuple[list[ast.stmt], list[int]]:
    """Return the statements in blocks, a mark after each, and the lines of those between marks.

    IPython compiles and runs each top-level statement apart, which takes longer than a mark: in
    blocks, a cell is hardly slower for being watched. The last one stays by itself: it is
    displayed.
    """
    found: list[ast.stmt] = []
    block: list[ast.stmt] = []
    lines: list[int] = []
    for statement in statements[:-1]:
        if _is_harmless(statement):
            if block:
                found += _block(block)
                block = []
            found.append(statement)
        else:
            block += (statement, _mark(statement))
            lines.append(statement.lineno)
    lines.append(statements[-1].lineno)
    return [*found, *_block(block), statements[-1]], lines


_FIXED = (ast.Constant, ast.Name, ast.UnaryOp)


def _is_harmless(statement: ast.stmt) -> bool:
    """Whether a statement calls nothing. Also those that mean something else in a block.

    That is a docstring, a ``__future__`` import, and constants, which a block has only once each.
    """
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        value = statement.value
        parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else (value,)
        return all(isinstance(part, _FIXED) for part in parts)
    if isinstance(statement, ast.FunctionDef):
        args = statement.args
        return not (statement.decorator_list or args.defaults or args.kw_defaults)
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass)


def _block(statements: list[ast.stmt]) -> list[ast.stmt]:
    if not statements:
        return []
    first, last = statements[0], statements[-1]
    at: dict[str, Any] = {
        "lineno": first.lineno,
        "col_offset": first.col_offset,
        "end_lineno": last.end_lineno,
        "end_col_offset": last.end_col_offset,
    }
    return [ast.If(ast.Constant(True, **at), statements, [], **at)]


def _mark(after: ast.stmt) -> ast.stmt:
    at: dict[str, Any] = {  # no line of its own for a debugger to stop at
        "lineno": after.lineno,
        "col_offset": after.col_offset,
        "end_lineno": after.lineno,
        "end_col_offset": after.col_offset,
    }
    return ast.Expr(ast.Call(ast.Name(_MARK, _LOAD, **at), [], [], **at), **at)


def _nothing() -> None:
    """What a mark does when nobody watches any more."""


def _text(lines: list[str], number: int) -> str:
    text = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    return text if len(text) <= 80 else text[:79] + "…"


def report() -> str:
    """Return what the guard saw in this process, for people."""
    now = guard.initialized()
    if not now:
        return "No accelerator is initialised in this kernel: ranks can be forked from it."
    lines = []
    for what in sorted(now):
        touch = guard.culprit(what)
        lines.append(f"{what}: initialised, {touch.where}")
        lines += [f"    {call}" for call in touch.calls]
    way_out = "restart it, or launch with --engine spawn"
    return "\n".join([*lines, f"Ranks forked from this kernel cannot use that: {way_out}."])
