"""Which cell initialised an accelerator: the guard's question, asked around every cell.

A marker between the top-level statements of a cell tells the statement too, whatever library it
called. Everything here is IPython's documented way to watch cells (events, AST transformers) and
is taken back by `stop`.
"""

from __future__ import annotations

import ast
import contextlib
from typing import Any

from . import guard

_MARK = "__nbtrain_look__"


class Blame:
    """Watches the cells of one shell. `mode` is 'warn' (say it at once) or 'off'."""

    def __init__(self, shell: Any) -> None:
        self.mode = "warn"
        self._shell = shell
        self._expecting = False
        self._cell: int | None = None
        self._lines: list[str] = []
        self._last: int | None = None

    def start(self) -> None:
        """Watch from the next cell on."""
        guard.look()
        guard.keep_checks_harmless()
        self._shell.events.register("pre_run_cell", self._before)
        self._shell.events.register("post_run_cell", self._after)
        self._shell.ast_transformers.append(self)
        self._shell.push({_MARK: self._between}, interactive=False)

    def stop(self) -> None:
        """Leave the shell and the environment as they were before `start`."""
        guard.restore_checks()
        with contextlib.suppress(ValueError):
            self._shell.events.unregister("pre_run_cell", self._before)
            self._shell.events.unregister("post_run_cell", self._after)
        if self in self._shell.ast_transformers:
            self._shell.ast_transformers.remove(self)
        self._shell.drop_by_id({_MARK: self._shell.user_ns.get(_MARK)})

    def _before(self, info: Any) -> None:
        self._expecting, self._cell, self._last = True, None, None
        self._lines = (info.raw_cell or "").splitlines()
        self._tell(guard.look())  # by a thread or a callback, between two cells

    def visit(self, tree: ast.Module) -> ast.Module:
        """Put a look between a cell's statements (IPython calls this with every cell's tree).

        Only the first tree after `_before` is a cell; later ones are what ``%timeit`` times.
        """
        if not self._expecting or not tree.body:
            return tree
        self._expecting = False
        self._cell = max(1, len(self._shell.history_manager.input_hist_parsed) - 1)
        body: list[ast.stmt] = []
        for before, statement in zip([None, *tree.body], tree.body, strict=False):
            if before is not None:
                mark = ast.parse(f"{_MARK}({before.lineno}, {statement.lineno})").body[0]
                body.append(ast.copy_location(mark, statement))
            body.append(statement)
        self._last = tree.body[0].lineno
        tree.body = body
        return ast.fix_missing_locations(tree)

    def _between(self, line: int, following: int) -> None:
        self._tell(guard.look(self._cell, line, self._statement(line)))
        self._last = following

    def _after(self, _result: Any) -> None:
        line = self._last
        self._tell(guard.look(self._cell, line, self._statement(line)))

    def _statement(self, line: int | None) -> str:
        if line is None or not 0 < line <= len(self._lines):
            return ""
        text = self._lines[line - 1].strip()
        return text if len(text) <= 80 else text[:79] + "…"

    def _tell(self, touches: list[guard.Touch]) -> None:
        for touch in touches if self.mode == "warn" else ():
            place = touch.where if touch.cell is not None else "something between two cells"
            print(
                f"nbtrain: {place} initialised {touch.what}. Ranks can no longer be forked from "
                "this kernel to use it: keep that inside the training function, and restart."
            )


def report() -> str:
    """Return what the guard saw in this process, for people."""
    now = guard.initialized()
    if not now:
        return "No accelerator is initialised in this kernel: ranks can be forked from it."
    lines = [f"{what}: initialised, {guard.culprit(what).where}" for what in sorted(now)]
    return "\n".join([*lines, "Ranks forked from this kernel cannot use that: restart it."])
