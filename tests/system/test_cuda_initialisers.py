"""What initialises CUDA and what does not, cell by cell: the table that nbtrain's guard rests on.

Rows that need a GPU run on one; the clean ones run here too, beside a stand-in for the driver.
`python tests/gpu` prints the whole table, with torch's own flag beside the driver's word.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cuda_stub import dirty
from tests.support.kernel import Notebook
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

HERE = ROOT / "tests" / "gpu"
sys.path.insert(0, str(HERE))
from rows import CLEAN, ROWS, Row  # noqa: E402

HAS_GPU = torch.cuda.device_count() > 0


def probe(row: Row, *library: str) -> dict[str, Any]:
    missing = [n for n in row.needs if n != "a GPU" and importlib.util.find_spec(n) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    out = subprocess.run(
        [sys.executable, str(HERE / "probe.py"), str(ROWS.index(row)), *library],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=HERE,
    )
    assert "\x02" in out.stdout, out.stderr
    found: dict[str, Any] = json.loads(out.stdout.rpartition("\x02")[2])
    return found


@pytest.mark.parametrize("row", [r for r in CLEAN if "a GPU" not in r.needs], ids=lambda r: r.name)
@pytest.mark.slow
def test_a_clean_cell_gives_no_alarm(row: Row, stub: Path) -> None:
    found = probe(row, str(stub))
    assert (found["dirty"], found["culprit"], found["error"]) == (False, "", "''")


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_the_driver_knows_and_the_child_agrees(row: Row) -> None:
    found = probe(row)
    assert found["dirty"] == row.dirty
    assert found["child"] == ("dead" if row.dirty else "works")
    assert found["flag"] == row.flag
    assert found["line"] == (row.line if row.dirty else None)
    assert found["fork"] == ("AcceleratorInitializedError" if row.dirty else "works")
    assert found["spawn"] == ("works" if row.dirty else "")


SETUP = """
import asyncio, threading, time, sys
sys.path.insert(0, {folder!r})
def touch(): driver.cuInit(0)
"""

CELLS = {
    "a statement": ("a = 1\ntouch()\nb = 2", 2),
    "an import alone": ("import json\nimport touching_module\nb = 2", 2),
    "a loop": ("for i in range(3):\n    a = i\n    touch()\nb = 1", 1),
    "an await": ("a = 1\nawait asyncio.sleep(0)\ntouch()\nawait asyncio.sleep(0)", 3),
    "a magic": ("a = 1\n%time touch()\nb = 2", 2),
    "a thread that the cell waits for": (
        "t = threading.Thread(target=touch)\nt.start()\nt.join()\nb = 1",
        None,  # either of the two: the thread decides
    ),
}


@pytest.mark.parametrize("kind", CELLS)
def test_the_culprit_is_right_however_it_was_done(
    kind: str,
    start_kernel: Callable[..., Notebook],
    stub: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "touching_module.py").write_text("import __main__\n__main__.touch()\n")
    kernel = dirty(start_kernel(), stub, SETUP.format(folder=str(tmp_path)), "%load_ext nbtrain")
    kernel.run("unsuspicious = 1")
    code, line = CELLS[kind]
    out = kernel.run(code)
    number = kernel.value("len(In) - 2")
    lines = [line] if line else [2, 3]
    assert any(f"nbtrain: In[{number}], line {n}" in out.stdout for n in lines), out
    assert out.stdout.count("initialised CUDA") == 1


def test_something_between_two_cells_is_told_as_that(
    start_kernel: Callable[..., Notebook],
    stub: Path,
) -> None:
    kernel = dirty(start_kernel(), stub, "%load_ext nbtrain\nimport threading")
    kernel.run("threading.Timer(0.1, driver.cuInit, (0,)).start()")
    wait_until(lambda: "CUDA: initialised" in kernel.run("%nbtrain guard").stdout)
    refused = kernel.run("%distributed -n 2 1")
    assert refused.ename == "AcceleratorInitializedError"
