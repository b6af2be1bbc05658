"""Check that an installation of nbtrain would bring it and change nothing.

    pip install --dry-run --report report.json nbtrain.whl
    python tests/tools/check_dry_run.py report.json

Exits with a line for each other package that pip would install or replace.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ALLOWED = {"nbtrain"}
"""What an installation may add."""


def main(report: Path) -> list[str]:
    """Return what pip would install besides nbtrain."""
    parts = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    if "nbtrain" not in [part["name"] for part in parts]:
        return ["pip would not install nbtrain"]
    return [
        f"pip would install {part['name']} {part['version']}"
        for part in parts
        if part["name"] not in ALLOWED
    ]


if __name__ == "__main__":
    sys.exit("\n".join(main(Path(sys.argv[1]))) or None)
