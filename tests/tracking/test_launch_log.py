"""The launcher's own log: silent by default, printed on request, kept in every run's folder."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import nbtrain
from nbtrain.errors import RankDied
from nbtrain.lifecycle.run import Run
from nbtrain.tracking import launch_log
from tests.support.cells import the_last_run

SECRET = "hunter2-of-the-tests"


def log_of(run: Run) -> str:
    return (run.folder / "launcher.log").read_text()


def test_a_run_s_folder_says_what_the_launcher_decided_and_why() -> None:
    run = nbtrain.launch(lambda: 1, num_processes=2, view="none")
    text = log_of(run)
    for part in (
        f"nbtrain {nbtrain.__version__}",
        f"Python {sys.version.split()[0]}",
        "the fork engine, since auto was asked for",
        "2 ranks on ",
        "listening on 127.0.0.1:",
        *(f"rank {rank.rank} is process {rank.pid}" for rank in run.state.ranks),
        "rank 0 ended with exit code 0: done",
        "the run succeeded after ",
    ):
        assert part in text, part
    assert all(launch_log._LINE.match(line) for line in text.splitlines())


def fail(secret: str) -> None:
    if nbtrain.rank() == 1:
        raise ValueError(secret)
    time.sleep(60)


def leave(secret: str) -> None:
    sys.exit(secret)


@pytest.mark.parametrize(
    ("task", "error", "logged"),
    [
        (
            fail,
            ValueError,
            [
                "rank 1 ended with exit code 1: failed (ValueError)",
                "stopping the ranks: failed",
                "terminate sent to rank 0 (failed)",
                "the run failed after ",
            ],
        ),
        (leave, RankDied, ["the run failed after "]),
    ],
    ids=["an exception", "sys.exit"],
)
def test_a_failure_and_signals_are_logged_and_no_argument_and_no_value_of_the_environment(
    task: Callable[[str], None], error: type[Exception], logged: list[str]
) -> None:
    with pytest.raises(error, match=SECRET):
        nbtrain.launch(task, SECRET, num_processes=2, env={"TOKEN": SECRET}, view="none")
    run = the_last_run()
    text = log_of(run)
    for part in ("TOKEN", *logged):
        assert part in text, part
    assert SECRET not in text


def test_a_record_is_one_line_and_what_processes_print_is_none(tmp_path: Path) -> None:
    path = tmp_path / "launcher.log"
    with launch_log.record_launch():
        launch_log.LOGGER.info("note: %s", "a note\nof two lines")
        launch_log.keep_in(path)
    assert path.read_text().endswith(" INFO note: a note of two lines\n")
    with path.open("a") as file:
        file.write("printed\n")
    assert launch_log.printed_in(path) == "printed"


def test_nothing_of_it_stays_in_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    logger = launch_log.LOGGER
    nbtrain.launch(lambda: 1, num_processes=1, view="none")
    descriptors = sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else []
    with pytest.raises(ZeroDivisionError):
        nbtrain.launch(lambda: 1 / 0, num_processes=1, view="none")
    if descriptors:
        assert sorted(os.listdir("/proc/self/fd")) == descriptors
    assert (logger.handlers, logger.level, logger.propagate) == ([], logging.NOTSET, True)
    assert [type(h) for h in logging.getLogger("nbtrain").handlers] == [logging.NullHandler]
    printed = capfd.readouterr()
    assert "INFO" not in printed.out + printed.err


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("info", True),
        ("warning", False),
        ("", False),
    ],
)
def test_on_request_it_is_printed(level: str, shown: bool, tmp_path: Path) -> None:
    script = """
import logging, nbtrain
logging.basicConfig()  # a handler that prints whatever gets to it
nbtrain.launch(int, num_processes=1, view="none")
"""
    environment = {**os.environ, launch_log.VARIABLE: level, "NBTRAIN_HOME": str(tmp_path)}
    command = [sys.executable, "-c", script]
    out = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert ("the fork engine" in out.stderr) is shown
    assert ("the fork engine" in out.stdout) is False


def test_a_handler_of_the_user_s_own_gets_it_and_stays() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    launch_log.LOGGER.addHandler(handler)
    try:
        with launch_log.record_launch():
            launch_log.LOGGER.info("the engine")
        assert (launch_log.LOGGER.level, launch_log.LOGGER.propagate) == (logging.NOTSET, True)
        assert launch_log.LOGGER.handlers == [handler]
    finally:
        launch_log.LOGGER.removeHandler(handler)
    assert [record.message for record in records] == ["the engine"]
