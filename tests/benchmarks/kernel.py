"""A real Jupyter kernel to measure in, as a notebook would have it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import start_new_kernel

HERE = Path(__file__).parent
PATIENCE = 900.0
_FIRST_CELL = "import torch, accelerate, nbtrain"


class Notebook:
    """Runs functions of these modules in a kernel, one after the other."""

    def __init__(self, client: BlockingKernelClient, pid: int, folder: Path) -> None:
        self._client = client
        self.pid = pid
        self.folder = folder
        self._answer = folder / "answer.json"
        self.cell(f"import sys; sys.path.insert(0, {str(HERE)!r})\n{_FIRST_CELL}")

    def cell(self, code: str) -> None:
        """Execute a cell as a person's: `input()` allowed, so that nbtrain draws its board."""
        reply = self._client.execute_interactive(
            code, allow_stdin=True, output_hook=_drop, stdin_hook=_drop, timeout=PATIENCE
        )
        _check(reply)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a module's function in the kernel; arguments and result travel as JSON."""
        self.cell(self._call(function, args))
        return json.loads(self._answer.read_text())

    def call_during(
        self, function: Callable[..., Any], *args: Any, meanwhile: Callable[[], float]
    ) -> float:
        """Call a function in the kernel; return what `meanwhile` finds while it is running."""
        asked = self._client.execute(self._call(function, args), allow_stdin=True)
        found = meanwhile()
        deadline = time.monotonic() + PATIENCE
        while (left := deadline - time.monotonic()) > 0:
            reply = self._client.get_shell_msg(timeout=left)
            if reply["parent_header"].get("msg_id") == asked:
                _check(reply)
                return found
        raise TimeoutError(f"{function.__name__} did not end")

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> str:
        module = function.__module__
        return (
            f"import json, pathlib, {module}\n"
            f"_answer = {module}.{function.__name__}(*json.loads({json.dumps(args)!r}))\n"
            f"_ = pathlib.Path({str(self._answer)!r}).write_text(json.dumps(_answer))"
        )


def _drop(_message: dict[str, Any]) -> None:
    """Let a message of the kernel go; a browser would draw it."""


def _check(reply: dict[str, Any]) -> None:
    content = reply["content"]
    if content["status"] != "ok":
        raise RuntimeError("\n".join(content.get("traceback", [content["status"]])))


@contextmanager
def notebook() -> Iterator[Notebook]:
    """Start a kernel with empty folders of its own; end it, whatever happened."""
    with tempfile.TemporaryDirectory(prefix="nbtrain-kernel-") as name:
        manager, client = start_new_kernel(
            kernel_name="python3",
            startup_timeout=120,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=name,
            env={**os.environ, "IPYTHONDIR": f"{name}/ipython", "JUPYTER_CONFIG_DIR": name},
        )
        try:
            pid = manager.provisioner.pid  # type: ignore[union-attr]
            yield Notebook(client, pid, Path(name))
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
