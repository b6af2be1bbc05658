"""Ranks that stay between cells on a TPU: the contract of every engine, and what is torch_xla's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from tests.parts.live import contract
from tests.support.kernel import Notebook

from .conftest import with_tpu

pytestmark = [pytest.mark.xla, pytest.mark.timeout(240)]

TRAIN = """%%distributed
for _ in range(3):
    loss = model(torch.ones(2, 4, device=accelerator.device)).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
weight = model.weight.detach()
accelerator.distributed_type.value, str(weight.device)"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A kernel with two chips."""
    folder = tmp_path_factory.mktemp("kernel")
    with closing(Notebook(folder / "home", folder)) as kernel:
        with_tpu(kernel, 2).run(contract.SETUP)
        yield kernel


@pytest.fixture
def live(notebook: Notebook) -> Notebook:
    """Two live ranks of the kernel."""
    contract.begin(notebook, "-e tpu")
    assert notebook.value("ranks.engine, ranks.device") == ("xla", "xla")
    return notebook


@pytest.mark.parametrize("check", contract.WITHOUT_THE_RECORDER, ids=lambda check: check.__name__)
def test_live_ranks(live: Notebook, check: Callable[[Notebook], None]) -> None:
    check(live)


def test_training_goes_on_from_cell_to_cell(live: Notebook) -> None:
    live.run("%nbtrain push model")
    made = live.run(
        "%%distributed\nfrom accelerate import Accelerator\naccelerator = Accelerator()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model, optimizer = accelerator.prepare(model, optimizer)"
    )
    assert not made.ename, made.traceback
    for _ in range(2):
        assert live.run(TRAIN).stdout == "[ranks 0–1] ('XLA', 'xla:0')\n"
    assert "xla:0" in live.run("%nbtrain vars").board
    pulled = live.run("%nbtrain pull model weight")
    assert not pulled.ename, pulled.traceback
    assert live.value("same is model and torch.equal(model.weight, weight)")
    assert not live.value("torch.equal(weight, model_before)")
    assert live.value("str(weight.device), str(model.weight.device)") == ("cpu", "cpu")
    is_clean = "not __import__('torch_xla')._XLAC._xla_runtime_is_initialized()"
    assert live.value(is_clean)


def test_a_rank_that_was_cut_off_from_the_device_is_named_as_such(live: Notebook) -> None:
    cell = """%%distributed
import hashlib
if rank == 1: raise ValueError('planted')
hashlib.pbkdf2_hmac('sha256', b'in C', b'hears no interrupt', 5_000_000)"""
    out = live.run(cell)
    assert (out.ename, out.evalue) == ("ValueError", "planted")
    assert "If it waited for another rank on the TPU" in out.stdout
    assert "TPU" not in live.run("%distributed 1").stdout  # it was said
    assert live.run(contract.SUM).stdout == "[ranks 0–1] tensor([2.])\n"


def test_two_devices_of_a_process_are_refused(start_tpu_kernel: Callable[..., Notebook]) -> None:
    kernel = start_tpu_kernel(2, ", device='0x0027'")
    out = kernel.run("%nbtrain start")
    assert (out.ename, "two devices" in out.evalue) == ("PlanError", True), out
    assert not kernel.process.children(recursive=True)
