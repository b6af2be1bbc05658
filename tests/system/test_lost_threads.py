"""A rank that waits for a thread of the notebook: the report of its hang says so, and names it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nbtrain.system.lost_threads import find_lost_threads
from tests.support.cells import must_run
from tests.support.kernel import Notebook
from tests.support.waiting import wait_until

CELL = """%%distributed -n 2 --hang-after 1 --on-hang stop --view html
from multiprocessing.pool import ThreadPool
import torch.distributed as dist
def train():
    dist.init_process_group("gloo")
    {line}
"""
LOST = (
    "A fork copies no threads, so a rank has none of the notebook's threads ({}). If {}, make it "
)


@pytest.fixture
def busy(notebook: Notebook) -> Iterator[Notebook]:
    """A notebook with threads of its own: one feeds a queue and holds a lock, one is a pool's."""
    must_run(
        notebook,
        "import queue, threading\n"
        "from multiprocessing.pool import ThreadPool\n"
        "batches, lock, over = queue.Queue(2), threading.Lock(), threading.Event()\n"
        "replies = queue.SimpleQueue()\n"
        "def feed():\n"
        "    with lock:\n"
        "        while not over.wait(0.01):\n"
        "            if not batches.full():\n"
        "                batches.put(1)\n"
        "feeder = threading.Thread(target=feed, name='feeder')\n"
        "feeder.start()\n"
        "assert batches.get() == 1",
    )
    yield notebook
    notebook.run("over.set(); feeder.join()")


@pytest.mark.parametrize(
    "line",
    [
        "while True: batches.get()",
        pytest.param("lock.acquire()", marks=pytest.mark.slow),
    ],
)
def test_a_hang_that_waits_for_a_thread_of_the_notebook_names_it(line: str, busy: Notebook) -> None:
    out = busy.run(CELL.format(line=line))
    assert out.ename == "RunTimeout"
    assert f"line 6: {line}. {LOST.format('feeder', 'ranks 0–1 wait for one')}" in out.evalue
    assert "(feeder)" in out.board
    report = busy.value("nbtrain.last_run().state.hang")
    assert report.endswith("make it and its queue, pool or lock in the function")


def test_a_rank_that_the_others_wait_for_may_miss_one_too(busy: Notebook) -> None:
    busy.run("pool = ThreadPool(1)\nassert pool.map(len, ['a']) == [1]")
    line = "nbtrain.rank() and pool.map(len, ['ab']); dist.barrier()"
    out = busy.run(CELL.format(line=line))
    assert out.ename == "RunTimeout"
    assert "rank 0 waits in barrier #1 for it. A fork copies no threads" in out.evalue
    assert "(feeder, Thread-" in out.evalue
    assert "If rank 1 waits for one" in out.evalue
    busy.run("pool.terminate()")


@pytest.mark.parametrize(
    "line",
    [
        "with ThreadPool(1) as pool: pool.apply(time.sleep, [600])",
        pytest.param("time.sleep(600)", marks=pytest.mark.slow),
    ],
)
def test_a_hang_of_another_cause_does_not(line: str, busy: Notebook) -> None:
    out = busy.run(CELL.format(line=line))
    assert out.ename == "RunTimeout"
    assert f"line 6: {line}" in out.evalue
    assert "thread" not in out.evalue.partition(line)[2]


def test_a_run_that_is_right_says_nothing_of_threads(busy: Notebook) -> None:
    line = "with ThreadPool(1) as pool: return batches.maxsize, pool.apply(len, ['a'])"
    out = must_run(busy, CELL.format(line=line))
    assert busy.value("nbtrain.last_run().results") == [(2, 1)] * 2
    assert "feeder" not in str(out)


NATIVE = """
import ctypes
libc = ctypes.CDLL(None)
thread = ctypes.c_ulong()
def work():
    if thread.value:
        libc.pthread_join(thread, None)
    else:
        libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)
        libc.pthread_setname_np(thread, b"pooled-0")
"""
"""A library whose pool of native threads is made at its first use, and is waited for at others."""


@pytest.mark.skipif(sys.platform != "linux", reason="only /proc shows the names of native threads")
def test_a_hang_in_a_library_whose_native_threads_are_the_notebooks_names_it(
    start_kernel: Callable[..., Notebook], tmp_path: Path
) -> None:
    packages = tmp_path / "site-packages"
    (packages / "pooled").mkdir(parents=True)
    (packages / "pooled" / "__init__.py").write_text(NATIVE)
    path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    notebook = start_kernel(environment={"PYTHONPATH": path})
    notebook.run("%load_ext nbtrain\nimport nbtrain, time\nfrom pooled import work\nwork()")
    out = notebook.run(CELL.format(line="work()"))
    assert out.ename == "RunTimeout"
    assert "line 6: work(). A fork copies no threads, so pooled, which was used" in out.evalue
    assert "Use --engine spawn" in out.evalue
    spawn = CELL.format(line="work()").replace("--hang-after 1", "--engine spawn --hang-after 60")
    assert notebook.run(spawn).ename == ""


# Without a kernel


def test_a_thread_of_a_pool_is_missed_only_while_it_works() -> None:
    gate, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait()

    before = {*find_lost_threads()["threads"]}
    with ThreadPoolExecutor(1, thread_name_prefix="reader") as pool:
        busy = pool.submit(work)
        begun.wait()
        assert {*find_lost_threads()["threads"]} - before == {"reader_0"}
        gate.set()
        busy.result()
        wait_until(lambda: {*find_lost_threads()["threads"]} == before)
