"""``nbtrain demo``, as a newcomer runs it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nbtrain.commands import cli
from nbtrain.commands.demo import SOURCE
from tests.support.paths import ROOT


def test_it_shows_the_loop_the_board_the_results_and_what_comes_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["demo", "-n", "2"]) == 0
    shown = capsys.readouterr().out
    parts = ["def train(model, epochs", "succeeded", "results: [", "accuracy: ", "run folder: "]
    parts += ["%load_ext nbtrain", "%%distributed"]
    assert [part for part in [*parts, "rank 1: "] if part not in shown] == []
    assert sorted(parts, key=shown.index) == parts
    before, after = map(int, re.findall(r"(\d+)%", shown.partition("accuracy: ")[2])[:2])
    assert after > 90 > before
    (folder,) = re.findall(r"run folder: (\S+)", shown)
    assert (Path(folder) / "weights").is_dir()


WITHOUT_END = """
import sys
from nbtrain.commands import cli, demo
demo.train.__defaults__ = (10**6, 0.05)
sys.exit(cli.main(["demo", "-n", "2"]))
"""


def test_ctrl_c_ends_it_with_its_ranks() -> None:
    command = [sys.executable, "-u", "-c", WITHOUT_END]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if b"rank 1: running" in line:
                break
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"")
    assert not any(rank.is_running() for rank in ranks)


def test_it_trains_the_loop_of_the_readme() -> None:
    assert f"%%distributed -n 2\n{SOURCE}```" in (ROOT / "README.md").read_text()
