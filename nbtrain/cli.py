"""The command ``nbtrain``. Thin."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import doctor


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, or 2 for a command line that makes no sense."""
    parser = argparse.ArgumentParser(
        prog="nbtrain", description="Train on many devices from a notebook cell."
    )
    parser.add_argument("--version", action="store_true", help="print nbtrain's version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser(
        "doctor", help="what this host offers, and what would be refused or warned of, on a page"
    )
    options = parser.parse_args(argv)
    if options.version:
        print(f"nbtrain {vars(sys.modules['nbtrain'])['__version__']}")
    elif options.command == "doctor":
        print(doctor.page())
        print("\nOf a notebook's own kernel, `%nbtrain doctor` in a cell tells the same.")
    else:
        parser.print_help()
    return 0
