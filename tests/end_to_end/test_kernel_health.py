"""Promise 1: whatever a run does, the kernel afterwards is what it was before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import psutil

from tests.support.health import HEALTH
from tests.support.kernel import Notebook
from tests.support.waiting import is_gone, wait_until

CASES = [
    ("ok", "%distributed -n 2 nbtrain.rank()", ""),
    ("ok", "%%distributed -n 2\ndef train():\n    torch.distributed.init_process_group('gloo')\n"
           "    torch.distributed.barrier()", ""),
    ("exception", "%%distributed -n 2\nif nbtrain.rank(): 1 / 0\ntime.sleep(60)",
     "ZeroDivisionError"),
    ("interrupt", "%%distributed -n 2\nprint('ready')\ntime.sleep(60)", "KeyboardInterrupt"),
    ("exit", "%%distributed -n 2\nif nbtrain.rank(): os._exit(3)\ntime.sleep(60)", "RankDied"),
    ("sigkill", "%%distributed -n 2\nif nbtrain.rank(): os.kill(os.getpid(), 9)\ntime.sleep(60)",
     "RankDied"),
    ("unpicklable", "%distributed -n 2 __import__('threading').Lock()", "ResultNotPicklable"),
    ("refused", "%distributed -n -1 1", "PlanError"),
    ("hostile", "%%distributed -n 2\nos.environ['X'] = '1'; os.chdir('/'); torch.manual_seed(7)\n"
                "signal.signal(signal.SIGTERM, signal.SIG_IGN); torch.set_num_threads(1)\n"
                "import logging; logging.basicConfig(); logging.getLogger().addHandler("
                "logging.NullHandler())", ""),
]  # fmt: skip


def test_runs_of_every_kind_leave_the_kernel_as_it_was(
    start_kernel: Callable[..., Notebook],
) -> None:
    kernel = start_kernel()
    kernel.run("%load_ext nbtrain\nimport nbtrain, os, signal, time, torch, tqdm.auto")
    kernel.run("import torch.distributed, accelerate, nbtrain.lifecycle.launcher\n" + HEALTH)
    kernel.run("torch.manual_seed(1); torch.randn(2000, 2000) @ torch.randn(2000, 2000)")
    kernel.run("before = health(); native = len(os.listdir('/proc/self/task'))")
    for kind, cell, ename in CASES:
        out = kernel.run(cell, interrupt_on="ready" if kind == "interrupt" else None)
        assert out.ename == ename, (kind, out)
    before, after = kernel.value("before, health()")
    for item in before:
        assert after[item] == before[item], item
    assert before["children"] == []
    assert kernel.value("len(os.listdir('/proc/self/task')) <= native") is True


def test_ranks_die_with_a_killed_kernel(start_kernel: Callable[..., Notebook]) -> None:
    kernel = start_kernel()
    kernel.run("%load_ext nbtrain\nimport nbtrain, time, os")
    ranks: list[psutil.Process] = []

    def kill_the_kernel(_out: object) -> None:
        children = kernel.process.children(recursive=True)
        if "ready" in str(_out) and len(children) >= 2:
            ranks.extend(children)
            kernel.process.kill()
            raise KernelKilled

    class KernelKilled(Exception):
        pass

    with contextlib.suppress(KernelKilled):
        kernel.run(
            "%%distributed -n 2\nprint('ready'); time.sleep(60)", during=kill_the_kernel, timeout=30
        )
    assert len(ranks) >= 2
    wait_until(lambda: all(map(is_gone, ranks)))


def test_a_shared_model_stays_shared(start_kernel: Callable[..., Notebook]) -> None:
    kernel = start_kernel()
    kernel.run("%load_ext nbtrain\nimport torch, nbtrain, gc, psutil")
    kernel.run("model = torch.nn.Linear(5000, 5000)  # 100 MB")
    kernel.run(
        "%%distributed -n 2\n"
        "def train(model):\n"
        "    total = sum(p.sum() for p in model.parameters()); gc.collect()\n"
        "    return psutil.Process().memory_full_info().uss / 2**20"
    )
    for private in kernel.value("nbtrain.last_run().results"):
        assert private < 60
