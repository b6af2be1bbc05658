"""Functions written for `mp.spawn`: the line that a refusal names runs when it is copied."""

from __future__ import annotations

import pytest

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
by_lambda = lambda rank, lr: (rank, nbtrain.world_size(), lr)
def function(rank, lr):
    return rank, nbtrain.world_size(), lr
def by_another_name(current_gpu_index, lr):
    return current_gpu_index, nbtrain.world_size(), lr
"""


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("train", ()),
        ("train.run", (1.0,)),
        ("bound", (1.0,)),
        ("by_lambda", (1.0,)),
        ("function", (1.0,)),
        ("by_another_name", (1.0,)),
    ],
)
@pytest.mark.parametrize("launcher", ["notebook_launcher({}, {}, 3)", "nbtrain.launch({}, *{})"])
def test_the_line_runs_in_place_of_the_function(
    notebook: Notebook, launcher: str, function: str, args: tuple[float, ...]
) -> None:
    notebook.run(KINDS)
    out = notebook.run(launcher.format(function, args))
    assert out.ename == "PlanError"
    assert "rank" in out.evalue
    assert "as for mp.spawn" in out.evalue
    line = out.evalue.partition("ass `")[2].partition("`")[0]
    out = notebook.run(launcher.format(line, args))
    assert not out.ename, out.traceback
    size = 3 if "3" in launcher else 2
    assert notebook.value("nbtrain.last_run().results") == [(r, size, 1.0) for r in range(size)]


@pytest.mark.parametrize("function", ["Train()", "Train().run", "lambda rank: rank"])
def test_where_no_line_would_run_none_is_named(notebook: Notebook, function: str) -> None:
    notebook.run(KINDS)
    out = notebook.run(f"notebook_launcher({function}, num_processes=2)")
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
    out = notebook.run(cell + line)
    assert not out.ename, out.traceback
    assert notebook.value("nbtrain.last_run().results") == [(0, 1.0), (1, 1.0)]


SUPPLIED = """
import functools, inspect
def supplies(function):
    def wrapper(*args):
        return function(7, *args)
    wrapper.__signature__ = inspect.signature(function)  # as wrapt's, and so sacred's
    return wrapper
@supplies
def captured(config):
    return config
"""


def test_a_decorator_that_shows_the_inner_signature_may_supply_the_argument(
    notebook: Notebook,
) -> None:
    notebook.run(SUPPLIED)
    out = notebook.run("notebook_launcher(captured, num_processes=2)")
    assert not out.ename, out.traceback
    assert notebook.value("nbtrain.last_run().results") == [7, 7]


def test_a_function_that_lacks_more_or_nothing_is_not_taken_for_one_with_a_rank(
    notebook: Notebook,
) -> None:
    notebook.run("def two(model, lr):\n    pass\ndef right(model, lr=1.0):\n    return model")
    out = notebook.run("notebook_launcher(two, num_processes=2)")
    assert out.ename == "TypeError"
    out = notebook.run("notebook_launcher(right, (5,), num_processes=2)")
    assert notebook.value("nbtrain.last_run().results") == [5, 5]
