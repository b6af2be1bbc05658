"""Runs of trackers that every rank would start, and those that are right."""

from __future__ import annotations

import pytest

from nbtrain.planning import lint
from nbtrain.planning.cell import read_cell

HEAD = "import wandb, mlflow, nbtrain\nfrom accelerate import Accelerator\ndef train(log=True):\n"


def notes(body: str) -> list[str]:
    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    findings = lint.lint(read_cell(HEAD + lines + "    return 1\n", "<cell>", {}), ranks=2)
    return [finding.text for finding in findings if finding.code == "tracker"]


def test_a_run_that_every_rank_would_start_is_reported_with_what_to_write() -> None:
    assert notes("run = wandb.init(project='mine')\nrun.log({'loss': 1})") == [
        "every rank would start a run of wandb; write it under `if nbtrain.rank() == 0:`, and what "
        "uses the run, too, or leave it out and run the cell with `--track wandb`"
    ]
    assert "is_main_process" in notes("accelerator = Accelerator()\nmlflow.start_run()")[0]
    assert notes("with mlflow.start_run():\n    mlflow.log_metric('loss', 1)")


@pytest.mark.parametrize(
    "body",
    [
        "accelerator = Accelerator(log_with='wandb')\naccelerator.init_trackers('mine')",
        "if nbtrain.rank() == 0:\n    wandb.init()",
        "accelerator = Accelerator()\nif accelerator.is_main_process:\n    wandb.init()",
        "wandb.init(group='all ranks')",
        "wandb.init(name=f'rank {nbtrain.rank()}')",
        "import os\nos.environ['WANDB_MODE'] = 'disabled'\nwandb.init()",
        "if nbtrain.rank() != 0:\n    return\nwandb.init()",
    ],
)
def test_code_that_is_right_gets_no_note(body: str) -> None:
    assert notes(body) == []
