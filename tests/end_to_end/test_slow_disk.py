"""A run folder on a slow disk, 20 ms for each call on one of its files, and on one that freezes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
