"""Colab: its kernel, its shell and its output tags, and cells with the metadata of its page.

`COLABTOOLS=DIR` names a checkout of googlecolab/colabtools, whose packages the kernel then is made
of (with portpicker, google-auth and requests installed, and Colab's versions of the rest); without
it, a kernel of the same names. Colab drops what threads send, and hears no click while a cell runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.cells import must_run
from tests.support.kernel import Notebook, Outputs

KERNEL = """
from ipykernel.ipkernel import IPythonKernel
from google.colab import _shell

class Kernel(IPythonKernel):
    def _shell_class_default(self):
        return _shell.Shell
"""
SHELL = """
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.interactiveshell import InteractiveShellABC

class Shell(ZMQInteractiveShell):
    def run_cell_magic(self, magic_name, line, cell):
        return super().run_cell_magic(magic_name, line, " " if line and not cell else cell)

InteractiveShellABC.register(Shell)
"""
CHECKOUT = os.environ.get("COLABTOOLS", "")
TRIED = "its real kernel and shell by hand, in CI a kernel of their names"


@pytest.fixture(scope="module")
def colab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder: Path = tmp_path_factory.mktemp("colab")
    packages = CHECKOUT or str(folder / "packages")
    if not CHECKOUT:
        package = folder / "packages" / "google" / "colab"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "_kernel.py").write_text(KERNEL)
        (package / "_shell.py").write_text(SHELL)
    options = ["--IPKernelApp.kernel_class=google.colab._kernel.Kernel"]
    if CHECKOUT:
        options.append("--ext=google.colab")
    paths = os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))
    variables = {"PYTHONPATH": paths, "COLAB_RELEASE_TAG": "release-colab"}
    with closing(
        Notebook(folder / "home", folder, environment=variables, options=options)
    ) as kernel:
        kernel.metadata = {"colab": {"cell_id": "q1w2e3r4"}}
        kernel.run("%load_ext nbtrain\nimport nbtrain, os, time, torch")
        yield kernel


@pytest.mark.host(
    "Colab",
    works="live board, summary that stays, ■; no Stop button",
    tried=TRIED,
)
def test_the_board_is_one_output_that_moves(colab: Notebook) -> None:
    go = Path(colab.process.cwd()) / "go"

    def look(out: Outputs) -> None:
        if sum("running" in update["text/html"] for update in out.updates) > 2:
            go.touch()

    out = must_run(
        colab,
        "%%distributed -n 2\nwhile not os.path.exists('go'):\n    time.sleep(0.05)",
        during=look,
    )
    assert len(out.displays) == 1
    assert not out.models
    assert "succeeded" in out.updates[-1]["text/html"]
    assert "Colab" in colab.run("%nbtrain doctor").stdout


@pytest.mark.host(
    "Colab",
    works="the rank's own error at its line; the next cell runs",
    tried=TRIED,
)
def test_a_failure_and_an_interrupt_leave_the_kernel_well(colab: Notebook) -> None:
    out = colab.run("%%distributed -n 2\nif nbtrain.rank():\n    1 / 0")
    assert out.ename == "ZeroDivisionError"
    assert "line 3" in out.traceback or "----> 3" in out.traceback, out.traceback
    waits = "%%distributed -n 2\nprint('ready', flush=True)\ntime.sleep(60)"
    out = colab.run(waits, interrupt_on="ready")
    assert out.ename == "KeyboardInterrupt"
    assert colab.value("nbtrain.last_run().state.status") == "interrupted"


@pytest.mark.part("steering")
@pytest.mark.host("Colab", works="the next cells steer a background run", tried=TRIED)
def test_a_background_run_is_steered_by_cells(colab: Notebook) -> None:
    out = colab.run(
        "import torch, nbtrain, time\n"
        "model = torch.nn.Linear(2, 1)\n"
        "def train(model):\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for _ in nbtrain.progress(range(100_000)):\n"
        "        model(torch.randn(4, 2)).pow(2).mean().backward()\n"
        "        optimizer.step()\n"
        "        time.sleep(0.01)\n"
        "run = nbtrain.launch(train, model, num_processes=2, background=True)\n",
        timeout=120,
    )
    assert not out.ename, out.traceback
    for command in ("turn lr=/3", "peek", "keep --name 'the first'", "finish"):
        out = colab.run(f"%nbtrain {command}", timeout=60)
        assert not out.ename, (command, out.traceback)
    colab.run("run.wait()", timeout=60)
    assert colab.value("run.state.status") == "succeeded"
    changes = [change.split(" at ")[0] for change in colab.value("run.summary().changes")]
    assert changes == ["lr /3", 'checkpoint "the first"', "finish"]
