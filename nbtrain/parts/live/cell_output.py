"""Shows a task on live ranks: a short one by its output, like a cell, a longer one by the board."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ...part_api import Display, RankState, RunState, format_ranks, plural, run_texts, show
from ...part_api import events as ev
from ...ui import limits, merged_log


class CellOutput(Display):
    """Prints what the ranks print and display. A task that takes longer has a `board`, too."""

    is_in_place = False

    def __init__(self, board: Callable[[], Display]) -> None:
        self._make_board = board
        self._board: Display | None = None

    def listen(self) -> None:
        if self._board is not None:
            self._board.listen()

    def update(self, state: RunState, now: float) -> None:
        """Draw the board, once the task has taken MAX_DRAW_INTERVAL_S. Prints nothing."""
        if self._board is None and state.elapsed(now) >= limits.MAX_DRAW_INTERVAL_S:
            self._board = self._make_board()
        if self._board is not None:
            self._board.update(state, now)

    def finish(self, state: RunState, now: float) -> None:
        """Complete the board, or print notes and what the ranks printed if there is no board.

        In both cases, then show what the ranks displayed.
        """
        if self._board is not None:
            self._board.finish(state, now)
        else:
            lines = [*run_texts.notes(state), *printed_lines(state.ranks)]
            if lines:
                print(*lines, sep="\n", flush=True)
        for line in displayed_outputs(state.ranks):
            print(line, flush=True) if isinstance(line, str) else show(dict(line))


def printed_lines(ranks: Sequence[RankState]) -> Iterator[str]:
    """Yield the lines that ranks printed, after ``[rank 0]``; a line of several ranks comes once.

    The traceback that ended a rank is left out; a line counts those that are no longer in memory.
    """
    logs: dict[int, list[str]] = {}
    for rank in ranks:
        lines = [*merged_log.cut_traceback(rank.log)]  # the caller raises the exception
        if left_out := rank.log_count - len(rank.log):
            lines.insert(0, f"… {plural(left_out, 'line')} before: run.logs()")
        logs[rank.rank] = lines
    yield from (f"[{format_ranks(n)}] {line}" for n, line in merged_log.merge_logs(logs))


def displayed_outputs(ranks: Sequence[RankState]) -> Iterator[str | Mapping[str, float | str]]:
    """Yield what ranks displayed: everything of the first that did, and what differs of others.

    A rich display is yielded as its MIME types, a text as lines after ``[rank 0]``. Of other ranks,
    only texts of a few lines come.
    """
    first = next((rank for rank in ranks if rank.displayed), None)
    if first is None:
        return
    texts = {rank.rank: [_text(each) for each in rank.displayed] for rank in ranks}
    for index, each in enumerate(first.displayed):
        others = [r for r in ranks if r is not first and index < len(r.displayed)]
        same = [first, *(r for r in others if texts[r.rank][index] == _text(each))]
        if set(each.data) - {"text/plain"}:
            yield each.data
        else:
            yield from _label_lines(same, _text(each))
        for rank in others:
            text = texts[rank.rank][index]
            if rank not in same and text.count("\n") < 4:
                yield from _label_lines([rank], text)


def _label_lines(ranks: Sequence[RankState], text: str) -> Iterator[str]:
    label = format_ranks([rank.rank for rank in ranks])
    yield from (f"[{label}] {line}" for line in text.split("\n"))


def _text(output: ev.Displayed) -> str:
    return str(output.data.get("text/plain", ""))
