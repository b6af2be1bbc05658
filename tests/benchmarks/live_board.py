"""What a live board costs: CPU time of the kernel, messages and bytes to the page."""

from __future__ import annotations

import time
from typing import Any

from kernel import Notebook, notebook
from table import Row, Target

ROUNDS = 3
SECONDS = 8.0
TARGETS = {8: 0.02, 64: 0.05}
"""Cores of the kernel's CPU time that the board may take, by the number of ranks."""


def rows(rounds: int | None) -> list[Row]:
    """Run ranks that log ten times a second, with the board and without, in turns."""
    found: list[Row] = []
    for ranks, limit in TARGETS.items():
        t: dict[str, list[dict[str, float]]] = {"none": [], "widget": []}
        with notebook() as kernel:
            for _ in range(rounds or ROUNDS):
                for view, figures in t.items():
                    figures.append(watched(kernel, ranks, view))
        board = [w["cpu"] - n["cpu"] for w, n in zip(t["widget"], t["none"], strict=True)]
        bare = [n["cpu"] for n in t["none"]]
        who = f"{ranks} ranks, ten logs a second each:"
        sent = [w["messages"] for w in t["widget"]], [w["kb"] for w in t["widget"]]
        found += [
            _row(f"{who} the board / the same run without", "cores", board, bare, own(limit)),
            _row(f"{who} messages to the page / 20", "1/s", sent[0], [20.0] * len(bare), own(20)),
            _row(
                f"{who} bytes to the page / 150 KB", "KB/s", sent[1], [150.0] * len(bare), own(150)
            ),
        ]
    return found


def own(limit: float) -> Target:
    return Target(limit, own_figure=True)


def _row(compared: str, unit: str, ours: Any, theirs: Any, target: Target) -> Row:
    return Row("live_board", compared, unit, ours, theirs, target)


def watched(kernel: Notebook, ranks: int, view: str) -> dict[str, float]:
    """Return cores, its start and its end left out, and messages/s and KB/s of a whole run."""
    kernel.messages, kernel.bytes = 0, 0
    kernel.start(run, ranks, view)
    told: dict[str, float] = kernel.finish()
    return {
        "cpu": told["cpu"],
        "messages": kernel.messages / told["lasted"],
        "kb": kernel.bytes / 1000 / told["lasted"],
    }


def run(ranks: int, view: str) -> dict[str, float]:
    """Run the ranks; return how long, and the kernel's cores while all of them were running."""
    import nbtrain
    from nbtrain.lifecycle import supervisor

    marks: list[tuple[float, float]] = []
    take = supervisor.Supervisor._decide

    def noting(self: Any, *args: Any) -> None:
        if all(rank.status == "running" for rank in self.state.ranks):
            marks.append((time.monotonic(), time.process_time()))
        take(self, *args)

    supervisor.Supervisor._decide = noting  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        nbtrain.launch(log_now_and_then, num_processes=ranks, view=view)
    finally:
        supervisor.Supervisor._decide = take  # type: ignore[method-assign]
    (start, cpu), (end, cpu_end) = marks[0], marks[-1]
    return {"lasted": time.monotonic() - began, "cpu": (cpu_end - cpu) / (end - start)}


def log_now_and_then() -> None:
    """Log two metrics ten times a second, under a bar."""
    import nbtrain

    total = int(10 * SECONDS)
    for step in nbtrain.progress(range(total)):
        nbtrain.log(step=step, loss=1 / (1 + step), accuracy=step / total)
        time.sleep(0.1)
