"""Finds the cell and the statement that initialise an accelerator.

It checks before and after every cell, and at marks between the top-level statements of a cell. So
it does not matter which library the statement called. For this it uses IPython's events and patches
its parser; `stop` restores them.
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
class _RunningCell:
    """A cell while it runs."""

    raw: str
    """Its text as typed."""
    number: int | None = None
    parsed: str = ""
    """Its Python source."""
    lines: list[int] = field(default_factory=list)
    """The lines, in `parsed`, of the statements that could initialise something."""
    at: int = 0
    """The index in `lines` of the running statement."""

    def record_inits(self) -> list[accelerator_guard.AcceleratorInit]:
        """Record accelerators that the running statement has initialised, and return them.

        The place has the line and the text as the user typed them. A cell that was never parsed has
        only its number.
        """
        if not self.lines:
            return accelerator_guard.record_inits(self.number)
        line = self.lines[min(self.at, len(self.lines) - 1)]
        # IPython strips leading blank lines before it parses, but the user counts them.
        skipped = len(self.raw) - len(self.raw.lstrip("\n"))
        typed, parsed = self.raw[skipped:].splitlines(), self.parsed.splitlines()
        # The numbers of lines differ if a magic over several lines has become one line.
        shown = (typed if len(typed) == len(parsed) else parsed)[line - 1]
        return accelerator_guard.record_inits(
            self.number, line + skipped, shorten(shown.strip(), 80)
        )


class CellWatch:
    """Watches the cells of one shell for initialised accelerators, until `stop`.

    `mode` is 'warn' (print it at once), 'block' (prevent it) or 'off' (only record it).
    """

    def __init__(self, shell: Any) -> None:
        """Start watching with the next cell.

        Registers events with IPython, patches its parser, torch and Accelerate, and adds a builtin.
        Sets ``PYTORCH_NVML_BASED_CUDA_CHECK`` unless it is set. `stop` undoes this.
        """
        self.mode = "warn"
        self.failures: dict[int, int] = {}
        """The line of the error for each cell that failed, by the cell's number."""
        self.defined_in_ranks: dict[str, int] = {}
        """The number of the %%distributed cell that defines a name, by the name."""
        self._shell = shell
        self._expecting = False
        self._stack: list[_RunningCell] = []  # a cell may run another one
        accelerator_guard.record_inits()
        accelerator_guard.set_nvml_check()
        accelerator_hooks.open_()
        shell.events.register("pre_run_cell", self._before_cell)
        shell.events.register("post_run_cell", self._after_cell)
        self._restore_parser = patch(shell.compile, "ast_parse", self._parse_with_marks)
        # A builtin, which %reset does not delete.
        setattr(builtins, _MARK, self._after_statement)

    def stop(self) -> None:
        """Restore the shell and the environment."""
        accelerator_guard.remove_nvml_check()
        accelerator_hooks.close()
        with contextlib.suppress(ValueError):
            self._shell.events.unregister("pre_run_cell", self._before_cell)
            self._shell.events.unregister("post_run_cell", self._after_cell)
        self._restore_parser()
        # Not deleted, because the rest of the running cell may have marks.
        setattr(builtins, _MARK, lambda: None)

    def set_mode(self, mode: str) -> None:
        """Change the mode: 'warn', 'block' or 'off'."""
        self.mode = mode
        accelerator_hooks.block(mode == "block")

    def _before_cell(self, info: Any) -> None:
        # A thread or a callback may have initialised one.
        self._warn(accelerator_guard.record_inits(statement="code that ran between two cells"))
        self._expecting = True
        self._stack.append(_RunningCell(info.raw_cell or ""))

    def _parse_with_marks(self, parse: Any, source: str, *args: Any, **kwargs: Any) -> ast.Module:
        """Parse as the shell does, and put marks between a cell's statements.

        Also prints a hint for each ``notebook_launcher(trainer.train())``. Only the first tree
        after `_before_cell` is a cell; later ones are what ``%timeit`` times. With an AST
        transformer, the documented way, IPython would visit every node of every cell, which takes
        longer than everything else. Seen in IPython 7.34 to 9.18.
        """
        tree: ast.Module = parse(source, *args, **kwargs)
        if not (self._expecting and self._stack and tree.body):
            return tree
        self._expecting = False
        cell = self._stack[-1]
        cell.number = max(1, len(self._shell.history_manager.input_hist_parsed) - 1)
        cell.parsed = source
        for line, call in _find_early_training(tree) if "launch" in source else ():
            print(
                f"nbtrain: line {line} calls `{call}()`, which trains in this kernel, before any "
                f"rank starts. Pass the function itself: `{call}` without the parentheses."
            )
        if len(tree.body) == 1:
            cell.lines = [tree.body[0].lineno]
        elif self._can_be_marked(tree):
            tree.body, cell.lines = _add_marks(tree.body)
        return tree

    def _can_be_marked(self, tree: ast.Module) -> bool:
        """Return whether a cell's statements do the same in blocks as at the top level.

        Transformers of other extensions expect statements at the top level, and so does a shell
        that displays each expression. A ``global`` in a block would come too late.
        """
        shell = self._shell
        if shell.ast_transformers or shell.ast_node_interactivity == "all":
            return False
        return not any(type(statement) is ast.Global for statement in tree.body)

    def _after_statement(self) -> None:
        """Record what the last statement initialised, and warn about it.

        Each mark calls this once, because it also advances to the cell's next marked line.
        """
        if self._stack:
            cell = self._stack[-1]
            if accelerator_guard.has_new_init():
                self._warn(cell.record_inits())
            cell.at += 1

    def _after_cell(self, result: Any) -> None:
        """Warn about a refused launch that the ended cell caught, and about new accelerators.

        For a cell that failed, keeps the line of the error in `failures`, and explains a
        `NameError` about a name that only the ranks have.
        """
        self._expecting = False
        if self._stack:
            cell = self._stack.pop()
            launcher = sys.modules.get("nbtrain.lifecycle.launcher")  # imported at a first launch
            take_refusals = getattr(launcher, "take_refusals", list)
            for refusal in take_refusals():
                if result.success:
                    print(f"nbtrain: a launch was refused, and the cell caught it: {refusal}")
            if cell.number is not None and not result.success:
                self.failures[cell.number] = self._find_failed_line(result.error_in_exec)
                self._explain_name(result.error_in_exec)
            if accelerator_guard.has_new_init():
                self._warn(cell.record_inits())

    def _explain_name(self, error: BaseException | None) -> None:
        """Explain a `NameError` about a name that a %%distributed cell defined in its ranks only.

        Prints nothing for other errors, and for a name that the notebook has by now.
        """
        # Not `error.name`, which an exception from a rank does not have.
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

    def _find_failed_line(self, error: BaseException | None) -> int:
        """Return the line of a cell at which an error occurred; 1 if it is unknown."""
        line = 1
        for frame, number in traceback.walk_tb(error.__traceback__ if error else None):
            # IPython 8.0 to 8.4 calls a cell's code `<cell line: 1>`.
            is_cell = frame.f_code.co_name.startswith(("<module>", "<cell line"))
            if is_cell and frame.f_globals is self._shell.user_ns:
                line = number
        return line

    def _warn(self, inits: list[accelerator_guard.AcceleratorInit]) -> None:
        """Print, for each accelerator, which ranks cannot use it and what to do.

        Nothing in mode 'off'.
        """
        for init in inits if self.mode != "off" else ():
            remedy = f"Restart the kernel and use {init.name} only inside the training function"
            is_gpu = init.name in accelerator_guard.GPUS
            users = "forked ranks" if is_gpu else "ranks"
            remedy += ", or launch with --engine spawn." if is_gpu else "."
            print(
                f"nbtrain: {init.place} initialised {init.name}, so {users} cannot use "
                f"{init.name}. {remedy}"
            )


def _add_marks(statements: list[ast.stmt]) -> tuple[list[ast.stmt], list[int]]:
    """Return the statements in blocks with marks, and the lines of the marked statements.

    Harmless statements (see `_is_harmless`) have no mark and no line. The last one stays alone,
    because IPython displays its value: it has no mark, but its line is the last in the list.
    IPython compiles and runs each top-level statement separately, which takes longer than a mark;
    with blocks, a watched cell is hardly slower.
    """
    marked: list[ast.stmt] = []
    lines: list[int] = []
    for is_harmless, group in itertools.groupby(statements[:-1], _is_harmless):
        block = list(group)
        if not is_harmless:
            lines += [statement.lineno for statement in block]
            place = _position(block[0], block[-1])
            marks = [node for statement in block for node in (statement, _make_mark(statement))]
            block = [ast.If(ast.Constant(True, **place), marks, [], **place)]
        marked += block
    return [*marked, statements[-1]], [*lines, statements[-1].lineno]


def _find_early_training(tree: ast.Module) -> list[tuple[int, str]]:
    """Return the line and the called function of each ``notebook_launcher(trainer.train())``.

    Found are `notebook_launcher` and `launch`, also as attributes, with a call of a method `train`
    or `fit` without positional arguments in the first place.
    """
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


def _is_constant(value: ast.expr | None) -> bool:
    """Return whether an expression is a constant, a name, or ``-x`` of one: it calls nothing."""
    while isinstance(value, ast.UnaryOp):
        value = value.operand
    return isinstance(value, (ast.Constant, ast.Name))


def _is_harmless(statement: ast.stmt) -> bool:
    """Return whether a statement needs no mark: it calls nothing, or may not be in a block.

    Harmless are assigned constants, plain functions, ``pass``, a docstring and a ``__future__``
    import; nothing else is. Constants stay outside of blocks: equal ones in one block would be one
    object.
    """
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        value = statement.value
        parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else (value,)
        return all(map(_is_constant, parts))
    if isinstance(statement, ast.FunctionDef):
        args = statement.args
        return not (statement.decorator_list or args.defaults or args.kw_defaults)
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass)


def _make_mark(after: ast.stmt) -> ast.stmt:
    place = _position(after, after)  # so that a debugger does not stop at the mark
    return ast.Expr(ast.Call(ast.Name(_MARK, _LOAD, **place), [], [], **place), **place)


def _position(first: ast.stmt, last: ast.stmt) -> dict[str, Any]:
    """Return the position, for a new syntax tree, that spans two statements."""
    return {
        "lineno": first.lineno,
        "col_offset": first.col_offset,
        "end_lineno": last.end_lineno,
        "end_col_offset": last.end_col_offset,
    }


def accelerator_status_text() -> str:
    """Return the accelerators that are initialised in this process, with their cells, as text."""
    now = accelerator_guard.initialized_accelerators()
    if not now:
        return "No accelerator is initialised in this kernel: ranks can be forked from it."
    lines = []
    for name in sorted(now):
        init = accelerator_guard.first_cause(name)
        lines.append(f"{name}: initialised, {init.place}")
        lines += [f"    {call}" for call in init.calls]
    names = " or ".join(sorted(now))
    users, remedy = "Forked ranks", "Restart the kernel, or launch with --engine spawn."
    if now - accelerator_guard.GPUS:
        users, remedy = "Ranks", "Restart the kernel."
    return "\n".join([*lines, f"{users} cannot use {names}. {remedy}"])
