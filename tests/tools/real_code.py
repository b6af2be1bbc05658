"""Lint, and run where that can be done offline, training code that people wrote.

    python tests/tools/real_code.py FOLDER            # lint every .py and .ipynb below it
    python tests/tools/real_code.py FOLDER --run      # and run the scripts, with 2 ranks

A note that a person judges false is a bug. The folder is not part of the repository: Accelerate's
`examples`, transformers' `examples/pytorch`, pytorch/examples and the Hugging Face course are such.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from nbtrain.planning.findings import CodeFinding
from nbtrain.planning.lint import lint
from nbtrain.planning.plan import Cell

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


_DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.Expr)


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


def notes(piece: Piece) -> list[tuple[str, CodeFinding]]:
    """Return what lint finds in a piece, each with its place, on the CPU and on GPUs."""
    cell = Cell(piece.source, str(piece.path), {}, piece.function)
    findings = dict.fromkeys(f for device in ("cpu", "cuda") for f in lint(cell, device=device))
    return [(piece.lines[finding.line - 1], finding) for finding in findings]


def run(path: Path, arguments: list[str]) -> None:
    """Run a script as a cell of two ranks, on tiny models and made data; print every note."""
    from nbtrain.lifecycle.launcher import run_plan
    from nbtrain.planning.cell import read_cell
    from nbtrain.planning.plan import Plan
    from tests.tools import made_data

    made_data.install()
    sys.argv, sys.path[0] = [str(path), *arguments], str(path.parent)
    notebook = ModuleType("__main__")  # what the variables of a kernel are
    notebook.__file__ = str(path)
    sys.modules["__main__"] = notebook
    cell = read_cell(path.read_text(), str(path), vars(notebook))
    try:
        ended = run_plan(Plan(cell, path.stem, num_processes=2, view="none", timeout=180))
    except BaseException as error:
        print(f"FAILED {path}: {type(error).__name__}: {str(error).splitlines()[0][:300]}")
        return
    print(f"RAN {path}")
    for note in ended.state.notes:
        print(f"    NOTE {note}")


def torchrun(path: Path, arguments: list[str]) -> None:
    """Run a script under the same factories in a rank of another launcher."""
    from tests.tools import made_data

    made_data.install()
    sys.argv, sys.path[0] = [str(path), *arguments], str(path.parent)
    runpy.run_path(str(path), run_name="__main__")


def main() -> None:
    """Print every note, with the line that it is about."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", action="store_true", help="run the scripts, too")
    parser.add_argument("--one", action="store_true", help="run this script alone, here")
    parser.add_argument("--under-torchrun", action="store_true", help="the same, in a rank of it")
    given, more = parser.parse_known_args()
    if given.one or given.under_torchrun:
        (run if given.one else torchrun)(given.folder.resolve(), more)
        return
    count = total = 0
    for piece in pieces(given.folder):
        count += 1
        for place, finding in notes(piece):
            total += 1
            line = piece.source.splitlines()[finding.line - 1].strip()
            print(f"{piece.path.parent}/{place} [{finding.code}] {finding.message}\n    {line}")
        if given.run and piece.path.suffix == ".py":
            with tempfile.TemporaryDirectory() as folder:
                tool = [sys.executable, "-m", "tests.tools.real_code", "--one"]
                environment = {**os.environ, "NBTRAIN_HOME": folder, "PYTHONPATH": _python_path()}
                command = [*tool, str(piece.path.resolve()), *more]
                subprocess.run(command, cwd=folder, env=environment, check=False)
    print(f"{count} pieces, {total} notes")


def _python_path() -> str:
    root = str(Path(__file__).parents[2])
    return os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))


if __name__ == "__main__":
    main()
