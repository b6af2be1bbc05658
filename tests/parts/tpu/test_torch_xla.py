"""What ranks on a TPU may be and do, and how they end, through a real kernel."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest

from tests.support.kernel import Notebook

pytestmark = pytest.mark.xla

STEP = """
def step(n=3):
    import torch_xla.core.xla_model as xm
    ones = torch.ones(2, device="xla") * (nbtrain.rank() + 1)
    return xm.all_reduce("sum", ones).cpu().tolist()
"""


@pytest.fixture
def kernel(notebook: Notebook) -> Notebook:
    assert not notebook.run(STEP).ename
    return notebook


def ranks_of(kernel: Notebook) -> list[psutil.Process]:
    return [p for p in kernel.process.children() if p.status() != psutil.STATUS_ZOMBIE]


def still_fit(kernel: Notebook) -> None:
    """No process is left, nothing was initialised, and the next launch works."""
    assert ranks_of(kernel) == []
    assert kernel.value("sorted(nbtrain.system.accelerator_guard.initialized_accelerators())") == []
    assert kernel.value("nbtrain.launch(step, view='none').results") == [[10.0, 10.0]] * 4


def test_a_result_on_the_device_comes_home_on_the_cpu(kernel: Notebook) -> None:
    out = kernel.run(
        "%%distributed --as run\n"
        "import torch_xla\n"
        "layer = torch.nn.Linear(2, 2).to('xla')\n"
        "{'layer': layer, 'tensor': torch.full((3,), 2.0, device='xla') + nbtrain.rank()}"
    )
    assert not out.ename, out.traceback
    value = "[(str(v['tensor'].device), v['tensor'].tolist()) for v in run.results]"
    assert kernel.value(value) == [("cpu", [2.0 + rank] * 3) for rank in range(4)]
    assert kernel.value("str(run.value['layer'].weight.device)") == "cpu"
    assert kernel.value("sorted(nbtrain.system.accelerator_guard.initialized_accelerators())") == []


def test_one_rank_drives_one_chip_and_any_other_number_is_refused(kernel: Notebook) -> None:
    cell = "[(xr.world_size(), xr.global_ordinal(), torch.ones(1, device='xla').item())]"
    out = kernel.run(f"%%distributed -n 1 --as run\nimport torch_xla.runtime as xr\n{cell}")
    assert not out.ename, out.traceback
    assert kernel.value("run.results") == [[(1, 0, 1.0)]]
    out = kernel.run("%distributed -n 3 step()")
    assert out.ename == "PlanError"
    assert "TPU v5e with 4 chips" in out.evalue
    assert "-n 1 or -n 4" in out.evalue


def test_the_failing_ranks_own_exception_is_raised(kernel: Notebook) -> None:
    out = kernel.run(
        "%%distributed\n"
        "def train():\n"
        "    step()\n"
        "    if nbtrain.rank() == 2:\n"
        "        raise ValueError('bad luck')\n"
        "    step()\n"
    )
    assert (out.ename, out.evalue) == ("ValueError", "bad luck")
    assert "----> 5         raise ValueError('bad luck')" in out.traceback
    assert "from rank 2 of 4" in out.traceback
    assert "engines/xla.py" not in out.traceback
    assert "engines/xla.py" not in kernel.value("'\\n'.join(nbtrain.last_run().logs(2))")
    still_fit(kernel)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("sys.exit(3)", "3"),
    ],
)
def test_a_rank_that_dies_is_told_and_the_others_are_ended(
    kernel: Notebook, how: str, words: str
) -> None:
    out = kernel.run(
        f"%%distributed\ndef train():\n    step()\n    if nbtrain.rank() == 1: {how}\n    step()\n"
    )
    assert out.ename == "RankDied"
    assert words in out.evalue
    assert "rank 1" in out.evalue
    still_fit(kernel)


def test_an_interrupt_ends_ranks_that_wait_in_a_collective(kernel: Notebook) -> None:
    out = kernel.run(
        "%%distributed\n"
        "def train():\n"
        "    step()\n"
        "    if nbtrain.rank() == 0:\n"
        "        print('the others wait')\n"
        "        time.sleep(60)\n"
        "    step()\n",
        interrupt_on="the others wait",
    )
    assert out.ename == "KeyboardInterrupt"
    still_fit(kernel)


def test_two_devices_of_a_process_are_driven_by_threads_with_equal_models_of_their_own(
    start_tpu_kernel: Callable[..., Notebook],
) -> None:
    """As on a TPU v2 or v3. There are no collectives between threads here: the CPU has none."""
    kernel = start_tpu_kernel(2, ", device='0x0027'")
    kernel.run("model = torch.nn.Linear(2, 2)\nbefore = model.weight.detach().clone()")
    out = kernel.run(
        "%%distributed --as run\n"
        "import threading\n"
        "def train(model):\n"
        "    import torch_xla\n"
        "    equal = torch.equal(model.weight, before)\n"
        "    model.to(torch_xla.device())\n"
        "    loss = model(torch.ones(1, 2, device=torch_xla.device())).sum()\n"
        "    loss.backward()\n"
        "    torch_xla.sync()\n"
        "    return (str(model.weight.device), equal, model.weight.grad.sum().item(),\n"
        "            threading.current_thread().name)\n"
    )
    assert not out.ename, out.traceback
    assert (
        kernel.value("run.results")
        == [[(f"xla:{index}", True, 4.0, f"xla:{index}") for index in range(2)]] * 2
    )
    out = kernel.run(
        "%%distributed\n"
        "def train(model):\n"
        "    if str(torch_xla.device()) == 'xla:1' and nbtrain.rank() == 1:\n"
        "        raise KeyError('here')\n"
        "    time.sleep(60)\n"
        "import torch_xla\n"
        "train(model)"
    )
    assert (out.ename, out.evalue) == ("KeyError", "'here'")
    assert ranks_of(kernel) == []
