"""A launcher that a rank reaches, behind a condition that nobody could see from outside."""

from __future__ import annotations

import re

import pytest

from tests.support.kernel import Notebook


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "notebook_launcher(train, num_processes=2)",
            "would start ranks within rank R of this run. Call `train(…)` itself instead",
        ),
        (
            "torch.multiprocessing.spawn(train, nprocs=2)",
            "mp.spawn would start ranks within rank R of this run. Call `train(nbtrain.rank(), …)`",
        ),
        ("nbtrain.launch(train)", "nbtrain would start ranks within rank R of this run. Call"),
        ("get_ipython().run_line_magic('distributed', 'train()')", "nbtrain would start ranks"),
    ],
)
def test_a_launcher_in_a_rank_is_refused_in_one_sentence(
    notebook: Notebook, call: str, message: str
) -> None:
    notebook.run("from accelerate import notebook_launcher\ndef train(*args):\n    return args")
    notebook.run(f"def main(again=True):\n    if again:\n        {call}")
    out = notebook.run("nbtrain.launch(main)")
    assert out.ename == "LaunchError"
    assert message in re.sub(r"rank \d", "rank R", out.evalue)
    assert "----> 3" in out.traceback


def test_processes_of_other_kinds_are_let_through(notebook: Notebook) -> None:
    notebook.run(
        "import multiprocessing\n"
        "def main():\n"
        "    with multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "        return pool.map(abs, [-1])"
    )
    out = notebook.run("nbtrain.launch(main).results")
    assert out.results[0]["text/plain"] == "[[1], [1]]"
