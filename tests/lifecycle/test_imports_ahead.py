"""What every rank would import is imported in the kernel, which is otherwise as it was."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nbtrain
from nbtrain.lifecycle import imports_ahead, limits
from tests.support.cells import the_last_run
from tests.support.kernel import Notebook
from tests.support.process_state import PROCESS_STATE
from tests.support.waiting import wait_until

SLOW = """
import sys
sys.slow_begins.set()
while not sys.slow_goes_on.wait(0.01):
    pass
done = True
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install modules of these sources, and have them imported ahead of time; nothing else."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(imports_ahead, "NAMES", ())
    monkeypatch.setattr(imports_ahead, "_failed", set())
    monkeypatch.setattr(imports_ahead, "_variables_at_import", None)

    def install(**sources: str) -> None:
        for name, source in sources.items():
            (folder / f"{name}.py").write_text(source)
        monkeypatch.setattr(imports_ahead, "NAMES", tuple(sources))

    yield install
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def slow(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Events of a module: its import has begun; it may end, which a test sets at last."""
    begins, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "slow_begins", begins, raising=False)
    monkeypatch.setattr(sys, "slow_goes_on", goes_on, raising=False)
    install(slow_one=SLOW, after_slow="")
    yield begins, goes_on
    goes_on.set()


def ranks_see(name: str) -> list[bool]:
    run = nbtrain.launch(lambda: name in sys.modules, num_processes=2, view="none")
    return [bool(result) for result in run.results]


def test_ranks_have_the_modules_and_a_broken_one_stops_none(install: Callable[..., None]) -> None:
    install(broken_one="1 / 0", whole_one="")
    assert ranks_see("whole_one") == [True, True]
    assert "whole_one" in sys.modules
    assert [*imports_ahead.import_one_by_one()] == []  # the broken one is not tried again


def test_what_a_module_sets_is_put_back(install: Callable[..., None]) -> None:
    install(
        setting_one="import os, warnings\n"
        "os.environ['TORCH_OF_A_MODULE'] = '1'\nwarnings.simplefilter('once')"
    )
    filters, environment = warnings.filters.copy(), dict(os.environ)
    assert ranks_see("setting_one") == [True, True]
    assert warnings.filters == filters
    assert dict(os.environ) == environment


def test_the_switch_and_variables_of_the_run_leave_imports_to_the_ranks(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(plain_one="")
    run = nbtrain.launch(len, "x", num_processes=1, env={"TORCH_COMPILE_DISABLE": "1"}, view="none")
    monkeypatch.setenv(imports_ahead.SWITCH, "off")
    assert ranks_see("plain_one") == [False, False]
    assert not run.state.findings
    monkeypatch.delenv(imports_ahead.SWITCH)
    assert ranks_see("plain_one") == [True, True]


def test_a_variable_that_came_too_late_is_named(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(plain_one="")
    ranks_see("plain_one")  # which reads no variable
    assert imports_ahead.changed_variables({"TORCHDYNAMO_VERBOSE": "1"}) == []
    imports_ahead._import_module("torch._dynamo")  # which does, and is there in the tests' process

    def found(**env: str) -> list[str]:
        run = nbtrain.launch(len, "x", num_processes=1, env=env, view="none")
        return [finding.text for finding in run.state.findings if finding.code == "import"]

    assert found(MINE="1", TORCHINDUCTOR_CACHE_DIR="/x") == []
    assert "TORCHINDUCTOR_MAX_AUTOTUNE changed after" in found(TORCHINDUCTOR_MAX_AUTOTUNE="1")[0]
    monkeypatch.setenv("TORCHDYNAMO_VERBOSE", "1")
    assert "TORCHDYNAMO_VERBOSE changed after" in found()[0]


@pytest.mark.parametrize("hangs", [False, True])
def test_an_interrupt_meanwhile_starts_no_rank(
    slow: tuple[threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    begins, goes_on = slow
    monkeypatch.setattr(limits, "IMPORT_TIMEOUT_S", 0.2 if hangs else 100.0)
    handler = signal.getsignal(signal.SIGINT)

    def press() -> None:
        begins.wait(100)
        os.kill(os.getpid(), signal.SIGINT)
        if not hangs:
            goes_on.set()

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        nbtrain.launch(len, "x", num_processes=2, view="none")
    thread.join()
    assert signal.getsignal(signal.SIGINT) is handler
    is_timer = lambda thread: isinstance(thread, threading.Timer)  # noqa: E731
    wait_until(lambda: not any(map(is_timer, threading.enumerate())))
    run = the_last_run()
    assert run.state.status == "interrupted"
    assert not (run.folder / "rank-0000.jsonl").exists()
    # A short import is whole; one that hung ended, and no other is begun in this kernel.
    assert [name in sys.modules for name in imports_ahead.NAMES] == [not hangs, False]
    assert ranks_see("after_slow") == [not hangs] * 2


STEP = """
%%distributed -n 2 --as run
import sys, torch
from accelerate import Accelerator
before = {*sys.modules}
accelerator = Accelerator()
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.backward(model(torch.ones(2, 3)).sum())
optimizer.step()
[name for name in {*sys.modules} - before if name.split(".")[0] in ("torch", "sympy")]
""".strip()


LOOK = """
def look():  # a cell that asks would be no idle moment
    spec = getattr(sys.modules.get('torch._dynamo'), '__spec__', None)
    if spec is not None and not getattr(spec, '_initializing', False):
        mark.touch()
    else:
        asyncio.get_running_loop().call_later(0.05, look)
look()
"""


def start_whole(start_kernel: Callable[..., Notebook]) -> Notebook:
    """Start a kernel that has all of its threads.

    If another process takes the port of the heartbeat before the kernel does, that thread ends.
    """
    while True:
        kernel = start_kernel(warm=False)
        if kernel.value("any(t.name == 'Heartbeat' for t in __import__('threading').enumerate())"):
            return kernel


@pytest.mark.slow
def test_a_kernel_that_was_idle_is_as_one_without_nbtrain(
    start_kernel: Callable[..., Notebook], tmp_path: Path
) -> None:
    """Signals, hooks, limits, environment, random states, threads, files, logging, torch."""
    states, kernels, mark = [], [], tmp_path / "imported"
    for load in ("", "%load_ext nbtrain"):
        kernel = start_whole(start_kernel)
        kernel.run(
            "import random, accelerate, numpy, torch, transformers\n"
            f"random.seed(1); numpy.random.seed(1); torch.manual_seed(1)\n{load}"
        )
        kernel.run(PROCESS_STATE)
        kernels.append(kernel)
    kernels[1].run(f"import asyncio, pathlib, sys\nmark = pathlib.Path({str(mark)!r})\n{LOOK}")
    wait_until(mark.exists, 100)
    for kernel in kernels:
        states.append(kernel.value("process_state()"))
    assert not kernels[0].value("'torch._dynamo' in __import__('sys').modules")
    for item in states[0]:
        assert states[0][item] == states[1][item], item
    out = kernels[1].run(STEP)
    assert not out.ename, out.traceback
    left = kernels[1].value("run.results[0]")
    assert len(left) < 5, left  # of 800: the first step imports next to nothing
    assert "No accelerator" in kernels[1].run("%nbtrain guard").stdout
    assert "torch._dynamo" in kernels[1].run("%nbtrain doctor").stdout.partition("imports")[2]
