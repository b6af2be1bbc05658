"""The ratchet of plain code: no room gets more lines, odd words or constants than it has.

`tests/tools/plain_words.py` counts, and shows each hit. A ceiling may only fall: whoever makes a
room smaller or plainer lowers its ceiling. Only a new feature raises the code lines and the
constants of its room, by what it needs.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

import pytest

from tests.tools.plain_words import PACKAGE, Room, measure_rooms


class Ceiling(NamedTuple):
    """The most that a room may have."""

    code_lines: int
    wordings_per_1000: float
    names_percent: float
    constants: int


CEILINGS = {
    "(root)": Ceiling(401, 2.5, 0.0, 0),
    "checks": Ceiling(1_742, 4.1, 0.0, 5),
    "commands": Ceiling(1_084, 2.4, 1.3, 3),
    "engines": Ceiling(2_673, 4.8, 0.0, 6),
    "hangs": Ceiling(1_724, 5.0, 1.4, 12),
    "lifecycle": Ceiling(2_192, 5.7, 1.3, 8),
    "parts": Ceiling(13_080, 4.2, 0.8, 62),
    "planning": Ceiling(1_955, 5.5, 0.0, 3),
    "system": Ceiling(1_292, 5.4, 0.6, 5),
    "tracking": Ceiling(2_804, 5.0, 0.9, 29),
    "transport": Ceiling(2_721, 2.1, 0.0, 5),
    "ui": Ceiling(3_760, 4.2, 0.9, 12),
    "worker": Ceiling(3_832, 3.9, 0.0, 16),
}


@pytest.fixture(scope="module")
def rooms() -> dict[str, Room]:
    return measure_rooms()


def test_every_room_has_a_ceiling(rooms: dict[str, Room]) -> None:
    assert rooms.keys() == CEILINGS.keys()


@pytest.mark.parametrize("name", CEILINGS)
def test_no_room_grows_beyond_its_ceiling(name: str, rooms: dict[str, Room]) -> None:
    room, ceiling = rooms[name], CEILINGS[name]
    shown = "\n".join(room.hits)
    assert room.code_lines <= ceiling.code_lines
    assert room.wordings_per_1000 <= ceiling.wordings_per_1000, shown
    assert room.names_percent <= ceiling.names_percent, shown
    assert room.constants <= ceiling.constants
    assert (room.one_word, room.no_unit) == (0, 0), shown


def test_a_function_of_several_lines_says_what_it_does() -> None:
    """A newcomer reads the name, the signature and one sentence, not the body."""
    shown = PACKAGE / "commands" / "demo.py"  # it prints its loop, which is the README's
    without = [
        f"{path.relative_to(PACKAGE)}:{function.lineno} {function.name}"
        for path in sorted({*PACKAGE.rglob("*.py")} - {shown})
        for owner in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(owner, (ast.Module, ast.ClassDef))
        for function in owner.body
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        if (function.end_lineno or 0) - function.lineno >= 5
        if not (function.name.startswith("__") or ast.get_docstring(function))
    ]
    assert without == []


def test_the_counter_sees_code_words_and_constants(tmp_path: object) -> None:
    source = (
        '"""Nobody looks."""\nWAIT = 1.0\n"""Seconds."""\n\n\ndef held():  # anew\n    return 1\n'
    )
    folder = PACKAGE.__class__(str(tmp_path)) / "room"
    folder.mkdir()
    (folder / "module.py").write_text(source)
    room = measure_rooms(folder.parent)["room"]
    assert (room.code_lines, room.odd_wordings, room.odd_names) == (3, 3, 1)
    assert (room.constants, room.one_word, room.no_unit) == (1, 1, 1)
