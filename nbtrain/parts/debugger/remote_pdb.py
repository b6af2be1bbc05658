"""pdb, or IPython's, that reads from the notebook and writes to it."""

from __future__ import annotations

import pdb
import select
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ...part_api import MAX_TEXT_CHARS, POLL_INTERVAL_S, Channel, Listener
from ...system.source_files import RANK_BODY, is_own, short_name
from ...worker.stopping import StopOnRequest

GO_ON = "c\n"

Report = Callable[[str, str], object]
"""Reports that the debugger waits, at an address, for someone to connect, and where in the code."""


class NotebookFile:
    """What a debugger reads and writes: a file for it, a `Channel` to the notebook behind that."""

    encoding = "utf-8"

    def __init__(
        self, folder: Path, name: str, report: Report, stopper: StopOnRequest | None
    ) -> None:
        self._stopper = stopper
        self._folder, self._name, self._report = folder, name, report
        self._listener: Listener | None = None
        self._channel: Channel | None = None
        self._text: list[str] = []
        self._asks = False
        self.turn = threading.RLock()
        """Held by the thread that is in the debugger."""
        self._place = ""
        self.prompt = ""
        """Ends the text before a prompt."""
        self.is_over = False
        """Whether the code has ended, by an exception."""
        self.has_ended = False
        """Whether the notebook has closed the connection, or the run must stop."""

    def open(self, filename: str, line: int) -> None:
        """Report to the notebook that the debugger waits, and where in the code.

        Does not wait for the notebook. Until `leave`, a first interrupt raises nothing in the rank:
        `readline` looks for it.
        """
        if self._listener is None:
            self._listener = Listener(self._folder, self._name)
        self._place = f"{short_name(filename)}, line {line}"
        if self._stopper is not None:  # an interrupt is seen below: a debugger swallows it
            self._asks, self._stopper.is_asked = self._stopper.is_asked, True
        self._report(str(self._listener.address), self._place)

    @property
    def _is_to_stop(self) -> bool:
        return self._stopper is not None and self._stopper.is_due

    def stop(self) -> None:
        """Raise KeyboardInterrupt if the run must stop, because the debugger would catch it."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self._stopper is not None and self._stopper.is_due and in_main_thread:
            self._stopper.raise_now()

    def leave(self, *, comes_back: bool) -> None:
        """Report that the code continues, and send the text that is left.

        `comes_back`: the debugger may open again after one line.
        """
        if self._stopper is not None:
            self._stopper.is_asked = self._asks
        self._report("", "")
        self._send({"comes_back": comes_back})

    def close(self) -> None:
        """Close the connection and the listener. May be repeated."""
        if self._channel is not None:
            self._channel.close()
        if self._listener is not None:
            self._listener.close()
        self._channel = self._listener = None

    def write(self, text: str) -> int:
        """Keep a text until the next prompt, or until the code continues."""
        self._text.append(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: the text is sent with the prompt."""

    def isatty(self) -> bool:
        """Whether this is a terminal."""
        return False

    def readline(self) -> str:
        """Prompt for a line, wait for it, and return it with its newline.

        Returns the command ``c`` (continue), from then on, if the notebook has closed the
        connection or the run must stop.
        """
        question = {"place": self._place, "prompt": self.prompt, "is_over": self.is_over}
        if not self.has_ended and self._send(question):
            line = self._receive()
            if line is not None:
                return f"{line}\n"
        self.has_ended = True
        return GO_ON

    def quit(self) -> None:
        """Have the run stopped, and wait for that."""
        if self._send({"quit": True}):
            self._receive()
        self.has_ended = True

    def _send(self, message: dict[str, Any]) -> bool:
        """Send a message with the text so far; return whether it was sent.

        Waits until the notebook has connected, or the run must stop. Text that cannot be sent is
        lost, and so is what exceeds `MAX_TEXT_CHARS`.
        """
        text, self._text = "".join(self._text), []
        if len(text) > MAX_TEXT_CHARS:
            left = len(text) - MAX_TEXT_CHARS
            text = f"{text[:MAX_TEXT_CHARS]}\n… and {left:,} characters more\n"
            text += message.get("prompt", "")
        channel = self._accept_channel()
        if channel is None:
            return False
        try:
            channel.send({**message, "text": text.removesuffix(message.get("prompt", ""))})
        except OSError:
            return False
        return True

    def _accept_channel(self) -> Channel | None:
        """Wait until the notebook has connected, and return the channel.

        None if the run must stop before that, or the file is closed.
        """
        while self._channel is None and self._listener is not None and not self._is_to_stop:
            self._channel = self._listener.accept(POLL_INTERVAL_S)
            if self._channel is not None:
                self._channel.trust()
        return self._channel

    def _receive(self) -> str | None:
        """Wait for the next line that the user types, and return it.

        None if the rank must stop, or the notebook has closed the connection.
        """
        assert self._channel is not None
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        while not self._is_to_stop:
            if poller.poll(1000 * POLL_INTERVAL_S):
                try:
                    return str(self._channel.receive()[0]["line"])
                except (EOFError, KeyError):
                    break
        return None


def debugger_class() -> type[pdb.Pdb]:
    """Return IPython's debugger where an IPython is there, else Python's."""
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        return pdb.Pdb
    from IPython.core.debugger import Pdb

    return Pdb  # type: ignore[no-any-return,unused-ignore]


def make_debugger(file: NotebookFile, *, is_over: bool = False) -> Any:
    """Return a debugger that reads from a `NotebookFile` and writes to it.

    `is_over`: the code has ended by an exception. Then ``q`` leaves the debugger; otherwise it
    stops the run.
    """

    class Debugger(debugger_class()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(stdin=file, stdout=file, nosigint=True, readrc=False)
            self.use_rawinput = False

        def interaction(self, frame: FrameType | None, trace: Any = None) -> None:
            """Talk to the user while no other thread does; continue if the connection has ended."""
            with file.turn:
                file.is_over = is_over
                file.open(*_place(frame, trace))
                try:
                    super().interaction(frame, trace)
                finally:
                    if file.has_ended:
                        self.clear_all_breaks()
                        self.set_continue()
                    file.leave(comes_back=not is_over and self.stoplineno != -1)
            if file.has_ended and not is_over:
                file.stop()

        def stop_here(self, frame: FrameType) -> bool:
            return bool(super().stop_here(frame)) and not is_own(frame.f_code.co_filename)

        def user_return(self, frame: FrameType, value: Any) -> None:
            super().user_return(frame, value)
            if frame.f_back is not None and frame.f_back.f_code.co_filename in RANK_BODY:
                self.set_continue()  # the task has ended: "next" would step through its callers

        def do_interact(self, _arg: str) -> None:
            self.message("`interact` does not work here: type statements one by one, as in !x = 3.")

        def _cmdloop(self) -> None:
            file.prompt = self.prompt
            self.cmdloop()

        def get_stack(self, frame: FrameType | None, trace: Any) -> tuple[list[Any], int]:
            """Return the frames from the user's code on, and the index of the present one."""
            stack, index = super().get_stack(frame, trace)
            files = [each.f_code.co_filename for each, _ in stack[:index]]
            first = max((i + 1 for i, file in enumerate(files) if file in RANK_BODY), default=0)
            while is_over and index > first and is_own(stack[index][0].f_code.co_filename):
                del stack[index]  # it raised there because the rank must stop
                index -= 1
            return stack[first:], index - first

        def do_quit(self, arg: str) -> bool:
            """q(uit): end the run; after an exception, leave the debugger."""
            if not is_over:
                file.quit()
            self.clear_all_breaks()
            self.set_continue()
            return True

        do_q = do_exit = do_EOF = do_quit  # noqa: N815

    return Debugger()


def _place(frame: FrameType | None, trace: Any) -> tuple[str, int]:
    """Return where the debugger stands: a file and a line."""
    if isinstance(trace, BaseException):
        trace = trace.__traceback__
    if isinstance(trace, TracebackType):
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
        # Not this frame, which raised because the rank must stop.
        return next((each for each in reversed(frames) if not is_own(each[0])), frames[-1])
    assert frame is not None
    return frame.f_code.co_filename, frame.f_lineno
