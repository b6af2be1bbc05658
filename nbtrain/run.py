"""What the user holds of a run: its values, logs, failure and picture, now or later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import events as ev
from . import serialize
from .errors import RunTimeout
from .folder import RunFolder, create, prune
from .outcome import Failure, headline, ranks_text, to_exception
from .state import RankState, RunState, fold
from .supervise import Reader, Supervisor
from .view import fronts, html

_last: Run | None = None


class Run:
    """A run of a function on several ranks, kept in its folder.

    Made by `%%distributed`, `launch` and `notebook_launcher`; ``Run.open(folder)`` reopens one,
    also in another kernel.
    """

    def __init__(
        self,
        folder: RunFolder,
        state: RunState,
        *,
        supervisor: Supervisor | None = None,
        drive: Callable[[], BaseException | None] | None = None,
    ) -> None:
        self._folder = folder
        self._state = state
        self._supervisor = supervisor
        self._drive = drive
        self._driving = threading.Lock()
        self._results: dict[int, Any] = {}
        self._error: BaseException | None = None
        self._drawn_in: int | None = None

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Reopen a run from its folder. Raises `FileNotFoundError` where there is none."""
        return cls(RunFolder(Path(folder)), read_state(RunFolder(Path(folder))))

    @property
    def folder(self) -> Path:
        """The run's folder: one log and one event file a rank."""
        return self._folder.path

    @property
    def state(self) -> RunState:
        """The present picture: `status`, `ranks`, `elapsed(now)`. Immutable."""
        return self._supervisor.state if self._supervisor is not None else self._state

    @property
    def results(self) -> list[Any]:
        """What each rank returned, by rank; None for one that returned nothing or did not end."""
        return [self._result(rank) for rank in range(self.state.world_size)]

    @property
    def value(self) -> Any:
        """What rank 0 returned."""
        return self._result(0)

    def _result(self, rank: int) -> Any:
        if rank not in self._results:
            try:
                data = self._folder.result(rank).read_bytes()
            except FileNotFoundError:
                return None
            self._results[rank] = serialize.loads(data)
        return self._results[rank]

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
            return RunTimeout(f"the run took longer than its timeout ({state.message})")
        failures = [self._failure(r) for r in state.ranks if r.status == "failed"]
        if not failures:
            return None
        cause = headline(failures)
        return to_exception(cause, _note(cause, failures, state))

    def _failure(self, rank: RankState) -> Failure:
        try:
            failed_at, captured = serialize.loads(self._folder.failure(rank.rank).read_bytes())
        except FileNotFoundError:
            log = "\n".join(last_words(self._log_lines(rank.rank, tail=200)))
            return Failure(rank.rank, rank.ended or 0.0, None, rank.returncode, log)
        return Failure(rank.rank, failed_at, captured)

    def logs(self, rank: int | None = None, tail: int | None = None) -> str:
        """Return what a rank printed, or all ranks, each line with its rank.

        Args:
            rank: the rank; None for all, one after the other.
            tail: only the last `tail` lines of each.
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
            lines = self._folder.log(rank).read_text("utf-8", "replace").splitlines()
        except FileNotFoundError:
            return []
        return lines if tail is None else lines[-tail:] if tail > 0 else []

    def wait(self) -> Run:
        """Wait until every rank is gone; return the run. Does not raise what a rank raised."""
        if self._drive is not None:
            with self._driving:
                drive, self._drive = self._drive, None
                if drive is not None:
                    self._error = drive()
                    self._drawn_in = _execution_count()
        if self._supervisor is not None:
            self._supervisor.over.wait()
        return self

    def stop(self) -> None:
        """End the run as an interrupt would, and wait until it has ended. May be repeated."""
        if self._supervisor is not None and not self.state.is_over:
            self._supervisor.request_stop("stopped by run.stop()")
            self.wait()

    def __repr__(self) -> str:
        state = self.state
        return (
            f"<Run {state.name}: {state.status}, {state.world_size} ranks, "
            f"{state.elapsed(time.time()):.1f} s>"
        )

    def _repr_html_(self) -> str:
        return html.render(self.state, time.time())

    def _ipython_display_(self) -> None:
        if self._drawn_in is not None and self._drawn_in == _execution_count():
            return
        fronts.put(fronts.bundle(self.state, time.time()))


def _execution_count() -> int | None:
    count: int | None = getattr(fronts.ipython_shell(), "execution_count", None)
    return count


def last_words(lines: list[str], count: int = 12) -> list[str]:
    """Return the lines that tell how a process died: its last, or faulthandler's stack's first."""
    crash = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error:")]
    return lines[max(0, crash[-1] - 4) :][:count] if crash else lines[-count:]


def _note(cause: Failure, failures: list[Failure], state: RunState) -> str:
    """Say which rank the exception is from and what became of the others."""
    where = f"nbtrain: this is from rank {cause.rank} of {state.world_size}"
    became: dict[str, list[int]] = {}
    for rank in state.ranks:
        if rank.rank != cause.rank and rank.status != "failed":
            words = "had finished" if rank.status == "done" else "stopped"
            became.setdefault(words, []).append(rank.rank)
    for other in failures:
        if other is not cause:
            kind = other.error.type_name if other.error else other.summary
            became.setdefault(f"failed too ({kind})", []).append(other.rank)
    others = "; ".join(
        f"{ranks_text(ranks)} {_was(words, ranks)}" for words, ranks in became.items()
    )
    told = f"{where}; {others}." if others else f"{where}."
    return f"{told} Its output: nbtrain.last_run().logs({cause.rank})"


def _was(words: str, ranks: list[int]) -> str:
    if words != "stopped":
        return words
    return "was stopped" if len(ranks) == 1 else "were stopped"


def read_state(folder: RunFolder) -> RunState:
    """Fold a run's picture from its files alone."""
    manifest = folder.read_manifest()
    state = initial_state(manifest)
    size = state.world_size
    everything = [*ev.read_events(folder.launcher_events), *Reader(folder, size).read(flush=True)]
    order = {"exited": 1, "finished": 2}
    return fold(state, sorted(everything, key=lambda e: (order.get(e.kind, 0), e.time)))


def initial_state(manifest: dict[str, Any]) -> RunState:
    """Return the picture of a run of which nothing is known but its manifest."""
    return RunState(
        name=manifest["name"],
        engine=manifest["engine"],
        ranks=tuple(RankState(rank) for rank in range(manifest["num_processes"])),
        created=manifest["created"],
        mixed_precision=manifest["mixed_precision"],
        device=manifest["device"],
    )


def new_folder(manifest: dict[str, Any]) -> RunFolder:
    """Make a run's folder and let the oldest ones go."""
    folder = create(manifest["name"], manifest)
    prune()
    return folder


def last_run() -> Run | None:
    """Return the last run launched from this process, however it ended; None before the first."""
    return _last


def remember(run: Run) -> None:
    """Make `run` the one that `last_run` returns."""
    global _last
    _last = run
