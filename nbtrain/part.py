"""The parts of nbtrain: features that can be removed, and how the core finds them.

A part is a folder in `nbtrain.parts` and a row in `TABLE`. Without both, its feature is missing and
everything else works. Its ``__init__`` has a `Part`, which refers to all code as text
("module:name"), so that it is imported when it is used. From here the core gets commands, engines,
and the parts' code for launches (`nbtrain.lifecycle.launch_sides`) and for ranks
(`nbtrain.worker.rank_context`). The core may depend on the traits of an engine or a plan, but not
on the part that they belong to.
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
"""The return value of a command that the core's command of the same name should handle."""


@dataclass(frozen=True)
class Typed:
    """A command as it was typed after ``%nbtrain``."""

    command: str
    text: str
    """The text after the command."""
    namespace: dict[str, Any]
    """The notebook's variables."""
    fill: Callable[[str], str]
    """Replaces ``{name}`` and ``$name`` by these variables."""


@dataclass(frozen=True)
class Command:
    """A command of ``%nbtrain``, or of ``nbtrain`` on the command line."""

    run: str
    """A function. In a notebook its argument is a `Typed`, and its return value is the magic's
    value. On the command line it gets the namespace of argparse, and returns the exit code."""
    help: str = ""
    """Lines of ``%nbtrain?``; on the command line a line of ``nbtrain --help``."""
    fills_options_alone: bool = False
    """Whether the command itself calls `Typed.fill`, because its text is not only options."""
    arguments: str = ""
    """On the command line, a function that adds arguments to a parser."""


@dataclass(frozen=True)
class Part:
    """What a part adds, by names."""

    commands: Mapping[str, Command] = field(default_factory=dict)
    """Commands of ``%nbtrain``."""
    shell_commands: Mapping[str, Command] = field(default_factory=dict)
    """Commands of ``nbtrain`` on the command line."""
    engines: Mapping[str, str] = field(default_factory=dict)
    launch_side: str = ""
    """A subclass of `nbtrain.lifecycle.launch_sides.LaunchSide`."""
    rank_side: str = ""
    """A subclass of `nbtrain.worker.rank_context.RankSide`."""
    devices: frozenset[str] | None = None
    """The kinds of device whose ranks use the `rank_side`; None: all."""
    provides: Mapping[str, str] = field(default_factory=dict)
    """What other parts may load with `load_provided`."""


@functools.cache
def parts() -> Mapping[str, Part]:
    """Return the parts by their names."""
    return {name: importlib.import_module(f"nbtrain.parts.{name}").PART for name in TABLE}


def load(reference: str) -> Any:
    """Import ``module:name`` from `nbtrain.parts`, and return it."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(f"nbtrain.parts.{module}"), name)


def commands() -> dict[str, Command]:
    """Return the parts' commands of ``%nbtrain``."""
    return {name: command for each in parts().values() for name, command in each.commands.items()}


def shell_commands() -> dict[str, Command]:
    """Return the parts' commands of ``nbtrain`` on the command line."""
    of_parts = (each.shell_commands for each in parts().values())
    return {name: command for commands in of_parts for name, command in commands.items()}


def engines() -> dict[str, str]:
    """Return the references of the parts' engines, by name."""
    rows = (row for each in parts().values() for row in each.engines.items())
    return {name: f"nbtrain.parts.{reference}" for name, reference in rows}


def require(part: str, what: str) -> None:
    """Raise `PlanError` if a part is missing; `what` names what needs it."""
    if part not in TABLE:
        raise PlanError(f"{what} needs the part `{part}` of nbtrain, which is not installed here")


def load_provided(part: str, name: str, what: str) -> Any:
    """Load what a part provides. Raises `PlanError`, which names `what`, if the part is missing."""
    require(part, what)
    return load(parts()[part].provides[name])
