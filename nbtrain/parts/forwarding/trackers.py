"""Sends a run to a tracker of experiments, through Accelerate's class for it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...lifecycle.run_info import run_info
from ...part_api import MAX_TEXT_CHARS, RunFolder, RunState, mask_text, strip_escapes
from ...part_api import events as ev
from ...planning.option_types import OF_ALL
from ...tracking.overview import history
from ...ui.limits import REPORT_INTERVAL_S
from .notifications import reason

STEP_TIMEOUT_S = 30.0
"""Seconds that a step waits for the ranks that did not report it: steps are sent in order."""

PROJECT = "nbtrain"
"""The project (experiment) of runs, where the tracker's own variable names no other."""

_VARIABLES = {"wandb": "WANDB_PROJECT", "comet_ml": "COMET_PROJECT_NAME"}
"""Which variable names the project: an argument of the tracker would come before it."""

_NAMED_BY = {"clearml": "task_name", "swanlab": "experiment_name", "mlflow": "run_name"}
"""How a tracker calls the argument that names the run, where that is not `name`."""


class RunTracker:
    """One run of a tracker, for a run of however many ranks."""

    def __init__(self, option: str, folder: RunFolder) -> None:
        self.name = option.removesuffix(OF_ALL)
        self._folder = folder
        self._means = StepMeans(every_rank=option.endswith(OF_ALL))
        self._machine = Machine()
        self._notes: set[str] = set()
        self._tracker: Any = None

    def start(self, state: RunState) -> None:
        """Begin a run of the tracker, and send what is known before the ranks start."""
        self._tracker = _start_tracker(self.name, self._folder.path.name)
        self._tracker.store_init_configuration(self._config(state))
        self._take_notes(state)

    def take(self, events: Sequence[ev.Event], state: RunState) -> None:
        """Send the steps that are complete, and what is new of the machine and the notes."""
        for step, values in self._means.add(events, state.world_size):
            self._log(values, step)
        if figures := self._machine.add(events):
            self._log(figures, self._means.last)
        self._take_notes(state)

    def finish(self, state: RunState) -> None:
        """Send the rest and how the run ended, and end the tracker's run."""
        for step, values in self._means.rest():
            self._log(values, step)
        if figures := self._machine.means():
            self._log(figures, self._means.last)
        self._take_notes(state)
        self._say("outcome", state.outcome)
        if why := reason(state):
            self._say("reason", why)
        _end(self.name, self._tracker, has_failed=state.status != "succeeded")

    def explain(self, error: BaseException) -> str:
        """Return the text of the note for an error of the tracker."""
        text = strip_escapes(mask_text(str(error)[:MAX_TEXT_CHARS]), 300) or type(error).__name__
        return f"the tracker failed ({type(error).__name__}: {text})"

    def _config(self, state: RunState) -> dict[str, Any]:
        """Return the configuration for the tracker: the function's arguments, and the run's."""
        info = run_info(self._folder)
        own = {
            "run": info.name,
            "title": info.title,
            "folder": str(self._folder.path),
            "ranks": info.ranks,
            "engine": info.engine,
            "device": state.device,
            "mixed_precision": info.mixed_precision or "no",
        }
        given = {k: "None" if v is None else v for k, v in info.parameters.items()}
        ours = {f"nbtrain/{key}": value for key, value in own.items()}
        return {self._clean_name(name): value for name, value in {**given, **ours}.items()}

    def _take_notes(self, state: RunState) -> None:
        """Send new notes, hangs, and requests of the user that were carried out."""
        for note in [*state.notes, state.hang, *(each.text for each in state.changes)]:
            if note and note not in self._notes:
                self._notes.add(note)
                self._say(f"note {len(self._notes)}", note)

    def _say(self, name: str, text: str) -> None:
        """Send a text: trackers whose metrics are numbers have another place for it."""
        name = f"nbtrain/{name}"
        if self.name == "mlflow":
            import mlflow

            mlflow.set_tag(name, text[:5000])
        elif self.name == "wandb":
            self._tracker.tracker.summary[name] = text
        elif self.name == "clearml":
            self._tracker.tracker.get_logger().report_text(f"{name}: {text}", print_console=False)
        else:
            self._tracker.log({name: text}, step=self._means.last)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._tracker.log({self._clean_name(name): v for name, v in values.items()}, step=step)

    def _clean_name(self, name: str) -> str:
        return re.sub(r"[^\w\-. :/]", "_", name) if self.name == "mlflow" else name


def _start_tracker(name: str, run: str) -> Any:
    """Return Accelerate's tracker of this name, with a new run in it.

    It is made without Accelerate's state, which would initialise the devices that the ranks need.
    For the whole process, it replaces Accelerate's logger and makes wandb silent.
    """
    from accelerate import tracking

    tracking.logger = _Logger(__name__)
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_CONSOLE", "off")
    known: type[Any] = tracking.LOGGER_TYPE_TO_CLASS[name]
    kind = type(known.__name__, (known,), {"main_process_only": False})
    if name == "tensorboard":
        tracker = kind(run, logging_dir="runs")
    elif name == "dvclive":
        tracker = kind(run)
    else:
        project = os.environ.get(_VARIABLES.get(name, ""), PROJECT)
        tracker = kind(project, **{_NAMED_BY.get(name, "name"): run})
    if hasattr(tracker, "start"):  # since Accelerate 1.8; before, it began when it was made
        tracker.start()
    return tracker


class _Logger(logging.Logger):
    """Replaces Accelerate's logger, which needs Accelerate's state."""

    warning_once = logging.Logger.warning


def _end(name: str, tracker: Any, *, has_failed: bool) -> None:
    """End the tracker's run; where it has a place for it, as one that failed."""
    if has_failed and name == "wandb":
        tracker.tracker.finish(exit_code=1)
    elif has_failed and name == "mlflow":
        import mlflow

        mlflow.end_run("FAILED")
    else:
        tracker.finish()


@dataclass
class StepMeans:
    """Means over ranks, step by step, each once all ranks have passed it or enough time has."""

    every_rank: bool = False
    last: int = 0
    """The last step that was sent."""
    _open: dict[int, dict[str, dict[int, float]]] = field(default_factory=dict)
    _began: dict[int, float] = field(default_factory=dict)
    _newest: dict[int, int] = field(default_factory=dict)
    _before: dict[int, ev.Event] = field(default_factory=dict)
    _by_user: set[str] = field(default_factory=set)
    _time: float = 0.0

    def add(
        self, events: Sequence[ev.Event], world_size: int
    ) -> list[tuple[int, dict[str, float]]]:
        """Add events; return the steps that are complete, each with its means by name, in order.

        A step is complete when all ranks have passed it, or about 30 s after it began. A new
        attempt completes all steps before it. Each step is returned once.
        """
        before = []
        if any(isinstance(event, ev.Attempt) for event in events):  # which goes over steps again
            before = self.rest()
            self._newest.clear()
            self._before.clear()
        for row in self._rows(events):
            rank = row["rank"]
            step = self._newest.get(rank, 0) if row["step"] is None else row["step"]
            self._newest[rank] = max(step, self._newest.get(rank, 0))
            self._time = max(self._time, row["time"])
            for name, value in row.items():
                if name not in history.KEYS and history.is_number(value):
                    self._began.setdefault(step, row["time"])
                    self._open.setdefault(step, {}).setdefault(name, {})[rank] = float(value)
        passed = min(self._newest.values()) if len(self._newest) == world_size else -1
        late = self._time - STEP_TIMEOUT_S
        return before + self._pop_steps(lambda step: step < passed or self._began[step] < late)

    def rest(self) -> list[tuple[int, dict[str, float]]]:
        """Return the steps that were not complete."""
        return self._pop_steps(lambda step: True)

    def _rows(self, events: Iterable[ev.Event]) -> list[history.Row]:
        """Return the rows of the history that the events add, of all ranks in order of time."""
        of_ranks: dict[int, list[ev.Event]] = {}
        for event in events:
            if isinstance(event, (ev.Metrics, ev.TrainingUpdate)):
                of_ranks.setdefault(event.rank, []).append(event)
        rows: list[history.Row] = []
        for rank, own in of_ranks.items():
            logged = [event for event in own if isinstance(event, ev.Metrics)]
            seen: list[ev.Event] = [e for e in own if isinstance(e, ev.TrainingUpdate)]
            self._by_user |= {name for event in logged for name in event.values}
            before = self._before.get(rank)  # for the rate since then; its own row was sent
            for row in history.merge_rows([[*([before] if before else []), *seen]]):
                if before is None or row["time"] != before.time:
                    left = {k: v for k, v in row.items() if k not in self._by_user}
                    rows.append({**left, "rank": rank})
            rows += [{**row, "rank": rank} for row in history.merge_rows([logged])]
            self._before |= {rank: seen[-1]} if seen else {}
        rows.sort(key=lambda row: float(row["time"]))
        return rows

    def _pop_steps(self, is_closed: Callable[[int], bool]) -> list[tuple[int, dict[str, float]]]:
        """Return the means of the steps that are closed, in order, and forget them."""
        steps = []
        for step in sorted(filter(is_closed, self._open)):
            self._began.pop(step, None)
            steps.append((step, self._means_of(self._open.pop(step))))
            self.last = max(self.last, step)
        return steps

    def _means_of(self, values: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
        means = {name: sum(ranks.values()) / len(ranks) for name, ranks in values.items()}
        if self.every_rank:
            means |= {f"{n}/rank {r}": v for n, ranks in values.items() for r, v in ranks.items()}
        return means


@dataclass
class Machine:
    """What ranks and their host use, averaged over some seconds."""

    _values: dict[str, list[float]] = field(default_factory=dict)
    _since: float = 0.0
    _last: float = 0.0

    def add(self, events: Iterable[ev.Event]) -> dict[str, float]:
        """Add events; about every 10 s, return the means by name since the last ones.

        Empty in between.
        """
        for event in events:
            for name, value in _figures(event):
                self._since, self._last = self._since or event.time, event.time
                self._values.setdefault(f"system/{name}", []).append(value)
        return self.means() if self._last > self._since + REPORT_INTERVAL_S else {}

    def means(self) -> dict[str, float]:
        """Return the figures since the last ones."""
        values, self._values, self._since, self._last = self._values, {}, 0.0, 0.0
        return {name: sum(each) / len(each) for name, each in values.items()}


def _figures(event: ev.Event) -> Iterable[tuple[str, float]]:
    """Return the machine's figures of one event by name: CPU cores, GiB, and percent of a GPU.

    Empty for an event that has none.
    """
    if isinstance(event, ev.Resources):
        gpu = event.gpu_memory
        every = {
            "cpu cores per rank": event.cpu,
            "memory GiB per rank": None if event.memory is None else event.memory / (1 << 30),
            "gpu memory GiB per rank": None if gpu is None else gpu / (1 << 30),
        }
        return [(name, value) for name, value in every.items() if value is not None]
    if isinstance(event, ev.Host):
        host = [("host memory GiB", event.used / (1 << 30))]
        return [*host, *((f"gpu {n} percent", use) for n, *_, use in event.gpus if use is not None)]
    return ()
