"""Letting a button's click in while the cell that shows the button still runs.

While a cell runs, ipykernel leaves what arrives on its shell channel for later, a click on a widget
among it. The loop that watches a run looks there itself, between two looks at the ranks. What is
for our widgets is handled; all else goes to ipykernel's own receiver, in the order it came, and so
waits for its turn in ipykernel's own queue exactly as it would have.

All that is private to ipykernel and pyzmq is in `_main_stream` and `Pump._receiver`; seen in
ipykernel 6.17, 6.31, 7.3, 7.4 with pyzmq 26 and 27. Where anything is not as expected, there is no
pump: a run then has no button, and ■ ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

CONTROL = "jupyter.widget.control"
"""The comm by which a page that was reloaded asks for the state of all widgets."""

_QUESTIONS = ("comm_info_request", "kernel_info_request")
_LIMIT = 200
_REMINDER = 2.0


class Idle:
    """Stands for a pump where no cell runs: ipykernel itself hears the clicks."""

    def pump(self, _comm_ids: Collection[str]) -> bool:
        """Do nothing."""
        return True


class Pump:
    """Handles messages for some widgets in the middle of a cell; main thread only."""

    def __init__(self, kernel: Any, stream: Any, reply_to: Any) -> None:
        self._was_reloaded = False
        self._kernel = kernel
        self._stream = stream
        self._reply_to = reply_to
        self._control: set[str] = set()
        self._reminder_due = 0.0

    def pump(self, comm_ids: Collection[str]) -> bool:
        """Handle what has come for these comms; False where that does not work (any more)."""
        taken: list[tuple[Any, Any]] = []
        works = True
        try:
            self._take(comm_ids, taken)
        except Exception:  # another version's stream: never the kernel's trouble
            works = False
        for idents, message in taken:
            self._handle(idents, message)
        if self._was_reloaded:
            self._remind()
        return works

    def _take(self, comm_ids: Collection[str], taken: list[tuple[Any, Any]]) -> None:
        """Collect messages that are ours; pass the others on."""
        receiver = self._receiver()

        def sort(frames: Any) -> Any:
            found = self._read(frames, comm_ids)
            if found is None:
                return receiver(frames)
            taken.append(found)
            return None

        self._stream.on_recv(sort, copy=False)
        try:
            self._stream.flush(_POLLIN, _LIMIT)
        finally:
            self._stream.on_recv(receiver, copy=False)

    def _receiver(self) -> Callable[[Any], Any]:
        """Return what ipykernel has set to receive messages. Raises `RuntimeError` if not so."""
        receiver: Callable[[Any], Any] | None = self._stream._recv_callback
        if receiver is None or self._stream._recv_copy:
            raise RuntimeError("nobody receives the messages of the shell channel")
        return receiver

    def _read(self, frames: Any, comm_ids: Collection[str]) -> tuple[Any, Any] | None:
        """Return a message with its sender if it is to be handled now."""
        session = self._kernel.session
        try:
            idents, parts = session.feed_identities(frames, copy=False)
            peeked = session.deserialize(parts, content=False, copy=False)
            kind, content = peeked["header"]["msg_type"], session.unpack(peeked["content"])
            if not self._is_ours(kind, content, comm_ids):
                return None
            return idents, session.deserialize(parts, content=True, copy=False)
        except Exception:  # not a message of the protocol: ipykernel knows what it is
            return None

    def _is_ours(self, kind: str, content: Any, comm_ids: Collection[str]) -> bool:
        if kind in _QUESTIONS:
            return True
        if kind == "comm_open" and content["target_name"] == CONTROL:
            self._control.add(content["comm_id"])
            return True
        if kind not in ("comm_msg", "comm_close"):
            return False
        if content["comm_id"] in comm_ids or content["comm_id"] in self._control:
            return True
        return kind == "comm_msg" and content["data"].get("method") == "request_state"

    def _remind(self) -> None:
        """Say now and then that the kernel is busy: a reloaded page does not know of the cell."""
        now = time.monotonic()
        if now >= self._reminder_due:
            self._reminder_due = now + _REMINDER
            with contextlib.suppress(Exception):  # a nicety
                self._kernel._publish_status("busy", "shell")

    def _handle(self, idents: Any, message: Any) -> None:
        """Have ipykernel's own handler answer; the cell stays the parent of what is shown."""
        kind, kernel = message["header"]["msg_type"], self._kernel
        asks = kind in _QUESTIONS
        self._was_reloaded |= kind in ("comm_info_request", "comm_open")
        try:
            if asks:
                kernel._publish_status("busy", "shell", message)
            answer = kernel.shell_handlers[kind](self._reply_to, idents, message)
            if asyncio.iscoroutine(answer):
                _finish(answer)
            if hasattr(self._reply_to, "flush"):
                self._reply_to.flush(_POLLOUT)
            if asks:  # one who asks waits for `idle`; the page shows the cell as running still
                kernel._publish_status("idle", "shell", message)
                kernel._publish_status("busy", "shell")
        except Exception as error:  # as ipykernel does with a handler's trouble
            kernel.log.error("nbtrain: %s was not handled", kind, exc_info=error)


_POLLIN, _POLLOUT = 1, 2  # zmq's, fixed by its ABI


def find(shell: Any) -> Pump | None:
    """Return a pump for this shell's kernel; None where it would not work.

    It works on the main thread, inside the event loop that ipykernel runs cells in.
    """
    kernel = getattr(shell, "kernel", None)
    if kernel is None or threading.current_thread() is not threading.main_thread():
        return None
    try:
        stream, reply_to = _main_stream(kernel)
        if asyncio.get_running_loop() is not stream.io_loop.asyncio_loop:
            return None
        pump = Pump(kernel, stream, reply_to)
        pump._receiver()
        handled = {"comm_msg", "comm_open", "comm_close", *_QUESTIONS}
        usable = handled <= set(kernel.shell_handlers) and callable(kernel._publish_status)
        return pump if usable and callable(stream.flush) else None
    except Exception:  # another kernel, or another version of this: there is ■
        return None


def _main_stream(kernel: Any) -> tuple[Any, Any]:
    """Return the stream that the main thread receives from, and what it replies to."""
    thread = getattr(kernel, "shell_channel_thread", None)
    if thread is None:  # ipykernel 6
        return kernel.shell_stream, kernel.shell_stream
    manager = thread.manager  # ipykernel 7: a thread receives and passes on
    return (
        manager._shell_channel_to_main.to_stream,
        manager.get_subshell_to_shell_channel_socket(None),
    )


def _finish(coroutine: Any) -> None:
    """Run a coroutine that waits for nothing to its end."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise RuntimeError("the handler waits for something")
