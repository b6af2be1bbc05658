"""Fresh processes in place of forked ones: the same cell, the same loss, the same everything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import Notebook, wait_until
from test_guard import stub  # noqa: F401  (a fixture)

import nbtrain
from nbtrain import guard
from nbtrain.errors import RankDied


def launch(function: Any, *args: Any, n: int = 1, **options: Any) -> nbtrain.Run:
    return nbtrain.launch(function, *args, num_processes=n, engine="spawn", view="none", **options)


SETUP = """
%load_ext nbtrain
import ctypes, torch, nbtrain, nbtrain.devices
from torch import nn
nbtrain.devices.gpu_count = lambda *_: 2
torch.manual_seed(5)
factor = 0.5
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    def forward(self, x):
        return scaled(self.layers(x))
def scaled(x):
    return x * factor
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(64, 8)
"""

TRAIN = """
factor = 0.25
def train(model, optimizer, data, steps=15):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    mine = data[nbtrain.rank()::nbtrain.world_size()]
    wrapped = nn.parallel.DistributedDataParallel(model)
    losses = []
    for _ in nbtrain.progress(range(steps)):
        noise = torch.randn_like(mine) * 0.1
        loss = (wrapped(mine + noise) - mine.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
"""


def test_a_dirty_kernel_trains_by_spawn_to_the_loss_of_a_clean_fork(
    start_kernel: Callable[..., Notebook],
    stub: Path,  # noqa: F811
) -> None:
    kernel = start_kernel()
    kernel.run(SETUP)
    state = "hash(torch.get_rng_state().numpy().tobytes())"
    before = kernel.value(state)
    assert kernel.run("%%distributed -n 2" + TRAIN).ename == ""
    forked = kernel.value("nbtrain.last_run().results")
    assert forked[0] != forked[1]
    assert forked[0][-1] < forked[0][0]

    kernel.run(f"ctypes.CDLL({str(stub)!r}).cuInit(0)")
    refused = kernel.run("%%distributed -n 2" + TRAIN)
    assert refused.ename == "AcceleratorInitializedError"
    assert "--engine spawn" in refused.traceback
    assert refused.displays == []

    out = kernel.run("%%distributed -n 2 --engine spawn" + TRAIN)
    assert out.ename == "", out.traceback
    assert "spawn" in out.board
    assert kernel.value("nbtrain.last_run().results") == forked
    assert kernel.value(state) == before
    assert kernel.value("factor") == 0.5


def test_a_cell_in_a_fresh_process_is_still_a_cell_of_the_notebook(notebook: Notebook) -> None:
    notebook.run("class Odd(ValueError): pass\nfactor = 3\ndef helper(x): return factor * x")
    out = notebook.run(
        "%%distributed -n 1 -e spawn\n"
        "!echo from the shell\n"
        "%env NBTRAIN_TEST=magic\n"
        "display({'shown': 1})\n"
        "import inspect, os, sys\n"
        "print(inspect.getsource(helper), os.environ['NBTRAIN_TEST'])\n"
        "print('in the log', file=sys.stderr)\n"
        "raise Odd(f'{helper(14)}')"
    )
    assert (out.ename, out.evalue) == ("Odd", "42")
    assert "----> 8 raise Odd" in out.traceback
    log = notebook.run("print(nbtrain.last_run().logs(0))").stdout
    for said in ("from the shell", "{'shown': 1}", "return factor * x", "magic", "in the log"):
        assert said in log
    assert "raise Odd(f'{helper(14)}')" in log  # with its line, as the notebook knows it
    assert notebook.run(
        "try:\n    %distributed -n 1 -e spawn (_ for _ in ()).throw(Odd('again'))\n"
        "except Odd as error: print('caught', error)"
    ).stdout.startswith("caught again")


def test_instances_of_the_notebooks_classes_come_back_as_such(notebook: Notebook) -> None:
    notebook.run(
        "class Point:\n    made = 0\n    def __init__(self, x): self.x = x\n"
        "    class Inner:\n        def name(self): return 'here'\n"
        "p, q = Point(1), Point.Inner()"
    )
    notebook.run(
        "%%distributed -n 1 -e spawn\nPoint.made = 5\nPoint.Inner.name = lambda self: 'there'\n"
        "(p, Point(2), q)"
    )
    assert notebook.run("a, b, c = nbtrain.last_run().value").ename == ""
    assert notebook.value("(type(a) is Point, b.x, Point.made, q.name())") == (True, 2, 0, "here")


def test_an_interrupt_while_they_import_ends_them(notebook: Notebook) -> None:
    out = notebook.run("%%distributed -n 2 -e spawn\nwhile True: pass", interrupt_on="starting")
    assert out.ename == "KeyboardInterrupt"
    assert "interrupted" in out.board
    assert "failed" not in out.board


def test_an_interrupt_is_an_interrupt_in_the_rank(notebook: Notebook) -> None:
    out = notebook.run(
        "%%distributed -n 2 -e spawn\nprint('be' + 'gun', flush=True)\n"
        "try: time.sleep(60)\nexcept KeyboardInterrupt: print('saved')",
        interrupt_on="begun",
    )
    assert out.ename == "KeyboardInterrupt"
    assert notebook.value("nbtrain.last_run().logs()").count("saved") == 2


def test_a_variable_that_cannot_go_stops_the_launch_before_it(notebook: Notebook) -> None:
    notebook.run("before = nbtrain.last_run()\nrows = (i for i in range(3))")
    out = notebook.run("%%distributed -n 2 -e spawn\nsum(rows)")
    assert out.ename == "PlanError"
    assert "`rows`, a generator, cannot be sent to a fresh process" in out.traceback
    assert out.displays == []
    assert notebook.value("nbtrain.last_run() is before")
    assert notebook.run("%%distributed -n 2 -e spawn\nrows = [1]\nsum(rows)").ename == ""


def test_the_first_word_and_the_last_of_a_killed_rank_are_there() -> None:
    def train() -> None:
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankDied, match="last words"):
        launch(train, n=2)


def test_a_crash_in_native_code_leaves_the_python_stack() -> None:
    def train() -> None:
        import ctypes

        ctypes.string_at(0)

    with pytest.raises(RankDied, match="string_at") as raised:
        launch(train)
    assert raised.value.signal == signal.SIGSEGV


def test_what_cannot_be_loaded_there_is_told_as_the_ranks_failure(tmp_path: Path) -> None:
    (tmp_path / "vanishing_module.py").write_text("class K: pass\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import vanishing_module  # type: ignore[import-not-found]

        assert launch(lambda k: type(k).__module__, vanishing_module.K()).value
        (tmp_path / "vanishing_module.py").unlink()
        for cached in tmp_path.glob("__pycache__/*"):
            cached.unlink()
        with pytest.raises(ModuleNotFoundError, match="vanishing_module") as raised:
            launch(len, vanishing_module.K())
        assert "in a fresh process" in str(raised.value.__notes__)
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("vanishing_module", None)


def test_the_environment_is_the_notebooks_and_the_ranks_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OF_THE_NOTEBOOK", "1")
    monkeypatch.chdir(tmp_path)

    def look() -> Any:
        import torch

        names = ("OF_THE_NOTEBOOK", "EXTRA", "PYTORCH_NVML_BASED_CUDA_CHECK")
        return [os.environ.get(n) for n in names], os.getcwd(), torch.get_num_threads()

    guard.keep_checks_harmless()
    try:
        seen = launch(look, n=2, env={"EXTRA": "2", "OMP_NUM_THREADS": "3"}).value
    finally:
        guard.restore_checks()
    assert seen == (["1", "2", None], str(tmp_path), 3)


def test_the_model_is_in_memory_once_however_many_ranks_read_it() -> None:
    model = torch.nn.Linear(4000, 4000)  # 64 MB

    def look(model: Any) -> tuple[int, int, float]:
        read = float(model.weight.detach().sum())
        mapped = [m for m in psutil.Process().memory_maps() if "memfd:nbtrain" in m.path]
        untouched = sum(m.anonymous for m in mapped)
        with torch.no_grad():
            model.weight.zero_()
        mapped = [m for m in psutil.Process().memory_maps() if "memfd:nbtrain" in m.path]
        return untouched, sum(m.anonymous for m in mapped), read

    for untouched, written, read in launch(look, model, n=2).results:
        assert untouched < 1 << 20
        assert written > 60 << 20
        assert read == pytest.approx(float(model.weight.detach().sum()), abs=1e-2)


def test_they_end_with_the_launcher(tmp_path: Path) -> None:
    script = (
        "import nbtrain, os, time\n"
        "def train():\n"
        f"    open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w').close()\n"
        "    time.sleep(60)\n"
        "nbtrain.launch(train, num_processes=2, engine='spawn', view='none')\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, timeout=30)
    finally:
        launcher.kill()
        launcher.wait()
    pids = [int(p.name) for p in tmp_path.iterdir()]
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))


def test_a_run_leaves_nothing(notebook: Notebook) -> None:
    look = (
        "(sorted(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task')), "
        "sorted(os.listdir('/dev/shm')), dict(os.environ), signal.pthread_sigmask(0, []), "
        "signal.getsignal(signal.SIGINT) is signal.default_int_handler, os.getcwd())"
    )
    notebook.run("%distributed -n 2 -e spawn 1")
    notebook.run(f"before = {look}")
    notebook.run("%distributed -n 2 -e spawn 1")
    notebook.run("%distributed -n 2 -e spawn 1 / 0")
    assert notebook.value(f"before == {look}")
