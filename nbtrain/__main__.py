"""Runs the command ``nbtrain`` as ``python -m nbtrain``, for when it is not on the PATH."""

from __future__ import annotations

import sys

from .commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
