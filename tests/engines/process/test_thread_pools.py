"""Pools of threads that the notebook has used work in a rank, which has none of their threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nbtrain.engines.process.forking import fork_process
from tests.support.cells import must_run
from tests.support.kernel import Notebook

POOLS = {
    "the notebook's own": """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(2, thread_name_prefix="reader")
""",
    "that in which torch.compile has kernels built": """
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
config.compile_threads = 2
pool = AsyncCompile.pool()
""",
}


@pytest.mark.parametrize("made", POOLS.values(), ids=POOLS)
def test_a_pool_that_the_notebook_has_used_works_in_the_ranks_and_goes_on_in_the_notebook(
    made: str, notebook: Notebook
) -> None:
    notebook.run(f"{made}\nfirst = pool.submit(sum, [1, 2])\nassert first.result() == 3")
    cell = (
        "%%distributed -n 2 --hang-after 20 --on-hang stop\n"
        "def train():\n"
        "    later = pool.submit(pow, 2, nbtrain.rank() + 3).result()\n"
        "    return first.result(), *pool.map(len, ['a', 'bc']), later\n"
    )
    assert notebook.run(cell).ename == ""
    assert notebook.value("nbtrain.last_run().results") == [(3, 1, 2, 8), (3, 1, 2, 16)]
    assert notebook.value("pool.submit(sum, [3, 4]).result()") == 7


def test_a_function_that_the_notebook_compiled_is_compiled_for_another_shape_in_the_ranks(
    start_kernel: Callable[..., Notebook],
) -> None:
    notebook = start_kernel(environment={"TORCHINDUCTOR_COMPILE_THREADS": "2"})
    notebook.run("%load_ext nbtrain\nimport os, nbtrain, torch")
    must_run(
        notebook,
        "os.environ['TORCHINDUCTOR_CACHE_DIR'] = os.path.abspath('compiled')\n"
        "compiled = torch.compile(lambda x: (x.sin() * 0 + 1).sum())\n"
        "assert compiled(torch.ones(32)) == 32",
        timeout=200,
    )
    cell = (
        "%%distributed -n 2 --hang-after 150 --on-hang stop\n"
        "def train():\n"
        "    return int(compiled(torch.ones(70, 70)))\n"
    )
    assert notebook.run(cell, timeout=200).ename == ""
    assert notebook.value("nbtrain.last_run().results") == [4900, 4900]


# Without a kernel


def test_a_child_begins_with_an_empty_pool_while_its_parent_has_work_in_it() -> None:
    gate, begun = threading.Event(), threading.Event()

    def work() -> int:
        begun.set()
        gate.wait()
        return 1

    with ThreadPoolExecutor(1) as pool:
        busy, waits = pool.submit(work), pool.submit(os.getpid)
        begun.wait()
        child = fork_process(lambda: pool.submit(pow, 2, 3).result(60) + waits.done())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        gate.set()
        assert code == 8
        assert (busy.result(), waits.result()) == (1, os.getpid())


SCORES = """
import joblib, numpy as np
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import cross_val_score
def scores():
    x = np.arange(24.0).reshape(12, 2)
    return cross_val_score(LinearRegression(), x, x.sum(1), cv=3, n_jobs=2).round(3).tolist()
"""


def test_a_pool_of_joblibs_that_the_notebook_used_works_in_ranks_and_after_them(
    notebook: Notebook, tmp_path: Path
) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    notebook.run(f"import os\nos.environ['JOBLIB_TEMP_FOLDER'] = {str(tmp_path)!r}")
    notebook.run(SCORES)
    assert notebook.value("scores()") == [1.0] * 3
    must_run(notebook, "%%distributed -n 2\ndef train():\n    return scores()", timeout=60)
    assert notebook.value("nbtrain.last_run().results") == [[1.0] * 3] * 2
    assert notebook.value("scores()") == [1.0] * 3
    notebook.run("from joblib.externals.loky import get_reusable_executor")
    notebook.run("get_reusable_executor().shutdown(wait=True)")
