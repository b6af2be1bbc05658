"""Run the public notebooks on the GPUs of this host, and print what came of each.

    python tests/gpu/notebooks.py [NAME ...]

A rank has a GPU of its own, so `-n 2` becomes the number of GPUs where there is one. Where
NBTRAIN_GPU_OUT names a folder, the executed notebooks are written there to be looked at.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

NOT_HERE = {"parallelism", "cluster", "tpu"}
"""What needs two ranks, a cluster or a TPU."""

PROBE = """
import json, nbtrain
from nbtrain.system import accelerator_guard
_run = nbtrain.last_run()
_summary = _run.summary() if _run else None
print(json.dumps({
    "status": _run and _run.state.status,
    "notes": list(_run.state.notes) if _run else [],
    "device": _summary and _summary.device,
    "memory": _summary and _summary.memory_bytes,
    "dirty": sorted(accelerator_guard.initialized_accelerators()),
}))
"""


def executed(path: Path, gpus: int) -> dict[str, Any]:
    """Run one notebook to its end or its first error."""
    import nbformat
    from nbclient.exceptions import CellExecutionError, CellTimeoutError
    from nbformat.v4 import new_code_cell

    from tests.support.kernel import execute

    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = re.sub(r"-n 2\b", f"-n {min(2, gpus)}", cell.source)
    cells = len(notebook.cells)
    notebook.cells.append(new_code_cell(PROBE))
    began, error = time.monotonic(), ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            execute(notebook, Path(folder), HF_HUB_OFFLINE="1")
        except (CellExecutionError, CellTimeoutError) as failure:
            error = str(failure)[-3000:]
    if folder := os.environ.get("NBTRAIN_GPU_OUT"):
        nbformat.write(notebook, Path(folder, f"{path.stem}.ipynb"))
    told = "".join(o.get("text", "") for o in notebook.cells[cells].get("outputs", ()))
    return {"seconds": time.monotonic() - began, "error": error, **json.loads(told or "{}")}


def in_a_process(path: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "\x02" not in done.stdout:
        return {"error": done.stderr[-2000:] or done.stdout[-2000:]}
    found: dict[str, Any] = json.loads(done.stdout.rpartition("\x02")[2])
    return found


def main(names: list[str]) -> None:
    folder = ROOT / "notebooks"
    paths = sorted([*folder.glob("*.ipynb"), *folder.glob("*/*.ipynb")])
    paths = [p for p in paths if p.stem not in NOT_HERE and (not names or p.stem in names)]
    failed = []
    print("| notebook | came to its end | device | memory at most | notes | in the kernel | s |")
    print("|" + "---|" * 7)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        for path, found in zip(paths, pool.map(in_a_process, paths), strict=True):
            error = found.get("error")
            cells = [
                path.stem,
                "no" if error else "yes",
                str(found.get("device")),
                f"{(found.get('memory') or 0) / 2**20:.0f} MiB",
                str(len(found.get("notes", ()))),
                ", ".join(found.get("dirty", ())) or "clean",
                f"{found.get('seconds', 0):.0f}",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
            if error or found.get("notes"):
                failed.append(f"{path.stem}: {found.get('notes')}\n{error}")
    print("\n\n".join(["", *failed]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        from nbtrain.system.gpus import gpu_count

        print("\x02" + json.dumps(executed(Path(sys.argv[2]), gpu_count() or 2)))
    else:
        main(sys.argv[1:])
