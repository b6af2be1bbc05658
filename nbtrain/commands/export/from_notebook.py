"""From a notebook's file to a script, by its text alone: nothing runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from ...errors import PlanError
from ...planning.cell import with_lookalikes
from . import script
from .slicing import needed
from .statements import import_of, read_earlier


def export(notebook: Path, path: Path, number: int | None = None) -> None:
    """Write the script of a notebook's ``%%distributed`` cell, the `number`-th if given.

    Raises `PlanError` if the file is not a notebook, the cell does not exist or has to be chosen,
    or the cell cannot become a script.
    """
    cells = _cells(notebook)
    at = _chosen(cells, number, notebook)
    places = [f"cell {position} of {notebook.name}" for position in range(1, at + 2)]
    earlier = read_earlier(zip(cells[:at], places, strict=False))
    training = script.read_training_cell(cells[at], places[at])
    known = {n for s in earlier for n in s.binds}
    names = training.needs(known)
    statements, missing = needed([s for s in earlier if not s.is_future], names)
    read = names | {n for s in statements for n in s.reads}
    for statement in statements:
        statement.check()
    parts = [import_of(s, read) if s.is_import else s.text for s in statements]
    unknown = sorted(missing - {"display", "__file__", "__name__"})
    if unknown:
        raise PlanError(
            f"{places[at]} uses {', '.join(with_lookalikes(n, known) for n in unknown)}, but "
            f"no earlier cell assigns {'it' if len(unknown) == 1 else 'them'} at top level"
        )
    if "display" in missing:
        parts.insert(0, script.DISPLAY)
    script.write(path, training, earlier, list(dict.fromkeys(parts)), names, {})


def _cells(notebook: Path) -> list[str]:
    """Return the sources of a notebook's code cells."""
    try:
        content = json.loads(notebook.read_text(encoding="utf-8"))
        # A source is a string, or a list of lines.
        return ["".join(c["source"]) for c in content["cells"] if c["cell_type"] == "code"]
    except OSError as error:
        raise PlanError(f"the notebook cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{notebook} is not a notebook of format 4 ({error!r})") from error


def _chosen(cells: Sequence[str], number: int | None, notebook: Path) -> int:
    """Return the index of the cell to export."""
    matches = [i for i, raw in enumerate(cells) if script.MAGIC.match(raw)]
    if not matches:
        raise PlanError(f"{notebook} has no %%distributed cell")
    if number is None and len(matches) == 1:
        return matches[0]
    if number is not None and 1 <= number <= len(matches):
        return matches[number - 1]
    shown = [f"  --cell {n}: {_head(cells[i])}" for n, i in enumerate(matches, 1)]
    problem = "several %%distributed cells" if number is None else f"no %%distributed cell {number}"
    raise PlanError("\n".join([f"{notebook} has {problem}; choose one:", *shown]))


def _head(raw: str) -> str:
    defined = re.findall(r"(?m)^(?:async )?def .*$", raw)
    return str(defined[-1] if defined else raw.strip().splitlines()[0]).rstrip(":")
