"""What the user holds of a run: its values, logs, failure and picture, now or later."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from . import history as past
from . import home, pruning, serialize, stacks, tensorboard, verdict
from .digest import digest, frame
from .errors import LaunchError, NodeFailed, RunTimeout
from .folder import RunFolder, create
from .follow import TICK, Follower, following
from .home import Home
from .outcome import Failure, headline, to_exception
from .reopen import TAIL_BYTES, read_state
from .state import RankState, RunState
from .summary import Summary, summary
from .supervise import Interrupts, Supervisor
from .view import fronts, html, plot, screen
from .view.screen import Front, execution_count
from .view.wording import counted

SMALL = 1 << 20
"""Bytes of a result that is held in memory as soon as its run is over."""

_last: Run | None = None
_last_pid: int | None = None
_needed: weakref.WeakSet[Run] = weakref.WeakSet()
"""Runs at hand whose results are in their folders alone."""

_behind: list[Run] = []
"""Runs that go on behind their cells, or did when last looked at: also those nobody holds."""


class Run:
    """A run on several ranks (its processes): `value`, `results`, `logs`, `history`, `failure`, …

    Made by `%%distributed`, `launch` and `notebook_launcher`; ``Run.open(folder)`` reopens one,
    also in another kernel.
    """

    def __init__(
        self,
        folder: RunFolder,
        state: RunState,
        *,
        watcher: Supervisor | Follower | None = None,
        drive: Callable[[], BaseException | None] | None = None,
        home: Home | None = None,
    ) -> None:
        self._folder = folder
        self._state = state
        self._watcher = watcher
        self._drive = drive
        self._home = home
        self._driving = threading.Lock()
        self._homing = threading.Lock()
        self._driver: int | None = None
        self._results: dict[int, Any] = {}
        self._small: dict[int, bytes] = {}
        self._error: BaseException | None = None
        self._drawn_in: int | None = None

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Reopen a run from its folder, as it stands now.

        Raises `FileNotFoundError` where there is none, `NbtrainError` for a damaged one.
        """
        found = RunFolder(Path(folder).expanduser().absolute())
        return cls(found, read_state(found))

    @property
    def folder(self) -> Path:
        """The run's folder: one log and one event file a rank."""
        return self._folder.path

    @property
    def state(self) -> RunState:
        """The present picture: `status`, `ranks`, `elapsed(now)`. Immutable."""
        return self._watcher.state if self._watcher is not None else self._state

    @property
    def results(self) -> list[Any]:
        """What each rank returned, by rank; None for one that returned nothing or did not end.

        Raises `NbtrainError` where the run's folder was deleted meanwhile.
        """
        return [self._result(rank) for rank in range(self.state.world_size)]

    @property
    def value(self) -> Any:
        """What rank 0 returned."""
        return self._result(0)

    def _result(self, rank: int) -> Any:
        if rank not in self._results:
            data = self._small.get(rank) or self._read_result(rank)
            if data is None:
                return None
            self._results[rank] = serialize.loads(data)
        return self._results[rank]

    def _read_result(self, rank: int) -> bytes | None:
        try:
            return self._folder.result(rank).read_bytes()
        except FileNotFoundError:
            self._folder.check_it_is_there()
            return None

    def _keep_results(self) -> None:
        """Have small results in memory, so that the folder may go; keep it for large ones."""
        for rank in range(self.state.world_size):
            with contextlib.suppress(OSError):
                if self._folder.result(rank).stat().st_size <= SMALL:
                    self._small[rank] = self._folder.result(rank).read_bytes()
                else:
                    _needed.add(self)

    @property
    def out(self) -> dict[str, Any]:
        """The variables that came back (``--out``), by name."""
        self._folder.check_it_is_there()
        return home.values(self._folder, self._home)

    def load(self, model: Any = None, name: str | None = None) -> None:
        """Load the weights that the run saved last into a model, in place: all, or nothing.

        `model` may be an optimizer; None: what was handed to the function. `name` is what that
        called it, where more than one was saved. Raises `NbtrainError` for what does not fit.
        """
        with _whole():
            home.load(self._folder, self._home, model, name)

    def bring_home(self) -> None:
        """Take what ranks left for the notebook, once, if the run has succeeded."""
        with self._homing:
            if self._home and self._watcher and self.state.status == "succeeded":
                self._watcher.state = self._home.take(self._folder, self.state)

    @property
    def exception(self) -> BaseException | None:
        """What the cell raised: the causing rank's own exception, or None after a success."""
        if self._error is None and self.state.is_over:
            self._error = self._find_error()
        return self._error

    def _find_error(self) -> BaseException | None:
        state = self.state
        if state.status == "interrupted":
            return KeyboardInterrupt(f"the run was stopped ({state.message})")
        if state.status == "timed out":
            return RunTimeout(f"the run took longer than its timeout: {state.message}")
        failures = [self._failure(r) for r in state.ranks if r.status == "failed"]
        why = verdict.of(state, failures)
        if why is None or why.rank < 0:
            kind = NodeFailed if why is not None and why.kind == "node" else LaunchError
            return None if why is None else kind(state.message)
        cause = headline(failures)
        note = verdict.note(cause, state, why)
        return to_exception(replace(cause, said=why.headline), note)

    @property
    def failure(self) -> verdict.Verdict | None:
        """Why the run failed: kind, rank, headline, evidence; None if it did not (yet)."""
        state = self.state
        return verdict.of(state, [self._failure(r) for r in state.ranks if r.status == "failed"])

    def _failure(self, rank: RankState) -> Failure:
        try:
            failed_at, captured = serialize.loads(self._folder.failure(rank.rank).read_bytes())
        except FileNotFoundError:
            log = "\n".join(verdict.last_words(self._log_lines(rank.rank, tail=200)))
            told, ended = verdict.death(rank), rank.ended or 0.0
            return Failure(rank.rank, ended, None, rank.returncode, log, told)
        return Failure(rank.rank, failed_at, captured)

    def logs(self, rank: int | None = None, tail: int | None = None) -> str:
        """Return what a rank printed, or all ranks, each line with its rank.

        Args:
            rank: the rank; None for all, one after the other.
            tail: only the last `tail` lines of each (at most the last MiB).
        """
        size = self.state.world_size
        if rank is not None and not 0 <= rank < size:
            raise IndexError(f"there is no rank {rank}: the run had ranks 0 to {size - 1}")
        if rank is not None:
            return "\n".join(self._log_lines(rank, tail))
        return "\n".join(
            f"[rank {r}] {line}" for r in range(size) for line in self._log_lines(r, tail)
        )

    def _log_lines(self, rank: int, tail: int | None) -> list[str]:
        try:
            with self._folder.log(rank).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL_BYTES) if tail is not None else 0)
                text = file.read().decode("utf-8", "replace")
        except FileNotFoundError:
            self._folder.check_it_is_there()
            return []
        lines = text.removesuffix("\n").split("\n") if text else []
        return lines if tail is None else lines[-tail:] if tail > 0 else []

    @property
    def history(self) -> Any:
        """Everything logged and seen so far, as a tidy pandas DataFrame.

        Columns are step, rank, time (seconds since the epoch) and one a metric; rows are in the
        order of time. What a rank did not say in a row is missing there.

        Raises:
            MissingExtra: pandas is not installed.
            NbtrainError: the run's folder was deleted meanwhile.
        """
        return past.frame(self._history_rows())

    def _history_rows(self) -> list[past.Row]:
        self._folder.check_it_is_there()
        return past.rows(self._folder, self.state.world_size)

    def plot(self, metric: str | Sequence[str] | None = None, *others: Run) -> Any:
        """Return a matplotlib figure of a metric or several, else of the loss.

        Every rank is faint, their mean strong; `others` are drawn over it, each in a colour of its
        own. The figure is not registered with pyplot.

        Raises:
            MissingExtra: matplotlib is not installed.
            NbtrainError: there is no number of that name.
        """
        metrics = [metric] if isinstance(metric, str) else list(metric or ())
        if not others:
            return plot.figure({self.state.name: self._history_rows()}, metrics)
        return plot.figure({r.folder.name: r._history_rows() for r in (self, *others)}, metrics)

    def compare(self, *others: Run) -> Any:
        """Return what runs were given and what came of it, side by side: a column a run.

        A pandas DataFrame; its rows are those of `nbtrain.runs`.

        Raises:
            MissingExtra: pandas is not installed.
            NbtrainError: the folder of one of the runs was deleted meanwhile.
        """
        for run in (self, *others):
            run._folder.check_it_is_there()
        return frame([digest(run._folder) for run in (self, *others)]).set_index("run").T

    def to_tensorboard(self, folder: str | Path) -> Path:
        """Write every number that was logged or seen as TensorBoard's event files; return where.

        They are in ``folder/RUN/rank-N``, each number at its step and its time.

        Raises:
            MissingExtra: tensorboard is not installed.
            NbtrainError: the run's folder was deleted meanwhile.
        """
        return tensorboard.write(self._history_rows(), Path(folder) / self.folder.name)

    def wait(self) -> Run:
        """Wait until every rank is gone; return the run. Does not raise what a rank raised.

        An interrupt ends the waiting for a run in the background, not the run.
        """
        if self._drive is not None:
            with self._driving:
                drive, self._drive = self._drive, None
                if drive is not None:
                    self._driver = threading.get_ident()
                    self._error = drive()
                    self._drawn_in = execution_count()
                    self._keep_results()
        self._follow()
        if self._watcher is not None and not self._watcher.over.is_set():
            _wait(self._watcher.over)
        with _whole():
            self.bring_home()
        return self

    def _follow(self) -> None:
        """Have the picture kept up to date, if the run goes on in another process."""
        if self._watcher is None and not self._state.is_over:
            self._watcher = following(self._folder)

    def stop(self, how: str = "by run.stop()") -> None:
        """End the run as an interrupt would, and wait until it has ended. May be repeated.

        It need not be one of this kernel. In the thread that watches the run (a signal handler, a
        button's callback) it only asks. `how` is kept with the run, and shown.
        """
        self._follow()
        if self._watcher is not None and not self.state.is_over:
            self._watcher.request_stop(how)
            if self._driver != threading.get_ident():
                self.wait()

    def stacks(self) -> stacks.Stacks:
        """Return where each rank is now: its Python stacks, also of one that hangs.

        Takes milliseconds; up to half a second where a rank cannot answer. Works for a run of
        another kernel on this host, too. Print it to read it.
        """
        self._folder.check_it_is_there()
        return stacks.ask(self._folder, range(self.state.world_size))

    def summary(self) -> Summary:
        """Return what it took and what came of it, in numbers: so far, or in the end."""
        self._follow()
        return summary(self.state, time.time())

    def __repr__(self) -> str:
        state = self.state
        return (
            f"<Run {state.name}: {state.status}, {counted(state.world_size, 'rank')}, "
            f"{state.elapsed(time.time()):.1f} s>"
        )

    def _repr_html_(self) -> str:
        return html.render(self.state, time.time())

    def _ipython_display_(self) -> None:
        if self._drawn_in is not None and self._drawn_in == execution_count():
            return
        self.show()

    def show(self) -> None:
        """Draw the run in the present cell; one that goes on in the background is drawn live."""
        self._follow()
        watcher, now = self._watcher, time.time()
        if isinstance(watcher, Follower) and not watcher.state.is_over:
            stop = partial(watcher.request_stop, "by the Stop button")
            front = fronts.choose("auto", stop, self.stacks, behind=True)
            if not isinstance(front, fronts.NoFront):
                self.draw_in(front)
                return
        screen.put(screen.bundle(self.state, now))

    def draw_in(self, front: Front) -> None:
        """Keep a front up to date, from here on to the run's end, behind the cell."""
        guarded = fronts.Guarded(front)
        guarded.update(self.state, time.time())
        if isinstance(self._watcher, Follower):
            self._watcher.show(guarded.update, guarded.finish)


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """Do something to its end, and raise `KeyboardInterrupt` after it: half of a model is none."""
    with Interrupts() as interrupts:
        yield
    if interrupts.count:
        raise KeyboardInterrupt


def _wait(over: threading.Event) -> None:
    """Wait for a run behind the cell, its buttons alive. Raises `KeyboardInterrupt`."""
    with Interrupts() as interrupts:
        hear = fronts.ears()
        while not over.wait(TICK) and not interrupts.count:
            hear()
    if interrupts.count:
        raise KeyboardInterrupt


def new_folder(manifest: dict[str, Any]) -> RunFolder:
    """Make a run's folder and let the oldest ones go."""
    folder = create(manifest["name"], manifest)
    pruning.prune(in_use={run.folder for run in _needed})
    return folder


def last_run() -> Run | None:
    """Return the last run launched from this process, however it ended; None before the first."""
    return _last if _last_pid == os.getpid() else None  # a rank inherits the notebook's


def remember(run: Run, goes_on: bool = False) -> None:
    """Make `run` the one that `last_run` returns; it may be one that goes on behind its cell."""
    global _last, _last_pid
    _last, _last_pid = run, os.getpid()
    if goes_on:
        _behind.append(run)
        _needed.add(run)


def going_on() -> list[Run]:
    """Return the runs of this process that go on in the background."""
    _behind[:] = [run for run in _behind if not run.state.is_over]
    return list(_behind)
