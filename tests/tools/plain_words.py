"""Count how plainly the package speaks to the people who read its code, room by room.

    python tests/tools/plain_words.py             # a table of all rooms
    python tests/tools/plain_words.py ROOM        # and each hit in one of them

A room is a folder of `nbtrain`. The table has code lines (without docstrings, comments and blank
lines), odd wordings per 1,000 words of docstrings and comments, odd function names in percent, and
numeric module constants: all, those of one word, and those in seconds or bytes without a unit in
the name. `tests/test_plain_words.py` compares the counts with a ceiling for each room.

The patterns only hint at sentences that need a second reading. A hit may be right, and a riddle may
have no hit.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "nbtrain"

_LISTS = """
of by in at without for as over behind around beside between until since
held shown written bound known lost left given drawn told said kept gone made sent taken found \
hidden met spent begun broken forgotten felt seen spoken
told said found its theirs mine ours taken kept gone one words where who why what heard spared \
sure patience wish deaf hopeless noted tried anew
there here again anew so behind alone home out apart aside
"""
_PREPOSITIONS, _PARTICIPLES, _ODD_WORDS, _ODD_ENDS = (
    frozenset(line.split()) for line in _LISTS.strip().split("\n")
)
"""Words that a name does not begin with, is alone, contains, and ends with (or a participle)."""

ODD_WORDINGS = {
    "of which": r"\b(of|in|by|at|to|for|from|on|with|before|after|behind|until) which\b",
    "nobody": r"\b(nobody|somebody|whoever|whatever|none)\b",
    "archaic": r"\b(but for|for want of|anew|meanwhile|at hand|let go|lets go|for ever"
    r"|all the same|as far as|as good as|be rid of|as such|beforehand|in vain|thereof|so many"
    r"|as many|no more|any more|that much|befell|yet to|or else)\b",
    "goes on": r"\b(go on|goes on|went on|gone on|comes? home|brings? home|at home|stays? behind"
    r"|is over|are over)\b",
    "is to be": r"\b(is|are|was|were) to (be|do|have|come|go|take|get|[a-z]+)\b",
    "say, tell, hear": r"\b(says?|said|tells?|told|hears?|heard|deaf|listens?|speaks?|looks?"
    r"|asks?|asked)\b",
}

_UNITS = re.compile(
    r"_(S|MS|US|BYTES|KIB|MIB|LINES|STEPS|RANKS|ITEMS|CHARS|PX|HZ|COUNT|LIMIT|SHARE|RATIO"
    r"|PERCENT)$|^(MAX|MIN)_"
)
_NUMBER = re.compile(r"(?=.*\d)[-\d._e+ <*()\[\],]+")


@dataclass
class Room:
    """The counts of a room, and its hits as lines of text."""

    code_lines: int = 0
    words: int = 0
    functions: int = 0
    odd_wordings: int = 0
    odd_names: int = 0
    constants: int = 0
    one_word: int = 0
    no_unit: int = 0
    hits: list[str] = field(default_factory=list)

    @property
    def wordings_per_1000(self) -> float:
        return 1000 * self.odd_wordings / max(1, self.words)

    @property
    def names_percent(self) -> float:
        return 100 * self.odd_names / max(1, self.functions)


def measure_rooms(package: Path = PACKAGE) -> dict[str, Room]:
    """Return the counts of each room; "(root)" has the modules beside the rooms."""
    rooms: dict[str, Room] = defaultdict(Room)
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        room = rooms[relative.parts[0] if len(relative.parts) > 1 else "(root)"]
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        statements = list(_statements(tree))
        docstrings = list(_docstrings(statements))
        room.code_lines += _code_lines(tokens, docstrings)
        _measure_prose(room, str(relative), tokens, docstrings)
        _measure_names(room, str(relative), statements)
        _measure_constants(room, str(relative), tree)
    return dict(rooms)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a module and what has statements of its own in it; expressions have none."""
    yield node
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, part, ()):
            if hasattr(child, "body"):
                yield from _statements(child)


def _docstrings(statements: Iterable[ast.AST]) -> Iterator[ast.Constant]:
    for node in statements:
        for child in getattr(node, "body", ()):
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value


def _code_lines(tokens: Iterable[tokenize.TokenInfo], docstrings: Iterable[ast.Constant]) -> int:
    documented = {
        line
        for text in docstrings
        for line in range(text.lineno, (text.end_lineno or text.lineno) + 1)
    }
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT}
    skipped |= {tokenize.DEDENT, tokenize.ENDMARKER}
    code: set[int] = set()
    for token in tokens:
        if token.type not in skipped:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documented)


def _measure_prose(
    room: Room,
    path: str,
    tokens: Iterable[tokenize.TokenInfo],
    docstrings: Iterable[ast.Constant],
) -> None:
    texts = [(text.lineno, str(text.value)) for text in docstrings]
    for token in tokens:
        if token.type == tokenize.COMMENT:
            texts.append((token.start[0], token.string))
    for line, text in texts:
        room.words += len(text.split())
        for kind, pattern in ODD_WORDINGS.items():
            for hit in re.finditer(pattern, text, re.I):
                room.odd_wordings += 1
                around = " ".join(text[max(0, hit.start() - 60) : hit.end() + 60].split())
                room.hits.append(f"{path}:{line} [{kind}] …{around}…")


def _measure_names(room: Room, path: str, statements: Iterable[ast.AST]) -> None:
    for node in statements:
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if is_function and not node.name.startswith("__"):
            room.functions += 1
            if is_odd_name(node.name):
                room.odd_names += 1
                room.hits.append(f"{path}:{node.lineno} [name] {node.name}")


def is_odd_name(name: str) -> bool:
    """Return whether a function's name is no verb with its object, as far as a pattern can see."""
    words = [word for word in name.strip("_").lower().split("_") if word]
    if not words:
        return False
    is_participle = words[0] in _PARTICIPLES or (words[0].endswith("ed") and len(words[0]) > 4)
    return (
        (words[0] in _PREPOSITIONS and len(words) > 1)
        or "_the_" in name
        or (len(words) == 1 and is_participle)
        or bool(_ODD_WORDS & set(words))
        or (len(words) > 1 and words[-1] in _ODD_ENDS | _PARTICIPLES)
    )


def _measure_constants(room: Room, path: str, tree: ast.Module) -> None:
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        value = getattr(node, "value", None)
        text = after.value if isinstance(after, ast.Expr) else None
        doc = str(text.value).split("\n")[0] if isinstance(text, ast.Constant) else ""
        if value is None or not _NUMBER.fullmatch(ast.unparse(value)):
            continue
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Name) and each.id.isupper():
                    _count_constant(room, path, each, doc)


def _count_constant(room: Room, path: str, name: ast.Name, doc: str) -> None:
    bare = name.id.strip("_")
    has_unit = re.search(r"\b([Ss]econds?|[Bb]ytes?)\b", doc[:60]) is not None
    room.constants += 1
    room.one_word += "_" not in bare
    room.no_unit += has_unit and not _UNITS.search(bare)
    if "_" not in bare or (has_unit and not _UNITS.search(bare)):
        room.hits.append(f"{path}:{name.lineno} [constant] {name.id}")


def main() -> None:
    """Print the table, and the hits of a room."""
    rooms = measure_rooms()
    print(f"{'room':12} {'code':>6} {'odd/1000':>9} {'odd names':>10} {'constants':>10}")
    for name, room in sorted(rooms.items()):
        constants = f"{room.constants}/{room.one_word}/{room.no_unit}"
        figures = f"{room.wordings_per_1000:9.1f} {room.names_percent:9.1f}% {constants:>10}"
        print(f"{name:12} {room.code_lines:6} {figures}")
    for name in sys.argv[1:]:
        print("", *rooms[name].hits, sep="\n")


if __name__ == "__main__":
    main()
