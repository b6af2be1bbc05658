"""What a failure that is a kind of its own says to do next, in a real kernel."""

from __future__ import annotations

import pytest

from tests.support.cells import must_run
from tests.support.kernel import Notebook

READS = {
    "a file that is not there": "open('weights.bin')",
    "a pickle in part": "import pickle; pickle.loads(pickle.dumps([1, 2, 3] * 99)[:50])",
}
JOIN = "    torch.distributed.init_process_group('gloo')\n"
WAIT = "call accelerator.wait_for_everyone(), or torch.distributed.barrier(), on every rank"


@pytest.mark.parametrize("name", READS)
def test_a_file_that_another_rank_still_writes_is_to_be_waited_for(
    notebook: Notebook, name: str
) -> None:
    cell = f"    if nbtrain.rank() == 1:\n        {READS[name]}\n    time.sleep(60)\n"
    out = notebook.run(f"%%distributed -n 2\ndef train():\n{JOIN}{cell}")
    assert out.ename not in ("", "KeyboardInterrupt")
    assert WAIT in out.traceback
    page = (out.updates or out.displays)[-1]["text/html"]
    assert "wait_for_everyone()" in page


def test_a_file_that_rank_0_does_not_find_is_missing(notebook: Notebook) -> None:
    cell = "    if nbtrain.rank() == 0:\n        open('weights.bin')\n    time.sleep(60)\n"
    out = notebook.run(f"%%distributed -n 2\ndef train():\n{cell}")
    assert out.ename == "FileNotFoundError"
    assert "wait_for_everyone" not in out.traceback


def test_a_last_batch_of_one_under_batch_norm_is_left_out(notebook: Notebook) -> None:
    cell = (
        "%%distributed -n 2\nfrom torch import nn\nfrom torch.utils.data import DataLoader\n"
        "def train():\n"
        "    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))\n"
        "    for x in DataLoader(torch.rand(9, 4), batch_size=4):\n        model(x)"
    )
    out = notebook.run(cell)
    assert out.ename == "ValueError", out.traceback
    assert "DataLoader(…, drop_last=True) leaves that batch out." in out.traceback
    assert "drop_last=True" in (out.updates or out.displays)[-1]["text/html"]
    assert not notebook.run(cell.replace("batch_size=4", "batch_size=4, drop_last=True")).ename


def test_workers_that_have_nothing_of_the_notebook_are_to_be_forked(notebook: Notebook) -> None:
    notebook.run(
        "import multiprocessing\nfrom torch.utils.data import DataLoader, Dataset\n"
        "class Own(Dataset):\n"
        "    def __len__(self): return 8\n    def __getitem__(self, i): return torch.zeros(2)"
    )
    notebook.run("multiprocessing.set_start_method('spawn', force=True)")
    cell = "for x in DataLoader(Own(), num_workers=1): pass"
    out = notebook.run(f"%%distributed -n 1\n{cell}")
    assert out.ename == "RuntimeError", out.traceback
    assert "A worker that is not forked has none of the notebook's variables. Call" in out.traceback
    assert "/dev/shm" not in out.traceback
    notebook.run("multiprocessing.set_start_method('fork', force=True)")
    assert not notebook.run(f"%%distributed -n 1\n{cell}").ename


FILE = """%%distributed -n 2
from accelerate import Accelerator
def train(joins={joins}):
    import pathlib, time
    file = pathlib.Path("written-by-rank-0.txt")
    if joins:
        accelerator = Accelerator()
    if nbtrain.rank() == 0:
        time.sleep(0 if joins else 60)
        file.write_text("x")
    if joins:
        accelerator.wait_for_everyone()
    return file.read_text()
"""


def test_ranks_that_never_joined_are_to_join_before_they_wait_for_a_file(
    notebook: Notebook,
) -> None:
    out = notebook.run(FILE.format(joins=False))
    assert out.ename == "FileNotFoundError"
    assert "make an `Accelerator()` at the beginning, and call" in out.traceback
    assert WAIT not in out.traceback
    must_run(notebook, FILE.format(joins=True))
    assert notebook.value("nbtrain.last_run().results") == ["x", "x"]


def test_a_refusal_that_the_cell_catches_is_on_the_page(notebook: Notebook) -> None:
    notebook.run("import torch.distributed as dist\ndef train():\n    return nbtrain.rank()")
    alone = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    notebook.run(alone)
    call = "nbtrain.launch(train, num_processes=2)"
    out = notebook.run(f"try:\n    {call}\nexcept Exception as error:\n    caught = str(error)")
    assert "a launch was refused, and the cell caught it" in out.stdout
    assert notebook.value("caught") in out.stdout
    out = notebook.run(call)
    assert out.ename == "PreflightError"
    assert "the cell caught it" not in out.stdout


def test_with_a_process_group_in_the_notebook_fresh_processes_train(notebook: Notebook) -> None:
    notebook.run("import torch.distributed as dist")
    notebook.run("dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)")
    cell = "\ndef train():\n    return nbtrain.rank()"
    out = notebook.run(f"%%distributed -n 2{cell}")
    assert out.ename == "PreflightError"
    magic = out.evalue.partition("processes: `")[2].partition("`")[0]
    must_run(notebook, f"{magic} -n 2{cell}")
    assert notebook.value("dist.get_world_size(), nbtrain.last_run().results") == (1, [0, 1])
