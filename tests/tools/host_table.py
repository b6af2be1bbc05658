"""Write the table of hosts into its page, from the tests: `python tests/tools/host_table.py`.

Each test that plays a host has a marker `host` with the host's name, what works, and how it was
tried. Tests of one file that tried a host in the same way share a row, and so do hosts of which the
same holds. A test compares the page.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "notebooks" / "install.md"
START, END = "<!-- the table, made by tests/tools/host_table.py -->\n", "<!-- its end -->\n"

Row = tuple[str, str, str, str]


def rows() -> list[Row]:
    """Return host, what works, how it was tried, and the test, sorted by host."""
    found = [row for path in sorted(ROOT.glob("tests/**/test_*.py")) for row in _rows_of(path)]
    return sorted(found, key=lambda row: row[0].lower())


def _rows_of(path: Path) -> Iterator[Row]:
    tree = ast.parse(path.read_text())
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in function.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.host":
                (host,) = (ast.literal_eval(argument) for argument in call.args)
                texts = {
                    keyword.arg: constants[keyword.value.id]
                    if isinstance(keyword.value, ast.Name)
                    else ast.literal_eval(keyword.value)
                    for keyword in call.keywords
                }
                yield host, texts["works"], texts["tried"], f"../{path.relative_to(ROOT)}"


def table() -> str:
    """Return the table as Markdown."""
    works: dict[tuple[str, str, str], list[str]] = {}
    for host, text, tried, place in rows():
        works.setdefault((host, tried, place), []).append(text)
    hosts: dict[tuple[str, str], list[str]] = {}
    for (host, tried, place), texts in works.items():
        shown = ". ".join(text[0].upper() + text[1:] for text in texts)
        hosts.setdefault((shown, f"[{tried}]({place})"), []).append(host)
    lines = ["| program | what works | how it was tried |", "|---|---|---|"]
    lines += [
        f"| {', '.join(names)} | {shown} | {link} |" for (shown, link), names in hosts.items()
    ]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the page with the table that the tests make."""
    head, _, rest = text.partition(START)
    return head + START + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
