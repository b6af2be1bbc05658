"""Print every sentence of nbtrain that a user may meet, to be read aloud.

    python tests/tools/sentences.py [ROOM ...]     # all rooms, or system, planning/lint, …

A sentence is a text of at least three words in the source that is no docstring: what is raised,
warned, printed, drawn or shown as help. Values are shown as {…}. HTML and patterns are left out.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "nbtrain"
_NO_SENTENCE = re.compile(r"<\w|[a-z-]+:[^ ]|\\[dswb]|\(\?|;$|[\x00-\x08]")


def sentences(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each sentence in a module's source."""
    tree = ast.parse(source)
    skipped = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in ast.walk(node) if part is not node}
            text = "".join(_part(value) for value in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if id(node) in skipped or _NO_SENTENCE.search(text):
            continue
        if len(re.findall(r"[A-Za-z{][\w'…}]*(?= |$)", text)) >= 3:
            yield node.lineno, " ".join(text.split())


def _part(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else "{…}"


def main(rooms: list[str]) -> None:
    """Print the sentences of some rooms, or of all, each behind its file and line."""
    folders = [PACKAGE / room for room in rooms] or [PACKAGE]
    for folder in folders:
        for path in [folder] if folder.is_file() else sorted(folder.rglob("*.py")):
            for line, text in sentences(path.read_text()):
                print(f"{path.relative_to(PACKAGE)}:{line}: {text}")


if __name__ == "__main__":
    main(sys.argv[1:])
