"""A real kernel that runs cells as a notebook does, and what a cell leaves on the page."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest
from jupyter_client.manager import KernelManager

from tests.support.warm import forked_kernels


def by_all(line: str) -> str:
    """Return what a board shows once all ranks have printed a line, and not when the first has."""
    return f"all ranks │</span> {line}"


def once(text: str, act: Callable[[Outputs], object]) -> Callable[[Outputs], None]:
    """Return what acts once, when a widget of the cell shows a text."""
    done: list[bool] = []

    def during(out: Outputs) -> None:
        if not done and any(text in str(m.get("value", "")) for m in out.models.values()):
            done.append(True)
            act(out)

    return during


@dataclass
class Outputs:
    """What a cell left on the page."""

    stdout: str = ""
    stderr: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    pages: list[str] = field(default_factory=list)
    next_inputs: list[dict[str, Any]] = field(default_factory=list)
    """What the cell asked the frontend to put into a cell, and whether into this one."""
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Widgets that are open, by their id, each with its present state."""
    prompts: list[str] = field(default_factory=list)
    """What stood before each input box that was answered."""
    custom: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What came last through comms that are no model's, by their id."""
    comm_bytes: int = 0
    comm_count: int = 0
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    seconds: float = 0.0

    @property
    def board(self) -> str:
        """The text form of the last thing shown."""
        return str((self.updates or self.displays)[-1]["text/plain"])

    def button(self, what: str = "stop") -> tuple[str, dict[str, Any]]:
        """The id and the state of an open button: the one to stop by, or 'search': for stacks."""
        found = [m for m in self.models.items() if m[1].get("icon") == what]
        assert len(found) == 1, self.models
        return found[0]

    def widget(self, kind: str) -> tuple[str, dict[str, Any]]:
        """The id and the state of the one open widget of a kind: ``Button``, ``HTML``."""
        found = [m for m in self.models.items() if m[1].get("_model_name") == f"{kind}Model"]
        assert len(found) == 1, self.models
        return found[0]


class Notebook:
    """A real kernel that runs cells as a notebook does."""

    def __init__(
        self,
        home: Path,
        folder: Path,
        allow_stdin: bool = True,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
        launcher: str = "ipykernel_launcher",
        options: Sequence[str] = (),
        warm: bool = False,
    ) -> None:
        """Start the kernel; with a `prefix` of its command, also in a network of its own.

        A `warm` one has imported torch by its first cell.
        """
        self.allow_stdin = allow_stdin
        self.metadata: dict[str, Any] | None = None
        """What a cell is sent with. A page names the cell, in one way or another, which is what
        None does; a console does not: {}."""
        self._start(home, folder, prefix, environment, launcher, options, warm)
        try:
            self.client.wait_for_ready(timeout=60)
        except RuntimeError:
            self.close()
            raise

    def _start(
        self,
        home: Path,
        folder: Path,
        prefix: Sequence[str],
        environment: Mapping[str, str],
        launcher: str,
        options: Sequence[str],
        warm: bool,
    ) -> None:
        self.manager = KernelManager(kernel_name="python3")
        # Not TCP: the client of a kernel that a test has killed goes on to connect to its ports,
        # and another kernel may have got one of them.
        self._sockets = tempfile.TemporaryDirectory(prefix="kernel-")
        self.manager.transport, self.manager.ip = "ipc", f"{self._sockets.name}/socket"
        assert self.manager.kernel_spec is not None
        argv = [launcher if a == "ipykernel_launcher" else a for a in self.manager.kernel_spec.argv]
        self.manager.kernel_spec.argv = [*prefix, *argv]
        variables = {
            **os.environ,
            "NBTRAIN_HOME": str(home),
            "IPYTHONDIR": str(folder / "ipython"),
            "TMPDIR": str(folder),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        }
        variables.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)  # Lightning sets it on import
        # A torch that loads a plugin for a device is none to fork from.
        warm = warm and not any(map(importlib.util.find_spec, ("torch_xla", "torch_tpu")))
        with forked_kernels() if warm else contextlib.nullcontext():
            self.manager.start_kernel(
                cwd=str(folder),
                env={**variables, **environment},
                extra_arguments=["--HistoryManager.enabled=False", *options],
            )
        self.client = self.manager.client()
        self.client.start_channels()

    @property
    def process(self) -> psutil.Process:
        """The kernel's process."""
        provisioner = getattr(self.manager, "provisioner", None)
        process = getattr(provisioner, "process", None)
        return psutil.Process((process or self.manager.kernel).pid)

    def run(
        self,
        cell: str,
        *,
        interrupt_on: str | None = None,
        during: Callable[[Outputs], None] | None = None,
        timeout: float = 60,
        stop_on_error: bool = False,
        replies: list[dict[str, Any]] | None = None,
        cell_id: str = "",
        answers: Sequence[str] | Callable[[Outputs], str | None] = (),
    ) -> Outputs:
        """Execute a cell; interrupt it once when a display or the output contains a text.

        `cell_id` is the page's name of the cell, by default a new one. `answers` are typed into the
        cell's input boxes, one after the other; or returned for each (None: none).
        """
        typist = answers if callable(answers) else _in_turn(answers)
        while self._asked() is not None:  # an input box that nobody answered
            pass
        out, started = Outputs(), time.monotonic()
        content = {
            "code": cell,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": self.allow_stdin,
            "stop_on_error": stop_on_error,
        }
        named = {"cellId": cell_id or str(uuid.uuid4())}
        metadata = named if self.metadata is None else self.metadata
        request = self.send("execute_request", content, metadata)
        while True:
            left = started + timeout - time.monotonic()
            if answers:
                self._type(out, typist)
            try:
                wait = min(0.02, left) if answers else left
                message = self.client.get_iopub_msg(timeout=max(0.01, wait))
            except queue.Empty:
                if left > 0.02:
                    continue
                self.manager.interrupt_kernel()
                raise AssertionError(f"the cell did not end in {timeout} s: {out}") from None
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            record(out, message["msg_type"], content)
            shown = message["msg_type"] in _SHOWN
            if shown and interrupt_on is not None and interrupt_on in str(content):
                interrupt_on = None
                self.manager.interrupt_kernel()
            if during is not None:
                during(out)
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                break
        self.read_reply(request, out, replies)
        out.seconds = time.monotonic() - started
        return out

    def _type(self, out: Outputs, typist: Callable[[Outputs], str | None]) -> None:
        """Answer an input box, if one is open."""
        prompt = self._asked()
        if prompt is not None:
            out.prompts.append(prompt)
            line = typist(out)
            if line is not None:
                self.client.input(line)

    def _asked(self) -> str | None:
        """Return what stands before an input box that was opened, if one was."""
        with contextlib.suppress(queue.Empty):
            return str(self.client.get_stdin_msg(timeout=0)["content"]["prompt"])
        return None

    def send(
        self, kind: str, content: dict[str, Any], metadata: dict[str, Any] | None = None
    ) -> str:
        """Send a message on the shell channel, as a page does; return its id."""
        message = self.client.session.msg(kind, content, metadata=metadata)
        self.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def click(self, model_id: str) -> str:
        """Click a button."""
        data = {"method": "custom", "content": {"event": "click"}}
        return self.send("comm_msg", {"comm_id": model_id, "data": data})

    def read_reply(
        self,
        request: str,
        out: Outputs | None = None,
        replies: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Wait for the reply to a request; `replies` gets all that came up to it."""
        while True:
            reply = self.client.get_shell_msg(timeout=30)
            if replies is not None:
                replies.append(reply)
            if reply["parent_header"].get("msg_id") == request:
                payload = reply["content"].get("payload", [])
                if out is not None:
                    out.pages = [p["data"].get("text/plain", "") for p in payload if "data" in p]
                    out.next_inputs = [p for p in payload if p["source"] == "set_next_input"]
                return dict(reply)

    def value(self, expression: str) -> Any:
        """Evaluate an expression in the kernel; its value must have a literal repr."""
        import ast

        out = self.run(f"print('\\x02' + repr(({expression})))")
        assert not out.ename, out.traceback
        return ast.literal_eval(out.stdout.rpartition("\x02")[2])

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        for owner in (self.client, self.manager):
            if not owner.context.closed:
                owner.context.destroy(linger=0)
        self._sockets.cleanup()


def _in_turn(answers: Sequence[str]) -> Callable[[Outputs], str | None]:
    left = iter(answers)
    return lambda _out: next(left, None)


_SHOWN = ("stream", "display_data", "update_display_data", "comm_open", "comm_msg")


def record(out: Outputs, kind: str, content: dict[str, Any]) -> None:
    if kind.startswith("comm_"):
        _record_comm(out, kind, content)
    if kind == "stream":
        setattr(out, content["name"], getattr(out, content["name"]) + content["text"])
    elif kind == "display_data":
        out.displays.append(content["data"])
    elif kind == "update_display_data":
        out.updates.append(content["data"])
    elif kind == "execute_result":
        out.results.append(content["data"])
    elif kind == "error":
        out.ename, out.evalue = content["ename"], content["evalue"]
        out.traceback = _without_colours("\n".join(content["traceback"]))


def _record_comm(out: Outputs, kind: str, content: dict[str, Any]) -> None:
    out.comm_count += 1
    out.comm_bytes += len(json.dumps(content, ensure_ascii=False))
    if kind == "comm_open":
        out.models[content["comm_id"]] = dict(content["data"].get("state", {}))
    elif kind == "comm_msg" and content["data"].get("method") == "update":
        out.models.setdefault(content["comm_id"], {}).update(content["data"]["state"])
    elif kind == "comm_msg":
        out.custom[content["comm_id"]] = content["data"]
    elif kind == "comm_close":
        out.models.pop(content["comm_id"], None)


def _without_colours(text: str) -> str:
    import re

    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def execute(notebook: Any, folder: Path, **variables: str) -> None:
    """Run a notebook's cells as `jupyter execute` does, in a kernel that is this Python.

    Raises `CellExecutionError` where a cell fails.
    """
    from ipykernel.kernelspec import write_kernel_spec
    from nbclient import NotebookClient

    write_kernel_spec(folder / "kernels" / "python3")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    environment = {
        **os.environ,
        "NBTRAIN_HOME": str(folder / "home"),
        "IPYTHONDIR": str(folder / "ipython"),
        **variables,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder))
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=500,
            resources={"metadata": {"path": str(folder)}},
        )
        client.execute(env=environment)
