"""Write down what users may rely on: python tests/tools/public_surface.py [--write].

The names of nbtrain with their signatures, exceptions, what a run has, options, commands, engines
and the fields of events. tests/public_surface.txt is what the last version had; the suite compares.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import nbtrain
from nbtrain import errors, part
from nbtrain.commands import cli, magics
from nbtrain.planning.option_types import ENGINES, SOURCES
from nbtrain.planning.plan import OPTIONS
from nbtrain.tracking.events import KINDS

FILE = Path(__file__).parents[1] / "public_surface.txt"


def surface() -> Iterator[str]:
    """Yield a line for each name."""
    for name in sorted(nbtrain.__all__):
        yield from _described(f"nbtrain.{name}", getattr(nbtrain, name))
    for name, value in sorted(vars(errors).items()):
        if isinstance(value, type) and issubclass(value, errors.NbtrainError):
            yield f"nbtrain.errors.{name}({', '.join(base.__name__ for base in value.__bases__)})"
    for option in OPTIONS:
        yield f"option {option.flags}"
    for name in sorted({*magics._COMMANDS, *part.commands()}):
        yield f"command {name}"
    shell_commands = next(each for each in cli._parser()._actions if each.dest == "command")
    for each in (shell_commands.choices or {}).values():
        yield f"shell {' '.join(each.format_usage().split()[1:])}"
    for name in sorted(ENGINES):
        yield f"engine {name}"
    for name in sorted(SOURCES):
        yield f"telemetry {name}"
    for kind, event in sorted(KINDS.items()):
        yield f"event {kind}: {', '.join(field.name for field in fields(event))}"


def _described(name: str, value: Any) -> Iterator[str]:
    if not isinstance(value, type):
        yield f"{name}{_signature(value)}"
        return
    yield f"{name}"
    for member, found in sorted(vars(value).items()):
        if not member.startswith("_"):
            is_method = inspect.isfunction(getattr(value, member, None))
            yield f"{name}.{member}{_signature(found) if is_method else ''}"


def _signature(function: Any) -> str:
    function = getattr(function, "__func__", function)
    parameters = inspect.signature(function).parameters.values()
    return f"({', '.join(str(each.replace(annotation=each.empty)) for each in parameters)})"


def text() -> str:
    """Return all lines."""
    return "".join(f"{line}\n" for line in surface())


if __name__ == "__main__":
    if "--write" in sys.argv:
        FILE.write_text(text())
    else:
        print(text(), end="")
