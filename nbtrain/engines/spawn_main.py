"""Runs in a fresh interpreter before it becomes a rank: the spawn engine calls `main`."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ..hangs import stack_dumps
from ..planning.plan import Plan
from ..planning.world import Placement
from ..tracking import clock
from ..tracking.run_folder import RunFolder
from ..transport import payload
from ..transport.job import Job
from ..worker import main as worker
from ..worker.task_runner import failing_plan
from .process.exit_steps import run_exit_steps, run_to_end
from .process.kernel_detach import exit_with_parent, text_stream


def main(order: dict[str, Any]) -> NoReturn:
    """Run the rank, and end the process."""
    run_to_end(lambda: run_rank(order))


def run_rank(order: dict[str, Any]) -> int:
    """Unpickle the plan and run the rank; return the exit code."""
    folder = RunFolder(Path(order["folder"]))
    exit_with_parent(order["parent"])
    clock.follow(order["clock"])
    _exit_at_interrupt(folder)
    sys.stdout = sys.__stdout__ = text_stream(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = text_stream(2)  # type: ignore[misc]
    faulthandler.enable(file=2)
    stack_dumps.register_for_stacks(folder, order["rank"])  # before imports, which may hang
    plan, classes = _load(order)
    job = Job(
        plan=plan,
        folder=folder,
        world=None if order["world"] is None else Placement(**order["world"]),
        shared_classes=classes,
        **order["job"],
    )
    code = worker.main(job, order["rank"])
    run_exit_steps()
    return code


def _exit_at_interrupt(folder: RunFolder) -> None:
    """From now on, end the process at a SIGINT if the run is stopping.

    Ignores any other SIGINT, and unblocks the signal. The rank replaces this handler.
    """

    def end(_signum: int, _frame: FrameType | None) -> None:
        if folder.stopping_file.exists():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _load(order: dict[str, Any]) -> tuple[Plan, frozenset[type]]:
    """Unpickle the plan and the notebook's classes, and close the order's descriptors.

    If that fails, the plan raises the error as the rank's own, and there are no classes.
    """
    try:
        return payload.unpack(order["parcel"])
    except Exception as error:  # the import of a user's module may raise anything
        place = "while loading the notebook's values in a fresh process"
        return failing_plan(error, place), frozenset()
    finally:
        for descriptor in order["descriptors"]:
            os.close(descriptor)
