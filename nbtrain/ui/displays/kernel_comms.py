"""Handles a button's click while the cell that shows the button still runs.

While a cell runs, ipykernel leaves messages on its shell channel for later, clicks on widgets too.
So the loop that watches a run reads that channel between two looks at the ranks. It handles the
messages for our widgets and passes all others, in order, to ipykernel's own receiver, where they
wait in ipykernel's queue as they would have.

What is private to ipykernel and pyzmq is in `_main_stream` and `CommPump._receiver`; seen in
ipykernel 6.17, 6.31, 7.3, 7.4 with pyzmq 26 and 27. Where anything differs, there is no pump: a run
then has no button, and ■ ends it.
"""

# jupyter-ui-poll 1.1 does not replace this: it swaps ipykernel's `execute_request` handler and
# replays cells itself, handles the messages of all widgets, and fails in VS Code (its issue 56).

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection
from typing import Any

CONTROL = "jupyter.widget.control"
"""The comm through which a reloaded page asks for the state of all widgets."""

_QUESTIONS = ("comm_info_request", "kernel_info_request")

Pump = Callable[[Collection[str]], bool]
"""Handles messages for these comms; returns False if that does not work (any more)."""


def idle_pump(_comm_ids: Collection[str]) -> bool:
    """Do nothing: no cell runs, so ipykernel itself handles the clicks."""
    return True


class CommPump:
    """Handles messages for some widgets in the middle of a cell; main thread only."""

    def __init__(self, kernel: Any, stream: Any, reply_to: Any) -> None:
        self._kernel = kernel
        self._stream = stream
        self._reply_to = reply_to
        self._control: set[str] = set()

    def pump(self, comm_ids: Collection[str]) -> bool:
        """Handle messages for these comms, as a `Pump`."""
        matches: list[tuple[Any, Any]] = []
        works = True
        try:
            self._take(comm_ids, matches)
        except Exception:  # another version's stream: the kernel goes on
            works = False
        for idents, message in matches:
            self._handle(idents, message)
        return works

    def _take(self, comm_ids: Collection[str], matches: list[tuple[Any, Any]]) -> None:
        """Collect messages for our widgets; pass the others on."""
        import zmq

        receiver = self._receiver()

        def sort(frames: Any) -> Any:
            match = self._read(frames, comm_ids)
            if match is None:
                return receiver(frames)
            matches.append(match)
            return None

        self._stream.on_recv(sort, copy=False)
        try:
            self._stream.flush(zmq.POLLIN, limit=200)
        finally:
            self._stream.on_recv(receiver, copy=False)

    def _receiver(self) -> Callable[[Any], Any]:
        """Return ipykernel's receiver of messages. Raises `RuntimeError` if it has none."""
        receiver: Callable[[Any], Any] | None = self._stream._recv_callback
        if receiver is None or self._stream._recv_copy:
            raise RuntimeError("the shell channel has no receiver")
        return receiver

    def _read(self, frames: Any, comm_ids: Collection[str]) -> tuple[Any, Any] | None:
        """Return a message with its sender if it is to be handled now."""
        session = self._kernel.session
        try:
            idents, parts = session.feed_identities(frames, copy=False)
            peeked = session.deserialize(parts, content=False, copy=False)
            kind, content = peeked["header"]["msg_type"], session.unpack(peeked["content"])
            if not self._is_for_widgets(kind, content, comm_ids):
                return None
            return idents, session.deserialize(parts, content=True, copy=False)
        except Exception:  # not a message of the protocol: ipykernel knows what it is
            return None

    def _is_for_widgets(self, kind: str, content: Any, comm_ids: Collection[str]) -> bool:
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

    def _handle(self, idents: Any, message: Any) -> None:
        """Call ipykernel's own handler; the cell stays the parent of what is shown."""
        import zmq

        kind, kernel = message["header"]["msg_type"], self._kernel
        asks = kind in _QUESTIONS
        try:
            if asks:
                kernel._publish_status("busy", "shell", message)
            answer = kernel.shell_handlers[kind](self._reply_to, idents, message)
            if asyncio.iscoroutine(answer):
                _finish(answer)
            if hasattr(self._reply_to, "flush"):
                self._reply_to.flush(zmq.POLLOUT)
            if asks:  # a question waits for `idle`, and the page still shows the cell as running
                kernel._publish_status("idle", "shell", message)
                kernel._publish_status("busy", "shell")
        except Exception as error:  # as ipykernel does when a handler fails
            kernel.log.error("nbtrain: the handler of %s failed", kind, exc_info=error)


def find_pump(shell: Any) -> Pump | None:
    """Return a pump for this shell's kernel; None if it would not work.

    It works on the main thread, inside the event loop that ipykernel runs cells in.
    """
    kernel = getattr(shell, "kernel", None)
    if kernel is None or threading.current_thread() is not threading.main_thread():
        return None
    try:
        stream, reply_to = _main_stream(kernel)
        if asyncio.get_running_loop() is not stream.io_loop.asyncio_loop:
            return None
        pump = CommPump(kernel, stream, reply_to)
        pump._receiver()
        handled = {"comm_msg", "comm_open", "comm_close", *_QUESTIONS}
        usable = handled <= set(kernel.shell_handlers) and callable(kernel._publish_status)
        return pump.pump if usable and callable(stream.flush) else None
    except Exception:  # another kernel, or another version: ■ still works
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
    """Run a coroutine to its end; it must not wait for anything."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise RuntimeError("the handler waits for something")
