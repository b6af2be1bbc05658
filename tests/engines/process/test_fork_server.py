"""Ranks that are forked from a clean process are what fresh interpreters would be, at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.cells import must_run
from tests.support.kernel import Notebook
from tests.support.waiting import is_gone, wait_until

SETUP = """
import os, sys, time, torch, nbtrain
from pathlib import Path
from nbtrain.engines.process import fork_server
from nbtrain.lifecycle import imports_ahead
def server():
    return fork_server.own.current and fork_server.own.current.pid
"""

SPAWN = "%%distributed -n 2 -e spawn --as run\n"
IS_FORKED = "'nbtrain.engines.fork_server_main' in sys.modules"


@pytest.fixture
def kernel(start_kernel: Callable[..., Notebook]) -> Notebook:
    kernel = start_kernel()
    kernel.run(f"%load_ext nbtrain\n{SETUP}")
    return kernel


def asked(kernel: Notebook, expression: str, options: str = "") -> list[object]:
    """Return what an expression is in each rank."""
    must_run(kernel, SPAWN.replace("--as", f"{options} --as") + expression)
    answers: list[object] = kernel.value("run.results")
    return answers


@pytest.mark.slow
def test_later_runs_have_the_same_process_and_the_kernels_own_children(kernel: Notebook) -> None:
    assert kernel.value("server()") is None  # nothing for those who never ask
    assert asked(kernel, IS_FORKED) == [True, True]
    first = kernel.value("server()")
    kernel.run("before = sorted(os.listdir('/proc/self/fd'))")
    pids = asked(kernel, "os.getppid(), os.getsid(0) == os.getpid(), 'torch' in sys.modules")
    assert pids == [(kernel.value("os.getpid()"), True, True)] * 2
    must_run(kernel, "%%distributed -n 2\nopen_ = len(os.listdir('/proc/self/fd'))")
    assert kernel.run(f"{SPAWN}1 / 0").ename == "ZeroDivisionError"
    assert kernel.run(f"{SPAWN}os._exit(3)").ename == "RankDied"
    assert kernel.value("server()") == first
    assert kernel.value("before == sorted(os.listdir('/proc/self/fd'))")
    assert psutil.Process(first).status() == psutil.STATUS_SLEEPING
    assert kernel.value("__import__('psutil').Process().children().__len__()") == 1


@pytest.mark.slow
def test_what_changed_in_the_notebook_is_so_in_its_ranks(kernel: Notebook, tmp_path: Path) -> None:
    asked(kernel, "1")
    kernel.run("first = server()\nos.environ['MINE'] = '5'")
    (tmp_path / "own_module.py").write_text("import os\nname = os.getcwd()")
    there = str(tmp_path / "there")
    kernel.run(f"os.makedirs({there!r}); os.chdir({there!r})")
    kernel.run(f"sys.path.append({str(tmp_path)!r}); import own_module")
    look = "own_module.name, os.environ['MINE'], sys.path"
    assert asked(kernel, look) == [(there, "5", kernel.value("sys.path"))] * 2
    assert kernel.value("server() == first")
    # What a library may have read when it was loaded, and what a process inherits.
    kernel.run("os.environ['CUDA_VISIBLE_DEVICES'] = '7'")
    assert asked(kernel, f"os.environ['CUDA_VISIBLE_DEVICES'], {IS_FORKED}") == [("7", True)] * 2
    assert kernel.value("server() != first")
    kernel.run("second, mask = server(), os.umask(0o077)")
    assert asked(kernel, "os.umask(0o077)") == [0o077, 0o077]
    assert kernel.value("server() != second")


def test_ranks_outlive_it_and_stop_when_asked(kernel: Notebook) -> None:
    asked(kernel, "1")
    killed = "os.kill(server, 9)\nwhile os.path.exists(f'/proc/{server}/exe'): time.sleep(0.01)"
    kernel.run("server = server()")
    out = kernel.run(f"{SPAWN}import torch.distributed as dist\n"
                     "dist.init_process_group('gloo')\ndist.barrier()\n"
                     f"if nbtrain.rank() == 0:\n    {killed.replace(chr(10), chr(10) + '    ')}\n"
                     "dist.barrier()\nprint('be' + 'gun', flush=True)\n"
                     "time.sleep(60)", interrupt_on="begun")  # fmt: skip
    assert out.ename == "KeyboardInterrupt"
    assert "interrupted" in out.board
    children = "[child.pid for child in __import__('psutil').Process().children()]"
    assert kernel.value(f"{children} == [fork_server.own.current.pid]")  # another one


@pytest.mark.slow
def test_it_ends_with_its_launcher_and_so_do_the_ranks(tmp_path: Path) -> None:
    script = (
        "import nbtrain, os, sys, time\n"
        "from nbtrain.engines.process import fork_server\n"
        "def train(server):\n"
        f"    open({str(tmp_path)!r} + f'/{{server}}', 'w').close()\n"
        f"    open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w').close()\n"
        "    time.sleep(60)\n"
        "options = {'num_processes': 2, 'engine': 'spawn', 'view': 'none'}\n"
        "nbtrain.launch(int, **options)\n"
        "nbtrain.launch(train, fork_server.own.current.pid, **options)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 3, timeout=60)
    finally:
        launcher.kill()
        launcher.wait()
    pids = [int(p.name) for p in tmp_path.iterdir()]
    wait_until(lambda: all(map(is_gone, pids)))


def fake_package(kernel: Notebook, tmp_path: Path, source: str) -> Path:
    """Install a package, and have nothing but it imported for fresh ranks."""
    folder = tmp_path / "site-packages"
    (folder / "fake_package").mkdir(parents=True)
    module = folder / "fake_package" / "__init__.py"
    module.write_text(source)
    kernel.run(f"sys.path.append({str(folder)!r}); imports_ahead.NAMES = ('fake_package',)")
    return module


@pytest.mark.slow
def test_where_the_kernel_has_another_copy_of_a_package_the_ranks_have_it_too(
    kernel: Notebook, tmp_path: Path
) -> None:
    fake_package(kernel, tmp_path, "version = 1")
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "fake_package.py").write_text("version = 5")
    kernel.run(f"sys.path.insert(0, {str(tmp_path / 'checkout')!r})")
    look = f"import fake_package\nfake_package.version, {IS_FORKED}"
    assert asked(kernel, look) == [(5, False)] * 2
    log = kernel.value("(run.folder / 'launcher.log').read_text()")
    assert "has fake_package from another place" in log


@pytest.mark.slow
def test_a_process_that_holds_an_accelerator_is_not_forked(
    kernel: Notebook, tmp_path: Path, stub: Path
) -> None:
    source = f"import ctypes\nctypes.CDLL({str(stub)!r}).cuInit(0)"
    fake_package(kernel, tmp_path, source)
    assert asked(kernel, f"{IS_FORKED}, 'fake_package' in sys.modules") == [(False, False)] * 2
    assert "initialised CUDA" in kernel.value("(run.folder / 'launcher.log').read_text()")


def test_an_interrupt_while_it_imports_starts_no_rank(kernel: Notebook, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    source = f"import os, time\nopen({str(tmp_path / 'begun')!r}, 'w')\n"
    source += f"while not os.path.exists({str(go_on)!r}): time.sleep(0.01)"
    fake_package(kernel, tmp_path, source)
    kernel.run(
        "import signal, threading\n"
        "def press():\n"
        f"    while not os.path.exists({str(tmp_path / 'begun')!r}): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=press).start()"
    )
    out = kernel.run(f"{SPAWN}1")
    assert out.ename == "KeyboardInterrupt"
    assert "Importing, once for all ranks" in kernel.value(
        "(nbtrain.last_run().folder / 'launcher.jsonl').read_text()"
    )
    go_on.touch()
    assert asked(kernel, f"{IS_FORKED}, 'fake_package' in sys.modules") == [(True, True)] * 2


def test_a_kernel_with_thousands_of_open_files_starts_fresh_ranks(kernel: Notebook) -> None:
    kernel.run(
        "import resource\nmost = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))\n"
        "files = [open(os.devnull) for _ in range(1100)]"
    )
    for _ in range(2):  # the second asks the process that the first has started
        assert asked(kernel, IS_FORKED) == [True, True]
    assert kernel.value("os.dup(0)") > 1024
