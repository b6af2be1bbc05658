"""Ranks on the CPU of a host where torch_xla is installed: Accelerate would take it, alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xla

SCRIPT = """
import nbtrain

def train():
    from accelerate import Accelerator
    from transformers import TrainingArguments
    arguments = TrainingArguments("out", use_cpu=True)
    accelerator = Accelerator()
    return accelerator.num_processes, str(accelerator.device), str(arguments.device)

run = nbtrain.launch(train, num_processes=2, view="none")
print(run.state.engine, run.state.device, run.results)
"""


@pytest.mark.parametrize("imported", ["", "import accelerate, transformers, torch_xla"])
def test_they_form_one_world(tmp_path: Path, imported: str) -> None:
    out = subprocess.run(
        [sys.executable, "-c", f"{imported}\n{SCRIPT}"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )
    ended = "fork cpu [(2, 'cpu', 'cpu'), (2, 'cpu', 'cpu')]"
    assert out.stdout.splitlines()[-1:] == [ended], out.stderr
