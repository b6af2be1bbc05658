"""A run folder on a slow disk, 20 ms for each call on one of its files, and on one that freezes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import wait_until

SOURCE = Path(__file__).parents[1] / "support" / "slow_files.c"

LAUNCH = """
import time, nbtrain

def train():
    for step in range(600):
        nbtrain.log(loss=1.0, step=step)
        time.sleep(0.1)

try:
    nbtrain.launch(train, view="none")
except KeyboardInterrupt:
    print(nbtrain.last_run().folder, time.time(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.skipif(not shutil.which("gcc") or sys.platform != "linux", reason="needs gcc")
def test_an_interrupt_reaches_the_ranks_soon(tmp_path: Path) -> None:
    library, home = tmp_path / "slow.so", tmp_path / "home"
    command = ["gcc", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    slow = {"LD_PRELOAD": str(library), "SLOW_FOLDER": str(home), "SLOW_US": "20000"}
    environment = {**os.environ, **slow, "NBTRAIN_HOME": str(home)}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", LAUNCH],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        while not any(b"metrics" in file.read_bytes() for file in home.glob("runs/*/rank-*.jsonl")):
            assert process.poll() is None
            time.sleep(0.05)
        pressed = time.time()
        process.send_signal(signal.SIGINT)
        folder, ended = process.stdout.readline().split()
    finally:
        process.kill()
        process.communicate()
    events = map(json.loads, (Path(folder) / "launcher.jsonl").read_text().splitlines())
    stopping = next(event["time"] for event in events if event["kind"] == "stopping")
    assert stopping - pressed < 3
    assert float(ended) - pressed < 8


FREEZES = """
import os, sys, time
import nbtrain, torch
here, mode = sys.argv[1:]

model = torch.nn.Linear(500, 500)

def train():
    torch.nn.init.constant_(model.weight, 3.0)
    for step in range(40):
        nbtrain.log(step=step, loss=1.0)
        if step == 10 and mode != "weights":
            open(f"{here}/now-{nbtrain.rank()}", "w").close()
        time.sleep(0.05)
    while mode == "interrupt" and not nbtrain.should_stop():
        nbtrain.log(loss=1.0)
        time.sleep(0.05)
    open(f"{here}/now-{nbtrain.rank()}", "w").close()
    while mode == "weights" and not os.path.exists(f"{here}/frozen"):
        time.sleep(0.01)
    return step

try:
    run = nbtrain.launch(train, num_processes=2, view="none", hang_after=1)
except KeyboardInterrupt:
    run = nbtrain.last_run()
steps = [rows.step.dropna().tolist() for _, rows in run.history.groupby("rank")]
least = 11 if mode == "interrupt" else 40
whole = all(of_rank == list(range(len(of_rank))) and len(of_rank) >= least for of_rank in steps)
print(run.state.outcome, whole, run.state.notes, repr(run.state.hang), float(model.weight.mean()))
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that can be frozen: who writes to it waits, and cannot even be killed."""
    tools = all(map(shutil.which, ("mount", "mkfs.ext4", "fsfreeze")))
    if sys.platform != "linux" or os.geteuid() != 0 or not tools:
        pytest.skip("needs root, mkfs.ext4 and fsfreeze")
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs a loop device ({mounted.stderr.strip()})")
    try:
        yield folder
    finally:
        subprocess.run(["fsfreeze", "-u", folder], stderr=subprocess.DEVNULL)
        subprocess.run(["umount", "-l", folder], check=True)


def _waits_for_the_disk(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_DISK_SLEEP


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["events", "weights", "interrupt"])
def test_a_disk_that_freezes_for_seconds_loses_nothing_and_is_no_hang(
    mode: str, disk: Path, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FREEZES, str(tmp_path), mode],
        env={**os.environ, "NBTRAIN_HOME": str(disk)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        launcher = psutil.Process(process.pid)
        wait_until(lambda: all((tmp_path / f"now-{rank}").exists() for rank in (0, 1)), 100)
        subprocess.run(["fsfreeze", "-f", disk], check=True)
        (tmp_path / "frozen").touch()
        wait_until(lambda: any(map(_waits_for_the_disk, launcher.children())), 30)
        if mode == "interrupt":
            process.send_signal(signal.SIGINT)
        time.sleep(3)  # a silence of a second is a hang
        subprocess.run(["fsfreeze", "-u", disk], check=True)
        output, _ = process.communicate(timeout=100)
    finally:
        subprocess.run(["fsfreeze", "-u", disk], stderr=subprocess.DEVNULL)
        process.kill()
        process.communicate()
    outcome = "interrupted" if mode == "interrupt" else "succeeded"
    assert f"{outcome} True () ''" in output, output
    if mode != "interrupt":  # what a stopped run trained does not replace the model
        assert output.split()[-1] == "3.0"
