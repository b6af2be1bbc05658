"""Check what is in a built sdist and wheel: `python tests/tools/check_dist.py DIST`.

The wheel is to hold the package, `py.typed`, the metadata and the licence, and nothing else; the
sdist all that is needed to build the wheel again and to run the tests. Exits with a line for each
thing that is missing or in excess.
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (".ci", ".github", "binder", "nbtrain", "notebooks", "tests")
FILES = ("CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml")
LEFTOVERS = {"__pycache__", ".ipynb_checkpoints"}


def main(dist: Path) -> list[str]:
    """Return what is wrong with the only wheel and the only sdist in a folder."""
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    return [*_check_wheel(wheel), *_check_sdist(sdist)]


def _checkout(*folders: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not LEFTOVERS & {*path.parts}
    }


def _version() -> str:
    match = re.search(r'^__version__ = "(.+)"$', (ROOT / "nbtrain/__init__.py").read_text(), re.M)
    assert match is not None, "nbtrain/__init__.py has no version"
    return match[1]


def _compare(name: str, present: set[str], expected: set[str]) -> list[str]:
    missing = [f"{name} lacks {path}" for path in sorted(expected - present)]
    return missing + [f"{name} should not contain {path}" for path in sorted(present - expected)]


def _check_wheel(path: Path) -> list[str]:
    info = f"nbtrain-{_version()}.dist-info"
    expected = _checkout("nbtrain") | {
        f"{info}/{name}"
        for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }
    with zipfile.ZipFile(path) as wheel:
        problems = _compare("the wheel", {*wheel.namelist()}, expected)
        if f"{info}/METADATA" in wheel.namelist():
            problems += _check_metadata(wheel.read(f"{info}/METADATA").decode())
    if "nbtrain/py.typed" not in expected:
        problems.append("the package has no py.typed")
    return problems


def _check_metadata(text: str) -> list[str]:
    metadata = HeaderParser().parsestr(text)
    expected = {
        "Name": "nbtrain",
        "Version": _version(),
        "License-Expression": "Apache-2.0",
        "License-File": "LICENSE",
        "Author": "nbtrain contributors",
        "Description-Content-Type": "text/markdown",
    }
    return [
        f"the wheel's {field} is {metadata[field]!r}, not {value!r}"
        for field, value in expected.items()
        if metadata[field] != value
    ]


def _check_sdist(path: Path) -> list[str]:
    expected = {"PKG-INFO", ".gitignore", *FILES, *_checkout(*FOLDERS)}
    with tarfile.open(path) as sdist:
        members = [member.name.partition("/") for member in sdist if member.isfile()]
    tops = {top for top, _, _ in members}
    problems = [] if tops == {f"nbtrain-{_version()}"} else [f"the sdist unpacks into {tops}"]
    return problems + _compare("the sdist", {name for _, _, name in members}, expected)


if __name__ == "__main__":
    problems = main(Path(sys.argv[1]))
    sys.exit("\n".join(problems) or None)
