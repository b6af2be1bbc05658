"""What a part may rely on, in this package or in another one: import it from here.

These names keep their meaning from one minor version to the next, as those of `nbtrain` do; all
others may change with any version. Each is imported at its first use, because a rank needs few.

- What a part is: `Part`, `Command`, `Device`, `Typed`, `PASS`. See `nbtrain.part`.
- A launch: `Plan`, whose `Task` is a `Call` or a `Cell`; the `Job` that is made of it; a `Finding`
  to show; `PlanError`, `LaunchError` and `MissingExtra` to raise. `run_plan` launches a plan.
- In the notebook: a `LaunchSide` acts before and after a launch, a `Companion` while it runs. A
  `CellPlace` runs cells elsewhere than on new ranks, and a `Display` shows a run.
- In a rank: a `RankSide` acts before and after the task, with the rank's `RankContext`. An
  `Observer` that is given to ``hooks.add`` gets the events of the training, and reports figures by
  `log_values`.
- A way to start ranks: a subclass of `Engine` (of `ForkEngine` or `SpawnEngine`) with its `Ranks`.
- A run's folder and what is in it: `RunFolder`, `EventWriter`, `new_events`, `events`, `RunState`.
  An `OrderWriter` passes orders of the launcher to the `OrderReader` of each rank.
- A process of its own: `ready_to_fork`, `fork_process`, `kernel_detach`; a `Channel` to one;
  `task_values`, `payload` and `result_pickler` for what is sent there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; a test compares it with `_NAMES`
    from .engines.base import SIGNALS, Action, Engine, Exit, Ranks
    from .engines.fork import ForkEngine
    from .engines.limits import UNKILLABLE_AFTER_S
    from .engines.process import kernel_detach
    from .engines.process.forking import fork_process, ready_to_fork
    from .engines.process.interpreter import interpreter_command
    from .engines.spawn import SpawnEngine
    from .errors import LaunchError, MissingExtra, NbtrainError, PlanError, RankDied
    from .findings import Finding
    from .lifecycle.catalog import find_run
    from .lifecycle.launch_sides import CellPlace, Companion, LaunchSide
    from .lifecycle.launcher import run_plan, run_submitted
    from .lifecycle.limits import FAILURE_REPORT_TIMEOUT_S, START_TIMEOUT_S
    from .lifecycle.run import Run, last_run, set_last_run, wait_for_state
    from .part import PASS, Command, Device, Part, Typed, load, load_provided
    from .planning import task_values
    from .planning.cell import name_with_lookalikes
    from .planning.option_parser import check_parsed, parser, plan_fields, split_line
    from .planning.option_types import Option, check_allowed
    from .planning.plan import OPTIONS, Call, Cell, Plan, Task
    from .planning.secrets import mask_source, mask_text
    from .planning.world import Placement
    from .system import host
    from .system.files import read_regular, write_atomically
    from .system.instrumentation import patch, replace, scope, undo_later, when_imported
    from .system.network import is_loopback, own_address
    from .system.source_files import is_library
    from .system.text import (
        format_bytes,
        format_duration,
        format_ranks,
        plural,
        short_repr,
        shorten,
        strip_escapes,
        with_article,
    )
    from .tracking import clock, events
    from .tracking.event_log import EventWriter, Reader, all_events, event_tail, new_events
    from .tracking.launch_log import LOGGER, attempt, printed_in
    from .tracking.limits import POLL_INTERVAL_S, UNRESPONSIVE_AFTER_S
    from .tracking.run_folder import JobState, RunFolder, is_queued, mark_stopping, set_scheduler
    from .tracking.state import IDLE, RankState, RunState, is_secondary_failure
    from .transport import payload, result_pickler
    from .transport.channel import Address, Channel, Listener, connect, fill_memory_file
    from .transport.file_sync import FileCopies, file_size, read_appended
    from .transport.job import Job
    from .transport.limits import CONNECT_TIMEOUT_S, MAX_TEXT_CHARS
    from .transport.orders import OrderReader, OrderWriter
    from .ui import run_texts
    from .ui.displays import prompt
    from .ui.displays.html_display import Display, show
    from .ui.tables import LEFT, RIGHT, html_table, text_table
    from .worker import hooks, rank_context
    from .worker.api import is_metric, log_values
    from .worker.hooks import Observer
    from .worker.hooks.guard import guard_step
    from .worker.limits import REPORT_INTERVAL_S
    from .worker.rank_context import RankContext, RankSide
    from .worker.rank_environment import rank_environment
    from .worker.task_runner import failing_plan, run_task

_NAMES = {
    "engines.base": "SIGNALS Action Engine Exit Ranks",
    "engines.fork": "ForkEngine",
    "engines.limits": "UNKILLABLE_AFTER_S",
    "engines.process": "kernel_detach",
    "engines.process.forking": "fork_process ready_to_fork",
    "engines.process.interpreter": "interpreter_command",
    "engines.spawn": "SpawnEngine",
    "errors": "LaunchError MissingExtra NbtrainError PlanError RankDied",
    "findings": "Finding",
    "lifecycle.catalog": "find_run",
    "lifecycle.launch_sides": "CellPlace Companion LaunchSide",
    "lifecycle.launcher": "run_plan run_submitted",
    "lifecycle.limits": "FAILURE_REPORT_TIMEOUT_S START_TIMEOUT_S",
    "lifecycle.run": "Run last_run set_last_run wait_for_state",
    "part": "Command Device PASS Part Typed load load_provided",
    "planning": "task_values",
    "planning.cell": "name_with_lookalikes",
    "planning.option_parser": "check_parsed parser plan_fields split_line",
    "planning.option_types": "Option check_allowed",
    "planning.plan": "OPTIONS Call Cell Plan Task",
    "planning.secrets": "mask_source mask_text",
    "planning.world": "Placement",
    "system": "host",
    "system.files": "read_regular write_atomically",
    "system.instrumentation": "patch replace scope undo_later when_imported",
    "system.source_files": "is_library",
    "system.network": "is_loopback own_address",
    "system.text": "format_bytes format_duration format_ranks plural short_repr shorten "
    "strip_escapes with_article",
    "tracking": "clock events",
    "tracking.event_log": "EventWriter Reader all_events event_tail new_events",
    "tracking.launch_log": "LOGGER attempt printed_in",
    "tracking.limits": "POLL_INTERVAL_S UNRESPONSIVE_AFTER_S",
    "tracking.run_folder": "JobState RunFolder is_queued mark_stopping set_scheduler",
    "tracking.state": "IDLE RankState RunState is_secondary_failure",
    "transport": "payload result_pickler",
    "transport.channel": "Address Channel Listener connect fill_memory_file",
    "transport.file_sync": "FileCopies file_size read_appended",
    "transport.job": "Job",
    "transport.orders": "OrderReader OrderWriter",
    "transport.limits": "CONNECT_TIMEOUT_S MAX_TEXT_CHARS",
    "ui": "run_texts",
    "ui.displays": "prompt",
    "ui.displays.html_display": "Display show",
    "ui.tables": "LEFT RIGHT html_table text_table",
    "worker": "hooks rank_context",
    "worker.api": "is_metric log_values",
    "worker.hooks": "Observer",
    "worker.hooks.guard": "guard_step",
    "worker.limits": "REPORT_INTERVAL_S",
    "worker.rank_context": "RankContext RankSide",
    "worker.rank_environment": "rank_environment",
    "worker.task_runner": "failing_plan run_task",
}
"""The names of each module: classes, functions and constants, and modules of a room."""

_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [  # written out because type checkers read it; a test compares it with `_NAMES`
    "CONNECT_TIMEOUT_S", "FAILURE_REPORT_TIMEOUT_S", "IDLE", "LEFT", "LOGGER", "MAX_TEXT_CHARS",
    "OPTIONS", "PASS", "POLL_INTERVAL_S", "REPORT_INTERVAL_S", "RIGHT", "SIGNALS",
    "START_TIMEOUT_S",
    "UNKILLABLE_AFTER_S", "UNRESPONSIVE_AFTER_S", "Action", "Address", "Call", "Cell", "CellPlace",
    "Channel", "Command", "Companion", "Device", "Display", "Engine", "EventWriter", "Exit",
    "FileCopies", "Finding", "ForkEngine", "Job", "JobState", "LaunchError", "LaunchSide",
    "Listener", "MissingExtra", "NbtrainError", "Observer", "Option", "OrderReader", "OrderWriter",
    "Part", "Placement", "Plan", "PlanError", "RankContext", "RankDied", "RankSide", "RankState",
    "Ranks", "Reader", "Run", "RunFolder", "RunState", "SpawnEngine", "Task", "Typed", "all_events",
    "attempt", "check_allowed", "check_parsed", "clock", "connect", "event_tail", "events",
    "failing_plan", "file_size", "fill_memory_file", "find_run", "fork_process", "format_bytes",
    "format_duration", "format_ranks", "guard_step", "hooks", "host", "html_table",
    "interpreter_command", "is_library", "is_loopback", "is_metric", "is_queued",
    "is_secondary_failure", "kernel_detach", "last_run", "load", "load_provided", "log_values",
    "mark_stopping", "mask_source", "mask_text", "name_with_lookalikes", "new_events",
    "own_address", "parser",
    "patch", "payload", "plan_fields", "plural", "printed_in", "prompt", "rank_context",
    "rank_environment", "read_appended", "read_regular", "ready_to_fork", "replace",
    "result_pickler", "run_plan", "run_submitted", "run_task", "run_texts", "scope", "set_last_run",
    "set_scheduler", "short_repr", "shorten", "show", "split_line", "strip_escapes", "task_values",
    "text_table", "undo_later", "wait_for_state", "when_imported", "with_article",
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
