"""A clock that is set during a run changes neither its duration nor the order of its events."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import nbtrain
from nbtrain.tracking import clock
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
