"""``python -m nbtrain``: the command ``nbtrain``, where that is not on the PATH."""

from __future__ import annotations

import sys

from .commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
