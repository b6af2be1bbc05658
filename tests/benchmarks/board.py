"""What the board costs the kernel: folding events into the picture, drawing it, its size.

In CPU time of this process. The peer of folding is the least that a reader of the same lines must
do, decoding them; of drawing, `rich`'s table of as many rows where rich is installed, else joining
the bytes; of the size, 30 KB.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from table import Row, Target, take_turns

from nbtrain.tracking import events as ev
from nbtrain.tracking.reducers import fold
from nbtrain.tracking.state import RankState, RunState
from nbtrain.ui import text_summary
from nbtrain.ui.board import board

ROUNDS = 15
MANY = 1024
EVENTS_A_SECOND = 10 * MANY
SECONDS = 3
"""Of events that one turn folds, in batches of a tenth of a second."""


def rows(rounds: int | None) -> list[Row]:
    """Measure all of it in this process."""
    return [*folding(rounds or ROUNDS), *drawing(rounds or ROUNDS)]


def folding(rounds: int) -> list[Row]:
    """Measure what an event costs, where 1,024 ranks say ten a second each."""
    batches = [list(batch(MANY, tick)) for tick in range(10 * SECONDS)]
    lines = [[ev.to_line(event) for event in events] for events in batches]
    t = take_turns(
        {
            "fold": lambda: per_event(batches, fold_all),
            "read": lambda: per_event(lines, read_all),
            "decode": lambda: per_event(lines, decode_all),
        },
        rounds,
    )
    share = [1e-6 * EVENTS_A_SECOND * figure for figure in t["read"]]
    least = [1e-6 * EVENTS_A_SECOND * figure for figure in t["decode"]]
    folded, decoded = "an event folded (1,024 ranks)", "its line by json.loads"
    return [
        Row("board", f"{folded} / {decoded}", "µs", t["fold"], t["decode"], own(45)),
        Row(
            "board",
            "lines read and folded at 1,024 ranks × 10 events/s / json.loads alone",
            "cores",
            share,
            least,
            own(0.5),
        ),
    ]


def own(limit: float) -> Target:
    """Return a target for nbtrain's own figure."""
    return Target(limit, own_figure=True)


def drawing(rounds: int) -> list[Row]:
    """Measure what a drawing costs, and how large it is."""
    found = []
    for ranks, limit in ((8, 3.0), (64, 10.0), (MANY, 50.0)):
        state = trained(ranks)
        drawn = board.render(state, 200.0).encode()
        t = take_turns(
            {
                "html": partial(milliseconds, lambda s=state: board.render(s, 200.0)),
                "text": partial(milliseconds, lambda s=state: text_summary.summary(s, 200.0)),
                "peer": partial(milliseconds, partial(peer_table(), state)),
            },
            rounds,
        )
        found += [
            Row("board", f"HTML of {ranks} ranks / {PEER}", "ms", t["html"], t["peer"], own(limit)),
            Row("board", f"text of {ranks} ranks / {PEER}", "ms", t["text"], t["peer"]),
            Row("board", f"page of {ranks} ranks / 30 KB", "B", [len(drawn)], [30_000], Target(1)),
        ]
    return found


def batch(ranks: int, tick: int) -> list[ev.Event]:
    """Return what each rank says in a tenth of a second: metrics, training or a bar."""
    now, found = 100 + tick / 10, list[ev.Event]()
    for rank in range(ranks):
        kind = (tick + rank) % 3
        if kind == 0:
            values = {"loss": 2 / (1 + tick) + rank / 1e4, "accuracy": tick / 300, "norm": 1.3}
            found.append(ev.Metrics(now, rank, tick, values))
        elif kind == 1:
            found.append(
                ev.TrainingUpdate(
                    now,
                    rank,
                    steps=5 * tick,
                    elapsed=tick / 10,
                    waited=tick / 100,
                    samples=64 * tick,
                    loss=0.5,
                    lr=1e-3,
                    epoch=1,
                    batch=tick,
                    batches=900,
                )
            )
        else:
            found.append(ev.Progress(now, rank, 0, tick, 900, tick / 10, "batch"))
    return found


def trained(ranks: int) -> RunState:
    """Return a run in full swing."""
    state = RunState("train()", "fork", tuple(RankState(r) for r in range(ranks)), created=100.0)
    state = fold(state, [ev.Started(100.0, rank, 1) for rank in range(ranks)])
    said = [ev.Output(100.0, rank, ("loading", f"shard {rank}", "ready")) for rank in range(ranks)]
    held = [ev.Resources(100.0, rank, 1.0, 10**9) for rank in range(ranks)]
    return fold(state, [*said, *held, *(e for tick in range(90) for e in batch(ranks, tick))])


def fold_all(batches: list[list[Any]]) -> None:
    """Fold events, a batch at a time."""
    state = RunState("train()", "fork", tuple(RankState(r) for r in range(MANY)), created=100.0)
    for events in batches:
        state = fold(state, events)


def read_all(batches: list[list[Any]]) -> None:
    """Decode lines into events, and fold those."""
    fold_all([[event for line in lines if (event := ev.from_line(line))] for lines in batches])


def decode_all(batches: list[list[Any]]) -> None:
    """Decode lines, and no more."""
    for lines in batches:
        for line in lines:
            json.loads(line)


def per_event(batches: list[list[Any]], action: Callable[[list[list[Any]]], None]) -> float:
    """Return the CPU µs that `action` takes an event."""
    start = time.process_time()
    action(batches)
    return 1e6 * (time.process_time() - start) / sum(map(len, batches))


def milliseconds(action: Callable[[], object], times: int = 5) -> float:
    """Return the CPU ms that `action` takes."""
    start = time.process_time()
    for _ in range(times):
        action()
    return 1e3 * (time.process_time() - start) / times


def peer_table() -> Callable[[RunState], str]:
    """Return what draws a table of a run's ranks by other means."""
    return rich_table if PEER.startswith("rich") else joined


def rich_table(state: RunState) -> str:
    """Draw the ranks as a table of rich's, into text."""
    from rich.console import Console
    from rich.table import Table

    table = Table("rank", "state", "at", "loss", "memory")
    for rank in state.ranks:
        bar, values = rank.bar, rank.metrics
        table.add_row(
            str(rank.rank), rank.status, f"{bar and bar.n}", f"{values.get('loss')}", "1.0 GB"
        )
    console = Console(width=100, record=True, file=_Nowhere())
    console.print(table)
    return console.export_text()


def joined(state: RunState) -> str:
    """Join as many short lines as there are ranks."""
    numbers = count()
    return "".join(f"{next(numbers)} {rank.status}\n" for rank in state.ranks)


class _Nowhere:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def _peer() -> str:
    try:
        import rich.table  # noqa: F401
    except ImportError:
        return "lines joined"
    return "rich's table of them"


PEER = _peer()
