"""What the next launch needs is imported while a kernel is idle, and no cell minds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cells import must_run
from tests.support.kernel import Notebook
from tests.support.waiting import wait_until

PART = """
import os, pathlib, threading, time
here = pathlib.Path(__file__).parent
thread = threading.current_thread().name
(here / "begun").touch()
while not (here / "goes on").exists():
    time.sleep(0.01)
done = True
(here / "done").touch()
"""

Start = Callable[..., tuple[Notebook, Path]]


@pytest.fixture
def start(start_kernel: Callable[..., Notebook], tmp_path: Path) -> Start:
    """Start a kernel in which `add()` has one module imported ahead of time, and nothing else."""
    package = tmp_path / "site-packages" / "idle_one"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "part.py").write_text(PART)

    def start() -> tuple[Notebook, Path]:
        kernel = start_kernel(environment={"NBTRAIN_PRELOAD": "on"})
        kernel.run("%load_ext nbtrain\nimport sys, torch")
        kernel.run(f"sys.path.append({str(package.parent)!r})")
        kernel.run(
            "from nbtrain.lifecycle import imports_ahead\nimports_ahead.NAMES = ()\n"
            "def add(): imports_ahead.NAMES = ('idle_one.part',)"
        )
        return kernel, package

    return start


def idle(kernel: Notebook, package: Path) -> None:
    """Wait until the kernel, after the cell that ran last, was idle for longer than it takes."""
    looked = package / "looked"
    kernel.run(
        "import asyncio, pathlib\n"
        f"asyncio.get_running_loop().call_later(1, pathlib.Path({str(looked)!r}).touch)"
    )
    wait_until(looked.exists, 100)


def test_an_idle_kernel_imports_what_a_launch_needs(start: Start) -> None:
    kernel, package = start()
    (package / "goes on").touch()
    kernel.run("add()")
    wait_until((package / "done").exists, 100)
    assert kernel.value("sys.modules['idle_one.part'].thread") == "MainThread"
    assert kernel.value("'nbtrain.lifecycle.launcher' in sys.modules") is True
    assert kernel.run("import idle_one.part\nprint(idle_one.part.done)").stdout == "True\n"


def test_a_cell_that_comes_meanwhile_waits_for_the_whole_module(start: Start) -> None:
    kernel, package = start()
    kernel.run("add()")
    wait_until((package / "begun").exists, 100)
    kernel.manager.interrupt_kernel()  # nothing runs that it could end
    threading.Timer(0.3, (package / "goes on").touch).start()
    out = kernel.run("from idle_one.part import done\nprint(done)")
    assert (out.stdout, out.ename) == ("True\n", "")


def test_nothing_is_imported_beside_a_thread(start: Start) -> None:
    kernel, package = start()
    (package / "goes on").touch()
    kernel.run(
        "import threading\nend = threading.Event()\nthreading.Thread(target=end.wait).start()"
    )
    kernel.run("add()")
    idle(kernel, package)
    assert kernel.value("'idle_one.part' in sys.modules") is False
    kernel.run("end.set()")
    wait_until((package / "done").exists, 100)


@pytest.mark.slow
def test_torch_compile_works_between_and_after_the_pieces(
    start_kernel: Callable[..., Notebook], tmp_path: Path
) -> None:
    """The very modules that broke when a thread imported them beside a cell."""
    kernel = start_kernel()
    kernel.run("%load_ext nbtrain\nimport sys, torch")
    marks = [tmp_path / "sympy", tmp_path / "torch._dynamo"]
    kernel.run(
        "import asyncio, pathlib\n"
        "def look(marks):\n"
        "    left = [m for m in marks if m.name not in sys.modules or m.touch()]\n"
        "    if left: asyncio.get_running_loop().call_later(0.005, look, left)\n"
        f"look([*map(pathlib.Path, {[str(mark) for mark in marks]})])"
    )
    wait_until(marks[0].exists, 100)
    between = kernel.run(
        "f = torch.compile(lambda x: x + 1, backend='eager')\nprint(f(torch.ones(1)).item())"
    )
    assert (between.stdout, between.ename) == ("2.0\n", "")
    wait_until(marks[1].exists, 100)
    must_run(
        kernel,
        "%%distributed -n 2 --as run\n"
        "assert 'torch._dynamo' in sys.modules\nf(torch.ones(1)).item()",
    )
    assert kernel.value("run.results") == [2.0, 2.0]
