"""Whether CUDA was touched: the driver's own word, from a stub that counts what it is asked."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.cells import must_run
from tests.support.cuda_stub import dirty
from tests.support.kernel import Notebook

ASK = """
import ctypes, sys, nbtrain
from nbtrain.system import gpus, accelerator_guard as guard
gpus.gpu_count = lambda *_: 2
driver = ctypes.CDLL(sys.argv[1])
print(guard.cuda_is_initialized(), guard.cuda_is_initialized())
driver.cuInit(0)
print(guard.cuda_is_initialized())
try:
    nbtrain.launch(lambda: 1, num_processes=2, view='none')
except nbtrain.NbtrainError as error:
    print(type(error).__name__, error)
print(nbtrain.launch(lambda: 1, engine='inline', view='none').value)
"""


def test_asking_is_clean_and_a_dirty_kernel_is_refused(stub: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-c", ASK, str(stub)], capture_output=True, text=True, timeout=60
    )
    lines = out.stdout.splitlines()
    assert lines[:2] == ["False False", "True"], out.stderr
    assert lines[2].startswith("AcceleratorInitializedError CUDA is already initialised")
    assert lines[3] == "1"


def test_a_later_load_is_noticed(stub: Path) -> None:
    script = (
        "import ctypes, sys\nfrom nbtrain.system import accelerator_guard as guard\n"
        "print(guard.record_inits(), guard.record_inits())\n"
        "ctypes.CDLL(sys.argv[1]).cuInit(0)\n"
        "print([t.name for t in guard.record_inits(3, 7, 'here()')], guard.record_inits(4))\n"
        "print(guard.first_cause('CUDA').place, '|', guard.first_cause('XLA').place)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", script, str(stub)], capture_output=True, text=True, timeout=60
    )
    assert out.stdout.splitlines() == [
        "[] []",
        "['CUDA'] []",
        "In[3], line 7: `here()` | before nbtrain was loaded",
    ], out.stderr


def test_the_cell_and_its_statement_are_named_at_once_and_at_the_launch(
    start_kernel: Callable[..., Notebook], stub: Path
) -> None:
    kernel = dirty(start_kernel(), stub, "%load_ext nbtrain")
    assert "can be forked" in kernel.run("%nbtrain guard").stdout
    assert kernel.run("%distributed -n 2 1").ename == ""
    clean = kernel.run("x = 1\ny = 2\nx + y")
    assert (clean.stdout, clean.results[0]["text/plain"]) == ("", "3")

    out = kernel.run("a = 1\nfor i in range(2):\n    driver.cuInit(0)\nb = 2\nb + 1")
    number = kernel.value("len(In) - 2")
    assert out.stdout.count("\n") == 1
    assert f"In[{number}], line 2: `for i in range(2):` initialised CUDA" in out.stdout
    assert out.results[0]["text/plain"] == "3"
    assert kernel.run("c = 3\nc").stdout == ""

    refused = kernel.run("%%distributed -n 2\n1")
    assert refused.ename == "AcceleratorInitializedError"
    assert f"First seen: In[{number}], line 2" in refused.traceback
    assert refused.displays == []
    assert f"CUDA: initialised, In[{number}], line 2" in kernel.run("%nbtrain guard").stdout


def test_one_rank_trains_in_a_kernel_that_has_initialised_cuda(
    start_kernel: Callable[..., Notebook], stub: Path
) -> None:
    kernel = dirty(start_kernel(), stub, "import os\n%load_ext nbtrain", "driver.cuInit(0)")
    out = must_run(kernel, "nbtrain.notebook_launcher(os.getpid, num_processes=1)")
    assert kernel.value("nbtrain.last_run().value == os.getpid()")
    assert "CUDA is initialised in this kernel (In[" in out.board
    assert "so the one rank trains in the kernel" in out.board
    one_gpu = "import nbtrain.engines as e; e.gpus.gpu_count = lambda env: 1; "
    out = kernel.run(f"{one_gpu}nbtrain.launch(os.getpid)")  # nobody said how many
    assert "so the one rank trains in the kernel" in out.board, out.traceback
    out = kernel.run("nbtrain.launch(os.getpid, env={'CUDA_VISIBLE_DEVICES': '2'})")
    assert out.ename == "AcceleratorInitializedError"  # it would have no effect in the kernel
    out = kernel.run("nbtrain.launch(os.getpid, num_processes=1, timeout=5)")
    assert out.ename == "AcceleratorInitializedError"  # a timeout needs a process of its own
    assert kernel.run("nbtrain.launch(os.getpid, num_processes=0)").ename == "PlanError"


def test_a_cell_that_fails_is_blamed_too(start_kernel: Callable[..., Notebook], stub: Path) -> None:
    kernel = dirty(start_kernel(), stub, "%load_ext nbtrain", "%nbtrain guard off")
    out = kernel.run("z = 1\ndriver.cuInit(0); 1 / 0\nnever = 1")
    assert out.ename == "ZeroDivisionError"
    assert "----> 2" in out.traceback
    assert out.stdout == ""
    assert "driver.cuInit(0); 1 / 0" in kernel.run("%nbtrain guard").stdout


def test_asking_torch_for_cuda_stays_harmless_in_the_notebook_only(notebook: Notebook) -> None:
    name = "'PYTORCH_NVML_BASED_CUDA_CHECK'"
    assert notebook.value(f"os.environ.get({name})") == "1"
    notebook.run(f"%distributed -n 1 os.environ.get({name})")
    assert notebook.value("nbtrain.last_run().value") is None
    notebook.run("%unload_ext nbtrain")
    assert notebook.value(f"os.environ.get({name})") is None
    notebook.run(f"os.environ[{name}] = '0'\n%load_ext nbtrain")
    notebook.run("%unload_ext nbtrain")
    assert notebook.value(f"os.environ.pop({name})") == "0"
    notebook.run("%load_ext nbtrain")


def test_a_watched_cell_is_the_cell_it_was(start_kernel: Callable[..., Notebook]) -> None:
    cells = (
        "x = 1\nfrom __future__ import annotations\ndef f(a: nothing): pass\ny = 2\ny",
        "import asyncio\na = await asyncio.sleep(0, 5)\nb = a + 1\nb",
        "1\n2\n3",
        "1\nx = 2\nfor i in range(2):\n    x += i\n",
        "x = 1\nx + 'a'\nx = 2",
        "x = 5\n\n\ndef g():\n    'Doc.'\n    raise KeyError('g')\n\ny = 6\ng()\nx = 7",
        "print(x, y)",
        "%config InteractiveShell.ast_node_interactivity = 'all'",
        "1\nx = 2\n3",
        "%config InteractiveShell.ast_node_interactivity = 'last_expr_or_assign'",
        "z = 1\nz = 8",
        "import inspect\nprint(inspect.getsource(g))",
        "class K:\n    n: int = 3\nk: float = 1.5\nK.__annotations__, __annotations__",
        "x = 0\nreturn 5",
        "zz = 1\nglobal zz\nzz",
        "a = 257\nb = 257\na is b",
        "t = (1, 2)\nu = (1, 2)\nt is u",
        "'hello'\nx = 1\nprint(__doc__)",
        "x = (",
        "%timeit -n 1 -r 1 -q pass",
        "import ast\nclass T(ast.NodeTransformer):\n"
        "    def visit_Constant(self, node): return node\n"
        "get_ipython().ast_transformers.append(T())",
        "a = 5\nlen([])\nx = 1\nlen([])\nx",
        "get_ipython().ast_transformers.clear()",
    )
    plain, watched = start_kernel(), start_kernel()
    watched.run("%load_ext nbtrain")
    plain.run("# as many cells")
    for cell in cells:
        expected, seen = plain.run(cell), watched.run(cell)
        for kind in ("stdout", "stderr", "results", "ename", "evalue"):
            assert getattr(seen, kind) == getattr(expected, kind), cell
        assert _steady(seen.traceback) == _steady(expected.traceback), cell


def _steady(traceback: str) -> str:
    """Leave out what differs between kernels: numbers of their processes, names of frames."""
    return re.sub(
        r"kernel-\d|ipykernel_\d+/\d+|<ipython-input[^>]*>|0x\w+|<cell line: \d+>", "…", traceback
    )
