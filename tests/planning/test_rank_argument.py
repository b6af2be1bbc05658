"""Functions written for `mp.spawn`: the line that a refusal names runs when it is copied."""

from __future__ import annotations

import pytest

from tests.support.cells import must_run
from tests.support.kernel import Notebook

KINDS = """
import functools
from nbtrain import notebook_launcher
class Train:
    def __call__(self, rank, lr=1.0):
        return rank, nbtrain.world_size(), lr
    def run(self, rank, lr):
        return rank, nbtrain.world_size(), lr
train = Train()
bound = functools.partial(train.run)
def function(rank, lr):
    return rank, nbtrain.world_size(), lr
"""


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("train", ()),
        ("bound", (1.0,)),
        ("function", (1.0,)),
    ],
)
def test_the_line_runs_in_place_of_the_function(
    notebook: Notebook, function: str, args: tuple[float, ...]
) -> None:
    notebook.run(KINDS)
    out = notebook.run(f"notebook_launcher({function}, {args}, 2)")
    assert out.ename == "PlanError"
    assert "rank" in out.evalue
    assert "as for mp.spawn" in out.evalue
    line = out.evalue.partition("ass `")[2].partition("`")[0]
    must_run(notebook, f"notebook_launcher({line}, {args}, 2)")
    assert notebook.value("nbtrain.last_run().results") == [(0, 2, 1.0), (1, 2, 1.0)]


def test_where_no_line_would_run_none_is_named(notebook: Notebook) -> None:
    notebook.run(KINDS)
    out = notebook.run("notebook_launcher(lambda rank: rank, num_processes=2)")
    assert out.ename == "PlanError"
    remedy = "Remove its parameter `rank`, and call `nbtrain.rank()` in it instead."
    assert out.evalue.endswith(remedy)
    assert "<lambda>" not in out.evalue


def test_a_cell_whose_function_may_take_its_rank_first_names_a_line_that_runs(
    notebook: Notebook,
) -> None:
    cell = "%%distributed -n 2\ndef train(gpu_id, lr=1.0):\n    return gpu_id, lr\n"
    out = notebook.run(cell)
    assert out.ename == "PlanError"
    line = out.evalue.partition("add `")[2].partition("`")[0]
    must_run(notebook, cell + line)
    assert notebook.value("nbtrain.last_run().results") == [(0, 1.0), (1, 1.0)]


def test_a_function_that_lacks_more_or_nothing_is_not_taken_for_one_with_a_rank(
    notebook: Notebook,
) -> None:
    notebook.run("def two(model, lr):\n    pass\ndef right(model, lr=1.0):\n    return model")
    out = notebook.run("notebook_launcher(two, num_processes=2)")
    assert out.ename == "TypeError"
    out = notebook.run("notebook_launcher(right, (5,), num_processes=2)")
    assert notebook.value("nbtrain.last_run().results") == [5, 5]
