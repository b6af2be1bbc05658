"""What ranks had to import once is imported in the kernel, which is otherwise as it was."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nbtrain
from nbtrain.lifecycle.preload import importer as importing
from nbtrain.lifecycle.preload import known_imports
from nbtrain.lifecycle.preload.importer import Importer
from nbtrain.lifecycle.preload.known_imports import KnownImports
from tests.support.health import HEALTH
from tests.support.kernel import Notebook
from tests.support.waiting import wait_until

TRAIN = """
%%distributed -n 2 --as run
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.backward(model(torch.ones(2, 3)).sum())
optimizer.step()
""".strip()

IDLE = (
    "'torch._dynamo' in sys.modules and not any("
    "t.name == 'nbtrain-import' for t in __import__('threading').enumerate())"
)

IMPORTED = "len(json.loads((run.folder / 'rank-0000.imports').read_text()))"


@pytest.fixture
def kernel(start_kernel: Callable[..., Notebook]) -> Notebook:
    """A kernel that may import ahead of time."""
    kernel = start_kernel()
    kernel.run("%env NBTRAIN_PRELOAD=on\n%load_ext nbtrain")
    kernel.run("import json, os, sys, time, torch, torch.distributed, accelerate, nbtrain")
    return kernel


def has_imported(kernel: Notebook) -> bool:
    """Whether the kernel is done; asked seldom, because it imports between cells only."""
    time.sleep(2 * importing.IDLE)
    return bool(kernel.value(IDLE))


def test_the_second_run_imports_nothing_and_the_kernel_is_as_it_was(kernel: Notebook) -> None:
    kernel.run(HEALTH)
    kernel.run(TRAIN)
    assert kernel.value(IMPORTED) > 100
    kernel.run("before = health()")
    wait_until(lambda: has_imported(kernel), 200)
    out = kernel.run(TRAIN)
    assert not out.ename, out
    assert kernel.value("(run.folder / 'rank-0000.imports').exists()") is False
    assert "Importing" not in out.board
    after = kernel.value("health()")
    before = kernel.value("before")
    for item in {*before} - {"warning filters", "threads", "children", "descriptors"}:
        assert after[item] == before[item], item  # modules may add filters, and nothing else
    assert not [name for name in after["threads"] if name == "nbtrain-import"]
    assert after["children"] == []
    assert "No accelerator" in kernel.run("%nbtrain guard").stdout
    assert "torch" in kernel.run("%nbtrain doctor").stdout.partition("ahead of time")[2]


def test_a_variable_that_came_too_late_is_named(kernel: Notebook) -> None:
    kernel.run(TRAIN)
    wait_until(lambda: has_imported(kernel), 200)
    out = kernel.run(TRAIN.replace("--as run", "--as run --env TORCH_COMPILE_DISABLE=1"))
    assert "TORCH_COMPILE_DISABLE changed after nbtrain had imported" in out.board
    assert "changed after" not in kernel.run(TRAIN).board


def test_a_variable_given_to_ranks_leaves_the_imports_to_them(run_root: Path) -> None:
    known_imports.write(KnownImports(("this",), reads=("SETTING",)))
    one = Importer()
    one._needed = {"this"}
    sys.modules.pop("this", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(importing.SWITCH, "on")
        assert not one.prepare({"SETTING": "1"}).is_going_on()
        assert "this" not in sys.modules


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An installed module whose import ends when the event is set."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    source = "import sys\nsys.slow_begins.set()\nassert sys.slow_goes_on.wait(100)\ndone = True"
    (folder / "slow_one.py").write_text(source)
    begins, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(sys, "slow_begins", begins, raising=False)
    monkeypatch.setattr(sys, "slow_goes_on", goes_on, raising=False)
    monkeypatch.setenv(importing.SWITCH, "on")
    known_imports.write(KnownImports(("slow_one",)))
    yield begins
    goes_on.set()
    sys.modules.pop("slow_one", None)


def test_a_process_that_is_forked_meanwhile_has_the_whole_module(slow: threading.Event) -> None:
    one = Importer()
    one._needed = {"slow_one"}
    going_on = one.prepare({})
    assert slow.wait(100)
    threading.Timer(0.2, sys.slow_goes_on.set).start()  # type: ignore[attr-defined]
    child = os.fork()
    if child == 0:
        os._exit(not getattr(sys.modules["slow_one"], "done", False))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    wait_until(lambda: not going_on.is_going_on(), 100)


def test_an_interrupt_while_modules_are_imported_is_heard_at_once(
    slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Importer()
    one._needed = {"slow_one"}
    monkeypatch.setattr("nbtrain.lifecycle.restarts.importer", one)

    def interrupt() -> None:
        slow.wait(100)
        os.kill(os.getpid(), 2)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        nbtrain.launch(lambda: None, num_processes=2, view="none")
    assert "slow_one" in sys.modules  # it is still being imported, by nobody's waiting
    run = nbtrain.last_run()
    assert run is not None
    assert run.state.status == "interrupted"
    sys.slow_goes_on.set()  # type: ignore[attr-defined]
    assert nbtrain.launch(nbtrain.rank, num_processes=2, view="none").results == [0, 1]


def test_an_importer_that_is_off_imports_nothing(
    slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(importing.SWITCH, "off")
    one = Importer()
    one._needed = {"slow_one"}
    assert not one.prepare({}).is_going_on()
    assert not slow.is_set()
