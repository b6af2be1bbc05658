"""A kernel that has begun to use XLA itself is refused, and told by which cell it did."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.xla

DIRTY = (
    "torch_xla.device()",
    "xr.world_size()",
    "torch_xla.sync()",
    "accelerate.utils.set_seed(0)",
    "accelerate.Accelerator(cpu=True)",
    "transformers.TrainingArguments('out')",
)
CLEAN = (
    "xr.device_type()",
    "torch_xla.tpu.num_available_chips()",
    "torch.nn.Linear(2, 2)",
    "transformers.set_seed",
    "torch.manual_seed(0)",
)

SHELLS = """
import os, sys, traceback
sys.path.append(sys.argv[1])
import torch, torch_xla, torch_xla.runtime as xr, accelerate, transformers, nbtrain
from tests.support import tpu_plugin as plugin
from IPython.core.interactiveshell import InteractiveShell
plugin.pretend(2)
os.environ["PJRT_DEVICE"] = "CPU"  # where the kernel's own XLA works, without a TPU
for statement in sys.argv[2:]:
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        shell = InteractiveShell.instance(user_ns={**globals()})
        shell.run_line_magic("load_ext", "nbtrain")
        shell.run_cell(f"x = 1\\n{statement}", store_history=True)
        print("guard:", sorted(nbtrain.system.accelerator_guard.initialized_accelerators()))
        try:
            run = nbtrain.launch(lambda: 1, engine="xla", view="none")
            print("launched:", run.results)
        except nbtrain.NbtrainError as error:
            print("refused:", type(error).__name__, str(error).replace("\\n", " "))
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
    print("end")
"""


def asked(tmp_path: Path, *statements: str) -> list[str]:
    """What a shell printed that ran each statement in its second line, then launched."""
    out = subprocess.run(
        [sys.executable, "-c", SHELLS, str(ROOT), *statements],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )
    told = out.stdout.split("end\n")[:-1]
    assert len(told) == len(statements), out.stderr
    return told


def test_each_way_to_initialise_xla_is_refused_and_its_cell_named(tmp_path: Path) -> None:
    told = dict(zip((*DIRTY, *CLEAN), asked(tmp_path, *DIRTY, *CLEAN), strict=True))
    for statement in DIRTY:
        said = told[statement]
        assert f"In[1], line 2: `{statement}` initialised XLA" in said, said
        assert "guard: ['XLA']" in said
        assert "refused: AcceleratorInitializedError XLA is already initialised" in said
        assert f"First seen: In[1], line 2: `{statement}`" in said
        assert "Restart the kernel" in said
    for statement in CLEAN:
        said = told[statement]
        assert "guard: []" in said
        assert "initialised XLA" not in said
        assert "launched: [1, 1]" in said, said
