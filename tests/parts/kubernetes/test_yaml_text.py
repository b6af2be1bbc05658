"""What is written as YAML reads back as it was."""

from __future__ import annotations

from typing import Any

import pytest

from nbtrain.parts.kubernetes.yaml_text import to_yaml

yaml = pytest.importorskip("yaml")

TEXTS = [
    "",
    " ",
    "a",
    "yes",
    "No",
    "null",
    "~",
    "1",
    "1e3",
    "0x1f",
    "2026-11-30",
    "a: b",
    "- a",
    "a # b",
    "#",
    "nvidia.com/gpu",
    "/script/train.py",
    "'quoted' \"twice\" \\ back",
    "é 😀 ﷽",
    "{a}",
    "*a",
    "&a",
    "@a",
    "%a",
    "tab\tinside",
    "trailing ",
]
BLOCKS = [
    "x = 1\n",
    "x = 1",
    "a\nb",
    "a\n\nb\n",
    "a\n\n\n",
    "a\n  \n",
    "a   \n   \nb\t\n",
    "\na\n",
    "  a\nb\n",
    "\ta\n",
    "a\n\tb\n        c\n",
    "a\rb\n",
    "a\r\nb\r\n",
    "a\x0cb\n",
    "a\x1bb\n",
    "a\x85b\n",
    "a\u2028b\n",
    "a\ufeffb\n",
    "é 😀\nb: c # d\n--- \n...\n",
    "\n",
    "\n\n",
    "# a\n---\nb\n",
]


@pytest.mark.parametrize("text", [*TEXTS, *BLOCKS])
@pytest.mark.parametrize("place", ["value", "key", "item", "first in a list"])
def test_text_reads_back(text: str, place: str) -> None:
    wholes: dict[str, dict[str, Any]] = {
        "value": {"a": {"b": text, "c": "d"}},
        "key": {text: {"b": 1}, "other key": 2},
        "item": {"a": ["x", text, "y"]},
        "first in a list": {"a": [{"b": text, "c": 1}, {"d": {"e": [text]}}]},
    }
    written = to_yaml(wholes[place])
    assert yaml.safe_load(written) == wholes[place], written


def test_a_program_stays_as_it_was_typed() -> None:
    program = "def f():\n    return 'é'\n\nprint(f())\n"
    expected = "data:\n  a.py: |\n    def f():\n        return 'é'\n\n    print(f())\nend: 1\n"
    assert to_yaml({"data": {"a.py": program}, "end": 1}) == expected
