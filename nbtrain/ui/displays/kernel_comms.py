"""Handles a button's click while the cell that shows the button still runs.

While a cell runs, ipykernel does not read its shell channel, so a click on a widget has to wait.
The loop that watches a run therefore reads that channel itself. It handles the messages for our
widgets. It passes all others, in order, to ipykernel's own receiver, in whose queue they wait as
usual.

Only `_main_stream` and `CommPump._receiver` use private names of ipykernel and pyzmq. They were
tested with ipykernel 6.17, 6.31, 7.3, 7.4 and pyzmq 26, 27. If anything differs, there is no pump:
a run then has no button, and ■ ends it.
"""

# jupyter-ui-poll 1.1 does not replace this: it swaps ipykernel's `execute_request` handler and
# replays cells itself, handles the messages of all widgets, and fails in VS Code (its issue 56).

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection
from typing import Any

CONTROL_TARGET = "jupyter.widget.control"
"""The target of the comm that a reloaded page opens to request the state of all widgets."""

_REQUESTS = ("comm_info_request", "kernel_info_request")

Pump = Callable[[Collection[str]], bool]
"""Handles messages for these comms. Returns False if that does not work, or stopped working."""


def idle_pump(_comm_ids: Collection[str]) -> bool:
    """Do nothing, successfully: between cells, ipykernel itself handles clicks."""
    return True


class CommPump:
    """Handles messages for some widgets in the middle of a cell. For the main thread only."""

    def __init__(self, kernel: Any, stream: Any, reply_to: Any) -> None:
        self._kernel = kernel
        self._stream = stream
        self._reply_to = reply_to
        self._control: set[str] = set()

    def pump(self, comm_ids: Collection[str]) -> bool:
        """Handle the waiting messages for these comms, as a `Pump`; return False if that failed.

        Other messages are passed on to ipykernel. Never raises.
        """
        matches: list[tuple[Any, Any]] = []
        works = True
        try:
            self._sort_messages(comm_ids, matches)
        except Exception:  # the stream of another version: the kernel still works
            works = False
        for idents, message in matches:
            self._handle(idents, message)
        return works

    def _sort_messages(self, comm_ids: Collection[str], matches: list[tuple[Any, Any]]) -> None:
        """Append waiting messages for our widgets to `matches`; pass the others on to ipykernel.

        Its receiver is in place again afterwards, also after an exception, which is raised.
        """
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
        """Return ipykernel's receiver of messages.

        Raises:
            RuntimeError: ipykernel has no receiver, or one of another kind.
        """
        receiver: Callable[[Any], Any] | None = self._stream._recv_callback
        if receiver is None or self._stream._recv_copy:
            raise RuntimeError("the shell channel has no receiver")
        return receiver

    def _read(self, frames: Any, comm_ids: Collection[str]) -> tuple[Any, Any] | None:
        """Return the sender and the message if it is for our widgets; else None. Never raises."""
        session = self._kernel.session
        try:
            idents, parts = session.feed_identities(frames, copy=False)
            peeked = session.deserialize(parts, content=False, copy=False)
            kind, content = peeked["header"]["msg_type"], session.unpack(peeked["content"])
            if not self._is_for_widgets(kind, content, comm_ids):
                return None
            return idents, session.deserialize(parts, content=True, copy=False)
        except Exception:  # not a message of Jupyter's protocol: left to ipykernel
            return None

    def _is_for_widgets(self, kind: str, content: Any, comm_ids: Collection[str]) -> bool:
        """Return whether a message of the page is one that a running cell must handle.

        These are messages for `comm_ids`, and requests for the kernel's info or the widgets' state,
        for which it notes the comm that a page opens.
        """
        if kind in _REQUESTS:
            return True
        if kind == "comm_open" and content["target_name"] == CONTROL_TARGET:
            self._control.add(content["comm_id"])
            return True
        if kind not in ("comm_msg", "comm_close"):
            return False
        if content["comm_id"] in comm_ids or content["comm_id"] in self._control:
            return True
        return kind == "comm_msg" and content["data"].get("method") == "request_state"

    def _handle(self, idents: Any, message: Any) -> None:
        """Call ipykernel's own handler. Output still belongs to the running cell.

        An exception is logged by the kernel, not raised.
        """
        import zmq

        kind, kernel = message["header"]["msg_type"], self._kernel
        is_request = kind in _REQUESTS
        try:
            if is_request:
                kernel._publish_status("busy", "shell", message)
            answer = kernel.shell_handlers[kind](self._reply_to, idents, message)
            if asyncio.iscoroutine(answer):
                _run_to_end(answer)
            if hasattr(self._reply_to, "flush"):
                self._reply_to.flush(zmq.POLLOUT)
            if is_request:  # the sender waits for `idle`; then the cell must show as running again
                kernel._publish_status("idle", "shell", message)
                kernel._publish_status("busy", "shell")
        except Exception as error:  # ipykernel logs a failed handler in the same way
            kernel.log.error("nbtrain: the handler of %s failed", kind, exc_info=error)


def find_pump(shell: Any) -> Pump | None:
    """Return a pump for this shell's kernel; None if it would not work.

    It only works on the main thread, inside the event loop where ipykernel runs cells.
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
        handled = {"comm_msg", "comm_open", "comm_close", *_REQUESTS}
        usable = handled <= set(kernel.shell_handlers) and callable(kernel._publish_status)
        return pump.pump if usable and callable(stream.flush) else None
    except Exception:  # another kernel, or another version: ■ still works
        return None


def _main_stream(kernel: Any) -> tuple[Any, Any]:
    """Return the stream that the main thread receives from, and the one for its replies.

    Raises `AttributeError` for another ipykernel.
    """
    thread = getattr(kernel, "shell_channel_thread", None)
    if thread is None:  # ipykernel 6
        return kernel.shell_stream, kernel.shell_stream
    manager = thread.manager  # ipykernel 7: a thread receives messages and passes them on
    return (
        manager._shell_channel_to_main.to_stream,
        manager.get_subshell_to_shell_channel_socket(None),
    )


def _run_to_end(coroutine: Any) -> None:
    """Run a coroutine to its end.

    Raises:
        RuntimeError: It waits for something.
    """
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise RuntimeError("the handler waits for something")
