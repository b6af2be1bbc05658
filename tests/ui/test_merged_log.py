"""Equal lines of ranks are one line, in a terminal and a headless run too."""

from __future__ import annotations

import itertools

import pytest

from nbtrain.tracking import events as ev
from nbtrain.tracking.reducers import fold
from nbtrain.tracking.state import RankState, RunState
from nbtrain.ui.board import log_panel
from nbtrain.ui.displays.terminal import TextDisplay


def run_of(*logs: str) -> RunState:
    """A run whose ranks print these lines, one after the other in each text."""
    ranks = tuple(RankState(number, "running") for number in range(len(logs)))
    events = [ev.Output(1.0, r, tuple(log.split(";"))) for r, log in enumerate(logs) if log]
    return fold(RunState("train", "fork", ranks, created=0.0), events)


def printed(capsys: pytest.CaptureFixture[str], *states: RunState) -> list[str]:
    """What a display of lines prints of a run in these moments, the last of which is its end."""
    display = TextDisplay()
    for state in states[:-1]:
        display.update(state, 1.0)
    display.finish(states[-1], 1.0)
    return [line for line in capsys.readouterr().out.split("\n") if line.startswith("[")]


@pytest.mark.parametrize(
    "prefix", ["", "[rank {0}] ", "[Rank {0}]: ", "rank{0}: ", "(rank {0}/4) ", "[{0}/4] "]
)
def test_a_line_that_all_ranks_print_is_there_once(
    capsys: pytest.CaptureFixture[str], prefix: str
) -> None:
    lines = [f"{prefix.format(r)}loading;{prefix.format(r)}ready" for r in range(4)]
    state = run_of(*lines)
    assert printed(capsys, state, state) == ["[ranks 0–3] loading", "[ranks 0–3] ready"]
    assert log_panel.merge_last_lines(state, 9) == [
        ("all ranks", "loading"),
        ("all ranks", "ready"),
    ]


def test_a_line_waits_for_other_ranks_that_print_it_soon(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, then = run_of("a;b", "a", ""), run_of("a;b", "a;b", "a;b;own")
    assert printed(capsys, first, then) == ["[ranks 0–2] a", "[ranks 0–2] b", "[rank 2] own"]


def test_what_one_rank_prints_alone_keeps_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    state = run_of("x;both", "both;y")
    assert printed(capsys, state) == ["[rank 0] x", "[ranks 0–1] both", "[rank 1] y"]
    state = run_of("a;shard 0;b;c", "a;shard 1;b", "a;b;c;own")
    lines = [("all ranks", "a"), ("rank 0", "shard 0"), ("rank 1", "shard 1")]
    lines += [("all ranks", "b"), ("ranks 0, 2", "c"), ("rank 2", "own")]
    assert log_panel.merge_last_lines(state, 12) == lines
    assert log_panel.merge_last_lines(state, 2) == lines[-2:]


def test_a_line_is_printed_while_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    state, display = run_of("only rank 0", ""), TextDisplay()
    for _ in itertools.count():
        display.update(state, 1.0)
        if "[rank 0] only rank 0" in capsys.readouterr().out:
            break
