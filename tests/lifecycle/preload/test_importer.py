"""What ranks had to import once is imported in the kernel, which is otherwise as it was."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from IPython.core.events import EventManager, available_events

import nbtrain
from nbtrain.lifecycle.preload import known_imports
from nbtrain.lifecycle.preload.importer import Importer
from nbtrain.lifecycle.preload.known_imports import KnownImports
from nbtrain.worker.telemetry.import_report import SWITCH
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

IMPORTED = "len(json.loads((run.folder / 'rank-0000.imports').read_text()))"


@pytest.fixture
def kernel(start_kernel: Callable[..., Notebook]) -> Notebook:
    """A kernel that may import ahead of time."""
    kernel = start_kernel(warm=False)
    kernel.run("%env NBTRAIN_PRELOAD=on\n%load_ext nbtrain")
    kernel.run("import json, os, sys, time, torch, torch.distributed, accelerate, nbtrain")
    kernel.run("from nbtrain.lifecycle.preload.importer import importer")
    return kernel


def has_learned(kernel: Notebook) -> bool:
    """Whether the trial after the kernel's first run is over."""
    return bool(kernel.value("importer._trial is not None and not importer._trial.is_alive()"))


@pytest.mark.slow
def test_the_second_run_imports_nothing_and_the_kernel_is_as_it_was(kernel: Notebook) -> None:
    kernel.run(HEALTH)
    kernel.run(TRAIN)
    assert kernel.value(IMPORTED) > 100
    kernel.run("before = health()")
    wait_until(lambda: has_learned(kernel), 200)
    out = kernel.run(TRAIN)
    assert not out.ename, out
    assert kernel.value("(run.folder / 'rank-0000.imports').exists()") is False
    assert kernel.value("'torch._dynamo' in sys.modules") is True
    after = kernel.value("health()")
    before = kernel.value("before")
    for item in {*before} - {"threads", "children", "descriptors"}:  # of the trial, at first
        assert after[item] == before[item], item
    assert not [name for name in after["threads"] if "nbtrain" in name]
    assert after["children"] == []
    assert "No accelerator" in kernel.run("%nbtrain guard").stdout
    assert "torch" in kernel.run("%nbtrain doctor").stdout.partition("ahead of time")[2]


@pytest.mark.slow
def test_a_variable_that_came_too_late_is_named(kernel: Notebook) -> None:
    kernel.run(TRAIN)
    wait_until(lambda: has_learned(kernel), 200)
    kernel.run(TRAIN)
    out = kernel.run(TRAIN.replace("--as run", "--as run --env TORCH_COMPILE_DISABLE=1"))
    assert "TORCH_COMPILE_DISABLE changed after nbtrain had imported" in out.board
    assert "changed after" not in kernel.run(TRAIN).board


def test_a_variable_given_to_ranks_leaves_the_imports_to_them(run_root: Path) -> None:
    known_imports.write(KnownImports(("this",), reads=("SETTING",)))
    one = Importer()
    one._needed = {"this"}
    sys.modules.pop("this", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "on")
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
    monkeypatch.setenv(SWITCH, "on")
    known_imports.write(KnownImports(("slow_one",)))
    yield begins
    goes_on.set()
    sys.modules.pop("slow_one", None)


def test_a_process_that_is_forked_meanwhile_has_the_whole_module(slow: threading.Event) -> None:
    one = Importer()
    one._needed, one._has_given_up = {"slow_one"}, True
    going_on = one.prepare({})
    assert slow.wait(100)
    threading.Timer(0.2, sys.slow_goes_on.set).start()  # type: ignore[attr-defined]
    child = os.fork()
    if child == 0:
        os._exit(not getattr(sys.modules["slow_one"], "done", False))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    wait_until(lambda: not going_on.is_going_on(), 100)


@pytest.mark.parametrize("has_shell", [True, False])
def test_an_interrupt_while_modules_are_imported_starts_no_rank(
    slow: threading.Event, monkeypatch: pytest.MonkeyPatch, has_shell: bool
) -> None:
    events = EventManager(None, available_events)
    shell = SimpleNamespace(events=events) if has_shell else None
    one = Importer()
    one._needed, one._has_given_up = {"slow_one"}, True

    def interrupt() -> None:
        slow.wait(100)
        os.kill(os.getpid(), 2)
        if not has_shell:
            sys.slow_goes_on.set()  # type: ignore[attr-defined]

    thread = threading.Thread(target=interrupt)
    monkeypatch.setattr("nbtrain.lifecycle.restarts.importer", one)
    with monkeypatch.context() as patch:
        patch.setattr("IPython.get_ipython", lambda: shell)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            nbtrain.launch(lambda: None, num_processes=2, view="none")
    thread.join()
    run = nbtrain.last_run()
    assert run is not None
    assert run.state.status == "interrupted"
    assert not (run.folder / "rank-0000.jsonl").exists()
    if has_shell:  # the next cell waits: two threads must not import beside each other
        assert not getattr(sys.modules["slow_one"], "done", False)
        threading.Timer(0.2, sys.slow_goes_on.set).start()  # type: ignore[attr-defined]
        events.trigger("pre_run_cell", None)
    assert sys.modules["slow_one"].done
    assert nbtrain.launch(nbtrain.rank, num_processes=2, view="none").results == [0, 1]


def test_what_a_module_sets_is_for_the_ranks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    source = "import os, warnings\nos.environ['OF_A_MODULE'] = '1'\nwarnings.simplefilter('once')"
    (folder / "setting_one.py").write_text(source)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setenv(SWITCH, "on")
    known_imports.write(KnownImports(("setting_one",)))
    one = Importer()
    one._needed, one._has_given_up = {"setting_one"}, True
    monkeypatch.setattr("nbtrain.lifecycle.restarts.importer", one)
    filters = warnings.filters.copy()
    run = nbtrain.launch(lambda: os.environ["OF_A_MODULE"], num_processes=2, view="none")
    assert run.results == ["1", "1"]
    assert "OF_A_MODULE" not in os.environ
    assert warnings.filters == filters
    assert sys.modules.pop("setting_one")


def test_an_importer_that_is_off_imports_nothing(
    slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "off")
    one = Importer()
    one._needed, one._has_given_up = {"slow_one"}, True
    assert not one.prepare({}).is_going_on()
    assert not slow.is_set()
