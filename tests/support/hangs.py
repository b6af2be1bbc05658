"""Runs that hang while a test looks at them, and what was reported of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import nbtrain
from nbtrain.lifecycle.run import Run
from nbtrain.tracking import events as ev
from nbtrain.tracking.event_log import read_events
from tests.support.cells import the_last_run
from tests.support.waiting import wait_until

AFTER = 1.0
"""Seconds after which a silence is a hang, where a test says nothing else."""


@contextlib.contextmanager
def launched(function: Callable[..., Any], *args: Any, **options: Any) -> Iterator[Run]:
    """A run that goes on while the test looks at it, and is stopped at its end."""
    before = nbtrain.last_run()
    # A fresh process imports for seconds: no hang, and not the moment to be asked.
    after = 4 * AFTER if options.get("engine") == "spawn" else AFTER
    options = {"num_processes": 2, "view": "none", "hang_after": after, **options}

    def drive() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            nbtrain.launch(function, *args, **options)

    thread = threading.Thread(target=drive)
    thread.start()
    wait_until(lambda: nbtrain.last_run() is not before)
    run = the_last_run()
    try:
        yield run
    finally:
        run.stop()
        thread.join(60)
        assert not thread.is_alive()


def verdicts(run: Run) -> list[ev.Hang]:
    return [e for e in read_events(run.folder / "launcher.jsonl") if isinstance(e, ev.Hang)]


def first_verdict(run: Run, saying: str = "") -> ev.Hang:
    """The first one that says something; a fresh process may take long to begin, too."""

    def found() -> list[ev.Hang]:
        return [told for told in verdicts(run) if told.text and saying in told.text]

    wait_until(found, 100)
    return found()[0]
