"""A real Jupyter kernel to measure in, as a notebook would have it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

HERE = Path(__file__).parent
HEADERS = 600
"""Bytes of a message beside its content: its own header, its parent's, a signature."""

PATIENCE = 900.0
"""Seconds after which a benchmark is given up."""


class Notebook:
    """Calls functions of these modules in a kernel, one at a time."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient, folder: Path) -> None:
        self._manager, self._client = manager, client
        self._asked = ""
        self._answer = folder / "answer.json"
        self.folder = folder
        self.messages = 0
        self.bytes = 0
        self.pid: int = manager.provisioner.pid  # type: ignore[union-attr]
        self.run(f"import sys; sys.path.insert(0, {str(HERE)!r})")
        self.run("import torch, accelerate, nbtrain")

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a module's function in the kernel; arguments and result travel as JSON."""
        self.start(function, *args)
        return self.finish()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin a call, whose result `finish` returns."""
        module, name = function.__module__, function.__name__
        self._ask(
            f"import json, pathlib, {module}\n"
            f"_answer = {module}.{name}(*json.loads({json.dumps(args)!r}))\n"
            f"_ = pathlib.Path({str(self._answer)!r}).write_text(json.dumps(_answer))"
        )

    def finish(self) -> Any:
        """Wait for the call that was started; return its result, or raise with its traceback."""
        self._wait()
        return json.loads(self._answer.read_text())

    def run(self, code: str) -> None:
        """Run a cell."""
        self._ask(code)
        self._wait()

    def _ask(self, code: str) -> None:
        # As a page's cell, which has a name and allows input(): nbtrain then draws its board.
        session = self._client.session
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": True}
        request = session.msg("execute_request", content, metadata={"cellId": "benchmark"})
        self._client.shell_channel.send(request)
        self._asked = request["header"]["msg_id"]

    def _wait(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while self._asked:
            self.check(0.1)
            if time.monotonic() > deadline:
                raise TimeoutError("a cell of the benchmark did not end")

    def check(self, wait: float = 0.0) -> None:
        """Take the kernel's messages, as a browser would, and wait for more up to `wait` seconds.

        Raises `RuntimeError` if the call has failed or the kernel is gone.
        """
        while self._client.iopub_channel.msg_ready():
            message = self._client.get_iopub_msg(timeout=0)
            self.messages += 1
            self.bytes += len(json.dumps(message["content"], default=str)) + HEADERS
        if not self._manager.is_alive():
            raise RuntimeError("the kernel died")
        try:
            reply = self._client.get_shell_msg(timeout=wait)
        except queue.Empty:
            return
        if reply["parent_header"].get("msg_id") == self._asked:
            self._asked = ""
            content = reply["content"]
            if content["status"] != "ok":
                raise RuntimeError("\n".join(content.get("traceback", [content["status"]])))


@contextmanager
def notebook() -> Iterator[Notebook]:
    """Start a kernel with empty folders of its own; end it, and what it left, whatever happened."""
    with tempfile.TemporaryDirectory(prefix="nbtrain-kernel-") as name:
        own = {key: f"{name}/{key}" for key in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "TMPDIR")}
        os.mkdir(own["TMPDIR"])
        manager, client = start_new_kernel(
            kernel_name="python3",
            startup_timeout=120,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=name,
            env={**os.environ, **own},
        )
        try:
            yield Notebook(manager, client, Path(name))
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
            _end_processes(own["IPYTHONDIR"])


def _end_processes(folder: str) -> None:
    """End what has a kernel's own `folder` in its environment: nobody does where a call has failed.

    The controllers and engines of ipyparallel outlive their kernel.
    """
    while left := list(_processes(folder)):  # what one of them starts meanwhile, too
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left)


def _processes(folder: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # another user's, or it has ended
            if process.environ().get("IPYTHONDIR") == folder:
                yield process
