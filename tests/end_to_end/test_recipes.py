"""The recipes and tutorials run headless; what nbtrain counts is what the library counted."""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell

from tests.support.kernel import execute
from tests.support.paths import NOTEBOOKS

# DeepSpeed compiles, which takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(600)

FOLDER, LESSONS = NOTEBOOKS / "recipes", NOTEBOOKS / "tutorials"

PROBE = """
import nbtrain
_run = nbtrain.last_run()
print({
    "steps": [rank.progress.steps if rank.progress else 0 for rank in _run.state.ranks],
    "samples": [rank.progress.samples if rank.progress else 0 for rank in _run.state.ranks],
    "notes": list(_run.state.notes),
    "status": _run.state.status,
})
"""


@dataclass(frozen=True)
class Recipe:
    """What a notebook needs, the steps and samples of each rank, and what it prints last."""

    needs: tuple[str, ...] = ()
    steps: int = 0
    samples: int | None = 0
    says: str = ""


RECIPES = {
    "trainer": Recipe(("transformers",), 32, 512, "48 steps; accuracy"),
    "sft_lora": Recipe(("trl", "peft", "datasets"), 40, 320, "loss"),
    "dpo": Recipe(("trl", "peft", "datasets"), 40, 320, "the dog barks"),
    "grpo": Recipe(("trl", "datasets"), 40, 320, "the dog barks"),
    "lightning": Recipe(("lightning",), 80, 2560, "80 steps"),
    "ddp": Recipe((), 56, 1792, "epochs 5 to 6: off by 0.0"),
    # 50 steps, and the one of torch's own that makes the optimizer's state for `get_state_dict`.
    "fsdp2": Recipe((), 50, None, "steps 101 to 150"),
    "deepspeed": Recipe(("deepspeed",), 32, 512, "weights on a rank; accuracy"),
    "metrics": Recipe(("torchmetrics",), 32, 512, "[1.0, 1.0]"),
    "sentence_transformers": Recipe(("sentence_transformers", "datasets"), 100, 400, "100 steps"),
    "streaming": Recipe(("datasets", "webdataset"), 0, 0, "64 and 64 samples, 0 of them on both"),
    "optuna": Recipe(("optuna",), 32, 512, "best of 9"),
    "diffusion": Recipe(("diffusers",), 160, 2560, "of 16 samples are right"),
    "fastai": Recipe(("fastai",), 80, 1280, "accuracy"),
    "tensorflow": Recipe(("tensorflow",), says="the weights of both ranks are equal: True"),
    "jax": Recipe(("jax", "optax"), says="the weights of both ranks are equal: True"),
    "keras_jax": Recipe(("keras", "jax"), 80, None, "the weights of both ranks are equal: True"),
    "keras_torch": Recipe(("keras",), 80, 1280, "accuracy"),
}

TUTORIALS = {
    "failure": "rank 0: IndexError: Target 7 is out of bounds.",
    "hang": "Rank 0 is in all_reduce",
    "scaling": "speed-up",
    "profile": "The ranks wait for batches",
    "overnight": "it went on from step 40",
    "steering": "finished early at step",
}
"""What each prints, beside what its own asserts check."""


def test_every_notebook_is_known_and_in_the_contents() -> None:
    contents = (NOTEBOOKS / "index.md").read_text().splitlines()
    for folder, names in ((FOLDER, RECIPES), (LESSONS, TUTORIALS)):
        assert {path.stem for path in folder.glob("*.ipynb")} == set(names)
        assert [n for n in names if f"{folder.name}/{n}" not in contents] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_it_runs_and_counts_what_the_library_counted(name: str, tmp_path: Any) -> None:
    recipe = RECIPES[name]
    for package in recipe.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    notebook.cells.append(new_code_cell(PROBE))
    environment = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),  # what DeepSpeed compiles
    }
    execute(notebook, tmp_path, **environment)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = ast.literal_eval("".join(output.text for output in code[-1].outputs))
    notes = [note for note in found["notes"] if "still running in the background" not in note]
    assert (found["status"], notes) == ("succeeded", [])  # of two trials side by side, it is true
    assert found["steps"] == [recipe.steps] * 2
    assert found["samples"] == [recipe.samples] * 2
    said = "".join(o.get("text", "") for cell in code[:-1] for o in cell.outputs)
    assert recipe.says in said


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_runs_and_prints_what_its_text_says(name: str, tmp_path: Any) -> None:
    notebook = nbformat.read(LESSONS / f"{name}.ipynb", as_version=4)
    execute(notebook, tmp_path, OMP_NUM_THREADS="1")
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    assert TUTORIALS[name] in "".join(
        o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in outputs
    )


def test_what_is_committed_is_of_one_whole_run() -> None:
    own = [NOTEBOOKS / f"{name}.ipynb" for name in ("quickstart", "parallelism")]
    for path in [*FOLDER.glob("*.ipynb"), *LESSONS.glob("*.ipynb"), *own]:
        assert not re.findall(r"/(?:tmp|home|root|work)/\w", path.read_text()), path.name
        cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
        assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1)), path.name
        assert not [o for c in cells for o in c.outputs if o.output_type == "error"], path.name
