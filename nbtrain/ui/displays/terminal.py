"""Shows a run in a terminal: as lines, or as a table that is redrawn if the cursor can move."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import TextIO

from ...system.text import format_ranks, plural
from ...tracking import events as ev
from ...tracking.state import RankState, RunState
from .. import limits, merged_log, run_texts, text_summary
from .html_display import Display, Pace, bundle, show

_COLOURS = {"done": 32, "succeeded": 32, "running": 34, "failed": 31, "failing": 31}
_COLOURS |= {"finished": 33, "stopping": 33, "interrupted": 33, "timed out": 33, "stopped": 33}
_STATUS = re.compile(rf"(?<=: )(?:{'|'.join(_COLOURS)})\b")


class TextDisplay(Display):
    """Lines of text: what ranks print, and every few seconds a line of progress per rank."""

    is_in_place = False

    def __init__(self, *, keep_html: bool = False, is_raised: bool = True) -> None:
        """Prepare the display; prints nothing yet.

        With `keep_html`, the end shows the board as HTML and not the summary as text. With
        `is_raised`, tracebacks that end ranks are left out, since the caller raises the exception
        of the run.
        """
        self.keep_html = keep_html
        self.is_text = not keep_html
        self._output = _Output(is_raised=is_raised)
        self._lines: dict[int, str] = {}
        self._next_line_at: float | None = None
        self._hang = ""
        self._steered: tuple[ev.Steered, ...] = ()

    def update(self, state: RunState, now: float) -> None:
        """Print new lines, a hang that begins or ends, requests, and at times the progress."""
        _print(self._output.new_lines(state))
        if state.hang != self._hang:
            self._hang = state.hang
            _print([f"⚠ {state.hang}" if state.hang else "● the run continues"])
        if state.steered != self._steered:
            self._steered = state.steered
            _print([f"● {state.steered[-1].text}"])
        if self._next_line_at is None:
            self._next_line_at = now + limits.REPORT_INTERVAL_S
            _print([f"● {state.full_title}: {run_texts.facts(state, now)}"])
        # It is reached, or the clock was set.
        elif not 0 < self._next_line_at - now <= limits.REPORT_INTERVAL_S:
            self._next_line_at = now + limits.REPORT_INTERVAL_S
            _print(self._progress_lines(state))

    def _progress_lines(self, state: RunState) -> list[str]:
        """Return the lines of active ranks that changed since the last call, which it remembers."""
        moved = []
        for rank in state.ranks:
            line = text_summary.rank_line(rank, state)
            if self._lines.get(rank.rank) != line and not rank.is_over:
                self._lines[rank.rank] = line
                moved.append(line)
        return moved

    def finish(self, state: RunState, now: float) -> None:
        """Print the rest of the output; then print the summary without notes, or show the board."""
        _print(self._output.new_lines(state, is_last=True))
        if self.keep_html:
            show(bundle(state, now))
        else:  # the notes were printed at the start
            _print([text_summary.summary(replace(state, findings=()), now)])


class TableDisplay(Display):
    """A table of the ranks, redrawn in place. What ranks print scrolls above it."""

    is_text = True
    is_in_place = False

    def __init__(self) -> None:
        self._output = _Output()
        self._pace = Pace()
        self._height = 0
        """Lines of the table on the screen, right above the cursor."""

    def update(self, state: RunState, now: float) -> None:
        """Draw the table of ranks in place of the last one, below new output, if that is due.

        It is cut to the size of the terminal.
        """
        if self._pace.claim_drawing(state, now):
            size = shutil.get_terminal_size()
            table = text_summary.summary(replace(state, findings=()), now).split("\n")
            table = [line[: size.columns] for line in table[: max(1, size.lines - 2)]]
            self._replace_table(self._output.new_lines(state), table)

    def finish(self, state: RunState, now: float) -> None:
        final = text_summary.summary(replace(state, findings=()), now).split("\n")
        self._replace_table(self._output.new_lines(state, is_last=True), final, wrap=True)
        self._height = 0

    def _replace_table(self, above: list[str], table: list[str], wrap: bool = False) -> None:
        """Replace the table and add new lines above it, in one write, so that nothing flickers.

        Long lines of the table are cut unless `wrap` is set. Remembers the height of the table.
        """
        up = f"\x1b[{self._height}F\x1b[0J" if self._height else ""
        head = "".join(f"{line}\n" for line in above)
        body = "\n".join(map(colour_status, table))
        clip, unclip = ("", "") if wrap else ("\x1b[?7l", "\x1b[?7h")
        sys.stdout.write(f"{up}{head}{clip}{body}\n{unclip}")
        sys.stdout.flush()
        self._height = len(table)


class _Output:
    """Lines to print: the warnings, then what ranks print, with equal lines of ranks only once.

    If `is_raised`, the tracebacks that end ranks are left out: the caller raises the exception that
    caused the others.
    """

    def __init__(self, *, is_raised: bool = True) -> None:
        self._is_raised = is_raised
        self._printed: dict[int, int] = {}
        self._printed_notes: set[str] = set()
        self._failed_ranks: set[int] = set()
        self._pending: dict[int, list[tuple[float, str]]] = {}
        """Lines that are not printed yet, by rank, each with the time when it was seen."""

    def new_lines(self, state: RunState, *, is_last: bool = False) -> list[str]:
        """Return the lines to print since the last call: new notes, then labelled lines of ranks.

        A line that other ranks may still print waits up to MAX_DRAW_INTERVAL_S, but not with
        `is_last`.
        """
        lines = [note for note in run_texts.notes(state) if note not in self._printed_notes]
        self._printed_notes.update(lines)
        now = time.monotonic()
        for rank in state.ranks:
            seen = [(now, line) for line in self._unprinted_lines(rank, state)]
            if seen:
                self._pending.setdefault(rank.rank, []).extend(seen)
        seen_by = math.inf if is_last else now - limits.MAX_DRAW_INTERVAL_S
        return [*lines, *self._merge_due_lines(state, seen_by)]

    def _unprinted_lines(self, rank: RankState, state: RunState) -> Iterator[str]:
        """Yield a rank's lines since the last call; a traceback that is raised is cut.

        A line counts those that are no longer in memory. The lines then count as printed.
        """
        new = rank.log_count - self._printed.get(rank.rank, 0)
        if new <= 0:
            return
        self._printed[rank.rank] = rank.log_count
        if new > len(rank.log):
            yield f"… {plural(new - len(rank.log), 'line')}: run.logs()"
        is_last = self._is_raised and state.attempt == state.attempts
        has_raised = is_last and rank.status not in ("starting", "running")
        lines = merged_log.lines_of(rank, state, new)
        if not has_raised:
            yield from lines
        elif rank.rank not in self._failed_ranks:
            if ev.TRACEBACK_FOLLOWS in lines:
                self._failed_ranks.add(rank.rank)
            yield from merged_log.cut_traceback(lines)

    def _merge_due_lines(self, state: RunState, seen_by: float) -> Iterator[str]:
        """Yield the lines that all active ranks have printed, and those seen before `seen_by`.

        They are removed from `_pending`, and have labels: ``[rank 0] loading``. A newer line that
        equals an older one is yielded with it.
        """
        pending = {rank: [line for _, line in seen] for rank, seen in self._pending.items()}
        active = {rank.rank for rank in state.ranks if not rank.is_over}
        groups = merged_log.group_logs(pending)
        if len(groups) != 1 or not active <= set(groups[0][0]):
            old = {line for s in self._pending.values() for at, line in s if at <= seen_by}
            for rank, seen in self._pending.items():
                due = takewhile(lambda each: each[0] <= seen_by or each[1] in old, seen)
                pending[rank] = [line for _, line in due]
        for rank, lines in pending.items():
            del self._pending[rank][: len(lines)]
        for ranks, line in merged_log.merge_logs(pending):
            yield f"[{format_ranks(ranks)}] {line}"


def can_redraw(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a stream is a terminal that can move its cursor and show colours.

    False if NO_COLOR is set, or TERM is not.
    """
    term = environment.get("TERM", "")
    if term in ("", "dumb") or environment.get("NO_COLOR"):
        return False
    return bool(getattr(stream, "isatty", lambda: False)())


def colour_status(line: str) -> str:
    """Return a line of a summary, with its status in colour."""
    return _STATUS.sub(lambda m: f"\x1b[{_COLOURS[m[0]]}m{m[0]}\x1b[0m", line, count=1)


def _print(lines: list[str]) -> None:
    if lines:
        print(*lines, sep="\n", flush=True)
