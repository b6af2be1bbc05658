"""Copies nbtrain without parts: `python without_parts.py FOLDER` copies the checkout without any.

What the copy cannot do is what those parts did: `tests/test_part.py` tries it part by part, and the
step `core` of the gate runs the core's whole suite in the checkout.
"""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parents[2]


def remove(names: Collection[str], package: Path) -> None:
    """Delete the folders of parts from a copy of the package, and their rows."""
    for name in names:
        shutil.rmtree(package / "parts" / name)
    table = package / "part.py"
    source = table.read_text()
    rows = (node for node in ast.parse(source).body if isinstance(node, ast.Assign))
    row = next(node for node in rows if ast.unparse(node.targets[0]) == "TABLE")
    kept = tuple(name for name in ast.literal_eval(row.value) if name not in names)
    old = ast.get_source_segment(source, row) or ""
    table.write_text(source.replace(old, f"TABLE: tuple[str, ...] = {kept!r}"))


def copy_package(names: Collection[str], folder: Path) -> Path:
    """Copy the package into a folder, without some parts; return the folder."""
    shutil.copytree(ROOT / "nbtrain", folder / "nbtrain")  # with what is compiled of it
    remove(names, folder / "nbtrain")
    return folder


def main() -> None:
    """Copy the checkout without any part, and without their tests."""
    folder = Path(sys.argv[1])
    ignored = shutil.ignore_patterns("__pycache__", ".git", "artifacts", "node_modules")
    shutil.copytree(ROOT, folder, ignore=ignored)
    parts = [each.name for each in (folder / "nbtrain/parts").iterdir() if each.is_dir()]
    remove(parts, folder / "nbtrain")
    shutil.rmtree(folder / "tests/parts")


if __name__ == "__main__":
    main()
