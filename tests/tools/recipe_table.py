"""Run each recipe with a tracker, and print a row for each: python tests/tools/recipe_table.py.

Steps and samples stand beside those that the library itself counts (`tests/end_to_end/
test_recipes.py`). Needs what `tests/requirements/recipes.txt` lists, and tensorboard.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.end_to_end.test_recipes import FOLDER, RECIPES, Recipe
from tests.support.kernel import execute

PROBE = """
import nbtrain
_state = nbtrain.last_run().state
print({
    "status": _state.status,
    "notes": len(_state.notes),
    "steps": [rank.progress.steps if rank.progress else 0 for rank in _state.ranks],
    "samples": [rank.progress.samples if rank.progress else None for rank in _state.ranks],
    "loss": [_state.curves.all["loss"].last] if "loss" in _state.curves.all else [],
    "runs": len(nbtrain.runs()),
})
"""

HEAD = ("recipe", "steps", "samples", "loss", "bars", "notes", "runs", "twice", "says", "seconds")


def row(name: str, recipe: Recipe, folder: Path) -> tuple[str, ...]:
    """Run one recipe; return what HEAD names."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            tracked = r"\1 --track tensorboard"
            cell.source = re.sub(r"^(%{1,2}distributed)", tracked, cell.source, flags=re.M)
    notebook.cells.append(new_code_cell(PROBE))
    began = time.monotonic()
    extensions = str(folder / "extensions")
    execute(
        notebook, folder, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TORCH_EXTENSIONS_DIR=extensions
    )
    seconds = time.monotonic() - began
    outputs = [o for c in notebook.cells[:-1] if c.cell_type == "code" for o in c.outputs]
    probed = "".join(output.text for output in notebook.cells[-1].outputs)
    known: dict[str, Any] = ast.literal_eval(probed)
    printed = "\n".join(o.get("text", "") for o in outputs)
    boards = [o.data.get("text/plain", "") for o in outputs if o.output_type == "display_data"]
    last = next((board for board in reversed(boards) if " rank 0: " in board), "")
    bars = re.findall(r"^ +rank \d: done +[█·]+ +(\d+ %)", last, re.M)
    of_rank = [set(re.findall(rf"^\[rank {rank}\] (.*)$", printed, re.M)) for rank in (0, 1)]
    without_times = [{re.sub(r"[\d:,.]+", "", line) for line in lines} for lines in of_rank]
    tracked = len([*folder.glob("runs/*/")])
    assert known["status"] == "succeeded"
    for line in without_times[0] & without_times[1]:
        print(f"<!-- twice: {line} -->")
    return (
        name,
        f"{known['steps']} of {[recipe.steps] * 2}",
        f"{known['samples']} of {[recipe.samples] * 2}",
        *(f"{loss:.4g}" for loss in known["loss"] or [float("nan")]),
        ", ".join(bars) or "none",
        str(known["notes"]),
        f"{tracked} of {known['runs']}",
        str(len(without_times[0] & without_times[1])),
        "yes" if recipe.says in printed else "no",
        f"{seconds:.0f}",
    )


def main(names: list[str]) -> None:
    """Print the table of these recipes, or of all."""
    print("|", " | ".join(HEAD), "|\n|" + "---|" * len(HEAD), flush=True)
    for name, recipe in RECIPES.items():
        if names and name not in names:
            continue
        if missing := [p for p in recipe.needs if importlib.util.find_spec(p) is None]:
            print(f"| {name} | {missing[0]} is not installed |")
            continue
        with tempfile.TemporaryDirectory() as folder:
            print("|", " | ".join(row(name, recipe, Path(folder))), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
