"""The parts of nbtrain: features that can be removed, and how the core finds them.

A part is a folder in `nbtrain.parts` and a row in `TABLE`. Without both, its feature is missing and
everything else works. Its ``__init__`` has a `Part`, which refers to all code as text
("module:name"), so that it is imported when it is used. From here the core gets commands, engines,
and the parts' code for launches (`nbtrain.lifecycle.launch_sides`) and for ranks
(`nbtrain.worker.rank_context`). The core may depend on the traits of an engine or a plan, but not
on the part that they belong to. A part imports of the core what `nbtrain.part_api` lists.

Another package adds a part by an entry point of the group ``nbtrain.parts``, whose value is its
`Part` ("package.module:PART").
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .errors import PlanError

_T = TypeVar("_T")

TABLE = (
    "live",
    "debugger",
    "steering",
    "profile",
    "memory",
    "memory_snapshot",
    "scaling",
    "export",
    "forwarding",
    "tpu",
    "ray",
    "slurm",
    "nodes",
    "kubernetes",
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
    """A command of ``%nbtrain``, or of ``nbtrain`` on the command line, or a cell magic."""

    run: str
    """A function. In a notebook its argument is a `Typed`, and its return value is the magic's
    value. On the command line it gets the namespace of argparse, and returns the exit code. For a
    cell magic it gets the line, and returns that of the ``%%distributed`` that it stands for."""
    help: str = ""
    """Lines of ``%nbtrain?`` or the text of ``%%name?``; on the command line a line of
    ``nbtrain --help``."""
    fills_options_alone: bool = False
    """Whether the command itself calls `Typed.fill`, because its text is not only options."""
    arguments: str = ""
    """On the command line, a function that adds arguments to a parser."""


@dataclass(frozen=True)
class Device:
    """A kind of device that a part's engines use, other than GPUs and CPUs."""

    label: str
    """Its name in texts."""
    segfaults_without_memory: bool = False
    """Whether a host without memory ends its ranks by SIGSEGV, not only by SIGKILL."""


@dataclass(frozen=True)
class Part:
    """What a part adds, by names.

    Code is named as "module:name". For a part of nbtrain, the module begins with the part's folder
    ("live.server:serve"), otherwise with the name of its package.
    """

    commands: Mapping[str, Command] = field(default_factory=dict)
    """Commands of ``%nbtrain``."""
    cell_magics: Mapping[str, Command] = field(default_factory=dict)
    """Magics of cells that run as with ``%%distributed``, such as ``%%rank``."""
    shell_commands: Mapping[str, Command] = field(default_factory=dict)
    """Commands of ``nbtrain`` on the command line."""
    engines: Mapping[str, str] = field(default_factory=dict)
    """Subclasses of `nbtrain.engines.Engine`, or functions that return an engine, by name."""
    default_engine: str = ""
    """A function of the environment that returns the engine of this part that ``-e auto`` uses on
    this host, or ''."""
    devices: Mapping[str, Device] = field(default_factory=dict)
    """The kinds of device that its engines use, by torch's name."""
    launch_side: str = ""
    """A subclass of `nbtrain.lifecycle.launch_sides.LaunchSide`."""
    rank_side: str = ""
    """A subclass of `nbtrain.worker.rank_context.RankSide`, for every rank. A `launch_side` can add
    one for some ranks, by `complete_job`."""
    provides: Mapping[str, str] = field(default_factory=dict)
    """What others may load with `load_provided`."""
    switch: str = ""
    """What switches the part off in ``NBTRAIN_DISABLE``, if no option or engine does."""


@functools.cache
def parts() -> Mapping[str, Part]:
    """Return the parts by their names: those of `TABLE`, then those of other packages.

    Of several parts, commands or engines of one name, the first is used.
    """
    return _merge(_own_parts(), _parts_of_packages())


@functools.cache
def _own_parts() -> dict[str, Part]:
    return {name: importlib.import_module(f"nbtrain.parts.{name}").PART for name in TABLE}


def _merge(*mappings: Mapping[str, _T]) -> dict[str, _T]:
    """Return the entries of all mappings; of several with one key, the first."""
    merged: dict[str, _T] = {}
    for mapping in mappings:
        merged |= {key: value for key, value in mapping.items() if key not in merged}
    return merged


def _parts_of_packages() -> dict[str, Part]:
    """Return the parts of other packages. One that cannot be imported is left out: see `broken`."""
    # Imported here: it loads email and zipfile, which ranks do not need.
    from importlib.metadata import entry_points

    found: dict[str, Part] = {}
    for point in entry_points(group="nbtrain.parts"):
        try:
            part = point.load()
            if not isinstance(part, Part):
                raise TypeError(f"{point.value} is a {type(part).__name__}, not a Part")
            for reference in filter(None, (part.launch_side, part.rank_side)):
                load(reference)  # which every launch uses
            found[point.name] = part
        except Exception as error:  # a broken package must not end nbtrain
            broken[point.name] = f"{type(error).__name__}: {error}"
    return found


broken: dict[str, str] = {}
"""What went wrong with parts of other packages, by name. ``%nbtrain doctor`` shows it."""


def load(reference: str) -> Any:
    """Import the ``module:name`` of a part, and return it."""
    module, _, name = _full(reference).partition(":")
    return getattr(importlib.import_module(module), name)


def _full(reference: str) -> str:
    """Return a reference of a part from the package on."""
    folder = reference.partition(":")[0].partition(".")[0]
    return f"nbtrain.parts.{reference}" if folder in TABLE else reference


def commands() -> dict[str, Command]:
    """Return the parts' commands of ``%nbtrain``."""
    return _merge(*(each.commands for each in parts().values()))


def cell_magics() -> dict[str, Command]:
    """Return the cell magics of nbtrain's parts: ``%load_ext`` cannot wait for other packages."""
    return _merge(*(each.cell_magics for each in _own_parts().values()))


def shell_commands() -> dict[str, Command]:
    """Return the parts' commands of ``nbtrain`` on the command line."""
    return _merge(*(each.shell_commands for each in parts().values()))


def engines() -> dict[str, str]:
    """Return the references of the parts' engines, by name."""
    references = _merge(*(each.engines for each in parts().values()))
    return {name: _full(reference) for name, reference in references.items()}


def default_engine(env: Mapping[str, str]) -> str:
    """Return the engine of a part that ``-e auto`` uses on this host; '' for one of the core."""
    chosen = (load(each.default_engine)(env) for each in parts().values() if each.default_engine)
    return next(filter(None, chosen), "")


def engines_of_packages() -> dict[str, str]:
    """Return the references of engines that parts of other packages add, by name."""
    added = (each.engines for name, each in parts().items() if name not in TABLE)
    return _merge(*added)


def cell_options() -> Iterable[Any]:
    """Return the options that the parts' launch sides add to ``%%distributed``."""
    sides = (load(each.launch_side) for each in parts().values() if each.launch_side)
    return (option for side in sides for option in side.cell_options)


def devices() -> dict[str, Device]:
    """Return the parts' kinds of device by torch's name; GPUs and CPUs are the core's."""
    return _merge(*(each.devices for each in parts().values()))


def rank_sides() -> tuple[str, ...]:
    """Return the references of what parts do in every rank."""
    return tuple(each.rank_side for each in parts().values() if each.rank_side)


def require(part: str, what: str) -> None:
    """Raise `PlanError` if a part is missing; `what` names what needs it."""
    if part not in parts():
        raise PlanError(f"{what} needs the part `{part}` of nbtrain, which is not installed here")


def load_provided(part: str, name: str, what: str) -> Any:
    """Load what a part provides. Raises `PlanError`, which names `what`, if the part is missing."""
    require(part, what)
    return load(parts()[part].provides[name])
