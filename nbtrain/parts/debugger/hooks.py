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

from ...part_api import (
    NbtrainError,
    RankContext,
    RankSide,
    clock,
    patch,
    rank_context,
    replace,
    undo_later,
)
from ...part_api import events as ev
from ...system.source_files import is_own
from ...worker.rank_context import sides_of
from .remote_pdb import NotebookFile, make_debugger

PATIENCE = timedelta(days=30)
"""How long collectives wait where one may be looked at in a debugger."""


class DebuggerRank(RankSide):
    """Has ``breakpoint()`` and failures open a debugger in the notebook."""

    def __init__(self) -> None:
        self._debugging: Debugging | None = None
        self._failed: BaseException | None = None  # what ended the last task

    def begin(self, context: RankContext) -> None:
        """Have ``breakpoint()`` and `pdb` in this task open a debugger in the notebook.

        Forgets the failure of the task before, except in a post-mortem task. With ``--debug`` and
        on live ranks, collectives wait for 30 days by default.
        """
        job = context.job
        debugging = self._debugging = Debugging(context)
        if not job.plan.is_post_mortem:
            self._failed = None
        undo_later(debugging.close)
        replace(sys, "breakpointhook", debugging.open_at_caller)
        for module in ("pdb", "IPython.core.debugger"):
            patch(module, "set_trace", debugging.set_trace)
        patch("pdb", "post_mortem", debugging.post_mortem)
        if job.plan.debug or job.ranks_stay:
            patch("torch.distributed.distributed_c10d", "_get_default_timeout", _wait_for_ever)

    def handle_failure(self, context: RankContext, error: BaseException) -> None:
        """Open the debugger at an exception with ``--debug``, and wait until it is left.

        A `KeyboardInterrupt` opens none. A live rank keeps any exception for `debug_failure`, with
        or without ``--debug``.
        """
        is_interrupt = isinstance(error, KeyboardInterrupt)
        if self._debugging is not None and context.job.plan.debug and not is_interrupt:
            self._debugging.look_into(error)
        if context.job.ranks_stay:
            self._failed = error  # with its frames, until the next task

    def debug_failure(self) -> None:
        """Open the debugger where the last task failed, and wait until it is left.

        Prints a message where nothing failed.
        """
        if self._failed is None:
            print("Nothing failed on this rank in the last cell.")
        elif self._debugging is not None:
            self._debugging.look_into(self._failed)


def _wait_for_ever(_original: Any, *_args: Any) -> timedelta:
    return PATIENCE


def debug_failure() -> None:
    """Open the debugger where the last task of this live rank failed, and wait until it is left."""
    for side in sides_of(rank_context.get().job):
        if isinstance(side, DebuggerRank):
            side.debug_failure()


class Debugging:
    """The debugger of one task of a rank; it costs nothing until it is opened."""

    def __init__(self, context: RankContext) -> None:
        self._unanswered = context.job.unanswered
        self._rank, self._writer = context.rank, context.writer
        self._process = os.getpid()
        name, scratch = f"debugger-{context.rank}", context.process_job.scratch
        self._file = NotebookFile(Path(scratch), name, self._report, context.stopper)
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
