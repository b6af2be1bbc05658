"""Lint, and run where that can be done offline, training code that people wrote.

    python tests/tools/real_code.py FOLDER            # lint every .py and .ipynb below it
    python tests/tools/real_code.py FOLDER --run --fixtures transformers/tests/fixtures
                                                      # and run the scripts, with 2 ranks

Each script runs as a notebook's cell and under torchrun, on tiny models and made data
(`known_scripts.py` has their arguments), and what the ranks counted is compared. That needs
transformers, datasets, evaluate and torchvision. A note that a person judges false is a bug. The
folder is not part of the repository: Accelerate's `examples`, transformers' `examples/pytorch`,
pytorch/examples and the Hugging Face course are such.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from nbtrain.findings import Finding
from nbtrain.planning.lint import lint
from nbtrain.planning.plan import Cell
from tests.tools import real_runs

_TRAINS = re.compile(r"backward\(|\.train\(\)|\.fit\(")
_LAUNCHERS = re.compile(r"(.*\.)?(spawn|notebook_launcher|launch)")


@dataclass(frozen=True)
class Piece:
    """A script or a notebook, as a cell of a run."""

    path: Path
    source: str
    function: str | None
    """The function that every rank calls; None: the statements themselves."""

    lines: tuple[str, ...]
    """The place of every line of the source in its file."""


def pieces(folder: Path) -> Iterator[Piece]:
    """Yield what trains below a folder."""
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.ipynb")]):
        try:
            found = [_script(path)] if path.suffix == ".py" else list(_cells(path))
        except (SyntaxError, ValueError, KeyError):
            continue
        yield from (piece for piece in found if _TRAINS.search(piece.source))


def _script(path: Path) -> Piece:
    """Return a script; its ranks call what it launches, or run its statements."""
    source = path.read_text()
    module, lines = ast.parse(source), source.splitlines()
    function = None
    blocks = [s for s in module.body if isinstance(s, ast.If) and "__main__" in ast.unparse(s.test)]
    for block in blocks:
        function = _launched(block) or function
        for number in range(block.lineno, (block.end_lineno or 0) + 1) if function else ():
            lines[number - 1] = ""
    if not blocks and all(isinstance(s, _DEFINES) for s in module.body):
        raise ValueError("a module that others import")
    places = tuple(f"{path.name}:{n}" for n in range(1, len(lines) + 1))
    return Piece(path, "\n".join(lines), function, places)


_DEFINES = (
    *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign),
    *(ast.Expr, ast.If, ast.Try),  # around imports, as of a library that may be missing
)


def _launched(block: ast.AST) -> str | None:
    """Return the function that a block gives to a launcher."""
    for call in (node for node in ast.walk(block) if isinstance(node, ast.Call)):
        if _LAUNCHERS.fullmatch(ast.unparse(call.func)) and call.args:
            return ast.unparse(call.args[0])
    return None


def _cells(path: Path) -> Iterator[Piece]:
    """Yield the cells of a notebook as one would write ``%%distributed`` above them."""
    cells = json.loads(path.read_text())["cells"]
    for number, each in enumerate((c for c in cells if c["cell_type"] == "code"), 1):
        lines = "".join(each["source"]).splitlines()
        text = "\n".join("" if line.lstrip().startswith(("!", "%")) else line for line in lines)
        try:
            body = ast.parse(text).body
        except SyntaxError:
            continue
        last = body[-1] if body else None
        function = last.name if isinstance(last, ast.FunctionDef) else None
        places = tuple(f"{path.name} cell {number}:{n}" for n in range(1, len(lines) + 1))
        yield Piece(path, text, function, places)


def notes(piece: Piece) -> list[tuple[str, Finding]]:
    """Return what lint finds in a piece, each with its place, on the CPU and on GPUs."""
    cell = Cell(piece.source, str(piece.path), {}, piece.function)
    findings = dict.fromkeys(f for device in ("cpu", "cuda") for f in lint(cell, device=device))
    return [(piece.lines[finding.place.line - 1], finding) for finding in findings]


def main() -> None:
    """Print every note, with the line that it is about; run what can be run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", action="store_true", help="run the scripts, too")
    parser.add_argument("--only", default="", help="only paths that contain this")
    parser.add_argument("--fixtures", default="", help="transformers' folder tests/fixtures")
    parser.add_argument("--timeout", type=float, default=180, help="seconds a run may take")
    parser.add_argument("--under-torchrun", action="store_true", help="run it here, as a rank")
    given, more = parser.parse_known_args()
    if given.under_torchrun:
        real_runs.in_torchrun(given.folder.resolve(), more)
        return
    count = total = 0
    scripts = []
    for piece in (p for p in pieces(given.folder) if given.only in str(p.path)):
        count += 1
        scripts += [piece.path] if piece.path not in scripts else []
        for place, finding in notes(piece):
            total += 1
            line = piece.source.splitlines()[finding.place.line - 1].strip()
            print(f"{piece.path.parent}/{place} [{finding.code}] {finding.text}\n    {line}")
    print(f"{count} pieces, {total} notes", flush=True)
    if given.run:
        real_runs.run_all(scripts, given.fixtures, given.timeout)


if __name__ == "__main__":
    main()
