"""The parts of nbtrain: features that can be taken away, and how the core finds them.

A part is a folder in `nbtrain.parts` and a row in `TABLE`. Without both, its feature is gone, and
all else works. Its ``__init__`` holds a `Part`, which names everything by text ("module:name"):
that is imported when it is used. The core asks here for commands, engines and for what accompanies
a launch (`nbtrain.lifecycle.launch_sides`) and a rank (`nbtrain.worker.rank_sides`). It may know
what an engine or a plan is like, and never which part that comes from.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import PlanError

TABLE = (
    "live",
    "debugger",
    "memory",
    "scaling",
    "export",
    "forwarding",
    "tpu",
    "ray",
    "nodes",
    "frameworks",
)
"""The parts of this installation, in the order of the help."""

PASS = object()
"""What a command returns to leave the rest to the core's command of the same name."""


@dataclass(frozen=True)
class Typed:
    """A command as it was typed after ``%nbtrain``."""

    command: str
    text: str
    """What follows the command."""
    namespace: dict[str, Any]
    """The notebook's variables."""
    fill: Callable[[str], str]
    """Fills ``{name}`` and ``$name`` from them."""


@dataclass(frozen=True)
class Command:
    """A command of ``%nbtrain``, or of ``nbtrain`` on the command line."""

    run: str
    """A function. In a notebook it gets a `Typed`, and what it returns is the magic's value. On the
    command line it gets what argparse has read, and returns the exit code."""
    help: str = ""
    """Lines of ``%nbtrain?``; on the command line a line of ``nbtrain --help``."""
    fills_options_alone: bool = False
    """Whether the command itself fills in variables: its text is not only options."""
    arguments: str = ""
    """On the command line, a function that adds arguments to a parser of argparse."""


@dataclass(frozen=True)
class Part:
    """What a part adds, each by its name."""

    commands: Mapping[str, Command] = field(default_factory=dict)
    """Of ``%nbtrain``."""
    shell_commands: Mapping[str, Command] = field(default_factory=dict)
    """Of ``nbtrain`` on the command line."""
    engines: Mapping[str, str] = field(default_factory=dict)
    launch_side: str = ""
    """A subclass of `nbtrain.lifecycle.launch_sides.LaunchSide`."""
    rank_side: str = ""
    """A subclass of `nbtrain.worker.rank_sides.RankSide`."""
    devices: frozenset[str] | None = None
    """The kinds of device of the ranks that get a `rank_side`; None: all ranks do."""
    provides: Mapping[str, str] = field(default_factory=dict)
    """What other parts may ask for, by `provided`."""


@functools.cache
def parts() -> Mapping[str, Part]:
    """Return the parts by their names."""
    return {name: importlib.import_module(f"nbtrain.parts.{name}").PART for name in TABLE}


def load(reference: str) -> Any:
    """Import what ``module:name`` names, inside `nbtrain.parts`."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(f"nbtrain.parts.{module}"), name)


def commands() -> dict[str, Command]:
    """Return the commands of ``%nbtrain`` that are of parts."""
    return {name: command for each in parts().values() for name, command in each.commands.items()}


def shell_commands() -> dict[str, Command]:
    """Return the commands of ``nbtrain`` on the command line that are of parts."""
    of_parts = (each.shell_commands for each in parts().values())
    return {name: command for commands in of_parts for name, command in commands.items()}


def engines() -> dict[str, str]:
    """Return the engines of parts, as name and reference."""
    rows = (row for each in parts().values() for row in each.engines.items())
    return {name: f"nbtrain.parts.{reference}" for name, reference in rows}


def require(part: str, what: str) -> None:
    """Raise `PlanError` if a part is missing; `what` names what needs it."""
    if part not in TABLE:
        raise PlanError(f"{what} needs the part `{part}` of nbtrain, which is not installed here")


def provided(part: str, name: str, what: str) -> Any:
    """Return what a part has for others. Raises `PlanError` if it is missing, naming `what`."""
    require(part, what)
    return load(parts()[part].provides[name])
