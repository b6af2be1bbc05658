"""A clock that is set during a run changes neither its duration nor the order of its events."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import nbtrain
from nbtrain.tracking import clock
from tests.support.clocks import compile_clock
from tests.support.kernel import Notebook
from tests.support.runs import launch
from tests.support.waiting import wait_until


@pytest.mark.parametrize("engine", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("jump", [-7200.0, 7200.0], ids=["back", "forward"])
def test_a_clock_that_is_set_changes_no_duration(
    jump: float, engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(clock, "_offset", clock.offset())
    real, started = time.time, time.monotonic()
    jumped = tmp_path / "jumped"

    def train() -> None:
        import time

        real = time.time
        for step in range(10):
            nbtrain.log(step=step)
            time.sleep(0.03)
            if step == 5:
                time.time = lambda: real() + jump
                jumped.touch()
        while jumped.exists():  # the launcher's clock has jumped, too
            time.sleep(0.01)

    def jump_too() -> None:
        wait_until(jumped.exists, 60)
        monkeypatch.setattr(time, "time", lambda: real() + jump)
        jumped.unlink()

    with ThreadPoolExecutor(1) as pool:
        jumping = pool.submit(jump_too)
        run = launch(train, engine=engine)
    jumping.result()
    took = time.monotonic() - started
    state = nbtrain.Run.open(run.folder).state
    for seen in (run.state, state):
        assert 0.2 < seen.elapsed(clock.now()) < took
    assert run.state.elapsed(clock.now()) == pytest.approx(state.elapsed(clock.now()), abs=1)
    rank = run.state.ranks[0]
    assert rank.started is not None
    assert rank.ended is not None
    assert 0 < rank.ended - rank.started < took


TRAIN = """
def train():
    step = 0
    while not nbtrain.should_stop():
        nbtrain.log(step=step, loss=1.0)
        print("step", step, flush=True)
        step += 1
        time.sleep(0.05)
"""


@pytest.fixture
def set_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the clock of all processes that begin from here on, at any time, by so many seconds."""
    library, ahead = compile_clock(tmp_path)
    monkeypatch.setenv("CLOCK_AHEAD", str(ahead))
    monkeypatch.setenv("LD_PRELOAD", str(library))

    def set_ahead(seconds: float) -> None:
        with ahead.open("r+b") as file:
            file.write(struct.pack("d", seconds))

    return set_ahead


def _command_line(verb: str, folder: Path) -> str:
    command = [sys.executable, "-m", "nbtrain", verb]
    home = {**os.environ, "NBTRAIN_HOME": str(folder / "home")}
    return subprocess.run(command, env=home, capture_output=True, text=True).stdout


def _seconds(text: str) -> float:
    """Return the seconds that a run took, in a line of `nbtrain runs` or the like."""
    hours, minutes, seconds = (
        re.search(rf"([\d.]+) {unit}\b(?!/)", text) for unit in ("h", "min", "s")
    )
    parts = [(3600, hours), (60, minutes), (1, seconds)]
    return sum(factor * float(match[1]) for factor, match in parts if match)


@pytest.mark.slow
@pytest.mark.parametrize("jump", [-7200.0, 7200.0], ids=["back", "forward"])
def test_other_processes_see_a_run_as_it_is_after_the_clock_was_set(
    jump: float,
    set_clock: Callable[[float], None],
    start_kernel: Callable[..., Notebook],
    tmp_path: Path,
) -> None:
    first = start_kernel()
    first.run(f"%load_ext nbtrain\nimport nbtrain, time\n{TRAIN}")
    before = time.monotonic()
    first.run("run = nbtrain.launch(train, num_processes=2, background=True)")
    wait_until(lambda: first.value("all((r.step or 0) > 3 for r in run.state.ranks)"), 60)
    after = time.monotonic()
    set_clock(jump)
    second = start_kernel()
    second.run("%load_ext nbtrain\nimport nbtrain, time; from nbtrain.lifecycle import catalog")
    second.run("run = catalog.find_run()")
    least = time.monotonic() - after - 0.1
    listed = second.run("%nbtrain runs").stdout
    texts = [_command_line(verb, tmp_path) for verb in ("runs", "show")]
    seen = [
        first.value("repr(run)"),
        second.value("repr(run)"),
        next(line for line in listed.splitlines() if "-train-" in line),
        next(line for line in texts[0].splitlines() if "-train-" in line),
        texts[1].splitlines()[0],
    ]
    most = time.monotonic() - before + 1
    for text in seen:
        assert "running" in text, text
        assert least < _seconds(text) < most, (text, least, most)
    assert second.value("[stack.trouble for stack in run.stacks()]") == ["", ""]
    second.run("run.stop()")
    for kernel in (first, second):
        kernel.run("run.wait()")
        assert kernel.value("run.state.status") == "interrupted"
        assert least < _seconds(kernel.value("repr(run)")) < time.monotonic() - before + 1
    assert first.value("bool((run.history.time.diff().dropna() >= 0).all())")


HANGS = """
def hangs():
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    for step in range(1000):
        nbtrain.log(step=step)
        dist.all_reduce(torch.ones(1))
        while step == 3 and not os.path.exists("clock-was-set"):
            time.sleep(0.01)
        if step == 10 and nbtrain.rank() == 1:
            time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("jump", [-7200.0, 7200.0], ids=["back", "forward"])
def test_who_waits_for_whom_is_known_after_the_clock_was_set(
    jump: float, set_clock: Callable[[float], None], start_kernel: Callable[..., Notebook]
) -> None:
    """What was recorded earlier than the rank's first group was not counted as its own."""
    kernel = start_kernel()
    kernel.run(f"%load_ext nbtrain\nimport nbtrain, os, time\n{HANGS}")
    kernel.run("run = nbtrain.launch(hangs, num_processes=2, background=True, hang_after=2)")
    wait_until(lambda: kernel.value("all((r.step or 0) == 3 for r in run.state.ranks)"), 60)
    set_clock(jump)
    kernel.run("open('clock-was-set', 'w').close()")
    wait_until(lambda: kernel.value("run.state.hang"), 60)
    hang = kernel.value("run.state.hang")
    kernel.run("run.stop()")
    assert "rank 0 waits in all_reduce #12 for it" in hang
