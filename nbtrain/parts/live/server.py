"""Runs in a live rank: `serve` runs the tasks that the notebook sends, until it disconnects.

To its engine, `serve` is a task as any other, of a run that lasts as long as the ranks live. Each
task is a run of its own, in a folder of its own: while it lasts, the rank's output and its reports
go there. Only what belongs to the process stays: variables, process groups, devices.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...part_api import (
    POLL_INTERVAL_S,
    Address,
    Channel,
    Plan,
    RankContext,
    RunFolder,
    connect,
    failing_plan,
    fill_memory_file,
    hooks,
    mark_stopping,
    payload,
    rank_context,
    read_appended,
    run_task,
    scope,
    task_values,
)
from ...transport.weights.models import find_parts
from ...worker import main
from ...worker.output.rich_output import RichOutput
from . import values
from .groups import ProcessGroups
from .limits import INTERRUPT_GRACE_S
from .model_state import layout, load_state, select_stateful
from .reloaded_modules import extend_path, reload_modules

_NO_CHECKPOINTS = (
    "live ranks on a cluster keep no checkpoints: their folders end with the cell. "
    "%nbtrain pull copies a model to the notebook; %%distributed --new runs with checkpoints"
)

Message = dict[str, Any]


def serve(address: Address, secret: str) -> None:
    """Run the tasks that come through the channel at `address`, and return when it is closed."""
    context = rank_context.get()
    channel = connect(address)
    if not channel.passes_files:
        context.checkpoint_refusal = _NO_CHECKPOINTS
    hooks.keep()
    server = LiveRank(channel, context)
    channel.send({"rank": context.rank, "secret": secret, **server.take_name_changes()})
    server.run()


class LiveRank:
    """Takes messages in a thread, so that one arrives while a task is stuck in a collective."""

    def __init__(self, channel: Channel, context: RankContext) -> None:
        self._channel, self._context, self._rank = channel, context, context.rank
        self._waiting: queue.SimpleQueue[tuple[Message, int | None] | None] = queue.SimpleQueue()
        self._namespace = vars(sys.modules["__main__"])
        self._known: set[str] = set()
        self._reloaded: dict[str, str] = {}  # modules that must be reloaded
        self._task: int | None = None
        self._called_off: int | None = None  # a task that was interrupted before it began
        self._has_heard = False
        self._folder: RunFolder | None = None  # of the task
        self._ending = threading.Lock()
        self._groups = ProcessGroups()
        self._groups.install()

    def run(self) -> None:
        """Handle the notebook's messages, one after the other, until the notebook disconnects."""
        threading.Thread(target=self._receive, name="nbtrain-live", daemon=True).start()
        while (received := self._waiting.get()) is not None:
            message, data = received
            answer = self._answer(message, data)
            descriptor = answer.pop("data", None)
            try:
                self._channel.send({"done": message["id"], **answer}, descriptor)
            except OSError:  # the notebook is gone
                return
            finally:
                if descriptor is not None:
                    os.close(descriptor)

    def _answer(self, message: Message, data: int | None) -> Message:
        """Handle a message, and return the answer; its ``error`` is what went wrong.

        An interrupt of this message ends nothing else.
        """
        idle = signal.getsignal(signal.SIGINT)
        answer: Message = {"error": "KeyboardInterrupt: it was interrupted"}
        try:
            self._has_heard = False
            signal.signal(signal.SIGINT, self._hear)
            with self._ending:
                is_off = message["id"] == self._called_off
                self._task = None if is_off else message["id"]
            if is_off:
                if data is not None:
                    os.close(data)
                raise KeyboardInterrupt
            try:
                self._follow_imports(message, data)
                answer = self._ACTIONS[message["do"]](self, message, data)
            except Exception as error:  # of the message: the rank stays
                answer = {"error": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
            self._stop_listening()
        except KeyboardInterrupt:
            self._stop_listening()
        signal.signal(signal.SIGINT, idle)
        return answer

    def _follow_imports(self, message: Message, data: int | None) -> None:
        """Import also from where the notebook does, and reload what it has reloaded.

        Modules that failed before are reloaded again. Raises what a module raises, after closing
        `data`.
        """
        extend_path(message.get("path", ()))
        self._reloaded |= message.get("reloaded", {})
        try:
            reload_modules(self._reloaded)
        except BaseException:  # a module may raise anything, and ■ may interrupt it
            if data is not None:  # no action will close it
                os.close(data)
            raise

    def _hear(self, _signum: int, _frame: object) -> None:
        if not self._has_heard:
            self._has_heard = True
            raise KeyboardInterrupt

    def _stop_listening(self) -> None:
        """Stop treating interrupts as meant for the current message. One may still arrive."""
        while True:
            try:
                with self._ending:
                    self._task = None
                signal.signal(signal.SIGINT, _ignore)
                return
            except KeyboardInterrupt:
                continue

    def _receive(self) -> None:
        """Queue the messages of the notebook, in a thread; an interrupt takes effect at once."""
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        while True:
            try:
                message, data = self._channel.receive()
            except EOFError:
                self._waiting.put(None)
                return
            if message["do"] == "interrupt":
                if message.get("asked") and self._folder is not None:
                    mark_stopping(self._folder)  # where it is a copy; else it is there already
                self._interrupt(main_thread, message["id"])
            else:
                self._waiting.put((message, data))

    def _interrupt(self, main_thread: int, task: int) -> None:
        """Interrupt a task; if it does not react within 0.3 s, make its collectives raise.

        A task that has not begun is called off instead.
        """
        with self._ending:
            if self._task != task:  # done, or it waits its turn
                self._called_off = task
                return
            signal.pthread_kill(main_thread, signal.SIGINT)
        deadline = time.monotonic() + INTERRUPT_GRACE_S
        while self._task == task and time.monotonic() < deadline:
            time.sleep(0.01)
            # A signal that comes right before a call that waits, such as `sleep`, does not end it.
            if not self._has_heard and signal.getsignal(signal.SIGINT) == self._hear:
                signal.pthread_kill(main_thread, signal.SIGINT)
        if self._task == task:
            self._groups.abort()

    # The handlers of messages. The reply's "data" is a descriptor.

    def _run_task(self, message: Message, data: int | None) -> Message:
        """Run a task in the folder of its run; return its exit code and the new variables."""
        assert data is not None
        with self._task_folder(message) as folder, self._use_folder(folder):
            try:
                plan, classes = self._plan(message, data)
            # The user's classes may raise anything while they are unpickled.
            except Exception as error:
                place = "while loading the notebook's values in a live rank"
                plan, classes = failing_plan(error, place), frozenset()
            job = replace(
                self._context.job,
                plan=plan,
                folder=folder,
                shared_classes=classes,
                unanswered=message["unanswered"],
                ranks_stay=True,
                folder_is_temporary=not self._channel.passes_files,
            )
            output = RichOutput(run_task, shows_values=True)
            output.install()
            code = main.run_in_rank(job, self._rank, output.run)
        return {"code": code, "groups": self._groups.describe(), **self.take_name_changes()}

    def _plan(self, message: Message, data: int) -> tuple[Plan, frozenset[type]]:
        """Unpack a task, with the variables that it brings; return its plan and shared classes.

        Closes `data`. Variables that the message does not name as sent keep their values.
        """
        before = dict(self._namespace)
        try:
            plan, classes = payload.unpack(f"/proc/self/fd/{data}", restores=False)
        finally:
            os.close(data)
            for name in before.keys() - set(message["sent"]):
                self._namespace[name] = before[name]
        return plan, classes

    @contextlib.contextmanager
    def _task_folder(self, message: Message) -> Iterator[RunFolder]:
        """Yield the folder of a task's run, and set it as this rank's.

        On another host than the notebook's, it is a new folder, which is copied to the notebook's
        host as it grows, and deleted at the end of the block.
        """
        home, scratch = RunFolder(Path(message["folder"])), self._context.job.scratch
        copied = _mirror_folder(self._channel, message["id"], scratch, self._rank)
        with contextlib.nullcontext(home) if self._channel.passes_files else copied as folder:
            self._folder = folder
            try:
                yield folder
            finally:
                self._folder = None

    @contextlib.contextmanager
    def _use_folder(self, folder: RunFolder) -> Iterator[None]:
        """Have this process print and report to the folder of a run, and answer questions there."""
        stdout, stderr = os.dup(1), os.dup(2)
        log = os.open(folder.log(self._rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        _flush()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        try:
            with scope():
                yield
        finally:
            self._stop_listening()
            rank_context.set_current(self._context)
            _flush()
            for saved, stream in ((stdout, 1), (stderr, 2)):
                os.dup2(saved, stream)
                os.close(saved)

    def _reform(self, message: Message, _data: int | None) -> Message:
        """Form the process group again, in all ranks together, after a collective has failed."""
        generation, forms = message["generation"], message["forms"]
        return {"lost": self._groups.reform(generation, self._namespace, forms=forms)}

    def _get(self, message: Message, _data: int | None) -> Message:
        asked = {key: message[key] for key in ("names", "limit", "has", "pulled")}
        file = values.pack_variables(self._namespace, **asked)
        return {"data": os.dup(file.fileno())}

    def _put(self, message: Message, data: int | None) -> Message:
        """Set variables; return those that still refer to what was replaced."""
        assert data is not None
        known = select_stateful(self._namespace)
        replaced = find_parts({n: known[n] for n in message["sent"] if n in known})
        others = {n: value for n, value in known.items() if n not in message["sent"]}
        stale = [n for n, v in others.items() if not replaced.keys().isdisjoint(find_parts({n: v}))]
        self._plan(message, data)
        for name, state in self._namespace.pop(payload.STATES, {}).items():
            load_state(self._namespace[name], state)
        return {"stale": stale, **self.take_name_changes()}

    def _layouts(self, message: Message, _data: int | None) -> Message:
        known = select_stateful(self._namespace)
        models = {name: value for name, value in known.items() if task_values.is_model(value)}
        layouts = {n: layout(known[n], models) if n in known else None for n in message["names"]}
        return {"layouts": layouts}

    def _describe(self, _message: Message, _data: int | None) -> Message:
        return {"variables": values.describe_variables(self._namespace)}

    def take_name_changes(self) -> Message:
        """Return the names of variables that are new or deleted since the last call.

        They are lists under ``new`` and ``deleted``.
        """
        names = set(task_values.public(self._namespace))
        new, deleted = sorted(names - self._known), sorted(self._known - names)
        self._known = names
        return {"new": new, "deleted": deleted}

    _ACTIONS: Mapping[str, Callable[[LiveRank, Message, int | None], Message]] = {
        "run": _run_task,
        "reform": _reform,
        "get": _get,
        "put": _put,
        "layouts": _layouts,
        "describe": _describe,
    }


def _ignore(_signum: int, _frame: object) -> None:
    """Do nothing at an interrupt."""


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or of the user's own kind
            stream.flush()


@contextlib.contextmanager
def _mirror_folder(channel: Channel, task: int, place: str, rank: int) -> Iterator[RunFolder]:
    """Yield a new folder in `place`, and copy it to the notebook's host as it grows.

    Events and log are sent as they grow, by a thread. At the end of the block the other files are
    sent, and the folder is deleted. If the notebook is gone, nothing is raised.
    """
    folder = RunFolder(Path(tempfile.mkdtemp(prefix=f"task-{task}-", dir=place)))
    is_over = threading.Event()
    have = {path.name: 0 for path in (folder.events(rank), folder.log(rank))}

    def follow() -> None:
        with contextlib.suppress(OSError):  # the notebook is gone
            while not is_over.wait(POLL_INTERVAL_S):
                _send_growth(channel, task, folder, have)

    copying = threading.Thread(target=follow, name="nbtrain-mirror", daemon=True)
    copying.start()
    try:
        yield folder
    finally:
        is_over.set()
        copying.join()
        with contextlib.suppress(OSError):
            for name in folder.list_result_files(rank):  # before the report that it is there
                _send(channel, task, name, folder.path / name)
            while _send_growth(channel, task, folder, have):
                pass
        shutil.rmtree(folder.path, ignore_errors=True)


def _send_growth(channel: Channel, task: int, folder: RunFolder, have: dict[str, int]) -> bool:
    """Send what has been appended to the files; return whether that was anything.

    `have` gets the bytes of each file that are sent. Raises `OSError` if the notebook is gone.
    """
    parts = read_appended(folder.path, have)
    for name, (offset, data) in parts.items():
        with fill_memory_file(lambda file, data=data: file.write(data)) as file:  # type: ignore[misc]
            channel.send({"file": name, "task": task, "grows": True}, file.fileno())
        have[name] = offset + len(data)
    return bool(parts)


def _send(channel: Channel, task: int, name: str, path: Path) -> None:
    """Send a whole file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        channel.send({"file": name, "task": task, "grows": False}, descriptor)
    finally:
        os.close(descriptor)
