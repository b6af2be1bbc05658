"""`Run`: the user's view of a run, with its values, logs, failure and state."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from .. import part
from ..errors import LaunchError, NbtrainError, ResultsLost, RunTimeout
from ..hangs import stacks, verdict
from ..hangs.failures import Failure, find_cause, to_exception
from ..hangs.lost_results import RESULTS_LOST
from ..planning.task_values import is_model
from ..system.files import SMALL_FILE_BYTES, open_regular, read_regular
from ..system.text import plural
from ..tracking import clock, pruning
from ..tracking import limits as tracking_limits
from ..tracking.curves import RATES, smooth, spread_evenly
from ..tracking.limits import POLL_INTERVAL_S
from ..tracking.overview import history as past
from ..tracking.overview.epochs import epoch_table, main_metric
from ..tracking.pruning import Mark
from ..tracking.replay import read_state
from ..tracking.run_folder import RunFolder, find
from ..tracking.state import RankState, RunState
from ..transport import result_pickler
from ..transport.weights import receiver as weights
from ..transport.weights.receiver import ResultReceiver
from ..ui.board import board
from ..ui.card import Card, card
from ..ui.displays import html_display, kernel_comms, select
from ..ui.displays.html_display import Display, execution_count
from ..ui.displays.rank_outputs import RankOutputs
from ..ui.displays.widget_board import listening_ids
from ..ui.summary import Summary, summary, to_dict
from .follower import Follower, shared_follower
from .launch_sides import add_below, buttons
from .run_info import frame, run_info
from .supervisor import Interrupts, Supervisor

_last: dict[int, Run] = {}
"""The last run by process, as a forked rank inherits the kernel's."""

_prunings = itertools.count(1)
"""Numbers the calls of `prune_old_runs`."""

_previous_curves: dict[str, dict[str, Any]] = {}
"""The main curve of the last run of each name, for the board of the next one."""

_background_runs: list[Run] = []
"""Background runs that had not ended at the last check, also without another reference."""


class Run:
    """A run on several ranks: its results, logs, metrics and failure, during the run and later.

    `%%distributed`, `nbtrain.launch` and `nbtrain.notebook_launcher` make one. ``Run.open(folder)``
    reopens one, also in another kernel.

    Example::

        run = nbtrain.last_run()
        run.value    # what rank 0 returned
        run.logs(1)  # what rank 1 printed
        run.history  # every metric, as a DataFrame
    """

    def __init__(
        self,
        folder: RunFolder,
        state: RunState,
        *,
        watcher: Supervisor | Follower | None = None,
        receiver: ResultReceiver | None = None,
    ) -> None:
        self._folder = folder
        self._state = state
        self._watcher = watcher
        self._receiver = receiver
        self._mark = _create_mark(folder) if receiver is not None else None
        self._load_lock = threading.Lock()
        self._launcher_thread = threading.get_ident() if isinstance(watcher, Supervisor) else None
        self._results: dict[int, Any] = {}
        self._small_results: dict[int, bytes] = {}
        self._error: BaseException | None = None
        self._drawn_in: int | None = None

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Reopen a run from its folder, or by its name in `nbtrain.runs()`, in its present state.

        The start of a name is enough if no other run's name begins with it; "#12" is a number.

        Raises:
            FileNotFoundError: the path does not exist.
            NbtrainError: the folder is damaged.
            PlanError: no run, or more than one, has this name.
        """
        path = Path(folder).expanduser()
        is_name = str(folder) == path.name and not path.exists()
        run_folder = find(path.name) if is_name else RunFolder(path.absolute())
        return cls(run_folder, read_state(run_folder))

    @property
    def folder(self) -> Path:
        """The run's folder, with one log and one event file per rank."""
        return self._folder.path

    def __fspath__(self) -> str:
        """Return the run's folder: a run can be used as a path."""
        return str(self.folder)

    @property
    def state(self) -> RunState:
        """The present state: `status`, `ranks`, `elapsed(now)` and more. It is immutable."""
        watcher = self._watcher  # another thread may set it to None
        return watcher.state if watcher is not None else self._state

    @property
    def results(self) -> list[Any]:
        """What each rank returned, as a list; None for a rank that returned nothing or did not end.

        Raises `NbtrainError` if the run's folder was deleted, or a result in it is damaged.
        """
        return [self._result(rank) for rank in range(self.state.world_size)]

    @property
    def value(self) -> Any:
        """What rank 0 returned."""
        return self._result(0)

    def _result(self, rank: int) -> Any:
        """Return what a rank returned; None if it returned nothing, or nothing was saved.

        Raises `NbtrainError` if the file is damaged, or the run's folder was deleted.
        """
        if rank not in self._results:
            file: IO[bytes]
            try:
                small = self._small_results.get(rank)
                path = self._folder.result(rank)
                file = open_regular(path) if small is None else io.BytesIO(small)
            except FileNotFoundError:
                self._folder.check_exists()
                return None
            try:
                with file:
                    self._results[rank] = result_pickler.load(file)
            except (pickle.UnpicklingError, EOFError, MemoryError) as error:
                raise NbtrainError(f"{path} is damaged: {error or 'it ends too early'}") from error
        return self._results[rank]

    def _keep_small_results(self) -> None:
        """Read small results into memory, so that the folder may be pruned. Large ones keep it."""
        is_needed = False
        for rank in range(self.state.world_size):
            with contextlib.suppress(OSError):
                if self._folder.result(rank).stat().st_size <= SMALL_FILE_BYTES:
                    self._small_results[rank] = read_regular(self._folder.result(rank))
                else:
                    is_needed = True
        if self._mark is not None and not is_needed:
            self._mark.release()

    @property
    def out(self) -> dict[str, Any]:
        """The variables that ``--out`` (`out`) copied back, by name."""
        self._folder.check_exists()
        return weights.load_variables(self._folder, self._receiver)

    def load(self, model: Any = None, name: str | None = None) -> None:
        """Load the weights that the run saved last into a model, in place: all of them, or none.

        Args:
            model: a model or an optimizer; None: all models and optimizers that the run was given.
            name: the name under which the run saved it, if it saved more than one.

        Raises:
            NbtrainError: the run saved no such weights, or they do not fit. Nothing is changed.
        """
        with _uninterruptible():
            weights.load(self._folder, self.state, self._receiver, model, name)

    def bring_home(self) -> None:
        """Load the trained weights and the variables of a run that succeeded, once.

        If the disk was too full for all of them, load the others.
        """
        with self._load_lock:
            state = self.state
            in_part = state.status == "failed" and state.code == RESULTS_LOST
            if self._receiver and self._watcher and (state.status == "succeeded" or in_part):
                self._watcher.state = self._receiver.take(self._folder, self.state)

    @property
    def exception(self) -> BaseException | None:
        """What the cell raised, such as the exception of a rank; None after a success.

        None, too, before the run has ended.
        """
        if self._error is None and self.state.is_over:
            self._error = self._find_error()
        return self._error

    def _find_error(self) -> BaseException | None:
        """Return the exception that the cell raises for an ended run; None after a success.

        It follows from the state alone: `KeyboardInterrupt`, `RunTimeout`, the failed rank's
        exception, `ResultsLost` or `LaunchError`.
        """
        state = self.state
        if state.status == "interrupted":
            return KeyboardInterrupt(f"the run was stopped ({state.message})")
        if state.status == "timed out":
            return RunTimeout(f"the run {verdict.describe_timeout(state)}")
        failures = [self._failure(r) for r in state.ranks if r.status == "failed"]
        report = verdict.explain_failure(state, failures)
        if report is None:
            return None
        if report.rank < 0:
            kind = ResultsLost if report.kind == "results lost" else LaunchError
            return kind(state.explanation)
        cause = find_cause(failures)
        note = verdict.exception_note(cause, state, report)
        cause = replace(cause, description=report.headline)
        return to_exception(cause, note, self._folder.cells())

    @property
    def failure(self) -> verdict.FailureReport | None:
        """Why the run failed: `kind`, `rank`, `headline`, `evidence`; None if it did not fail."""
        state = self.state
        return verdict.explain_failure(
            state, [self._failure(r) for r in state.ranks if r.status == "failed"]
        )

    def _failure(self, rank: RankState) -> Failure:
        """Return how a rank failed: by the exception that it saved, or by the end of its log."""
        try:
            failed_at, captured = result_pickler.loads(
                read_regular(self._folder.failure(rank.rank))
            )
        except FileNotFoundError:
            log = "\n".join(verdict.final_lines(self._log_lines(rank.rank, tail=200)))
            description, ended = verdict.describe_death(rank), rank.ended or 0.0
            return Failure(rank.rank, ended, None, rank.returncode, log, description)
        return Failure(rank.rank, failed_at, captured)

    def logs(self, rank: int | None = None, tail: int | None = None) -> str:
        """Return what a rank printed, or what all ranks printed, with the rank before each line.

        Args:
            rank: the rank; None: all ranks, one after the other.
            tail: only the last `tail` lines of each rank (at most the last MiB).

        Raises:
            IndexError: the run has no such rank.
            NbtrainError: the run's folder was deleted.
        """
        size = self.state.world_size
        if rank is None:
            lines = (f"[rank {r}] {line}" for r in range(size) for line in self._log_lines(r, tail))
            return "\n".join(lines)
        if not 0 <= rank < size:
            raise IndexError(_no_such_rank(rank, self.state))
        return "\n".join(self._log_lines(rank, tail))

    def _log_lines(self, rank: int, tail: int | None) -> list[str]:
        """Return the lines that a rank printed: all, or the last `tail` of the last MiB.

        Empty without a log, or with a `tail` of 0 or less. Raises `NbtrainError` if the run's
        folder was deleted.
        """
        try:
            with open_regular(self._folder.log(rank)) as file:
                size = file.seek(0, os.SEEK_END)
                start = file.seek(max(0, size - SMALL_FILE_BYTES) if tail is not None else 0)
                text = file.read(size - start).decode("utf-8", "replace")
        except FileNotFoundError:
            self._folder.check_exists()
            return []
        lines = text.removesuffix("\n").split("\n") if text else []
        return lines if tail is None else lines[-tail:] if tail > 0 else []

    @property
    def history(self) -> Any:
        """All metrics that were logged or seen so far, as a pandas DataFrame.

        Its columns are step, rank, time (seconds since 1970) and one per metric. The rows are in
        the order of time. A metric that a rank did not log in a row is missing there.

        Raises:
            MissingExtra: pandas is not installed.
            NbtrainError: the run's folder was deleted.
        """
        self._folder.check_exists()
        return past.frame(past.rows(self._folder, self.state.world_size))

    @property
    def epochs(self) -> Any:
        """The epochs that have ended, as a pandas DataFrame with one row per epoch.

        Its columns are epoch, steps (optimizer steps since the start), seconds (with the
        validation), one for each loss and metric, and best. A metric is the mean over ranks of the
        last value in the epoch. If a function trains more than once, as for folds, the column
        training has the number of the training, and each training has a best epoch.

        Raises `MissingExtra` if pandas is not installed.
        """
        table = epoch_table(self.state)
        rows = (
            {
                **({"training": r.training} if table.has_trainings else {}),
                "epoch": r.epoch,
                "steps": r.steps,
                "seconds": r.seconds,
                **r.values,
                "best": r.is_best,
            }
            for r in table.rows
        )
        first = ("training",) if table.has_trainings else ()
        return past.table(list(rows), "run.epochs", (*first, "epoch", "steps", "seconds"))

    def card(self, *, dark: bool = False) -> Card:
        """Return a picture of the run to share, 600 pixels wide. A notebook displays it.

        It shows the run's name, ranks, time, best metric, speed and result, the curve of the loss,
        and what each rank did. ``run.card().save("card.png")`` writes it to a file, PNG (with the
        package resvg-py) or SVG.

        Args:
            dark: light text on a dark ground.
        """
        self._follow()
        return card(self.state, clock.now(self.state.clock_offset), dark=dark)

    def compare(self, *others: Run | str) -> Any:
        """Return the arguments and outcomes of runs side by side, as a pandas DataFrame.

        It has one column per run, and the columns of `nbtrain.runs` as its rows.

        Args:
            others: runs, or names of runs as for `open`.

        Raises:
            MissingExtra: pandas is not installed.
            NbtrainError: the folder of one of the runs was deleted.
            PlanError: no run, or more than one, has this name.
        """
        runs = [Run.open(run) if isinstance(run, str) else run for run in (self, *others)]
        for run in runs:
            run._folder.check_exists()
        return frame([run_info(run._folder) for run in runs]).set_index("run").T

    def wait(self) -> Run:
        """Wait until the run has ended, copy its results back, and return the run.

        It does not raise what a rank raised; `exception` has that. An interrupt ends the waiting
        for a run in the background, not the run.
        """
        self._follow()
        watcher = self._watcher  # another thread may set it to None
        if watcher is not None and not watcher.over.is_set():
            with _uninterruptible() as interrupts:
                # Interrupts are counted: one that is raised in the pump could lose a message.
                pump = kernel_comms.find_pump(html_display.ipython_shell())
                while not watcher.over.wait(POLL_INTERVAL_S) and not interrupts.count:
                    if pump is not None and not pump(listening_ids()):
                        pump = None
        with _uninterruptible():
            self.bring_home()
        return self

    def _follow(self) -> None:
        """Follow the run's folder, if another process watches the run."""
        if self._watcher is None and not self._state.is_over:
            self._watcher = shared_follower(self._folder)

    def stop(self, how: str = "by run.stop()") -> None:
        """End the run as an interrupt does, and wait until it has ended.

        It also ends a run of another kernel. In the thread that watches the run (a signal handler,
        a button's callback), it requests the end and does not wait.

        Args:
            how: who or what ended the run; the board shows it.
        """
        self._follow()
        watcher = self._watcher  # another thread may set it to None
        if watcher is not None and not self.state.is_over:
            watcher.request_stop(how)
            if self._launcher_thread != threading.get_ident():
                self.wait()

    def finish(self, after: str = "step") -> None:
        """End the training as if its loop had come to its end; the code after the loop still runs.

        All ranks end it after the same step. The run is a success: it evaluates and saves what it
        would at its end, returns its value, and the notebook gets the trained weights. Trainers of
        transformers, Lightning and fastai end in their own way, and so do loops over tqdm bars and
        `nbtrain.progress`, and loops that call `nbtrain.should_stop`. Of other loops, the loaders
        of the training end: the epochs that are left train nothing. Loops without either, and those
        with ``while`` or ``next``, continue, which the board shows.

        It also finishes a run of another kernel. It returns once the ranks have agreed on the step,
        or 3 s later: before the first step and in an evaluation, they agree at their next step. If
        a rank makes no step for 2 s while others wait for it, all continue, and nbtrain tries it
        again 2 s later.

        Args:
            after: "step" or "epoch": the present one is completed.

        Raises:
            NbtrainError: the run has ended, is finishing already, or cannot be steered.
            PlanError: `after` is neither, or steering is switched off on this host.
        """
        part.load_provided("steering", "finish", "run.finish()")(self, after)

    def turn(
        self, optimizer: int | str | None = None, group: int | None = None, **settings: Any
    ) -> None:
        """Change settings of the optimizers, or knobs, while the ranks train.

        All ranks train with the new values from the same step on. Under a learning-rate scheduler
        the turn is a factor on what the scheduler sets, until it is taken back. It returns once the
        ranks have agreed on the step, as `finish`.

        Example::

            run.turn(lr=3e-4)
            run.turn(lr="/3", optimizer="AdamW")
            run.turn(lr=None)  # as the code has it

        Args:
            optimizer: the number of an optimizer, in the order of their first steps, or the name of
                its class; by default all.
            group: the number of a parameter group; by default all.
            settings: ``lr``, ``weight_decay``, ``momentum``, ``betas`` (two numbers), or the name
                of a `nbtrain.knob`; with a number, a factor such as ``"*0.5"`` or ``"/3"``, or
                None.

        Raises:
            NbtrainError: the run has ended or cannot be steered; or a rank made no step for 2 s
                while others waited for it; or a setting is not there, or cannot have the value.
                Nothing is changed.
            PlanError: a value is no finite number, or out of bounds.
        """
        turn = part.load_provided("steering", "turn", "run.turn()")
        turn(self, settings, optimizer, group)

    def peek(self, model: Any = None, name: str | None = None) -> int:
        """Load the weights of a run that trains into a model, in place; return their step.

        All ranks copy their weights after the same step and go on; sharded models are gathered. It
        waits for the next step and until the weights are here. An interrupt ends that. It also
        works for a run of another kernel, with a `model` of this one.

        Example::

            run = nbtrain.launch(train, model, num_processes=2, background=True)
            run.peek()
            model.eval()(x)

        Args:
            model: as in `load`.
            name: as in `load`.

        Raises:
            NbtrainError: as `turn`; or the run has no such weights, or they do not fit. Nothing
                is changed.
            PlanError: `model` is an optimizer or a scheduler, or steering is switched off on this
                host.
        """
        request = part.load_provided("steering", "peek", "run.peek()")
        return int(request(self, model, name).step)

    def keep(self, name: str = "") -> Path:
        """Save a checkpoint of a run that trains; return the folder or file that it is in.

        It is of one step of all ranks, which train on. Trainers of transformers and Lightning save
        all that they need to continue there, and ``Accelerator.save_state`` what the Accelerator
        has prepared. Of another loop, the models that the function was given and their optimizers
        are saved. It waits for the next step and until the checkpoint is complete. It also works
        for a run of another kernel.

        The checkpoint is in the run's folder, which nbtrain does not delete then.

        Example::

            path = run.keep("before the restart")
            nbtrain.launch(train, model, start_from=path)

        Args:
            name: what charts and tables call it.

        Raises:
            NbtrainError: as `turn`; or nothing can be saved, or not all nodes of the run see its
                folder.
            PlanError: steering is switched off on this host, or the name is no short text.
        """
        request = part.load_provided("steering", "keep", "run.keep()")
        return request(self, name)  # type: ignore[no-any-return]

    def profile(
        self, steps: int = 3, *, shapes: bool = False, stacks: bool = False, memory: bool = False
    ) -> Any:
        """Record the next steps of all ranks, and return what their time went to.

        All ranks record the same steps, after two more that warm the profiler up, and train on. It
        waits until the steps are recorded. A notebook draws the result, with advice if one cause
        stands out; ``save("trace.json.gz")`` writes one trace of all ranks for Perfetto. It also
        works for a run of another kernel.

        Example::

            run = nbtrain.launch(train, model, num_processes=2, background=True)
            run.profile()

        Args:
            steps: how many optimizer steps are recorded, at most 10.
            shapes: record the sizes of tensors, too.
            stacks: record all Python calls, too: this slows Python down several times.
            memory: record what operations allocate, too: small operations take about 10 % longer.

        Raises:
            NbtrainError: as `turn`; or the training ends before the steps are recorded, or uses a
                profiler of its own.
            PlanError: `steps` is out of range, or steering or profiles are switched off on this
                host.
        """
        record = part.load_provided("profile", "record", "run.profile()")
        return record(self, steps, shapes=shapes, stacks=stacks, memory=memory)

    @property
    def profiles(self) -> list[Any]:
        """What was recorded of the run, by `profile` or ``--profile``, in the order of its steps.

        Raises `NbtrainError` if another user could have written the run's folder.
        """
        return list(part.load_provided("profile", "profiles", "run.profiles")(self))

    def stacks(self) -> stacks.Stacks:
        """Return the Python stacks of each rank as they are now, also of a rank that hangs.

        Print the result to read it. It takes milliseconds, or up to half a second if a rank cannot
        answer (3 s if ranks are on other hosts). It also works for a run of another kernel on this
        host. Raises `NbtrainError` if the run's folder was deleted.
        """
        self._folder.check_exists()
        return stacks.read_stacks(self._folder, range(self.state.world_size))

    def summary(self) -> Summary:
        """Return the run in numbers, so far or at its end: times, speed, metrics and memory."""
        self._follow()
        return summary(self.state, clock.now(self.state.clock_offset))

    def to_dict(self) -> dict[str, Any]:
        """Return the summary and the state of each rank, as a dictionary that fits into JSON."""
        self._follow()
        folder = {"run": self.folder.name, "folder": str(self.folder)}
        return folder | to_dict(self.state, clock.now(self.state.clock_offset))

    def __repr__(self) -> str:
        state = self.state
        return (
            f"<Run {state.title}: {state.outcome}, {plural(state.world_size, 'rank')}, "
            f"{state.elapsed(clock.now(state.clock_offset)):.1f} s>"
        )

    def _repr_html_(self) -> str:
        return board.render(self.state, clock.now(self.state.clock_offset))

    def _ipython_display_(self) -> None:
        if self._drawn_in is not None and self._drawn_in == execution_count():
            return
        self.show()

    def show(self, rank: int | None = None) -> None:
        """Draw the run's board in the present cell. A run in the background is drawn live.

        After the run, the figures that one rank displayed are shown below.

        Args:
            rank: the rank whose figures are shown; None: rank 0.

        Raises:
            IndexError: the run has no such rank.
        """
        self._follow()
        if rank is not None and not 0 <= rank < self.state.world_size:
            raise IndexError(_no_such_rank(rank, self.state))
        if self.state.is_over or not draw_live(self):
            html_display.show(html_display.bundle(self.state, clock.now(self.state.clock_offset)))
            RankOutputs(rank).finish(self.state)


def _no_such_rank(rank: int, state: RunState) -> str:
    return f"there is no rank {rank}: the run had ranks 0 to {state.world_size - 1}"


def draw_live(run: Run, view: str = "auto") -> bool:
    """Start to draw a background run in this cell; return whether this frontend can.

    Returns at once. The run's follower draws until the end. False for a run without a follower.
    """
    watcher = run._watcher
    if not isinstance(watcher, Follower):
        return False
    stop = partial(watcher.request_stop, "by the Stop button")
    display = select.choose(
        view, stop, run.stacks, partial(buttons, run._folder), is_background=True
    )
    guarded = select.GuardedDisplay(add_below(display, run._folder))
    guarded.update(run.state, clock.now(run.state.clock_offset))
    watcher.show(guarded.update, guarded.finish)
    return type(display) is not Display  # the base class draws nothing


def wait_for_state(
    run: Run, is_reached: Callable[[RunState], object], timeout_s: float
) -> RunState:
    """Wait until the state of a run fulfils a condition, or the run has ended; return the state.

    Returns after the timeout, too, and at once in the thread that watches the run, as in a button's
    callback: there the state does not change.
    """
    run._follow()
    deadline = time.monotonic() + timeout_s
    while run._launcher_thread != threading.get_ident() and time.monotonic() < deadline:
        if run.state.is_over or is_reached(run.state):
            break
        time.sleep(POLL_INTERVAL_S / 5)
    return run.state


def _create_mark(folder: RunFolder) -> Mark | None:
    """Mark the run as in use, so that no kernel deletes it; None if the disk is full."""
    try:
        return Mark(folder)
    except OSError:  # the disk is full: other kernels may prune the run after its end
        return None


@contextlib.contextmanager
def _uninterruptible() -> Iterator[Interrupts]:
    """Delay `KeyboardInterrupt` until the end of the block: half of a model is useless."""
    with Interrupts() as interrupts:
        yield interrupts
    if interrupts.count:
        raise KeyboardInterrupt


def prune_old_runs(newest: RunFolder, is_over: Callable[[], bool], *, every: int = 1) -> None:
    """Delete the oldest runs that are not kept, and the weights of older ones that are.

    Only on each `every`-th call. `newest` is a run that has just begun and stays, as do runs that
    are running or in use. `is_over` ends the deleting early.
    """
    if next(_prunings) % every == 0:
        pruning.prune(newest=newest, is_over=is_over)


def last_run() -> Run | None:
    """Return the last run that this process launched, also if it failed; None before the first."""
    return _last.get(os.getpid())


def last_run_folder() -> Path | None:
    """Return the folder of the last run, to compare it with the one after the next run.

    It is None before the first. A caller must not keep the `Run` itself: the error of a failed cell
    refers to the caller's frames, so each run and its error would keep the run before it in memory,
    back to the first.
    """
    run = last_run()
    return None if run is None else run.folder


def set_last_run(run: Run, in_background: bool = False) -> None:
    """Make `last_run` return `run`. With `in_background`, also list it in `background_runs`."""
    _last[os.getpid()] = run
    if in_background:
        _background_runs.append(run)


def mark_finished(run: Run, error: BaseException | None) -> None:
    """Detach a finished run from its supervisor; keep its state, small results and main curve.

    `error` becomes `run.exception`; None leaves that to the state. The present cell counts as the
    one that shows the run. Without large results, other kernels may delete its folder now.
    """
    run._error = error
    with run._load_lock:  # another thread may be in `bring_home`
        run._state, run._watcher = run.state, None  # `Out` of IPython keeps the run
    run._drawn_in = execution_count()
    run._keep_small_results()
    _keep_curve(run)


def _keep_curve(run: Run) -> None:
    """Keep the main curve of a run, if it has one."""
    state, curves = run.state, run.state.curves.all
    metric = main_metric(name for name in curves if name not in RATES)
    points = smooth(curves[metric].band) if metric is not None else []
    if metric is None or len(points) < 8:
        return
    title = state.title if state.number is None else f"{state.title} #{state.number}"
    rounded = [
        (x, float(f"{y:.5g}")) for x, y in spread_evenly(points, tracking_limits.MAX_BINS // 4 - 1)
    ]
    _previous_curves.pop(state.name, None)
    _previous_curves[state.name] = {"title": title, "metric": metric, "points": rounded}
    while len(_previous_curves) > tracking_limits.MAX_RUNS:
        del _previous_curves[next(iter(_previous_curves))]


def previous_curve(name: str) -> dict[str, Any] | None:
    """Return the main curve of the last run of this name in this process, for a manifest."""
    return _previous_curves.get(name) if os.getpid() in _last else None


def load_peeked(run: Run, folder: RunFolder, model: Any = None, name: str | None = None) -> None:
    """Load weights that the ranks of a run saved in a folder while they train, as `Run.load`.

    Raises `NbtrainError`, too, if the notebook has the weights of the run's end already.
    """
    with _uninterruptible(), run._load_lock:
        if run._receiver is not None and run._receiver.has_received:
            raise NbtrainError(
                "the run has ended, and the notebook's models have its final weights. "
                "run.load(model) loads these into another model"
            )
        weights.load(folder, run.state, run._receiver, model, name, call="run.peek")


def find_run_with_models(folder: RunFolder) -> Run | None:
    """Return the background run of a folder, if it gives models back to this process."""
    for run in background_runs():
        if run.folder == folder.path and run._receiver is not None:
            return run if any(map(is_model, run._receiver.objects().values())) else None
    return None


def background_runs() -> list[Run]:
    """Return the background runs of this process that have not ended."""
    _background_runs[:] = [run for run in _background_runs if not run.state.is_over]
    return list(_background_runs)
