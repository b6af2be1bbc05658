"""Requests a line from the user without blocking, so that the run is still watched."""

from __future__ import annotations

import os
import sys
from typing import Any, Protocol

from ...system.files import is_readable
from .html_display import ipython_shell, is_marimo


class Prompt(Protocol):
    """A place where the user may type an answer."""

    holds_screen: bool
    """Whether drawings would disturb a line that is being typed."""

    def ask(self, text: str) -> None:
        """Show a text and return at once. `answer` gives the line later."""

    def answer(self) -> str | None:
        """Return the typed line; None until it is complete."""


def find() -> Prompt | None:
    """Return the prompt of the notebook or terminal that runs this code; None if it has no prompt.

    In a notebook, only if the front-end allows input; never in marimo.
    """
    shell = ipython_shell()
    kernel = getattr(shell, "kernel", None)
    if kernel is not None:
        can_answer = getattr(kernel, "_allow_stdin", False) and hasattr(kernel, "stdin_socket")
        return KernelPrompt(kernel) if can_answer else None
    try:
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    except (AttributeError, ValueError):  # there is no stdin, or it is closed
        return None
    return TerminalPrompt(sys.stdin.fileno()) if is_terminal and not is_marimo() else None


class KernelPrompt:
    """The input box of a notebook's cell, as ``input()`` opens it, without blocking."""

    holds_screen = False

    def __init__(self, kernel: Any) -> None:
        self._kernel, self._socket = kernel, kernel.stdin_socket

    def ask(self, text: str) -> None:
        """Send the front-end a request for a line, and drop answers to earlier requests."""
        sys.stdout.flush()
        sys.stderr.flush()
        kernel, session = self._kernel, self._kernel.session
        while session.recv(self._socket)[1] is not None:
            pass
        content = {"prompt": text, "password": False}
        ident = kernel._parent_ident["shell"]
        parent = kernel.get_parent("shell")
        session.send(self._socket, "input_request", content, parent, ident=ident)

    def answer(self) -> str | None:
        """Return the typed line; None until it is sent. Does not wait."""
        _, reply = self._kernel.session.recv(self._socket)
        return None if reply is None else str(reply["content"].get("value", ""))


class TerminalPrompt:
    """A terminal."""

    holds_screen = True

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._typed = b""

    def ask(self, text: str) -> None:
        """Print a text."""
        print(text, end="", flush=True)

    def answer(self) -> str | None:
        """Return the typed line without its end; None until it is complete. Does not wait.

        The end of the input (Ctrl-D) counts as "quit".
        """
        if b"\n" not in self._typed:
            if not is_readable(self._descriptor):
                return None
            read = os.read(self._descriptor, 4096)
            self._typed += read or b"quit\n"  # Ctrl-D
        line, found, rest = self._typed.partition(b"\n")
        if not found:
            return None
        self._typed = rest
        return line.decode(errors="replace")
