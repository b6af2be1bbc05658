"""What a part may rely on, in this package or in another one: import it from here.

These names keep their meaning from one minor version to the next, as those of `nbtrain` do; all
others may change with any version. Each is imported at its first use, because a rank needs few.

- What a part is: `Part`, `Command`, `Device`, `Typed`, `PASS`. See `nbtrain.part`.
- A launch: `Plan`, whose `Task` is a `Call` or a `Cell`; the `Job` that is made of it; a `Finding`
  to show; `PlanError`, `LaunchError` and `MissingExtra` to raise.
- In the notebook: a `LaunchSide` acts before and after a launch, a `Companion` while it runs.
- In a rank: a `RankSide` acts before and after the task, with the rank's `RankContext`. An
  `Observer` that is given to ``hooks.add`` gets the events of the training, and reports figures by
  `log_values`.
- A way to start ranks: a subclass of `Engine` (of `ForkEngine` or `SpawnEngine`) with its `Ranks`.
- A run's folder and what is in it: `RunFolder`, `EventWriter`, `new_events`, `events`, `RunState`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; a test compares it with `_NAMES`
    from .engines.base import Action, Engine, Exit, Ranks
    from .engines.fork import ForkEngine
    from .engines.spawn import SpawnEngine
    from .errors import LaunchError, MissingExtra, NbtrainError, PlanError
    from .findings import Finding
    from .lifecycle.launch_sides import Companion, LaunchSide
    from .lifecycle.run import Run
    from .part import PASS, Command, Device, Part, Typed
    from .planning.cell import name_with_lookalikes
    from .planning.option_parser import check_parsed, parser, plan_fields, split_line
    from .planning.plan import Call, Cell, Plan, Task
    from .planning.secrets import mask_source
    from .planning.world import Placement
    from .system.files import write_atomically
    from .system.instrumentation import patch, replace, undo_later, when_imported
    from .system.network import is_loopback, own_address
    from .system.text import (
        format_bytes,
        format_duration,
        format_ranks,
        plural,
        shorten,
        with_article,
    )
    from .tracking import clock, events
    from .tracking.event_log import EventWriter, new_events
    from .tracking.limits import POLL_INTERVAL_S, UNRESPONSIVE_AFTER_S
    from .tracking.run_folder import RunFolder
    from .tracking.state import RankState, RunState
    from .transport.channel import Channel, Listener, connect
    from .transport.job import Job
    from .ui.tables import RIGHT, html_table, text_table
    from .worker import hooks, rank_context
    from .worker.api import is_metric, log_values
    from .worker.hooks import Observer
    from .worker.rank_context import RankContext, RankSide

_NAMES = {
    "engines.base": "Action Engine Exit Ranks",
    "engines.fork": "ForkEngine",
    "engines.spawn": "SpawnEngine",
    "errors": "LaunchError MissingExtra NbtrainError PlanError",
    "findings": "Finding",
    "lifecycle.launch_sides": "Companion LaunchSide",
    "lifecycle.run": "Run",
    "part": "Command Device PASS Part Typed",
    "planning.cell": "name_with_lookalikes",
    "planning.option_parser": "check_parsed parser plan_fields split_line",
    "planning.plan": "Call Cell Plan Task",
    "planning.secrets": "mask_source",
    "planning.world": "Placement",
    "system.files": "write_atomically",
    "system.instrumentation": "patch replace undo_later when_imported",
    "system.network": "is_loopback own_address",
    "system.text": "format_bytes format_duration format_ranks plural shorten with_article",
    "tracking": "clock events",
    "tracking.event_log": "EventWriter new_events",
    "tracking.limits": "POLL_INTERVAL_S UNRESPONSIVE_AFTER_S",
    "tracking.run_folder": "RunFolder",
    "tracking.state": "RankState RunState",
    "transport.channel": "Channel Listener connect",
    "transport.job": "Job",
    "ui.tables": "RIGHT html_table text_table",
    "worker": "hooks rank_context",
    "worker.api": "is_metric log_values",
    "worker.hooks": "Observer",
    "worker.rank_context": "RankContext RankSide",
}
"""The names of each module: classes, functions and constants, and modules of a room."""

_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [  # written out because type checkers read it; a test compares it with `_NAMES`
    "PASS",
    "POLL_INTERVAL_S",
    "RIGHT",
    "UNRESPONSIVE_AFTER_S",
    "Action",
    "Call",
    "Cell",
    "Channel",
    "Command",
    "Companion",
    "Device",
    "Engine",
    "EventWriter",
    "Exit",
    "Finding",
    "ForkEngine",
    "Job",
    "LaunchError",
    "LaunchSide",
    "Listener",
    "MissingExtra",
    "NbtrainError",
    "Observer",
    "Part",
    "Placement",
    "Plan",
    "PlanError",
    "RankContext",
    "RankSide",
    "RankState",
    "Ranks",
    "Run",
    "RunFolder",
    "RunState",
    "SpawnEngine",
    "Task",
    "Typed",
    "check_parsed",
    "clock",
    "connect",
    "events",
    "format_bytes",
    "format_duration",
    "format_ranks",
    "hooks",
    "html_table",
    "is_loopback",
    "is_metric",
    "log_values",
    "mask_source",
    "name_with_lookalikes",
    "new_events",
    "own_address",
    "parser",
    "patch",
    "plan_fields",
    "plural",
    "rank_context",
    "replace",
    "shorten",
    "split_line",
    "text_table",
    "undo_later",
    "when_imported",
    "with_article",
    "write_atomically",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name at its first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"{__name__} has no {name}: parts may use {', '.join(__all__)}")
    room = importlib.import_module(f"nbtrain.{_MODULES[name]}")
    if not hasattr(room, name):
        importlib.import_module(f"{room.__name__}.{name}")
    return globals().setdefault(name, getattr(room, name))
