"""What tests share: a private run root, a real kernel, and a check that nothing is left behind."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbtrain import part
from nbtrain.engines.process import fork_server
from nbtrain.system import gpus
from tests.support import slurm
from tests.support.cuda_stub import STUB
from tests.support.kernel import Notebook

if importlib.util.find_spec("torch_tpu") is None:  # with it, torch is for the tests' processes only
    import torch._dynamo  # noqa: F401  (once: every rank that trains would import it by itself)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the tests in a browser and on a cluster, which take minutes, to those who ask."""
    name, asked = collection_path.name, (*config.args, config.option.markexpr)
    wanted = any(name in str(word) for word in asked)
    return True if name in ("browser", "cluster") and not wanted else None


def pytest_configure(config: pytest.Config) -> None:
    """Train on the CPU, also where there are GPUs, unless the tests that need one are asked for."""
    is_asked = re.search(r"(?<!not )\bgpu\b", config.option.markexpr)
    # To count GPUs imports torch, which would load torch_tpu in this process.
    if not is_asked and importlib.util.find_spec("torch_tpu") is None and gpus.gpu_count():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


_LONGEST = (
    *("end_to_end", "engines", "parts", "lifecycle", "commands", "worker", "hangs", "transport"),
    *("checks", "tracking", "system", "ui"),
)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what has a mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow. Begin with the longest files, so that no worker waits for another's."""
    slow = set((Path(__file__).parent / "slow.txt").read_text().splitlines())
    for item in items:
        if not slow.isdisjoint((item.nodeid, item.nodeid.partition("::")[0])):
            item.add_marker(pytest.mark.slow)
        names = {name for mark in item.iter_markers("part") for name in mark.args}
        if missing := names.difference(part.TABLE):
            reason = f"needs the part {min(missing)} of nbtrain"
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("xla") and importlib.util.find_spec("torch_xla") is None:
            reason = "needs torch_xla: pip install -r tests/requirements/xla.txt"
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("slurm") and slurm.find_slurm() is None:
            item.add_marker(pytest.mark.skip(reason=slurm.MISSING))
    order = {room: place for place, room in enumerate(_LONGEST)}
    folder = Path(__file__).parent
    items.sort(key=lambda item: order.get(item.path.relative_to(folder).parts[0], len(order)))


# Behind a `&` of a shell, programs ignore interrupts, which some tests send to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def run_root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of a test live in a folder of its own."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("NBTRAIN_HOME", str(home))
    return home


def _descendants(pid: int) -> set[int]:
    """Return the processes below one, as Linux lists them.

    psutil reads the entries of all processes of the host, which was a tenth of the suite's CPU:
    twice for each test, and kernels that have ended are among them.
    """
    found: set[int] = set()
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            found.update(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
    return found.union(*map(_descendants, found))


@pytest.fixture(autouse=True)
def leaves_no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves a child of the test process behind, but what spawned ranks are forked from."""
    before = _descendants(os.getpid())
    yield
    if fork_server.own.current is not None:
        before.add(fork_server.own.current.pid)
    left = [psutil.Process(pid) for pid in _descendants(os.getpid()) - before]
    if "notebook" not in request.fixturenames:
        assert not left, left


@pytest.fixture(scope="module")
def shared_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """One kernel for a module's tests, with nbtrain loaded and torch imported."""
    folder = tmp_path_factory.mktemp("kernel")
    with closing(Notebook(folder / "home", folder, warm=True)) as kernel:
        kernel.run("%load_ext nbtrain\nimport os, time, signal, torch._dynamo, nbtrain")
        yield kernel


@pytest.fixture
def notebook(shared_kernel: Notebook) -> Notebook:
    """The module's kernel, back in its first state of mind, if not of memory."""
    return shared_kernel


@pytest.fixture
def start_kernel(tmp_path: Path) -> Iterator[Callable[..., Notebook]]:
    """Start kernels of the test's own; a `warm=False` one imports by itself, like a user's."""
    kernels: list[Notebook] = []

    def start(**options: Any) -> Notebook:
        folder = tmp_path / f"kernel-{len(kernels)}"
        folder.mkdir()
        warm = "LD_PRELOAD" not in os.environ  # which a process reads when it begins
        kernels.append(Notebook(tmp_path / "home", folder, **{"warm": warm, **options}))
        return kernels[-1]

    yield start
    for kernel in kernels:
        kernel.close()


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this process makes temporary files: a folder with a name short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-xc", "-", "-o", str(library)],
        input=STUB,
        text=True,
        check=True,
    )
    return library
