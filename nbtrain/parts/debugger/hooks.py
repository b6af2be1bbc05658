"""Opens a rank's debugger: at ``breakpoint()``, after a failure, and on request."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ...errors import NbtrainError
from ...system import instrumentation
from ...system.source_files import is_own
from ...tracking import clock
from ...tracking import events as ev
from ...tracking.event_log import EventWriter
from ...transport.job import Job
from ...worker.rank_sides import RankSide
from .remote_pdb import NotebookFile, make_debugger

PATIENCE = timedelta(days=30)
"""How long collectives wait where one may be looked at in a debugger."""

_active: Debugging | None = None
_failed: BaseException | None = None
"""What ended the last task of this process, kept for `debug_failure`."""


class DebuggerRank(RankSide):
    """Has ``breakpoint()`` and failures open a debugger in the notebook."""

    def begin(self, job: Job, rank: int, writer: EventWriter, scratch: str) -> None:
        """Have ``breakpoint()`` and `pdb` in this task open a debugger in the notebook.

        Forgets the failure of the task before, except in a post-mortem task. With ``--debug`` and
        on live ranks, collectives wait for 30 days by default.
        """
        global _active, _failed
        _active = Debugging(job, rank, writer, scratch)
        if not job.plan.is_post_mortem:
            _failed = None
        instrumentation.undo_later(_active.close)
        instrumentation.replace(sys, "breakpointhook", _active.open_at_caller)
        for module in ("pdb", "IPython.core.debugger"):
            instrumentation.patch(module, "set_trace", _active.set_trace)
        instrumentation.patch("pdb", "post_mortem", _active.post_mortem)
        if job.plan.debug or job.is_live:
            instrumentation.patch(
                "torch.distributed.distributed_c10d", "_get_default_timeout", _wait_for_ever
            )

    def handle_failure(self, job: Job, error: BaseException) -> None:
        """Open the debugger at an exception with ``--debug``, and wait until it is left.

        A `KeyboardInterrupt` opens none. A live rank keeps any exception for `debug_failure`, with
        or without ``--debug``.
        """
        global _failed
        if _active is not None and job.plan.debug and not isinstance(error, KeyboardInterrupt):
            _active.look_into(error)
        if job.is_live:
            _failed = error  # with its frames, until the next task


def _wait_for_ever(_original: Any, *_args: Any) -> timedelta:
    return PATIENCE


def debug_failure() -> None:
    """Open the debugger where the last task of a live rank failed, and wait until it is left.

    Prints a message where nothing failed.
    """
    if _failed is None:
        print("Nothing failed on this rank in the last cell.")
    elif _active is not None:
        _active.look_into(_failed)


class Debugging:
    """The debugger of one task of a rank; it costs nothing until it is opened."""

    def __init__(self, job: Job, rank: int, writer: EventWriter, scratch: str) -> None:
        self._unanswered = job.unanswered
        self._rank, self._writer = rank, writer
        self._process = os.getpid()
        name = f"debugger-{rank}"
        self._file = NotebookFile(Path(scratch), name, self._report)
        self._debuggers = threading.local()  # what one traces is of one thread

    def _report(self, address: str, place: str) -> None:
        self._writer.write(ev.Debugger(clock.now(), self._rank, address=address, place=place))

    def set_trace(self, _original: Any, *_args: Any, **_options: Any) -> None:
        """Do what ``pdb.set_trace()`` does."""
        self.open_at_caller()

    def post_mortem(self, original: Any, t: Any = None) -> None:
        """Do what ``pdb.post_mortem()`` does: open the debugger where an exception was raised.

        `t` is an exception or a traceback; None: the exception that is being handled. Raises
        `NbtrainError` if the notebook cannot answer.
        """
        error = sys.exc_info()[1] if t is None else t
        if isinstance(error, TracebackType):
            error = Exception("from a traceback").with_traceback(error)
        if not isinstance(error, BaseException) or error.__traceback__ is None:
            original(t)  # which raises what it raises everywhere
            return
        self._check("pdb.post_mortem")
        self.look_into(error)

    def open_at_caller(self, *_args: Any, **_options: Any) -> None:
        """Open the debugger at the caller.

        Does nothing with ``PYTHONBREAKPOINT=0``. Raises `NbtrainError` if the notebook cannot
        answer, and in a process that the rank has started.
        """
        if os.environ.get("PYTHONBREAKPOINT") == "0":
            return
        self._check("breakpoint")
        if not hasattr(self._debuggers, "own"):
            self._debuggers.own = make_debugger(self._file)
        self._debuggers.own.set_trace(_caller())

    def _check(self, call: str) -> None:
        """Raise `NbtrainError` if the notebook cannot answer, or in a process of the rank's.

        `call` is the name of the user's call, for the message.
        """
        if os.getpid() != self._process:
            raise NbtrainError(
                f"{call}() works in a rank itself, not in a process that it has started. To debug "
                "a worker of a DataLoader, use num_workers=0"
            )
        if self._unanswered:
            raise NbtrainError(
                f"{call}() cannot ask you here: {self._unanswered}. Delete it, or run the cell in "
                "the foreground of a notebook or a terminal, on this host"
            )

    def look_into(self, error: BaseException) -> None:
        """Open the debugger at the frame that raised, and wait until it is left.

        Does nothing where the notebook cannot answer. Exceptions and interrupts in the debugger are
        ignored.
        """
        if self._unanswered or error.__traceback__ is None:
            return
        debugger = make_debugger(self._file, is_over=True)
        self._file.write("".join(traceback.format_exception_only(error)))
        debugger.reset()
        # The failure must be reported in any case.
        with contextlib.suppress(Exception, KeyboardInterrupt):
            debugger.interaction(None, error.__traceback__)

    def close(self) -> None:
        """Hang up."""
        self._file.close()


def _caller() -> FrameType:
    """Return the innermost frame that does not belong to nbtrain."""
    frame = sys._getframe(1)
    while is_own(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame
