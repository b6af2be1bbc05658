"""What is touched of torch_xla, as far as it can be tried without one; the rest is in tests/xla."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nbtrain.parts.tpu import chips, xla
from tests.support.tpu_environment import KAGGLE, STALE


def test_what_gave_another_process_its_place_is_forgotten() -> None:
    env = {**KAGGLE, **STALE, "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "OTHER": "1"}
    xla.forget_place(env)
    assert env == {**KAGGLE, "TPU_HOST_BOUNDS": "1,1,1", "TPU_WORKER_ID": "0", "OTHER": "1"}


def test_what_the_plan_sets_is_kept() -> None:
    env = {"TPU_VISIBLE_CHIPS": "2", "TPU_PROCESS_BOUNDS": "1,1,1", "CLOUD_TPU_TASK_ID": "5"}
    xla.forget_place(env, keep={"TPU_VISIBLE_CHIPS", "TPU_PROCESS_BOUNDS"})
    assert env == {"TPU_VISIBLE_CHIPS": "2", "TPU_PROCESS_BOUNDS": "1,1,1"}


LOAD = """
from nbtrain import errors
from nbtrain.system import accelerator_guard
from nbtrain.parts.tpu import xla
print("XLA" in accelerator_guard.initialized_accelerators(), xla.compilations())
try:
    xla.load()
except errors.NbtrainError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "MissingExtra a TPU needs torch_xla, which is not installed: pip install"),
        ("import _no_such_module", "ModuleNotFoundError: No module named '_no_such_module'"),
        ("raise ImportError('undefined symbol: _ZN5torch')", "ImportError: undefined symbol"),
        ("", "LaunchError torch_xla does not work with torch"),
    ],
)
def test_a_torch_xla_that_cannot_be_used_says_what_to_install(
    tmp_path: Path, source: str | None, words: str
) -> None:
    if source is None:
        script = f"import sys; sys.modules['torch_xla'] = None\n{LOAD}"
    else:
        script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{LOAD}"
        (tmp_path / "torch_xla.py").write_text(source)
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    untouched, told = out.stdout.splitlines()
    assert untouched == "False None"
    assert words in told
    assert chips.XLA_INSTALL in told
