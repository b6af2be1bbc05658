"""Print the changelog's notes of a version: python tests/tools/release_notes.py 0.3.0.

Fails if nbtrain has another version, or the changelog has no notes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def notes(version: str, changelog: str) -> str:
    """Return what stands below the heading of a version; "" if nothing does."""
    _, _, rest = changelog.partition(f"## [{version}]")
    return re.split(r"^## \[|^\[[\w.]+\]: ", rest, flags=re.M)[0].partition("\n")[2].strip()


def main(version: str) -> None:
    """Print the notes of the version that is released."""
    own = re.search(r'^__version__ = "(.+)"$', (ROOT / "nbtrain/__init__.py").read_text(), re.M)
    if own is None or own[1] != version:
        sys.exit(f"the tag is {version}, and nbtrain/__init__.py says {own and own[1]}")
    text = notes(version, (ROOT / "CHANGELOG.md").read_text())
    if not text:
        sys.exit(f"CHANGELOG.md has no notes below a heading [{version}]")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1])
