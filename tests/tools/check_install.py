"""Train on two ranks with an installed nbtrain: `python tests/tools/check_install.py`.

Run it in a folder outside the repository, with the Python that nbtrain was installed for. A real
kernel executes the notebook below; exits with a message unless both ranks took part and nbtrain
came from that Python's own packages.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import nbclient
import nbformat

CELLS = (
    "%load_ext nbtrain",
    """
%%distributed -n 2
import os, torch
import torch.distributed as dist

def train():
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.getpid()
""".strip(),
    """
import json, os, nbtrain
print(json.dumps({"file": nbtrain.__file__, "version": nbtrain.__version__, "kernel": os.getpid(),
                  "results": nbtrain.last_run().results}))
""".strip(),
)


def main() -> None:
    """Execute the notebook and check what its last cell printed."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    printed = json.loads(notebook.cells[-1].outputs[0]["text"])
    packages = Path(sysconfig.get_path("purelib"))
    imported = Path(printed["file"])
    assert imported.is_relative_to(packages), f"imported from {imported}, not from {packages}"
    ranks, totals, processes = zip(*printed["results"], strict=True)
    assert (ranks, totals) == ((0, 1), (3.0, 3.0)), printed["results"]
    assert len({*processes, printed["kernel"]}) == 3, "the ranks were not processes of their own"
    command = [Path(sys.executable).with_name("nbtrain"), "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert version.strip() == f"nbtrain {printed['version']}", version
    print(f"two ranks trained with nbtrain {printed['version']} from {packages}")


if __name__ == "__main__":
    main()
