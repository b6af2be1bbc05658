"""Notebooks in the manner of public ones, cell by cell in a real kernel, by either launcher.

They are in `public_notebooks`, with Accelerate's launcher. Only its import is changed here. Each
training prints what it has counted itself; a later cell prints a result by what was saved.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nbtrain.system.text import format_number
from tests.support.cells import must_run
from tests.support.kernel import Notebook, Outputs

FOLDER = Path(__file__).parent / "public_notebooks"
OWN, THEIRS = "nbtrain", "accelerate"


@dataclass(frozen=True)
class Public:
    """What a notebook needs, and how much of its bar is full at the end of each launching cell."""

    needs: tuple[str, ...] = ()
    percent: tuple[int, ...] = (100, 100)


NOTEBOOKS = {
    "accelerate_nlp": Public(("transformers",)),
    "diffusion": Public(("diffusers",)),
    "dtensor": Public(),
    "fastai_tabular": Public(("fastai",)),
    "hf_trainer": Public(("transformers",)),
    "kaggle_folds": Public(("sklearn", "pandas"), (100,)),
    "lightning_ddp": Public(("lightning",)),
    "magic": Public((), (100,)),
    "own_ddp": Public(),
    "resume_bf16": Public(),
    "trainer_subclass": Public(("transformers",), (55, 100)),  # it stops early
}
COMPARED = (
    *("accelerate_nlp", "diffusion", "dtensor", "fastai_tabular"),
    *("hf_trainer", "own_ddp", "trainer_subclass"),
)
"""Not `lightning_ddp`: under Accelerate's launcher, Lightning takes its ranks for a notebook."""

PROBE = """
import ast as _ast, nbtrain as _nbtrain
_run = _nbtrain.last_run()
_summary, _ranks = _run.summary(), _run.state.ranks
print("\\x02" + repr({
    "status": _run.state.status, "notes": _run.state.notes, "flaw": _run.state.flaw,
    "counts": [[_ast.literal_eval(line[7:]) for line in _run.logs(rank).splitlines()
                if line.startswith("counts ")][-1] for rank in range(2)],
    "steps": [rank.progress.steps for rank in _ranks],
    "samples": [rank.progress.samples for rank in _ranks],
    "losses": [(rank.progress.loss, rank.metrics.get("loss")) for rank in _ranks],
    "summary": (_summary.steps, _summary.samples),
    "history": int(_run.history["step"].max()),
}))
"""


def cells_of(name: str, launcher: str) -> list[str]:
    """Return a notebook's cells; skip the test where a library is not installed."""
    for package in NOTEBOOKS[name].needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    text = (FOLDER / f"{name}.ipy").read_text()
    if launcher == OWN:
        both = "from accelerate import Accelerator\nfrom nbtrain import notebook_launcher"
        text = text.replace("from accelerate import Accelerator, notebook_launcher", both)
        text = text.replace("from accelerate import notebook_launcher", both.split("\n")[1])
    return re.split(r"^# %%\n", text, flags=re.M)[1:]


def is_launch(cell: str) -> bool:
    return bool(re.search(r"^ *notebook_launcher\(|^%%distributed", cell, re.M))


def board_of(out: Outputs) -> str:
    """Return the text of the board, which a rank's displays may stand below."""
    shown = [str(each.get("text/plain", "")) for each in (*out.displays, *out.updates)]
    return [text for text in shown if "rank 0:" in text][-1]


def check(board: str, found: dict[str, Any], percent: int) -> None:
    """Compare what is on the board, and in the run, with what the ranks counted themselves."""
    assert (found["status"], found["flaw"]) == ("succeeded", "")
    assert not found["notes"]
    counts = found["counts"]
    assert found["steps"] == [count["steps"] for count in counts]
    assert found["history"] == counts[0]["steps"]
    if "samples" in counts[0]:
        assert found["samples"] == [count["samples"] for count in counts]
        assert found["summary"] == (counts[0]["steps"], sum(found["samples"]))
    lines = re.findall(r"^ *rank \d: .*", board, re.M)
    for count, (seen, logged), line in zip(counts, found["losses"], lines, strict=True):
        assert f" {percent} % " in line
        assert set(re.findall(r"[\d.,]+ (\w+)/s\b", line)) <= {"steps"}, line
        if "logged" in count:
            assert logged == pytest.approx(count["logged"])
            assert f"loss {format_number(count['logged'])}" in line
        else:
            assert seen == pytest.approx(count["loss"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_to_its_end_and_the_board_has_its_own_figures(
    name: str, start_kernel: Callable[..., Notebook]
) -> None:
    cells = cells_of(name, OWN)
    kernel = start_kernel(environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    percents = iter(NOTEBOOKS[name].percent)
    results = ""
    for cell in cells:
        out = must_run(kernel, cell, timeout=120)
        results += "".join(re.findall(r"^result .*\n", out.stdout, re.M))
        if is_launch(cell):
            probed = must_run(kernel, PROBE)
            found: dict[str, Any] = eval(probed.stdout.rpartition("\x02")[2])
            check(board_of(out), found, next(percents))
    assert results


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", COMPARED)
def test_its_results_are_those_of_accelerates_launcher(
    name: str, start_kernel: Callable[..., Notebook]
) -> None:
    # Without a GPU, Accelerate's ranks join each other only where they are to use the CPU.
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    results: dict[str, str] = {}
    for launcher in (OWN, THEIRS):
        kernel = start_kernel(environment=environment)
        kernel.run("import torch._dynamo")  # or each of Accelerate's ranks imports it
        for cell in cells_of(name, launcher):
            out = must_run(kernel, cell, timeout=200)
            results[launcher] = "".join(re.findall(r"^result .*\n", out.stdout, re.M))
            if results[launcher]:  # a second launch is more than Accelerate promises
                break
    assert numbers(results[OWN]) == pytest.approx(numbers(results[THEIRS]), rel=1e-3, abs=1e-4)


def numbers(text: str) -> list[float]:
    """Return the numbers of a text; there must be some."""
    found = [float(number) for number in re.findall(r"\d+\.?\d*", text)]
    assert found
    return found
