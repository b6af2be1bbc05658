"""Finds the cell that initialises an accelerator, by looking before and after every cell.

Marks between the top-level statements of a cell find the statement too, whichever library it
called. IPython's events and its parser are hooked for this; `stop` restores them.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import itertools
import re
import sys
import traceback
from dataclasses import dataclass, field
from typing import Any

from ..system import accelerator_guard, accelerator_hooks
from ..system.instrumentation import patch
from ..system.text import shorten

_UNKNOWN = re.compile(r"^name '(\w+)' is not defined")
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

    def look(self) -> list[accelerator_guard.AcceleratorInit]:
        if not self.lines:
            return accelerator_guard.record_inits(self.number)
        line = self.lines[min(self.at, len(self.lines) - 1)]
        # IPython strips leading blank lines before it parses; people count them.
        skipped = len(self.raw) - len(self.raw.lstrip("\n"))
        typed, parsed = self.raw[skipped:].splitlines(), self.parsed.splitlines()
        # The lines differ in number where a magic over several lines has become one.
        shown = (typed if len(typed) == len(parsed) else parsed)[line - 1]
        return accelerator_guard.record_inits(
            self.number, line + skipped, shorten(shown.strip(), 80)
        )


class CellWatch:
    """Watches the cells of one shell.

    `mode` is 'warn' (print it at once), 'block' (prevent it) or 'off' (only remember it).
    """

    def __init__(self, shell: Any) -> None:
        """Watch from the next cell on."""
        self.mode = "warn"
        self.failures: dict[int, int] = {}
        """By the number of a cell that failed: the line at which it did."""
        self.defined_in_ranks: dict[str, int] = {}
        """By the name that a cell of ranks binds: the cell's number."""
        self._shell = shell
        self._expecting = False
        self._stack: list[_Running] = []  # a cell may run another one
        accelerator_guard.record_inits()
        accelerator_guard.keep_checks_harmless()
        accelerator_hooks.open_()
        shell.events.register("pre_run_cell", self._before)
        shell.events.register("post_run_cell", self._after)
        self._restore_parser = patch(shell.compile, "ast_parse", self._parse_with_marks)
        # Among the builtins, where no %reset reaches it.
        setattr(builtins, _MARK, self._between)

    def stop(self) -> None:
        """Leave the shell and the environment as they were before."""
        accelerator_guard.restore_checks()
        accelerator_hooks.close()
        with contextlib.suppress(ValueError):
            self._shell.events.unregister("pre_run_cell", self._before)
            self._shell.events.unregister("post_run_cell", self._after)
        self._restore_parser()
        # Not deleted: the rest of this very cell may hold marks.
        setattr(builtins, _MARK, lambda: None)

    def set_mode(self, mode: str) -> None:
        """Change the mode: 'warn', 'block' or 'off'."""
        self.mode = mode
        accelerator_hooks.block(mode == "block")

    def _before(self, info: Any) -> None:
        # By a thread, or by a callback.
        self._warn(accelerator_guard.record_inits(statement="code that ran between two cells"))
        self._expecting = True
        self._stack.append(_Running(info.raw_cell or ""))

    def _parse_with_marks(self, parse: Any, source: str, *args: Any, **kwargs: Any) -> ast.Module:
        """Parse as the shell does, and put looks between a cell's statements.

        Only the first tree after `_before` is a cell; later ones are what ``%timeit`` times. The
        documented way, an AST transformer, has IPython visit every node of every cell, which takes
        longer than all the rest. Seen in IPython 7.34 to 9.18.
        """
        tree: ast.Module = parse(source, *args, **kwargs)
        if not (self._expecting and self._stack and tree.body):
            return tree
        self._expecting = False
        cell = self._stack[-1]
        cell.number = max(1, len(self._shell.history_manager.input_hist_parsed) - 1)
        cell.parsed = source
        for line, call in _trains_before(tree) if "launch" in source else ():
            print(
                f"nbtrain: line {line} calls `{call}()`, which trains in this kernel, before any "
                f"rank starts. Pass the function itself: `{call}` without the parentheses."
            )
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
            if accelerator_guard.has_new_init():
                self._warn(cell.look())
            cell.at += 1

    def _after(self, result: Any) -> None:
        self._expecting = False
        if self._stack:
            cell = self._stack.pop()
            launcher: Any = sys.modules.get("nbtrain.lifecycle.launcher")
            refusals = [] if launcher is None else launcher.take_refusals()  # before any launch
            for refusal in refusals:
                if result.success:
                    print(f"nbtrain: a launch was refused, and the cell caught it: {refusal}")
            if cell.number is not None and not result.success:
                self.failures[cell.number] = self._line_of_failure(result.error_in_exec)
                self._explain_name(result.error_in_exec)
            if accelerator_guard.has_new_init():
                self._warn(cell.look())

    def _explain_name(self, error: BaseException | None) -> None:
        """Say where a name is that only ranks have: what their cell defines, they keep."""
        # Not `error.name`: an exception that comes from a rank has none.
        found = _UNKNOWN.search(str(error)) if isinstance(error, NameError) else None
        number = self.defined_in_ranks.get(found[1]) if found is not None else None
        if found is not None and number is not None and found[1] not in self._shell.user_ns:
            remedy = (
                "Define it in a cell without %%distributed: then the notebook and the ranks have "
                f"it. Or copy its value back with `%%distributed --out {found[1]}`."
            )
            if "trainer" in found[1].lower():
                from ..transport.result_pickler import FROM_TRAINER

                remedy = FROM_TRAINER
            print(f"nbtrain: In[{number}] defined `{found[1]}` in its ranks only. {remedy}")

    def _line_of_failure(self, error: BaseException | None) -> int:
        """Return the line of a cell that an error came from; 1 if it is not known."""
        line = 1
        for frame, number in traceback.walk_tb(error.__traceback__ if error else None):
            # IPython 8.0 to 8.4 calls a cell's code `<cell line: 1>`.
            is_cell = frame.f_code.co_name.startswith(("<module>", "<cell line"))
            if is_cell and frame.f_globals is self._shell.user_ns:
                line = number
        return line

    def _warn(self, touches: list[accelerator_guard.AcceleratorInit]) -> None:
        for touch in touches if self.mode != "off" else ():
            remedy = f"Restart the kernel and use {touch.name} only inside the training function"
            on_tpu = touch.name in accelerator_guard.OF_ONE_PROCESS
            users = "ranks" if on_tpu else "forked ranks"
            remedy += "." if on_tpu else ", or launch with --engine spawn."
            print(
                f"nbtrain: {touch.place} initialised {touch.name}, so {users} cannot use "
                f"{touch.name}. {remedy}"
            )


def _with_marks(statements: list[ast.stmt]) -> tuple[list[ast.stmt], list[int]]:
    """Return the statements in blocks, a mark after each, and the lines of those between marks.

    IPython compiles and runs each top-level statement apart, which takes longer than a mark: in
    blocks, a cell is hardly slower for being watched. The last one stays by itself: it is
    displayed.
    """
    marked: list[ast.stmt] = []
    lines: list[int] = []
    for is_harmless, group in itertools.groupby(statements[:-1], _is_harmless):
        block = list(group)
        if not is_harmless:
            lines += [statement.lineno for statement in block]
            place = _span(block[0], block[-1])
            marks = [node for statement in block for node in (statement, _mark(statement))]
            block = [ast.If(ast.Constant(True, **place), marks, [], **place)]
        marked += block
    return [*marked, statements[-1]], [*lines, statements[-1].lineno]


def _trains_before(tree: ast.Module) -> list[tuple[int, str]]:
    """Return each ``notebook_launcher(trainer.train(), …)``: its line, and what it calls."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Name(id="notebook_launcher" | "launch")
                | ast.Attribute(attr="notebook_launcher" | "launch"),
                args=[ast.Call(func=ast.Attribute(attr="train" | "fit") as called, args=[]), *_],
            ):
                found.append((node.lineno, ast.unparse(called)))
    return found


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


def _mark(after: ast.stmt) -> ast.stmt:
    place = _span(after, after)  # no line of its own for a debugger to stop at
    return ast.Expr(ast.Call(ast.Name(_MARK, _LOAD, **place), [], [], **place), **place)


def _span(first: ast.stmt, last: ast.stmt) -> dict[str, Any]:
    return {
        "lineno": first.lineno,
        "col_offset": first.col_offset,
        "end_lineno": last.end_lineno,
        "end_col_offset": last.end_col_offset,
    }


def accelerator_status_text() -> str:
    """Return which accelerators are initialised in this process, and by which cells, as text."""
    now = accelerator_guard.initialized_accelerators()
    if not now:
        return "No accelerator is initialised in this kernel: ranks can be forked from it."
    lines = []
    for name in sorted(now):
        touch = accelerator_guard.first_cause(name)
        lines.append(f"{name}: initialised, {touch.place}")
        lines += [f"    {call}" for call in touch.calls]
    names = " or ".join(sorted(now))
    users, remedy = "Forked ranks", "Restart the kernel, or launch with --engine spawn."
    if now & accelerator_guard.OF_ONE_PROCESS:
        users, remedy = "Ranks", "Restart the kernel."
    return "\n".join([*lines, f"{users} cannot use {names}. {remedy}"])
