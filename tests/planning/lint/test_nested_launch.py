"""A launcher left in the cell or in the function: what is refused, and what is not."""

from __future__ import annotations

import pytest

from nbtrain.planning import lint
from nbtrain.planning.cell import read_cell
from tests.support.kernel import Notebook

TRAIN = "from accelerate import notebook_launcher\ndef train(model, epochs=1):\n    return epochs\n"


def refused(source: str) -> list[tuple[int, str]]:
    """Return (line, remedy) of everything that refuses a cell."""
    findings = lint.lint(read_cell(source, "<cell>", {}))
    return [(f.line, f.message.partition(". ")[2]) for f in findings if f.level == "refuse"]


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
    ],
)
def test_a_launcher_in_the_cell_is_refused_with_what_to_write(last: str, remedy: str) -> None:
    ((line, text),) = refused(TRAIN + last)
    assert line == 4 + last.count("\n")
    assert text.startswith(remedy)


@pytest.mark.parametrize("call", ["mp.spawn", "torch.multiprocessing.spawn", "xmp.spawn", "spawn"])
def test_a_function_that_expects_its_rank_is_given_it(call: str) -> None:
    source = (
        "from torch.multiprocessing import spawn\n"
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
    ],
)
def test_what_may_be_no_launch_is_not_refused(last: str) -> None:
    assert refused(TRAIN + last) == []


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
