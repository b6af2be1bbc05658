"""Which cell initialised an accelerator: the guard's question, asked around every cell.

A marker between the top-level statements of a cell tells the statement too, whatever library it
called. Everything here is IPython's documented way to watch cells (events, AST transformers) and
is taken back by `stop`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
from dataclasses import dataclass, field
from typing import Any

from . import gate, guard

_MARK = "__nbtrain_look__"


@dataclass
class _Running:
    """A cell while it runs: its number, the text of its statements by line, the one under way."""

    raw: str
    number: int | None = None
    statements: dict[int, str] = field(default_factory=dict)
    line: int | None = None

    def look(self) -> list[guard.Touch]:
        return guard.look(self.number, self.line, self.statements.get(self.line or 0, ""))


class Blame:
    """Watches the cells of one shell.

    `mode` is 'warn' (say it at once), 'block' (keep it from happening) or 'off' (only remember).
    """

    def __init__(self, shell: Any) -> None:
        self.mode = "warn"
        self._shell = shell
        self._expecting = False
        self._stack: list[_Running] = []  # a cell may run another one

    def start(self) -> None:
        """Watch from the next cell on."""
        guard.look()
        guard.keep_checks_harmless()
        gate.open_()
        self._shell.events.register("pre_run_cell", self._before)
        self._shell.events.register("post_run_cell", self._after)
        self._shell.ast_transformers.append(self)
        # Among the builtins, where no %reset reaches it.
        setattr(builtins, _MARK, self._between)

    def stop(self) -> None:
        """Leave the shell and the environment as they were before `start`."""
        guard.restore_checks()
        gate.close()
        with contextlib.suppress(ValueError):
            self._shell.events.unregister("pre_run_cell", self._before)
            self._shell.events.unregister("post_run_cell", self._after)
        if self in self._shell.ast_transformers:
            self._shell.ast_transformers.remove(self)
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

    def visit(self, tree: ast.Module) -> ast.Module:
        """Put a look between a cell's statements (IPython calls this with every cell's tree).

        Only the first tree after `_before` is a cell; later ones are what ``%timeit`` times.
        """
        if not self._expecting or not tree.body:
            return tree
        self._expecting = False
        cell = self._stack[-1]
        cell.number = max(1, len(self._shell.history_manager.input_hist_parsed) - 1)
        # IPython strips leading blank lines before it parses; people count them.
        lines = cell.raw.splitlines()
        skipped = len(lines) - len(cell.raw.lstrip("\n").splitlines())
        places = [statement.lineno + skipped for statement in tree.body]
        cell.statements = {n: _text(lines, n) for n in places}
        cell.line = places[0]
        body: list[ast.stmt] = tree.body[:1]
        for place, statement in zip(places[1:], tree.body[1:], strict=True):
            mark = ast.parse(f"{_MARK}({place})").body[0]
            body += [ast.copy_location(mark, statement), statement]
        tree.body = body
        return ast.fix_missing_locations(tree)

    def _between(self, following: int) -> None:
        """The statement under way has ended, the one at `following` begins."""
        if self._stack:
            self._tell(self._stack[-1].look())
            self._stack[-1].line = following

    def _after(self, _result: Any) -> None:
        if self._stack:
            self._tell(self._stack.pop().look())

    def _tell(self, touches: list[guard.Touch]) -> None:
        for touch in touches if self.mode != "off" else ():
            place = touch.where if touch.cell is not None else "something between two cells"
            print(
                f"nbtrain: {place} initialised {touch.what}. Ranks can no longer be forked from "
                "this kernel to use it: keep that inside the training function, and restart."
            )


def _nothing(_following: int) -> None:
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
    return "\n".join([*lines, "Ranks forked from this kernel cannot use that: restart it."])
