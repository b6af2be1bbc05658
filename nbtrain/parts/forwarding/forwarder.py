"""Sends a run to trackers, and messages to people, from a process next to the launcher.

It reads the run's folder, as any follower does. Because it is a separate process, a tracker that
fails, hangs or starts threads disturbs neither the kernel nor the forks of ranks. It is not a child
of the kernel, so it outlives a kernel that dies, and then reports the run as lost.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from ...lifecycle.limits import FOLDER_CHECK_INTERVAL_S
from ...part_api import (
    Companion,
    Finding,
    Plan,
    Reader,
    RunFolder,
    RunState,
    all_events,
    clock,
    fork_process,
    kernel_detach,
    new_events,
    ready_to_fork,
)
from ...part_api import events as ev
from ...system.files import is_readable
from ...tracking.reducers import end_run, fold
from ...tracking.replay import initial_state, split_closing
from ...tracking.run_folder import is_watched

END_TIMEOUT_S = 10.0
"""Seconds that the end of a run waits for trackers; what is left is sent behind it."""

SEND_TIMEOUT_S = 120.0
"""The process ends after so long, and does not send the rest."""

_GONE = (
    "the process that sends this run to trackers and sends messages has ended. The training "
    "continues; nothing more of this run is sent."
)


_LATE = (
    f"the end of this run is not confirmed yet. nbtrain tries for {SEND_TIMEOUT_S:.0f} s more. "
    "Look there whether the run is complete: the server may be down."
)
_DIED = (
    "the process that sends this run died before the end was confirmed. What is there may be "
    "incomplete."
)

_DONE = "\x06"
"""The start of a line that reports that a receiver has all of the run, or failed."""


class Receiver(Protocol):
    """Gets what happens in a run."""

    name: str

    def start(self, state: RunState) -> None:
        """Start. An error ends only this receiver."""

    def take(self, events: Sequence[ev.Event], state: RunState) -> None:
        """Take the new events, and the state after them."""

    def finish(self, state: RunState) -> None:
        """Take the final state of the run."""


class Forwarder(Companion):
    """The launcher's side, which reports how the run ended and receives notes."""

    def __init__(
        self, connection: socket.socket | None = None, receivers: Iterable[str] = ()
    ) -> None:
        self._connection = connection
        self._pending = list(receivers)
        """Those that neither failed nor confirmed the end."""
        self._has_ended = False
        """Whether the other end knows how the run ended."""
        self._buffer = b""

    def notes(self) -> list[ev.Event]:
        """Return what could not be forwarded, in sentences."""
        return self._notes(0.0)

    def _notes(self, wait: float, is_pressed: Callable[[], bool] = lambda: True) -> list[ev.Event]:
        """Wait up to `wait` seconds for the process's end; return the notes that it has sent.

        The wait ends early when ■ is pressed. Removes the receivers that are done from `_pending`,
        and closes the connection where the process has ended.
        """
        until = time.monotonic() + wait
        while self._connection is not None:
            left = until - time.monotonic()
            if not is_readable(self._connection, max(0.0, min(left, FOLDER_CHECK_INTERVAL_S))):
                if left <= 0 or is_pressed():
                    break
                continue
            with contextlib.suppress(OSError):
                if new := self._connection.recv(1 << 16):
                    self._buffer += new
                    continue
            if not self._has_ended:  # the process died
                self._buffer += f"{_GONE}\n".encode()
            self._close()
        *lines, self._buffer = self._buffer.split(b"\n")
        texts = [line.decode() for line in lines]
        for text in texts:
            if text.startswith(_DONE):
                self._pending.remove(text.removeprefix(_DONE))
        return [_note(text) for text in texts if not text.startswith(_DONE)]

    def finish(self, end: ev.Finished, is_pressed: Callable[[], bool]) -> list[ev.Event]:
        """Report the end of the run to the process, and return what went wrong as notes.

        Waits up to 10 s for the receivers, not at all after an interrupt, and closes the
        connection. Empty where all was sent, or the connection was closed before.
        """
        if self._connection is None:
            return []
        with contextlib.suppress(OSError):
            self._connection.sendall(ev.to_line(end))
            self._has_ended = True
        # Who stopped the run waits for nothing more; the process sends the rest behind it.
        if end.status == "interrupted":
            notes = self._notes(0.0)
            self._pending.clear()
        else:
            try:
                notes = self._notes(END_TIMEOUT_S, is_pressed)
            except KeyboardInterrupt:  # raised where the rank is this process
                notes = self._notes(0.0)
        if self._pending:
            names, has_died = " and ".join(dict.fromkeys(self._pending)), self._connection is None
            notes.append(_note(f"{names}: {_DIED if has_died else _LATE}"))
        self._close()
        return notes

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _note(text: str) -> ev.Event:
    return ev.RunNote.of(Finding("not-forwarded", text))


def start_forwarder(plan: Plan, folder: RunFolder) -> Forwarder:
    """Start the process that sends a run to trackers and to people; return its `Forwarder`.

    Where no process can be started, the notes of the `Forwarder` say so.
    """
    ours, other = socket.socketpair()
    names = [receiver.name for receiver in _receivers(plan, folder)]
    try:
        with ready_to_fork():
            between = fork_process(partial(_fork_forwarder, plan, folder, ours, other))
        with contextlib.suppress(ChildProcessError):  # reaped elsewhere: SIGCHLD is ignored
            os.waitpid(between, 0)
    except OSError:  # out of processes: the training does not need this one
        pass  # the launcher's end then notes the end of that process
    finally:
        other.close()
    return Forwarder(ours, names)


def _fork_forwarder(
    plan: Plan, folder: RunFolder, ours: socket.socket, other: socket.socket
) -> int:
    """Fork the process that forwards, so that it is no child of the kernel; return 0.

    Runs in a process between the kernel and the new one. That process ends at once.
    """
    ours.close()
    fork_process(partial(_forward, plan, folder, other))
    return 0


def _forward(plan: Plan, folder: RunFolder, connection: socket.socket) -> int:
    """Send the run to all receivers until it has ended; return the exit code.

    Runs in the process of its own, which it detaches from the kernel. What is not sent 120 s after
    the end of the run is lost.
    """
    kernel_detach.leave_kernel(Path(os.devnull))
    warnings.simplefilter("ignore")  # the notebook's may be errors, which imports would raise
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # of a launcher around the kernel
        os.environ.pop(name, None)
    manifest = folder.read_manifest()
    state = initial_state(manifest, folder.manifest)
    threads = [_Thread(each, connection) for each in _receivers(plan, folder)]
    for thread in threads:
        thread.put(thread.receiver.start, state)
    state = _follow(folder, state, connection, threads)
    until = time.monotonic() + SEND_TIMEOUT_S
    for thread in threads:
        thread.put(thread.receiver.finish, state)
        thread.put(None)
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return 0


def _receivers(plan: Plan, folder: RunFolder) -> list[Receiver]:
    """Return the trackers and the notifiers that a plan has."""
    from .notifications import Notifier
    from .trackers import RunTracker

    trackers = [RunTracker(name, folder) for name in plan.track]
    return [*trackers, *(Notifier(url, folder) for url in filter(None, plan.notify))]


def _follow(
    folder: RunFolder, state: RunState, connection: socket.socket, threads: Iterable[_Thread]
) -> RunState:
    """Forward events until the run ends; return its final state.

    A run that the launcher no longer watches ends as lost.
    """
    reader, received = Reader(folder, state.world_size), b""
    ranks = range(state.world_size)
    while True:
        is_lost = False
        if is_readable(connection, FOLDER_CHECK_INTERVAL_S):
            new = b""
            with contextlib.suppress(OSError):
                new = connection.recv(1 << 16)
            received += new
            is_lost = not new  # the launcher ended, or it gave the run up
        end = ev.from_line(received) if received.endswith(b"\n") else None
        is_lost = is_lost or not is_watched(folder)
        is_over = end is not None or is_lost
        ready, closing = split_closing((all_events if is_over else new_events)(reader.launcher), [])
        events = [*ready, *reader.read(ended=ranks if is_over else ()), *closing]
        if end is not None:
            events.append(end)
        state = fold(state, events)
        if is_lost and not state.is_over:
            reason = "the process that watched the run ended before the run did"
            state = end_run(state, "lost", clock.now(state.clock_offset), reason)
        for thread in threads:
            thread.put(thread.receiver.take, events, state)
        if state.is_over:
            return state


class _Thread(threading.Thread):
    """Serves one receiver: one that waits for a network does not hold up the others."""

    def __init__(self, receiver: Receiver, connection: socket.socket) -> None:
        super().__init__(name=f"nbtrain-{receiver.name}", daemon=True)
        self.receiver = receiver
        self._connection = connection
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.start()

    def put(self, call: Callable[..., None] | None, *args: object) -> None:
        """Queue a call of the receiver, or its end with None. A failed receiver is not called."""
        if self.is_alive():
            self._calls.put(partial(call, *args) if call is not None else None)

    def run(self) -> None:
        """Make the queued calls until the end of the queue, or until the receiver raises an error.

        Sends a line to the launcher for the error, and one at the end in any case.
        """
        try:
            while (call := self._calls.get()) is not None:
                call()
        except BaseException as error:  # a library's own, SystemExit too: a note, never more
            note = f"{self.receiver.name}: {self._reason(error)}"
            self._send(" ".join(note.split()))
        self._send(f"{_DONE}{self.receiver.name}")

    def _send(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the launcher no longer waits
            self._connection.sendall(f"{line}\n".encode())

    def _reason(self, error: BaseException) -> str:
        text = getattr(self.receiver, "explain", str)(error)
        return f"{text}. The training continues; nothing more of this run is sent there."
