"""Fifty calls through Accelerate's launcher and ours: what differs is in the page's table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

DIFFERENCES = {
    "processes of two": "the device of CPU ranks",
    "prepare a loss on two": "a model without trainable parameters",
    "bf16 on one": "`mixed_precision`",
    "bf16 on two": "`mixed_precision`",
    "an unknown precision": "arguments that cannot be right",
    "a text for args": "arguments that cannot be right",
    "a tensor for args": "arguments that cannot be right",
    "a node that is none": "arguments that cannot be right",
    "LOCAL_RANK of one": "torchrun's variables",
    "an exception on two": "an exception on several processes",
}
"""What comes of a call by one launcher alone, and the row of the table in `launching.md`."""


def outcomes(launcher: str, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    command = [sys.executable, "-W", "ignore", "-m", "tests.tools.both_launchers", launcher]
    done = subprocess.run(
        [*command, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads((folder / "outcomes.json").read_text())
    return found


@pytest.mark.timeout(500)
def test_what_differs_from_accelerates_launcher_is_in_the_table(tmp_path: Path) -> None:
    theirs = outcomes("accelerate", tmp_path / "accelerate")
    ours = outcomes("nbtrain", tmp_path / "nbtrain")
    assert len(ours) >= 40
    assert {call for call in ours if ours[call] != theirs[call]} == DIFFERENCES.keys()
    page = (ROOT / "notebooks/guides/launching.md").read_text()
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert set(DIFFERENCES.values()) <= set(rows)
