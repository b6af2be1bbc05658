"""Returns the command that starts a fresh interpreter."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

_BOOT = """
import sys
sys.path[:] = [p for p in sys.path if p]  # not the json.py of a notebook's folder
import json
order = json.loads(sys.argv.pop())
sys.path[:] = order["path"]
from MODULE import main
del json, sys
main(globals().pop("order"))
"""


def interpreter_command(module: str, order: Mapping[str, Any]) -> list[str]:
    """Return the command of a fresh interpreter that calls a module's `main` with an order."""
    return [sys.executable, "-c", _BOOT.replace("MODULE", module), json.dumps(order)]
