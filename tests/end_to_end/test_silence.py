"""Ways to go wrong that used to end without a word: what a user reads, in a real kernel.

Others are tested beside the code that finds them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from tests.support.cells import must_run
from tests.support.kernel import Notebook, Outputs

SETUP = """
import torch._dynamo
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
x = torch.arange(96.0).reshape(96, 1) / 96
DATA = TensorDataset(x, (x > 0.4).float())
def parts(model=None):
    model = model or nn.Linear(1, 1)
    return model, torch.optim.Adam(model.parameters(), lr=0.1), DataLoader(DATA, batch_size=8)
def fit(model, optimizer, loader, backward):
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x) - y).pow(2).mean()
        backward(loss)
        optimizer.step()
"""


@dataclass(frozen=True)
class Case:
    """A cell, or the body of the function that is one, and what is read of it."""

    cell: str
    reads: tuple[str, ...]
    options: str = ""


WRONG = {
    "a variable that never was": Case(
        "    winner = 3",
        (
            "⚠ train(): finished, but winner was not returned",
            "Local variables of a function end when it returns",
        ),
        "--out winner",
    ),
    "a stream that is not sharded": Case(
        "    class Stream(torch.utils.data.IterableDataset):\n"
        "        def __iter__(self): return iter(DATA)\n"
        "    accelerator = Accelerator()\n"
        "    model, optimizer = accelerator.prepare(*parts()[:2])\n"
        "    fit(model, optimizer, DataLoader(Stream(), 8), accelerator.backward)",
        ("all 2 ranks train on the same batches", "`split_dataset_by_node`"),
    ),
    "no comma behind an argument": Case(
        "nbtrain.notebook_launcher(parts, args=(nn.Linear(1, 1)), num_processes=2)",
        ("args must be a tuple", "write args=(x,), with the comma"),
    ),
}
RIGHT = {
    "a configuration of the function's own": (
        "nbtrain.launch(lambda config: config['lr'], config={'lr': 0.1}, num_processes=2)",
        [0.1, 0.1],
    ),
    "a file that rank 0 writes, by an attribute": (
        "%%distributed -n 2\n"
        "class Trainer:\n"
        "    def __init__(self, gpu_id): self.gpu_id = gpu_id\n"
        "    def save(self):\n"
        "        if self.gpu_id == 0: torch.save({}, 'last.pt')\n"
        "def train(): Trainer(nbtrain.rank()).save()",
        [None, None],
    ),
    "tokenizers that a fork finds in use": (
        "from tokenizers import Tokenizer, models\n"
        "words = Tokenizer(models.BPE())\n"
        "words.encode_batch(['a b'] * 100)\n"
        "def train():\n"
        "    return len(words.encode_batch(['a b'] * 100))\n"
        "nbtrain.launch(train, num_processes=2)",
        [100, 100],
    ),
}


def of(cell: str, options: str = "") -> str:
    """Return a cell, or that of a function's body."""
    return cell if cell[0] != " " else f"%%distributed -n 2 {options}\ndef train():\n{cell}"


@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_is_said_with_what_to_do(notebook: Notebook, name: str) -> None:
    case = WRONG[name]
    notebook.run(SETUP)
    out = notebook.run(of(case.cell, case.options))
    page = "\n".join([out.board if out.displays else "", out.traceback])
    for text in case.reads:
        assert page.count(text) == 1, page


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_counted_rightly_and_shows_no_note(notebook: Notebook, name: str) -> None:
    cell, results = RIGHT[name]
    notebook.run(SETUP)
    out = must_run(notebook, of(cell, "--timeout 55"))
    assert "⚠" not in out.board
    assert "succeeded" in out.board
    assert notebook.value("nbtrain.last_run().results") == results
    assert "huggingface/tokenizers" not in notebook.value("nbtrain.last_run().logs()")


def test_a_warning_about_a_call_names_the_users_line(notebook: Notebook) -> None:
    notebook.run(
        "%%distributed -n 2\n"
        "def train():\n"
        "    torch.distributed.init_process_group('gloo')\n"
        "    net = torch.nn.Linear(1, 1)\n"
        "    torch.nn.parallel.DistributedDataParallel(net, check_reduction=True)"
    )
    log = notebook.value("nbtrain.last_run().logs(0)")
    assert "py:5: FutureWarning: The `check_reduction` argument" in log
    assert "nbtrain" not in log


@pytest.mark.slow
def test_a_rest_of_all_ranks_is_noted_before_a_hang_is_due(notebook: Notebook) -> None:
    notebook.run(
        "from nbtrain.hangs import limits\n"
        "usual = limits.IDLE_NOTE_AFTER_S\n"
        "limits.IDLE_NOTE_AFTER_S = 8.0"
    )
    noted: list[str] = []

    def read(out: Outputs) -> None:
        if out.displays and not noted and "waits in barrier" in out.board:
            noted.append(out.board)
            notebook.manager.interrupt_kernel()

    out = notebook.run(
        "%%distributed -n 2 --hang-after 3000 --on-hang stop --view html\n"
        "import torch.distributed as dist\n"
        "def train():\n"
        "    dist.init_process_group('gloo')\n"
        "    if nbtrain.rank() == 0: time.sleep(600)\n"
        "    dist.barrier()",
        during=read,
    )
    notebook.run("limits.IDLE_NOTE_AFTER_S = usual")
    assert out.ename == "KeyboardInterrupt"  # it was not stopped for it
    assert re.search(r"rank 0 is at In\[\d+\], line 5: .*time.sleep\(600\)", noted[0])
    assert "rank 1 waits in barrier #1 for it" in noted[0]
