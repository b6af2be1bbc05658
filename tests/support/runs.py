"""Runs that a test launches and looks at, and pictures of runs that were never launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nbtrain
from nbtrain.tracking import events as ev
from nbtrain.tracking.event_log import read_events
from nbtrain.tracking.state import RankState, RunState


def launch(function: Callable[..., Any], *args: Any, n: int = 1, **options: Any) -> nbtrain.Run:
    """Run a function on `n` ranks, and draw nothing."""
    return nbtrain.launch(function, *args, num_processes=n, view="none", **options)


def events(run: nbtrain.Run, rank: int = 0) -> list[ev.Event]:
    """Return all that a rank reported."""
    return list(read_events(run.folder / f"rank-{rank:04d}.jsonl"))


def last(run: nbtrain.Run, rank: int = 0) -> ev.TrainingUpdate:
    """Return what a rank reported of its training last."""
    reports = [e for e in events(run, rank) if isinstance(e, ev.TrainingUpdate)]
    assert reports, "nothing was seen of the training"
    return reports[-1]


def picture(ranks: int = 2) -> RunState:
    """Return the state of a run that has reported nothing yet."""
    return RunState("train()", "fork", tuple(RankState(r) for r in range(ranks)), created=100.0)
