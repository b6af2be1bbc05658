"""`RunState`: the state of a run, immutable, computed from its events by the reducers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..findings import Finding
from ..system.text import strip_escapes
from . import events as ev
from .curves import Curves
from .overview.timeline import Timeline

IDLE = "idle"
"""The status of a live rank that a task does not run on."""

SHORTEST = 0.1
"""Seconds that a rate covers, at least."""

SMOOTHED = 5.0
"""Seconds over which a rank's rates and its waiting are averaged."""


_ECHOING = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")

ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "read error",
    "timed out waiting",
    "nccl communicator was aborted",
    "remote process exited",
    "failed to recv, got 0 bytes",
    "socket timeout",
    "client socket has timed out",
    "watchdog caught collective operation timeout",
)
"""What torch says in a rank when another one went away: the echo of a failure, not its cause."""

ECHO_OF_JAX = "jax distributed service detected fatal errors"
"""What JAX prints before it aborts a process whose peer is gone."""

ECHOES_OF_ANY_TYPE = re.compile(
    r"gloo (?:all\w+|reduce\w*|collective\w+|broadcast|send|recv) failed"
    r"|collective ops is aborted by"
)
"""What JAX and TensorFlow say then, in errors of several types."""


@dataclass(frozen=True)
class ProgressBar:
    """A progress bar, as of `time`."""

    n: float = 0
    total: float | None = None
    elapsed: float = 0.0
    description: str = ""
    unit: str = "it"
    closed: bool = False
    time: float = field(default=0.0, compare=False)

    @property
    def fraction(self) -> float | None:
        return min(1.0, max(0.0, self.n / self.total)) if self.total else None

    @property
    def rate(self) -> float | None:
        return self.n / self.elapsed if self.elapsed > 0 and self.n > 0 else None

    @property
    def remaining(self) -> float | None:
        """Seconds left at the mean rate so far."""
        if self.closed or not self.rate or self.total is None:
            return None
        return max(0.0, self.total - self.n) / self.rate


@dataclass(frozen=True)
class TrainingProgress(ev.TrainingCounts):
    """How a rank's training goes, as of `time`, with rates that are smoothed."""

    time: float = 0.0
    step_rate: float | None = None
    """Steps per second, as are the rates of samples and batches."""
    sample_rate: float | None = None
    waiting: float | None = None
    """The share of time, 0 to 1, spent waiting for data."""
    batch_rate: float | None = None
    is_uneven: bool = False
    """Whether epochs differ in how many batches they have: then none tells how long others take."""

    @property
    def bar(self) -> ProgressBar | None:
        """Where the loader stands, for a loop that shows no bar of its own."""
        if self.batch is None:
            steps = ProgressBar(self.steps, None, self.elapsed, "", "step", time=self.time)
            return steps if self.steps else None
        name = "" if self.epoch is None else f"epoch {self.epoch}"
        # The rate of an epoch alone would begin anew with each.
        elapsed = self.batch / self.batch_rate if self.batch_rate else 0.0
        return ProgressBar(self.batch, self.batches, elapsed, name, "batch", time=self.time)


_COUNTS = tuple(f.name for f in fields(ev.TrainingCounts))


def progress_after(old: TrainingProgress | None, event: ev.TrainingUpdate) -> TrainingProgress:
    """Return how training goes after `event`."""
    old = old or TrainingProgress()
    counts: dict[str, Any] = {name: getattr(event, name) for name in _COUNTS}
    counts["precision"] = strip_escapes(event.precision, 20)
    if event.loss is None:
        counts["loss"] = old.loss
    if type(event.loops) is tuple and any(total < 1 for _, _, total, _ in event.loops):
        counts["loops"] = ()
    sizes = old.batches or 0, event.batches or 0
    uneven = old.is_uneven or (min(sizes) > 0 and max(sizes) - min(sizes) > 0.1 * max(sizes))
    return TrainingProgress(**counts, time=event.time, is_uneven=uneven, **_rates(old, event))


def _rates(old: TrainingProgress, event: ev.TrainingUpdate) -> dict[str, Any]:
    """Return rates and the share of waiting, averaged over the last seconds."""
    seconds = event.elapsed - old.elapsed
    # Nothing new, or counted anew; or a first moment, which shows no rate.
    is_too_soon = seconds < SHORTEST or event.steps < old.steps or event.waited < old.waited
    # As long as less than that has passed, what is known is the mean of all: a first interval,
    # which warms up, counts no more than another.
    whole = 1 - math.exp(-max(seconds, event.elapsed) / SMOOTHED) if seconds > 0 else 1.0
    weight = (1 - math.exp(-max(0.0, seconds) / SMOOTHED)) / whole

    def smooth(before: float | None, count: float | None) -> float | None:
        if is_too_soon or count is None or count < 0:
            return before
        now = count / seconds
        return now if before is None else before + weight * (now - before)

    samples = None if event.samples is None else event.samples - (old.samples or 0)
    waited = min(seconds, event.waited - old.waited)
    return {
        "step_rate": smooth(old.step_rate, event.steps - old.steps),
        "sample_rate": smooth(old.sample_rate, samples),
        "waiting": smooth(old.waiting, waited),
        "batch_rate": smooth(old.batch_rate, _batches_since(old, event)),
    }


def _batches_since(old: TrainingProgress, event: ev.TrainingUpdate) -> int | None:
    """Return how many batches there were since `old`; None where that is not known."""
    if event.batch is None or event.epoch is None:
        return None
    if old.epoch is None or event.epoch == old.epoch:
        return event.batch - (old.batch or 0)
    if old.batch is None or old.batches is None:
        return None
    return old.batches - old.batch + (event.epoch - old.epoch - 1) * old.batches + event.batch


@dataclass(frozen=True)
class ResourceUsage:
    """What a rank uses of its host and its GPU."""

    cpu: float | None = None
    """Cores."""
    memory: int | None = None
    """Bytes, as are all memories here."""
    gpu: int | None = None
    """The index of its GPU."""
    gpu_memory: int | None = None
    first_memory: int | None = None
    """When it was measured for the first time."""
    measured: float | None = None
    """When it was measured last."""
    most_memory: int | None = None
    most_gpu_memory: int | None = None
    on: str = ""
    """The kind of device that has its weights, gradients and optimizer states."""
    weights: int = 0
    """The most that there was, as of gradients and optimizer states."""
    gradients: int = 0
    optimizer_states: int = 0

    @property
    def counted(self) -> int:
        """The bytes of all tensors that were counted."""
        return self.weights + self.gradients + self.optimizer_states

    def after_measuring(self, event: ev.Resources) -> ResourceUsage:
        """Return the usage after it was measured from outside."""
        return replace(
            self,
            cpu=event.cpu,
            memory=event.memory,
            gpu=event.gpu,
            gpu_memory=event.gpu_memory,
            first_memory=event.memory if self.first_memory is None else self.first_memory,
            measured=event.time,
            most_memory=_larger(self.most_memory, event.memory),
            most_gpu_memory=_larger(self.most_gpu_memory, event.gpu_memory),
        )

    def after_counting(self, event: ev.TensorMemory) -> ResourceUsage:
        """Return the usage after the rank has counted its tensors."""
        return replace(
            self,
            on=event.on,
            weights=max(self.weights, event.weights),
            gradients=max(self.gradients, event.gradients),
            optimizer_states=max(self.optimizer_states, event.optimizer_states),
        )


def _larger(old: int | None, new: int | None) -> int | None:
    return max((n for n in (old, new) if n is not None), default=None)


REST = "Python, libraries, activations"
"""The part of a host's memory that cannot be divided further."""


@dataclass(frozen=True)
class EpochRow:
    """What a rank came to in an epoch."""

    epoch: int
    """As the loop counts it."""
    steps: int
    """Optimizer steps since the start."""
    seconds: float
    loss: float | None = None
    """The mean of its losses."""
    metrics: Mapping[str, float | str] = field(default_factory=dict)
    """The last values logged from its first step to the next epoch's."""
    ended: float = 0.0
    """Seconds since the epoch; with its validation."""
    training: int = 1
    """As in `events.EpochEnd`."""


@dataclass(frozen=True)
class RankState:
    """One rank."""

    rank: int
    status: str = "starting"
    """Starting, running, failing, done, failed or stopped."""
    phase: str = ""
    """What a running rank is busy with, where that is not training."""
    phases: tuple[tuple[str, float], ...] = ()
    """The phases before its first step, each with when it began."""
    debugger: str = ""
    """The address of the debugger that waits in it."""
    hang: str = ""
    """What the rank does in a hang: 'stuck?', 'waiting', or, of its own pace, 'slow?'."""
    pid: int | None = None
    node: str = ""
    """The name of its host, where that is not the launcher's."""
    started: float | None = None
    ended: float | None = None
    bars: Mapping[int, ProgressBar] = field(default_factory=dict)
    metrics: Mapping[str, float | str] = field(default_factory=dict)
    """The last values logged, of at most `reducers.METRICS` names."""
    fresh: frozenset[str] = frozenset()
    """The names of metrics that were logged in the present epoch."""
    epochs: tuple[EpochRow, ...] = ()
    """The epochs that are over, at most `reducers.EPOCHS`."""
    timeline: Timeline = field(default_factory=Timeline)
    """What it did over time."""
    step: int | None = None
    steps_before: int = 0
    """Optimizer steps of the attempts before this one."""
    progress: TrainingProgress | None = None
    usage: ResourceUsage = field(default_factory=ResourceUsage)
    compiled: tuple[int, float] | None = None
    """How many programs torch_xla compiled, and in how many seconds."""
    log: tuple[str, ...] = ()
    """Its last lines, at most `reducers.LOG_LINES`."""
    log_count: int = 0
    """How many lines were seen; a log that grew by tens of MiB at once has more."""
    error: str | None = None
    error_type: str = ""
    """The name of the exception's class, or `events.OS_EXIT`."""
    result: str | None = None
    checksum: str = ""
    """As in `events.Ended`."""
    returncode: int | None = None
    cause: str = ""
    cause_code: str = ""
    """As in `events.Exited`."""
    evidence: tuple[Finding, ...] = ()
    """What the rank or its host saw of how it ended."""
    collectives: tuple[tuple[int, str, str, bool], ...] = ()
    """As in `events.Ended`."""
    saved: tuple[ev.ArtifactSaved, ...] = ()
    """What it saved for the notebook."""
    displayed: tuple[ev.Displayed, ...] = ()
    """What it displayed, at most `reducers.DISPLAYS`."""

    @property
    def is_over(self) -> bool:
        return self.status in ("done", "failed", "stopped", IDLE)

    @property
    def has_left(self) -> bool:
        """Whether its code called ``sys.exit`` or ``os._exit``."""
        return self.error_type in (SystemExit.__name__, ev.OS_EXIT)

    @property
    def has_lost_peers(self) -> bool:
        """Whether it failed as a rank does when another one went away."""
        return is_secondary_failure(self.error_type, self.error or "")

    @property
    def nest(self) -> list[ProgressBar]:
        """The bars that move, from the outside in; if none does, those that ended last.

        A bar that ended before the training went on (of a download, of a model's weights) is none.
        """
        moving = [bar for bar in self.bars.values() if not bar.closed]
        trained = self.progress.time if self.progress is not None and self.progress.steps else 0.0
        ended = [b for b in self.bars.values() if b.time >= trained or self.is_over]
        return moving or ended[::-1]

    @property
    def bar(self) -> ProgressBar | None:
        """The bar to show where there is room for one: the innermost.

        Without any, the one that the training itself makes.
        """
        made = self.progress.bar if self.progress is not None else None
        return next(reversed(self.nest), made)

    @property
    def loss(self) -> float | None:
        """The last loss: the one that was logged, else the one that was seen."""
        logged = self.metrics.get("loss")
        if isinstance(logged, (int, float)):
            return logged
        return self.progress.loss if self.progress is not None else None

    @property
    def has_lost_its_loss(self) -> bool:
        """Whether the last steps were made with a loss that is not finite.

        Where no loss was seen, the one that was logged tells: whether a step followed is not known.
        """
        if self.progress is not None and self.progress.loss is not None:
            return self.progress.has_diverged
        losses = [v for name, v in self.metrics.items() if ev.is_training_loss(name)]
        return any(isinstance(v, float) and not math.isfinite(v) for v in losses)

    def bytes_by_part(self, *, most: bool = False) -> dict[str, int]:
        """Return the bytes that the rank holds on its GPU, else in its host's memory, by part.

        As of now, or (`most`) when it held most. Weights, gradients and optimizer states are
        counted in the rank; the rest is what torch, or the system, reports beyond them. Parts that
        are not known are left out, and so are those that would be less than nothing: memory shared
        with the notebook counts for neither.
        """
        usage, progress = self.usage, self.progress or TrainingProgress()
        known = {
            "weights": usage.weights,
            "gradients": usage.gradients,
            "optimizer states": usage.optimizer_states,
        }
        peak, reserved = progress.peak, progress.reserved
        if peak and usage.on != "cpu":
            beyond = "activations, temporary buffers" if usage.counted else "allocated"
            rest = {beyond: peak - usage.counted}
            if reserved is not None:
                total = usage.most_gpu_memory if most else usage.gpu_memory
                rest["allocator's reserve"] = reserved - peak
                rest["CUDA context"] = 0 if total is None else total - max(peak, reserved)
        else:
            memory = usage.most_memory if most else usage.memory
            in_memory = usage.on == "cpu" and memory is not None
            rest = {REST: (memory or 0) - usage.counted if in_memory else 0}
        return {name: size for name, size in {**known, **rest}.items() if size > 0}


@dataclass(frozen=True)
class EarlierRun:
    """The curve of the notebook's last run of the same name, to compare with."""

    title: str
    """``train #11``."""
    metric: str
    points: tuple[tuple[float, float], ...]
    """Steps and smoothed values, two or more."""

    @property
    def number(self) -> str:
        """What tells it from the run that is shown, which has the same name: ``#11``."""
        return self.title.rpartition(" ")[2]


@dataclass(frozen=True)
class RunState:
    """A whole run."""

    name: str
    engine: str
    ranks: tuple[RankState, ...]
    created: float
    mixed_precision: str = "no"
    device: str = "cpu"
    is_live: bool = False
    """Whether its ranks are live ones, which stay between the cells."""
    status: str = "starting"
    """Starting, running, stopping, succeeded, failed, interrupted, timed out or lost."""
    ended: float | None = None
    message: str = ""
    remedy: str = ""
    """What to do about the message."""
    code: str = ""
    """Why the run ended so, for programs; see `events.Finished`."""
    findings: tuple[Finding, ...] = ()
    """What may go wrong, seen before the run started or since; the newest first."""
    attempt: int = 1
    attempts: int = 1
    """How many attempts there are at most."""
    restarts: tuple[tuple[float, float], ...] = ()
    """When each attempt but the first began, and how far the curves were."""
    curves: Curves = field(default_factory=Curves)
    hosts: Mapping[str, ev.Host] = field(default_factory=dict)
    """How hosts were when last measured, by name; "" is the launcher's own."""
    gpu_memory: tuple[ev.GpuMemory, ...] = ()
    """Of the launcher's GPUs, before the ranks started and after they ended."""
    hang: str = ""
    """Which ranks hang, and where."""
    if_killed: tuple[str, ...] = ()
    """What may have used the memory, should a rank be killed for want of it."""
    loaded: Mapping[str, ev.ArtifactLoaded] = field(default_factory=dict)
    """What the notebook loaded of what ranks saved, by name."""
    flaws: tuple[str, ...] = ()
    """What notes say of the result, in a few words: that it is wrong."""
    not_finite: ev.NotFinite | None = None
    """The first loss of any rank that was not finite."""
    number: int | None = None
    """By which people call it: ``train #12``."""
    cell: int | None = None
    """The number of the cell that runs, where it has no function: `name` is a line of it."""
    earlier: EarlierRun | None = None
    clock_offset: float | None = None
    """Of the launcher's `clock`, which dates the events; None if it is of another host or boot."""

    @property
    def is_over(self) -> bool:
        return self.ended is not None

    @property
    def title(self) -> str:
        """What people call it in short: ``train(model)``, ``cell [12]``."""
        return self.name if self.cell is None else f"cell [{self.cell}]"

    @property
    def full_title(self) -> str:
        """The title, that of a cell with its first telling line."""
        return self.name if self.cell is None else f"{self.title} {self.name}"

    @property
    def explanation(self) -> str:
        """The message, and what to do about it."""
        return f"{self.message} {self.remedy}".rstrip()

    @property
    def notes(self) -> tuple[str, ...]:
        """The findings as people read them: one line each."""
        return tuple(finding.shown for finding in self.findings)

    @property
    def flaw(self) -> str:
        """What makes the result of the run wrong although no rank failed; "" for nothing."""
        for rank in self.ranks:
            if self.not_finite is not None and rank.has_lost_its_loss:
                return not_finite_loss(self.not_finite)
        spoiled = [saved for rank in self.ranks for saved in rank.saved if saved.not_finite]
        if spoiled:
            return f"`{spoiled[0].not_finite}` of `{spoiled[0].name}` is not finite"
        missing = [name for name, loaded in self.loaded.items() if loaded.trouble]
        failed = "cannot be read" if ev.RETURNED in missing[:1] else "was not updated"
        if missing and self.loaded[missing[0]].code == ev.NO_VARIABLE:  # there was none before
            failed = "was not returned"
        return next(iter(self.flaws), f"{missing[0]} {failed}" if missing else "")

    @property
    def precision(self) -> str:
        """What ranks really train in; before that is known, what the launch asked for."""
        known = (rank.progress.precision for rank in self.ranks if rank.progress is not None)
        return next(filter(None, known), self.mixed_precision)

    @property
    def outcome(self) -> str:
        """The status as people read it: a run that ended with a flaw has not just succeeded."""
        return outcome(self.status, self.flaw)

    @property
    def host(self) -> ev.Host | None:
        """What the launcher's own host had left, if ranks run there."""
        return self.hosts.get("")

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def elapsed(self, now: float) -> float:
        """Seconds since the launch, or that the run took."""
        return max(0.0, (self.ended if self.ended is not None else now) - self.created)


def outcome(status: str, flaw: str) -> str:
    """Return how a run ended, for people: ``finished, but …`` where its result is wrong."""
    return f"finished, but {flaw}" if flaw and status == "succeeded" else status


def not_finite_loss(event: ev.NotFinite) -> str:
    """Describe the first loss that was not finite: ``the loss of rank 1 became nan by step 5``."""
    loss = strip_escapes(event.loss, 10)
    step = f" by step {event.step + 1}" if event.step >= 0 else ""
    return f"the loss of rank {event.loss_rank} became {loss}{step}"


def is_secondary_failure(error_type: str, text: str) -> bool:
    """Whether an error is what a rank raises when another one went away."""
    text = text.lower()
    is_echo = error_type in _ECHOING and any(echo in text for echo in ECHOES)
    return is_echo or bool(ECHOES_OF_ANY_TYPE.search(text))
