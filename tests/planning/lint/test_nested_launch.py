"""A launcher left in the cell or in the function: what is refused, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch

from nbtrain.planning import lint
from nbtrain.planning.cell import read_cell
from tests.support.kernel import Notebook

TRAIN = (
    "from accelerate import notebook_launcher; import accelerate, nbtrain, subprocess, os\n"
    "def train(model, epochs=1):\n    return epochs\n"
)


def refused(source: str, ranks: int | None = None, **names: Any) -> list[tuple[int, str]]:
    """Return (line, remedy) of everything that refuses a cell in a notebook with these names."""
    findings = lint.lint(read_cell(source, "<cell>", names), ranks=ranks)
    return [(f.place.line, f.text.partition(". ")[2]) for f in findings if f.level == "refuse"]


@pytest.mark.parametrize(
    ("last", "remedy"),
    [
        ("notebook_launcher(train)", "Delete line 4: %%distributed itself calls train() on "),
        ("notebook_launcher(train, (model,), 2)", "Delete line 4: "),
        ("run = notebook_launcher(train, args=(model, epochs))", "Delete line 4: "),
        ("notebook_launcher(train, args=(model, 3))", "Write `train(model, 3)` instead: "),
        ("accelerate.notebook_launcher(train, args=config)", "Write `train(*config)` instead: "),
        ("if __name__ == '__main__':\n    notebook_launcher(train)", "Delete line 5: "),
        ("with context:\n    nbtrain.launch(train, model, 3)", "Write `train(model, 3)` instead: "),
        ("get_ipython().system('accelerate launch train.py')", "Delete line 4, or run it in a cel"),
        ("subprocess.run(['torchrun', 'train.py'])", "Delete line 4, or run it in a cell of its"),
        ("trainer = Trainer(strategy='ddp_notebook')", 'Write `strategy="ddp"`: the ranks are '),
        ("L.Trainer(strategy='ddp_notebook').fit(net)", 'Write `strategy="ddp"`: the ranks are '),
    ],
)
def test_a_launcher_in_the_cell_is_refused_with_what_to_write(last: str, remedy: str) -> None:
    ((line, text),) = refused(TRAIN + last)
    assert line == 4 + last.count("\n")
    assert text.startswith(remedy)


@pytest.mark.parametrize("call", ["mp.spawn", "torch.multiprocessing.spawn", "xmp.spawn", "spawn"])
def test_a_function_that_expects_its_rank_is_given_it(call: str) -> None:
    source = (
        "from torch.multiprocessing import spawn; import torch, torch.multiprocessing as mp; "
        "import torch_xla.distributed.xla_multiprocessing as xmp\n"
        "def work(rank, size, name):\n    return rank\n"
        "def main():\n    size = 2\n"
        f"    {call}(work, args=(size, 'a'), nprocs=size)\n"
    )
    ((line, text),) = refused(source)
    assert line == 6
    assert text.startswith("Write `work(nbtrain.rank(), nbtrain.world_size(), 'a')` instead: ")


@pytest.mark.parametrize(
    "last",
    [
        "if alone:\n    notebook_launcher(train)",
        "alone and notebook_launcher(train)",
        "start = lambda: notebook_launcher(train)",
        "def start():\n    notebook_launcher(train)\ntrain(1)",
        "def start():\n    if alone:\n        return 1\n    notebook_launcher(train)\nstart()",
        "notebook_launcher(train, num_processes=1)",
        "spawn(train)",
        "pool.spawn(train)",
        "subprocess.run(['ls', 'torchrun.log'.upper()])",
        "def notebook_launcher(function):\n    return function()\nnotebook_launcher(train)",
        "notebook_launcher(train)  # nbtrain: ignore[nested-launch]",
        "mp = MessagePassing()\nmp.spawn(3)",
        "w = World()\nw.mp.spawn('zombie', 3)",
        "accelerate.notebook_launcher(train, (), 1)",
        "get_ipython().system('torchrun --version')",
        "get_ipython().getoutput('accelerate launch --help | head')",
        "get_ipython().run_cell_magic('writefile', 'go.sh', 'torchrun train.py\\n')",
        "subprocess.run(['torchrun', '--help'])",
        "agent.run('torchrun train.py')",
        "config = dict(strategy='ddp_notebook')",
    ],
)
def test_what_may_be_no_launch_is_not_refused(last: str) -> None:
    assert refused(TRAIN + last) == []


class World:
    def spawn(self, kind: str, count: int) -> None: ...


def test_what_a_name_stands_for_is_asked_of_the_notebook() -> None:
    cell = "mp.spawn(work, 3)\nlaunch(work)\nprint()"
    assert refused(cell, mp=World(), launch=print) == []
    found = refused(cell, mp=torch.multiprocessing, launch=accelerate.notebook_launcher)
    assert [line for line, _ in found] == [1, 2]


@pytest.mark.parametrize(
    "command",
    [
        "get_ipython().system('torchrun --help; torchrun train.py')",
        "get_ipython().run_cell_magic('bash', '', 'cd x\\ntorchrun train.py')",
        "subprocess.run([sys.executable, '-m', 'torch.distributed.run', 'train.py'])",
        "os.system('CUDA_VISIBLE_DEVICES=0 accelerate launch train.py')",
    ],
)
def test_a_command_that_starts_ranks_is_refused(command: str) -> None:
    ((line, text),) = refused(TRAIN + command)
    assert line == 4
    assert text.startswith("Delete line 4, or run it in a cell of its own")


@pytest.mark.slow
def test_a_single_rank_may_start_processes_that_prepare_its_data(
    start_kernel: Callable[..., Notebook],
) -> None:
    notebook = start_kernel(warm=False)  # the processes import what its own process ran first
    notebook.run("%load_ext nbtrain")
    source = "import os\ndef prep(i):\n    os.makedirs(f'made/{i}')\n"
    notebook.run(f"%%writefile prep.py\n{source}")
    cell = "import prep, torch.multiprocessing as mp\nmp.spawn(prep.prep, nprocs=2)\nprint('made')"
    out = notebook.run(f"%%distributed -n 1\n{cell}")
    assert out.ename == "", out.evalue
    assert (
        "`mp.spawn(prep.prep, nprocs=2)` starts processes that are no ranks of this run. If they "
        "are meant to train, choose the number of ranks with -n (num_processes), and write "
        "`prep.prep(nbtrain.rank())` instead: every rank runs this line. [nested-launch]"
    ) in out.board
    assert notebook.value("sorted(__import__('os').listdir('made'))") == ["0", "1"]
    assert refused(cell, ranks=2)[0][0] == 2


def test_nothing_starts_and_the_cell_says_which_line_to_delete(notebook: Notebook) -> None:
    runs = "str(getattr(nbtrain.last_run(), 'folder', None))"
    before = notebook.value(runs)
    out = notebook.run(
        "%%distributed\nfrom accelerate import notebook_launcher\n"
        "def train():\n    return 1\n\nnotebook_launcher(train, num_processes=2)"
    )
    assert out.ename == "PlanError"
    assert "`notebook_launcher(train, num_processes=2)` would start more ranks" in out.evalue
    assert "Delete line 6: %%distributed itself calls train() on every rank." in out.evalue
    assert notebook.value(runs) == before
    out = notebook.run("%%distributed\n!torchrun --nproc_per_node 2 train.py")
    assert "line 2, column 1: `!torchrun --nproc_per_node 2 train.py` would start" in out.evalue
    notebook.run("def main():\n    torch.multiprocessing.spawn(print, nprocs=2)")
    out = notebook.run("nbtrain.launch(main)")
    assert ", line 2, column 5: `torch.multiprocessing.spawn(print, nprocs=2)`" in out.evalue
    assert "Write `print(nbtrain.rank())` instead" in out.evalue
