"""From a notebook's file to a script: its text alone, nothing is run."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from ..cell import Options, parse_options, read_cell, split_words, with_lookalikes
from ..errors import PlanError
from ..names import names_read
from . import script
from .slicing import needed
from .statements import Statement, as_python, import_of, read, read_earlier

_MAGIC = re.compile(r"\s*%%distributed\b(.*)\n?")


def export(notebook: Path, path: Path, number: int | None = None) -> None:
    """Write the script of a notebook's ``%%distributed`` cell, the `number`-th if given.

    Raises `PlanError` for a file that is no notebook, a cell that is not there or has to be
    chosen, and what cannot be a script.
    """
    cells = _cells(notebook)
    at = _chosen(cells, number, notebook)
    earlier = [
        statement
        for position, raw in enumerate(cells[:at], 1)
        for statement in read_earlier(raw, f"cell {position} of {notebook.name}")
    ]
    training = training_of(cells[at], f"cell {at + 1} of {notebook.name}")
    names = wanted(training, {n for s in earlier for n in s.binds})
    found, missing = needed([s for s in earlier if not s.is_future], names)
    parts = _parts(found, names)
    _refuse_missing(training, missing, earlier)
    if "display" in missing:
        parts.insert(0, script.DISPLAY)
    material = script.Material(parts, script.futures(earlier))
    script.write(path, script.text(training, material, names, path.name), {})


def _cells(notebook: Path) -> list[str]:
    """Return the sources of a notebook's code cells."""
    try:
        content = json.loads(notebook.read_text(encoding="utf-8"))
        return [_text(c["source"]) for c in content["cells"] if c["cell_type"] == "code"]
    except OSError as error:
        raise PlanError(f"the notebook cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{notebook} is not a notebook of format 4 ({error!r})") from error


def _text(source: str | Sequence[str]) -> str:
    return source if isinstance(source, str) else "".join(source)


def _chosen(cells: Sequence[str], number: int | None, notebook: Path) -> int:
    """Return the index of the cell to export."""
    found = [i for i, raw in enumerate(cells) if _MAGIC.match(raw)]
    if not found:
        raise PlanError(f"{notebook} has no %%distributed cell")
    if number is None and len(found) == 1:
        return found[0]
    if number is not None and 1 <= number <= len(found):
        return found[number - 1]
    shown = [f"  --cell {n}: {_head(cells[i])}" for n, i in enumerate(found, 1)]
    told = "several %%distributed cells" if number is None else f"no %%distributed cell {number}"
    raise PlanError("\n".join([f"{notebook} has {told}; choose one:", *shown]))


def _head(raw: str) -> str:
    defined = re.findall(r"(?m)^(?:async )?def .*$", raw)
    return str(defined[-1] if defined else raw.strip().splitlines()[0]).rstrip(":")


def training_of(raw: str, where: str, flags: int = 0) -> script.Training:
    """Read a ``%%distributed`` cell. Raises `PlanError` for one that is no Python."""
    magic = _MAGIC.match(raw)
    source = as_python(_MAGIC.sub("", raw, count=1) if magic else raw)
    try:
        # Numbered as in the notebook: the magic's line is one.
        cell = read_cell("\n" * bool(magic) + source, where, {}, flags)
    except SyntaxError as error:
        raise PlanError(f"{where}, line {error.lineno}: {error.msg}") from error
    try:
        options = parse_options(split_words(magic[1] if magic else ""))
    except PlanError:  # `-n {ranks}`: what the notebook fills in is not known here
        options = Options()
    statements = tuple(read(source, where))
    return script.Training(source, where, statements, cell.function, cell.parameters, options)


def wanted(training: script.Training, known: Collection[str]) -> set[str]:
    """Return the names that the cell takes from the notebook, which has those that are known."""
    own = training.binds
    names = names_read(script.body(training))
    return names | {
        p.name
        for p in training.parameters
        if p.name not in own and (p.default is None or p.name in known)
    }


def _refuse_missing(
    training: script.Training, missing: set[str], earlier: Sequence[Statement]
) -> None:
    missing = missing - {"display", "__file__", "__name__"}
    if missing:
        known = {n for s in earlier for n in s.binds}
        shown = ", ".join(with_lookalikes(n, known) for n in sorted(missing))
        raise PlanError(
            f"{training.where} needs {shown}: no cell before it binds "
            f"{'that name' if len(missing) == 1 else 'those names'} at its top level"
        )


def _parts(found: Sequence[Statement], names: set[str]) -> list[str]:
    """Return the texts of statements, of imports only what is needed, each once."""
    names = names | {n for s in found for n in s.reads}
    parts: dict[str, None] = {}
    for one in found:
        one.refuse_what_no_script_can()
        parts[import_of(one, names) if one.is_import else one.text] = None
    return list(parts)
