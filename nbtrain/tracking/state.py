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
from . import limits
from .curves import Curves
from .overview.timeline import Timeline

IDLE = "idle"
"""The status of a rank that waits for tasks and has no part in this one."""

_ECHO_TYPES = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")

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
"""What torch reports in a rank that lost its peers: the echo of a failure, not its cause."""

ECHO_OF_JAX = "jax distributed service detected fatal errors"
"""What JAX prints before it aborts a process that has lost its peers."""

ECHOES_OF_ANY_TYPE = re.compile(
    r"gloo (?:all\w+|reduce\w*|collective\w+|broadcast|send|recv) failed"
    r"|collective ops is aborted by"
)
"""What JAX and TensorFlow report then, in errors of several types."""


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
        """Seconds left at the mean rate."""
        if self.closed or not self.rate or self.total is None:
            return None
        return max(0.0, self.total - self.n) / self.rate


@dataclass(frozen=True)
class TrainingProgress(ev.TrainingCounts):
    """The counts and smoothed rates of a rank's training, as of `time`."""

    time: float = 0.0
    step_rate: float | None = None
    """Steps per second; the other rates are samples and batches per second."""
    sample_rate: float | None = None
    waiting: float | None = None
    """The share of time, 0 to 1, spent waiting for data."""
    batch_rate: float | None = None
    is_uneven: bool = False
    """Whether epochs have different numbers of batches, so that their duration is unknown."""

    @property
    def bar(self) -> ProgressBar | None:
        """A bar of the loader's batches, for a loop without a progress bar.

        Before the first batch was counted, a bar of the steps. Its total may be None. None before
        the first step.
        """
        if self.batch is None:
            steps = ProgressBar(self.steps, None, self.elapsed, "", "step", time=self.time)
            return steps if self.steps else None
        name = "" if self.epoch is None else f"epoch {self.epoch}"
        # Not the time in this epoch: the rate would start again with each epoch.
        elapsed = self.batch / self.batch_rate if self.batch_rate else 0.0
        return ProgressBar(self.batch, self.batches, elapsed, name, "batch", time=self.time)


_COUNTS = frozenset(f.name for f in fields(ev.TrainingCounts))


def progress_after(old: TrainingProgress | None, event: ev.TrainingUpdate) -> TrainingProgress:
    """Return the progress after `event`."""
    old = old or TrainingProgress()
    counts = {name: value for name, value in vars(event).items() if name in _COUNTS}
    counts["precision"] = strip_escapes(event.precision, 20)
    if event.loss is None:
        counts["loss"] = old.loss
    if type(event.loops) is tuple and any(total < 1 for _, _, total, _ in event.loops):
        counts["loops"] = ()
    # What was read before the first step is not trained with: Lightning tries the validation first.
    sizes = (old.steps and old.batches) or 0, event.batches or 0
    uneven = old.is_uneven or (min(sizes) > 0 and max(sizes) - min(sizes) > 0.1 * max(sizes))
    return TrainingProgress(**counts, time=event.time, is_uneven=uneven, **_rates(old, event))


def _rates(old: TrainingProgress, event: ev.TrainingUpdate) -> dict[str, Any]:
    """Return the rates and the share of waiting, averaged over the last seconds."""
    seconds = event.elapsed - old.elapsed
    # No new counts, counts that started again, or an interval that is too short for a rate.
    has_restarted = event.steps < old.steps or event.waited < old.waited
    has_no_rate = has_restarted or seconds < limits.TIMELINE_BIN_S
    # Until the window is full, the result is the mean of all intervals, so that the first one, in
    # which a training warms up, has no larger weight.
    window = (
        1 - math.exp(-max(seconds, event.elapsed) / limits.RATE_WINDOW_S) if seconds > 0 else 1.0
    )
    weight = (1 - math.exp(-max(0.0, seconds) / limits.RATE_WINDOW_S)) / window

    def smooth(before: float | None, count: float | None) -> float | None:
        if has_no_rate or count is None or count < 0:
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
    """Return the number of batches since `old`, or None."""
    if event.batch is None or event.epoch is None:
        return None
    if old.epoch is None or event.epoch == old.epoch:
        return event.batch - (old.batch or 0)
    if old.batch is None or old.batches is None:
        return None
    return old.batches - old.batch + (event.epoch - old.epoch - 1) * old.batches + event.batch


@dataclass(frozen=True)
class ResourceUsage:
    """The memory and CPU that a rank uses. All memory is in bytes."""

    cpu: float | None = None
    """Cores."""
    memory: int | None = None
    gpu: int | None = None
    """The index of its GPU."""
    gpu_memory: int | None = None
    first_memory: int | None = None
    """The memory at the first measurement."""
    measured: float | None = None
    """The time of the last measurement, in seconds since the epoch."""
    most_memory: int | None = None
    most_gpu_memory: int | None = None
    on: str = ""
    """The type of device with its weights, gradients and optimizer states."""
    weights: int = 0
    """The maximum, as for gradients and optimizer states."""
    gradients: int = 0
    optimizer_states: int = 0

    @property
    def tensor_bytes(self) -> int:
        """The bytes of weights, gradients and optimizer states."""
        return self.weights + self.gradients + self.optimizer_states

    def after_measuring(self, event: ev.Resources) -> ResourceUsage:
        """Return the usage after the launcher measured the rank."""
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
        """Return the usage after the rank counted its tensors."""
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
"""The part of a host's memory whose use is unknown."""


@dataclass(frozen=True)
class EpochRow:
    """The results of a rank in an epoch."""

    epoch: int
    """The number that the loop gives it."""
    steps: int
    """Optimizer steps since the start."""
    seconds: float
    loss: float | None = None
    """The mean of its losses."""
    metrics: Mapping[str, float | str] = field(default_factory=dict)
    """The last values logged between its first step and that of the next epoch."""
    ended: float = 0.0
    """Seconds since 1970, after its validation."""
    training: int = 1
    """As in `events.EpochEnd`."""


@dataclass(frozen=True)
class RankState:
    """One rank."""

    rank: int
    status: str = "starting"
    """Starting, running, failing, done, failed or stopped."""
    phase: str = ""
    """What a running rank does if it is not training."""
    phases: tuple[tuple[str, float], ...] = ()
    """The phases before its first step, each with its start."""
    debugger: str = ""
    """The address of a debugger that waits in it."""
    hang: str = ""
    """The rank's role in a hang: 'stuck?', 'waiting', or 'slow?' without a hang."""
    pid: int | None = None
    node: str = ""
    """The name of its host if that is not the launcher's."""
    started: float | None = None
    ended: float | None = None
    bars: Mapping[int, ProgressBar] = field(default_factory=dict)
    metrics: Mapping[str, float | str] = field(default_factory=dict)
    """The last value of each logged metric, up to `limits.MAX_METRICS`."""
    fresh: frozenset[str] = frozenset()
    """The names of metrics that were logged in the current epoch."""
    epochs: tuple[EpochRow, ...] = ()
    """The epochs that have ended."""
    timeline: Timeline = field(default_factory=Timeline)
    step: int | None = None
    steps_before: int = 0
    """Optimizer steps of earlier attempts."""
    progress: TrainingProgress | None = None
    usage: ResourceUsage = field(default_factory=ResourceUsage)
    compiled: tuple[int, float] | None = None
    """The number of programs that torch_xla compiled, and the seconds that this took."""
    log: tuple[str, ...] = ()
    """Its last lines."""
    log_count: int = 0
    """The number of its lines."""
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
    """What the rank or its host found out about its end."""
    collectives: tuple[tuple[int, str, str, bool], ...] = ()
    """As in `events.Ended`."""
    saved: tuple[ev.ArtifactSaved, ...] = ()
    """What it saved for the notebook."""
    displayed: tuple[ev.Displayed, ...] = ()
    """What it displayed."""
    boundary: ev.StepBoundary | None = None
    """Where it waited, or waits, for the last request to steer the training."""
    settings: ev.SettingsSeen | None = None
    """The settings that a slider can change; only the first rank reports them."""

    @property
    def is_over(self) -> bool:
        return self.status in ("done", "failed", "stopped", IDLE)

    @property
    def has_called_exit(self) -> bool:
        """Whether its code called ``sys.exit`` or ``os._exit``."""
        return self.error_type in (SystemExit.__name__, ev.OS_EXIT)

    @property
    def has_lost_peers(self) -> bool:
        """Whether it failed because another rank had ended."""
        return is_secondary_failure(self.error_type, self.error or "")

    @property
    def nest(self) -> list[ProgressBar]:
        """The open bars, from the outermost in, or the closed ones if no bar is open.

        A bar that was closed before the training continued, such as that of a download, is not
        included.
        """
        moving = [bar for bar in self.bars.values() if not bar.closed]
        trained = self.progress.time if self.progress is not None and self.progress.steps else 0.0
        ended = [b for b in self.bars.values() if b.time >= trained or self.is_over]
        return moving or ended[::-1]

    @property
    def bar(self) -> ProgressBar | None:
        """The innermost bar, or, without one, a bar of the training's batches."""
        training_bar = self.progress.bar if self.progress is not None else None
        return next(reversed(self.nest), training_bar)

    @property
    def loss(self) -> float | None:
        """The last loss that was logged, or otherwise the last that was observed."""
        logged = self.metrics.get("loss")
        if isinstance(logged, (int, float)):
            return logged
        return self.progress.loss if self.progress is not None else None

    @property
    def has_diverged(self) -> bool:
        """Whether the last steps were made with a loss that is not finite.

        If no loss was observed, the logged one decides, although no step may have followed it.
        """
        if self.progress is not None and self.progress.loss is not None:
            return self.progress.has_diverged
        losses = [v for name, v in self.metrics.items() if ev.is_training_loss(name)]
        return any(isinstance(v, float) and not math.isfinite(v) for v in losses)

    def bytes_by_part(self, *, most: bool = False) -> dict[str, int]:
        """Return the bytes that the rank uses on its GPU, or of its host's memory, by part.

        Returns the current bytes, or with `most` the maximum. Weights, gradients and optimizer
        states are counted in the rank; the rest is what torch or the system reports in addition.
        Parts that are unknown or negative are left out: memory shared with the notebook is in no
        part.
        """
        usage, progress = self.usage, self.progress or TrainingProgress()
        known = {
            "weights": usage.weights,
            "gradients": usage.gradients,
            "optimizer states": usage.optimizer_states,
        }
        peak, reserved = progress.peak, progress.reserved
        if peak and usage.on != "cpu":
            beyond = "activations, temporary buffers" if usage.tensor_bytes else "allocated"
            rest = {beyond: peak - usage.tensor_bytes}
            if reserved is not None:
                total = usage.most_gpu_memory if most else usage.gpu_memory
                rest["allocator's reserve"] = reserved - peak
                rest["CUDA context"] = 0 if total is None else total - max(peak, reserved)
        else:
            memory = usage.most_memory if most else usage.memory
            in_memory = usage.on == "cpu" and memory is not None
            rest = {REST: (memory or 0) - usage.tensor_bytes if in_memory else 0}
        return {name: size for name, size in {**known, **rest}.items() if size > 0}


@dataclass(frozen=True)
class PreviousRun:
    """The curve of the notebook's last run of the same name, for comparison."""

    title: str
    """``train #11``."""
    metric: str
    points: tuple[tuple[float, float], ...]
    """At least two steps with smoothed values."""

    @property
    def number(self) -> str:
        """The number at the end of the title, such as ``#11``: the two runs have one name."""
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
    takes_tasks: bool = False
    """Whether its ranks wait for tasks until they are stopped; the run has their name."""
    status: str = "starting"
    """Starting, running, stopping, succeeded, failed, interrupted, timed out or lost."""
    ended: float | None = None
    message: str = ""
    remedy: str = ""
    """What to do about the message."""
    code: str = ""
    """Why the run ended so, for programs; see `events.Finished`."""
    findings: tuple[Finding, ...] = ()
    """What may be wrong with the run, newest first."""
    attempt: int = 1
    attempts: int = 1
    """The maximum number of attempts."""
    restarts: tuple[tuple[float, float], ...] = ()
    """The start of each attempt except the first, and the last step of the curves then."""
    curves: Curves = field(default_factory=Curves)
    hosts: Mapping[str, ev.Host] = field(default_factory=dict)
    """The last measurement of each host, by name; "" is the launcher's host."""
    gpu_memory: tuple[ev.GpuMemory, ...] = ()
    """The launcher's GPUs before the ranks started and after they ended."""
    hang: str = ""
    """Which ranks hang, and where."""
    loaded: Mapping[str, ev.ArtifactLoaded] = field(default_factory=dict)
    """What the notebook has loaded, by name."""
    flaws: tuple[str, ...] = ()
    """Why the result is wrong, in a few words each."""
    not_finite: ev.NotFinite | None = None
    """The first loss of any rank that was not finite."""
    deadline: ev.Deadline | None = None
    """When something other than the run ends it."""
    steered: tuple[ev.Steered, ...] = ()
    """The user's requests to steer the training, in their order."""
    number: int | None = None
    """The number in ``train #12``."""
    cell: int | None = None
    """The number of the cell that runs, if it has no function; `name` is a line of it then."""
    previous: PreviousRun | None = None
    is_submitted: bool = False
    """Whether a scheduler starts it, in a job of a cluster."""
    is_queued: bool = False
    """Whether that job has not begun, so that the number of ranks may change."""
    clock_offset: float | None = None
    """The launcher's `clock.offset()`, or None if it is of another host or another boot."""

    @property
    def is_over(self) -> bool:
        return self.ended is not None

    @property
    def title(self) -> str:
        """The short title: ``train(model)``, ``cell [12]``."""
        return self.name if self.cell is None else f"cell [{self.cell}]"

    @property
    def full_title(self) -> str:
        """The title; for a cell, with the line that `name` has."""
        return self.name if self.cell is None else f"{self.title} {self.name}"

    @property
    def changes(self) -> tuple[ev.Steered, ...]:
        """What the user changed in the training, in the order of the steps."""
        return tuple(each for each in self.steered if each.change)

    @property
    def explanation(self) -> str:
        """The message, and what to do about it."""
        return f"{self.message} {self.remedy}".rstrip()

    @property
    def notes(self) -> tuple[str, ...]:
        """The findings as text, one line each."""
        return tuple(finding.full_text for finding in self.findings)

    @property
    def flaw(self) -> str:
        """Why the result is wrong although no rank failed; "" if it is not wrong."""
        for rank in self.ranks:
            if self.not_finite is not None and rank.has_diverged:
                return not_finite_loss(self.not_finite)
        spoiled = [saved for rank in self.ranks for saved in rank.saved if saved.not_finite]
        if spoiled:
            return f"`{spoiled[0].not_finite}` of `{spoiled[0].name}` is not finite"
        missing = [name for name, loaded in self.loaded.items() if loaded.trouble]
        failed = "cannot be read" if ev.RETURNED in missing[:1] else "was not updated"
        if missing and self.loaded[missing[0]].code == ev.NO_VARIABLE:
            failed = "was not returned"
        return next(iter(self.flaws), f"{missing[0]} {failed}" if missing else "")

    @property
    def precision(self) -> str:
        """The precision that ranks train in, or the launch's option until that is known."""
        known = (rank.progress.precision for rank in self.ranks if rank.progress is not None)
        return next(filter(None, known), self.mixed_precision)

    @property
    def outcome(self) -> str:
        """The status as text: a run whose result is wrong is "finished, but …".

        A run whose job has not begun is "waiting".
        """
        if self.is_queued and self.status == "starting":
            return "waiting"
        return outcome(self.status, self.flaw)

    @property
    def host(self) -> ev.Host | None:
        """The last measurement of the launcher's host, if ranks run there."""
        return self.hosts.get("")

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def elapsed(self, now: float) -> float:
        """Return the seconds since the launch, or, if the run has ended, that it took."""
        return max(0.0, (self.ended if self.ended is not None else now) - self.created)


def outcome(status: str, flaw: str) -> str:
    """Return how a run ended as text: ``finished, but …`` if its result is wrong."""
    return f"finished, but {flaw}" if flaw and status == "succeeded" else status


def not_finite_loss(event: ev.NotFinite) -> str:
    """Describe the first loss that was not finite: ``the loss of rank 1 became nan by step 5``."""
    loss = strip_escapes(event.loss, 10)
    step = f" by step {event.step + 1}" if event.step >= 0 else ""
    return f"the loss of rank {event.loss_rank} became {loss}{step}"


def is_secondary_failure(error_type: str, text: str) -> bool:
    """Whether a rank raised the error because another one had ended."""
    text = text.lower()
    is_echo = error_type in _ECHO_TYPES and any(echo in text for echo in ECHOES)
    return is_echo or bool(ECHOES_OF_ANY_TYPE.search(text))
