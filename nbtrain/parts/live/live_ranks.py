"""Starts live ranks and runs tasks on them: `start` and `LiveRanks`.

The ranks are a run in the background, whose function takes tasks (`nbtrain.parts.live.server`):
what watches, ends and reaps them is what does so for every such run. Each task is a run of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import select
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from ... import engines
from ...lifecycle.restarts import socket_folder
from ...lifecycle.supervisor import Interrupts
from ...part_api import (
    FAILURE_REPORT_TIMEOUT_S,
    START_TIMEOUT_S,
    UNKILLABLE_AFTER_S,
    UNRESPONSIVE_AFTER_S,
    Call,
    Cell,
    Channel,
    Exit,
    Finding,
    LaunchError,
    Listener,
    NbtrainError,
    Option,
    Plan,
    PlanError,
    RankDied,
    Run,
    RunFolder,
    check_allowed,
    clock,
    format_duration,
    format_ranks,
    last_run,
    load_provided,
    plan_fields,
    plural,
    prompt,
    run_plan,
    set_last_run,
    task_values,
    with_article,
)
from ...planning.option_types import SECONDS, variable_name
from ...system.files import SMALL_FILE_BYTES
from ...transport.weights.models import Part
from . import limits
from .engine import LiveEngine, Message
from .reloaded_modules import ReloadedModules, import_path
from .server import serve
from .variables import Snapshot, Variables, notebook

IDLE_TIMEOUT = Option(
    "--idle-timeout",
    "end the live ranks after this many seconds without a cell for them",
    **SECONDS,
    field="idle_timeout",
    metavar="SECONDS",
)

_NAME = "live ranks"
"""What the run of live ranks is called."""

_TPU_CUT_OFF = (
    "A rank was stopped while it waited. If it waited for another rank on the TPU, collectives "
    "fail from now on: copy what you need with %nbtrain pull, then %nbtrain restart"
)

_live: dict[int, LiveRanks] = {}
"""The last live ranks by process, as a fork inherits those of its parent."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


def start(
    num_processes: int | None = None, *, idle_timeout: float | None = None, **options: Any
) -> LiveRanks:
    """Start live ranks, which stay until `LiveRanks.stop` or the kernel's end, and return them.

    While they live, ``%%distributed`` and ``%distributed`` run on them, and what a cell defines
    stays in the ranks for the next cell. Forked ranks begin with the notebook's variables.

    Args:
        num_processes: the number of ranks; None: one per GPU, or 2 on a host without any.
        idle_timeout: end the ranks after this many seconds without a task; None: never.
        options: `engine`, `mixed_precision`, `downcast_bf16`, `config` and `env`, and for a Ray
            cluster `address`, `nodes`, `resources` and `wait_for_nodes`, as for `nbtrain.launch`.

    Raises:
        PlanError: an option cannot be used as written, or there are live ranks already; nothing
            was started.
        PreflightError: the state of this process forbids the launch; nothing was started.
        LaunchError: the ranks could not be started.
    """
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise PlanError(
            f"nbtrain.start has no option {unknown[0]!r}; its options are {', '.join(_OPTIONS)}"
        )
    IDLE_TIMEOUT.check(idle_timeout, "idle_timeout")
    check_allowed("live", "%nbtrain start")
    if current() is not None:
        raise PlanError("live ranks are already running. End them first: %nbtrain stop")
    secret = secrets.token_hex(16)
    fields = plan_fields({"num_processes": num_processes, **options})
    fields |= {"background": True, "view": "none", "telemetry": (), "hang_after": None}
    plan = Plan(Call(serve), _NAME, takes_tasks=True, **{**fields, "sync": False})
    folder = Path(tempfile.mkdtemp(prefix=f"nbtrain-live-{os.getpid()}-", dir=socket_folder()))
    try:
        with contextlib.closing(_listener(plan, folder)) as listener:
            plan = replace(plan, task=Call(serve, (listener.address, secret)))
            snapshot = Snapshot(notebook())
            with _PreserveLastRun():
                run = run_plan(plan)
            ranks = _wait_for_ranks(run, listener, secret, snapshot)
    finally:  # once the ranks have connected, too: a kernel that is killed would leave it
        shutil.rmtree(folder, ignore_errors=True)
    if idle_timeout is not None:
        ranks.end_when_idle(idle_timeout)
    return ranks


def _listener(plan: Plan, folder: Path) -> Listener:
    """Open a socket that the ranks of a plan can connect to.

    Raises `PlanError` if this system or the plan's engine has no live ranks.
    """
    if sys.platform != "linux":
        raise PlanError("live ranks work on Linux only")
    engine = engines.choose(plan)
    if not engine.can_stay:
        raise PlanError(f"ranks of the {engine.name} engine cannot live between cells")
    return Listener(engine.home_address(plan) or folder)


_OPTIONS = (
    *("engine", "mixed_precision", "downcast_bf16", "config", "env"),
    *("address", "nodes", "resources", "wait_for_nodes"),
)


def _wait_for_ranks(run: Run, listener: Listener, secret: str, snapshot: Snapshot) -> LiveRanks:
    """Wait up to 120 s until each rank has connected, and make them the current live ranks.

    They are stopped when this process exits. Raises what ended a rank, or `LaunchError`; then, as
    after an interrupt, all ranks are ended.
    """
    channels: dict[int, Channel] = {}
    names: dict[int, set[str]] = {}
    deadline = time.monotonic() + START_TIMEOUT_S
    try:
        # A rank may connect before its pid is known here, which its first task needs.
        while len(channels) < run.state.world_size or any(r.pid is None for r in run.state.ranks):
            if run.state.is_over or any(rank.is_over for rank in run.state.ranks):
                run.wait()
                raise run.exception or LaunchError(run.state.explanation)
            if time.monotonic() > deadline:
                ranks = run.state.ranks
                missing = [r.rank for r in ranks if r.rank not in channels or r.pid is None]
                raise LaunchError(
                    f"{format_ranks(missing)} did not begin within {START_TIMEOUT_S:g} s"
                )
            channel = listener.accept(0.1)
            if channel is not None:
                hello = _hello(channel, secret)
                if hello is not None:
                    channels[hello["rank"]], names[hello["rank"]] = channel, set(hello["new"])
    except BaseException:  # including an interrupt: end ranks that could not be reached
        for channel in channels.values():
            channel.close()
        run.stop("because the ranks could not be started")
        raise
    started = _live[os.getpid()] = LiveRanks(run, channels, names, snapshot)
    atexit.register(started.stop)
    return started


def _hello(channel: Channel, secret: str) -> Message | None:
    """Return the first message of a rank.

    None if it is not a rank's, with the `secret`; then the connection is closed.
    """
    # Any data of another process, such as deeply nested JSON, ends only this connection.
    with contextlib.suppress(Exception):
        message, _ = channel.receive()
        if secrets.compare_digest(str(message["secret"]).encode(), secret.encode()):
            channel.trust()
            return message
    channel.close()
    return None


def current() -> LiveRanks | None:
    """Return the ranks that live, if there are any."""
    ranks = last()
    return None if ranks is None or ranks.has_ended else ranks


def last() -> LiveRanks | None:
    """Return the last ranks that this process started, also if they have ended."""
    return _live.get(os.getpid())


def find_lost_ranks() -> LiveRanks | None:
    """Return ranks that have ended and were not stopped or replaced."""
    ranks = last()
    return ranks if ranks is not None and ranks.has_ended and not ranks.was_stopped else None


def _exclusive_use(
    method: Callable[Concatenate[LiveRanks, _P], _T],
) -> Callable[Concatenate[LiveRanks, _P], _T]:
    """Make a method wait until the ranks are free, and let no other thread use them meanwhile.

    In the main thread it first waits for a task in the background, with a message. The time for
    which the ranks count as idle begins at the method's end.
    """

    @functools.wraps(method)
    def used(self: LiveRanks, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        self._wait_for_background()
        with self._turn:
            try:
                return method(self, *args, **kwargs)
            finally:
                self._last_use = time.monotonic()

    return used


class _PreserveLastRun:
    """Sets `last_run` back after its block, unless the block raises: then the user needs that run.

    A class, so that no frame refers to the old run: its error refers to the frames of its caller.
    """

    def __enter__(self) -> None:
        self._before = last_run()

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        before, self._before = self._before, None
        if kind is None and before is not None:
            set_last_run(before)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _drop_data(message: Message) -> None:
    """Close what came with a message, if it is there still."""
    data = message.pop("data", None)
    if data is not None:
        os.close(data)


def _failed_rank(run: Run | None) -> int:
    """Return the rank whose failure ended a run; 0 if it is unknown."""
    failure = None if run is None else run.failure
    return 0 if failure is None else max(failure.rank, 0)


class LiveRanks:
    """Live ranks: training processes that keep their variables between cells.

    `nbtrain.start`, or ``%nbtrain start``, makes them. A ``with`` block ends them when it is left.

    Example::

        with nbtrain.start(2) as ranks:
            ranks.push(learning_rate=1e-3)
            run = ranks.run(train, model)
    """

    def __init__(
        self, run: Run, channels: dict[int, Channel], names: dict[int, set[str]], snapshot: Snapshot
    ) -> None:
        self._run, self._channels, self._pid = run, channels, os.getpid()
        self.options: Sequence[str] = ()
        """The options that ``%nbtrain start`` was given."""
        self.variables = Variables(self._ask, names, snapshot)
        self._reloaded = ReloadedModules(channels)
        self._are_far = not all(channel.passes_files for channel in channels.values())
        self._tasks = 0
        self._task_folder: RunFolder | None = None
        self._trouble = ""
        self.error: BaseException | None = None
        """What the last task of a cell raised."""
        self._failed = 0  # the rank that caused it
        self._background_run: Run | None = None  # the last task in the background
        self._background_ranks: Sequence[int] = ()
        self._is_free = threading.Event()  # of it
        self._is_free.set()
        self._news = ""
        self._generation = 0
        self._groups: dict[int, Mapping[str, Any]] = {}
        self._turn, self._last_use = threading.RLock(), time.monotonic()
        self._is_stopped = threading.Event()
        self._ended_by_idleness = ""
        self.was_stopped = False
        """Whether the user has stopped them: then they are not missed."""
        self.engine, self.device = run.state.engine, run.state.device
        self.mixed_precision = run.state.mixed_precision
        self.world_size = run.state.world_size

    def __enter__(self) -> LiveRanks:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def __len__(self) -> int:
        return self.world_size

    def __repr__(self) -> str:
        return f"<LiveRanks: {plural(self.world_size, 'rank')}, {self._status_text()}>"

    def _status_text(self) -> str:
        if self.has_ended:
            return "stopped"
        dead = self.dead()
        return f"{format_ranks(dead)} ended" if dead else "ready"

    @property
    def has_ended(self) -> bool:
        """Whether all ranks are gone."""
        return self._run.state.is_over or not self._channels

    @property
    def end_reason(self) -> str:
        """Return why the ranks have ended, as a sentence without a full stop; never empty.

        It has a meaning only after they have ended.
        """
        if self.was_stopped:
            return "these ranks were stopped"
        return self._ended_by_idleness or (
            "The live ranks have ended; variables that only they had are lost"
        )

    def dead(self) -> list[int]:
        """Return the ranks whose processes have ended."""
        return [rank for rank in range(self.world_size) if rank not in self._channels]

    # What the engine of a task needs

    @property
    def names(self) -> Mapping[int, Collection[str]]:
        """The variables of each rank."""
        return self.variables.names

    def parts_there(self, sent: Mapping[str, Any], ranks: Sequence[int]) -> Mapping[int, Part]:
        """Return the parts of the notebook's models that ranks have, for what is sent to them."""
        return self.variables.find_known_parts(sent, ranks)

    @property
    def pids(self) -> Mapping[int, int]:
        """The process of each rank."""
        return {rank.rank: rank.pid for rank in self._run.state.ranks if rank.pid is not None}

    @property
    def nodes(self) -> Mapping[int, str]:
        """The host of each rank that is not on this one."""
        return {rank.rank: rank.node for rank in self._run.state.ranks if rank.node}

    def new_task(self, folder: RunFolder | None = None) -> int:
        """Begin a task and return its number, which no other task has.

        `folder` is that of its run, if any. For ranks on other hosts, requests for stacks in it are
        linked to the folder of the live ranks.
        """
        self._tasks += 1
        self._task_folder = folder
        if folder is not None and self._are_far:  # ranks on other hosts get requests there
            folder.questions.symlink_to(RunFolder(self._run.folder).questions)
        return self._tasks

    def send(self, rank: int, message: Message, data: int | None = None) -> None:
        """Send a message to a rank. Raises `OSError` for one that is gone."""
        if rank not in self._channels:
            raise OSError(f"rank {rank} has ended")
        if message["do"] in ("run", "put"):
            path = [] if self._are_far else import_path()
            message = {**message, "path": path, "reloaded": self._reloaded.take(rank)}
        self._channels[rank].send(message, data)

    def receive(self, ranks: Collection[int], timeout: float) -> dict[int, Message | None]:
        """Wait up to `timeout` s for messages, and return the next one of each rank that has one.

        None for a rank that is gone. A part of a file is saved and not returned, so the result may
        be empty before the timeout.
        """
        channels = {rank: self._channels.get(rank) for rank in ranks}
        # Another thread may close one: its descriptor is negative then.
        descriptors = {r: channel.fileno() if channel else -1 for r, channel in channels.items()}
        ended = {rank: None for rank, descriptor in descriptors.items() if descriptor < 0}
        messages: dict[int, Message | None] = dict(ended)
        by_descriptor = {d: rank for rank, d in descriptors.items() if d >= 0}
        poller = select.poll()
        for descriptor in by_descriptor:
            poller.register(descriptor, select.POLLIN)
        over = {r.rank for r in self._run.state.ranks if r.is_over} if self._are_far else set()
        for descriptor, _ in poller.poll(0 if ended else 1000 * timeout) if by_descriptor else ():
            rank = by_descriptor.pop(descriptor)
            message = self._receive_message(rank)
            if message != {}:
                messages[rank] = message
        for rank in over.intersection(by_descriptor.values()):  # a host that is lost hangs up not
            if (channel := self._channels.pop(rank, None)) is not None:
                channel.close()
            messages[rank] = None
        return messages

    def _receive_message(self, rank: int) -> Message | None:
        """Return the next message of a rank, `{}` where it was a part of a file; None: it ended."""
        try:
            message, data = self._channels[rank].receive()
        except KeyError:  # another thread has stopped the ranks
            return None
        except EOFError:
            if (channel := self._channels.pop(rank, None)) is not None:  # else they were stopped
                channel.close()
            return None
        message["data"] = data
        if "file" in message:
            self._save_part(message)
            return {}
        if message["done"] != self._tasks:  # a late reply
            _drop_data(message)
        self.variables.names[rank] |= set(message.get("new", ()))
        self.variables.names[rank] -= set(message.get("deleted", ()))
        if "groups" in message:
            self._groups[rank] = message["groups"]
        return message

    def _save_part(self, message: Message) -> None:
        """Write the received part of a file of the task's run, if the run continues."""
        if message["data"] is None:  # an empty file comes without data
            message["data"] = os.open(os.devnull, os.O_RDONLY)
        with contextlib.suppress(OSError), open(message["data"], "rb") as file:  # a full disk
            if message["task"] != self._tasks or self._task_folder is None:
                return
            path = self._task_folder.path / message["file"]
            path.parent.mkdir(mode=0o700, exist_ok=True)
            file.seek(0)
            if message["grows"]:
                with open(path, "ab", opener=_open_private) as target:
                    shutil.copyfileobj(file, target)
            else:
                partial = path.with_name(f"{path.name}.partial")
                with open(partial, "wb", opener=_open_private) as target:
                    shutil.copyfileobj(file, target)
                partial.replace(path)

    def end_of(self, rank: int) -> Exit:
        """Return how the process of a rank ended; wait up to 2 s until that is known.

        For ranks on other hosts up to 15 s. The return code is None if it is still not known.
        """
        patience = UNKILLABLE_AFTER_S if self._are_far else FAILURE_REPORT_TIMEOUT_S
        deadline = time.monotonic() + patience
        while not (state := self._run.state.ranks[rank]).is_over and time.monotonic() < deadline:
            time.sleep(0.01)
        return Exit(rank, state.returncode, clock.now(), state.cause, code=state.cause_code)

    def end(self, how: str) -> None:
        """Have all processes ended, without waiting for it."""
        for rank in list(self._channels):
            self._channels.pop(rank).close()
        self._run._watcher.request_stop(how)  # type: ignore[union-attr]

    # Called by the user

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run:
        """Run ``function(*args, **kwargs)`` on every rank, and return the finished `Run`.

        It does what `nbtrain.launch` does: ``run.results`` has the return values, models among the
        arguments are updated, and it raises what the rank that failed first raised.
        """
        if not callable(function):
            raise PlanError(
                f"run needs a function to call, not {with_article(type(function).__name__)}"
            )
        call = Call(function, args, kwargs)
        return self.run_plan(Plan(call, call.name))

    def run_plan(self, plan: Plan, ranks: Sequence[int] | None = None) -> Run:
        """Run a plan's task on some ranks, all by default. Raises what `nbtrain.launch` does.

        A background run is returned after its start. The next use of the ranks waits for its end,
        but another background run raises `PlanError`.
        """
        targets = list(range(self.world_size)) if ranks is None else list(ranks)
        if plan.is_background:
            return self._run_in_background(plan, targets)
        return self._run_now(plan, targets)

    @_exclusive_use
    def _run_now(self, plan: Plan, targets: Sequence[int]) -> Run:
        """Run a task and wait for it; keep the error that it raises for `debug`, and raise it.

        Afterwards forms the process group again, if that is needed.
        """
        try:
            run = self._launch_task(plan, targets)
        except BaseException as error:  # including an interrupt: `debug` needs the last exception
            self.error = error
            self._failed = _failed_rank(last_run())
            raise
        finally:
            self._recover()
            self._say_news()
        return run

    def _run_in_background(self, plan: Plan, targets: Sequence[int]) -> Run:
        """Run a task in the background, after the process group was formed again if it broke.

        Raises `PlanError` if another task is in the background, and `RankDied` or `NbtrainError` if
        ranks have ended.
        """
        self._check_is_whole()
        if busy := self._busy_with():
            if not self._is_settling():
                raise PlanError(
                    f"the ranks are busy with {busy} in the background. Wait for it: "
                    "nbtrain.last_run().wait(), or end it: nbtrain.last_run().stop()"
                )
            self._is_free.wait()  # no longer than it takes to make them ready
        self._recover()  # while they are free: with the flag down, it would wait for this very task
        self._check_is_whole()
        self._say_news()
        self._last_use = time.monotonic()
        self._is_free.clear()
        self._background_run = None
        try:
            self._background_run = self._launch_task(plan, targets)
            self._background_ranks = targets
        except BaseException:  # including an interrupt: no other code sets it
            self._is_free.set()
            raise
        return self._background_run

    def _launch_task(self, plan: Plan, targets: Sequence[int]) -> Run:
        """Launch a task on ranks, with the variables of the notebook that these lack.

        Returns its run, and waits for the end unless the plan is a background one. Raises
        `RankDied` or `NbtrainError` if ranks have ended, and what the task raises.
        """
        self._recover()  # an interrupt may have come before it was done
        self._check_is_whole()
        if isinstance(plan.task, Cell):
            plan = replace(plan, sync=False)
        engine, noticed = LiveEngine(self, targets), list[Finding]()
        sent: dict[str, Any] = {}
        if isinstance(plan.task, Cell):
            has = set.intersection(*(self.variables.names[rank] for rank in targets))
            task_values.keep_references(plan.task)
            read = task_values.all_variables(plan.task)
            sent = {name: value for name, value in read.items() if name not in has}
            if changed := self.variables.find_changes(read, has):
                names = ", ".join(f"`{name}`" for name in changed)
                text = f"the notebook's {names} changed after the ranks got it."
                noticed = [
                    Finding("changed", text, f"%nbtrain push {', '.join(changed)} sends it again.")
                ]
        self.error = None
        try:
            return run_plan(plan, noticed, engine=engine)
        finally:
            self.variables.snapshot.take(sent, sent)

    @contextlib.contextmanager
    def occupied(self) -> Iterator[None]:
        """Keep the ranks for a task in the background while the body runs.

        Other threads wait. At the end the ranks are made ready for the next task.
        """
        with self._turn:
            try:
                yield
            finally:
                try:
                    self._recover()
                finally:  # in any case, because another thread may wait for it
                    self._last_use = time.monotonic()
                    self._is_free.set()

    def doing(self, rank: int) -> str:
        """Return what a rank does now, in words; empty for a rank that has ended."""
        if rank in self.dead():
            return ""
        if (busy := self._busy_with()) and rank in self._background_ranks:
            return busy
        return f"idle for {format_duration(time.monotonic() - self._last_use)}"

    def _busy_with(self) -> str:
        """Return what the ranks do in the background; '' for nothing."""
        if self._is_free.is_set() or self.has_ended:
            return ""
        run = self._background_run
        return "a cell" if run is None else f"`{run.state.name}`"

    def _is_settling(self) -> bool:
        """Whether a background task has ended, and the ranks are prepared for the next."""
        return self._background_run is not None and self._background_run.state.is_over

    def _wait_for_background(self) -> None:
        """Wait until a task in the background has ended, with a message, and print the news.

        Does nothing outside of the main thread. An interrupt ends only the wait.
        """
        if threading.current_thread() is threading.main_thread():
            if (busy := self._busy_with()) and self._background_run is not None:
                if not self._is_settling():
                    print(
                        f"The ranks are busy with {busy} in the background. Waiting until it ends."
                    )
                self._background_run.wait()
                self._is_free.wait()
            self._say_news()

    def _say_news(self) -> None:
        """Print what happened to the ranks that the user has not read."""
        news, self._news = self._news, ""
        if news:
            print(news, flush=True)

    @_exclusive_use
    def debug(self, rank: int | None = None) -> None:
        """Open the debugger at the line where the last task failed, and wait until it is left.

        Args:
            rank: the rank to debug; None: the rank that failed first.

        Raises:
            PlanError: the ranks are on a cluster, there is no notebook or terminal to type in, no
                task has failed, or there is no such rank.
            NbtrainError: a rank has ended.
        """
        if self._are_far:
            raise PlanError(
                "the debugger works on this host only, and these ranks are on a cluster"
            )
        if prompt.find() is None:
            raise PlanError("the debugger needs a notebook or a terminal in which you can type")
        if self._background_run is not None and self._background_run is last_run():
            self.error, self._failed = (
                self._background_run.exception,
                _failed_rank(self._background_run),
            )
        if self.error is None:
            raise PlanError("no cell has failed on these ranks since the last one that worked")
        self._check_is_whole()
        target = self._failed if rank is None else rank
        self._check_rank(target)
        call = Call(load_provided("debugger", "debug_failure", "`ranks.debug()`"))
        plan = Plan(call, "debug", is_post_mortem=True, view="none", telemetry=(), sync=False)
        with _PreserveLastRun():
            run_plan(plan, engine=LiveEngine(self, [target]))

    def _check_rank(self, rank: int) -> None:
        """Raise `PlanError` for a rank that does not exist."""
        if not 0 <= rank < self.world_size:
            raise PlanError(
                f"there is no rank {rank}: the live ranks are 0 to {self.world_size - 1}"
            )

    def _check_is_whole(self) -> None:
        """Raise `RankDied` if some ranks have ended, and `NbtrainError` if all of them have.

        Also raises `NbtrainError` if the ranks could not be made ready after an earlier task.
        """
        dead = self.dead()
        if self.has_ended:
            raise NbtrainError(f"{self.end_reason}. %nbtrain restart starts new ranks")
        if dead:
            raise RankDied(
                f"{format_ranks(dead)} of the live ranks ended. The others still have their "
                "variables: copy what you need with %nbtrain pull, then %nbtrain restart"
            )
        if self._trouble:
            raise NbtrainError(f"{self._trouble}. %nbtrain restart starts new ranks")

    def _recover(self) -> None:
        """Form the process group again if a task ended within a collective, and wait for that.

        Does nothing if a rank has ended. A failure is not raised: the next task raises it. What
        happened is kept for `_say_news`.
        """
        states = [state for state in self._groups.values() if state["is_formed"]]
        was_cut_off = any(state["is_broken"] for state in self._groups.values())
        is_needed = was_cut_off and (bool(states) or self.device == "xla")
        is_needed = is_needed or len({state["count"] for state in states}) > 1
        is_needed = is_needed or 0 < len(states) < len(self._groups)
        if self.has_ended or self.dead() or not is_needed:
            return
        self._generation += 1
        message = {"do": "reform", "generation": self._generation}
        message["forms"] = len(states) == len(self._groups) == self.world_size
        try:
            answers = self._ask(self._channels, message, may_stop=False)
        except NbtrainError as error:  # the cell's own error is the one to raise
            self._trouble = f"the ranks could not form a new process group: {error}"
            return
        self._groups.clear()
        lost = sorted({name for answer in answers.values() for name in answer["lost"]})
        names = ", ".join(f"`{name}`" for name in lost)
        rest = f"; {names} must be sharded again" if lost else ", and their variables are kept"
        self._news = f"The ranks formed a new process group{rest}." if states else ""
        if was_cut_off and self.device == "xla":
            self._news = f"{self._news} {_TPU_CUT_OFF}".lstrip()

    @_exclusive_use
    def _ask(
        self,
        ranks: Iterable[int],
        message: Message,
        data: int | None = None,
        *,
        may_stop: bool = True,
    ) -> dict[int, Message]:
        """Send a message to ranks, and return their answers by rank.

        Waits for the ranks to be free, and then up to 30 s. The caller closes descriptors in
        ``data``. Raises `NbtrainError` for an error in a rank or no answer, and `RankDied` for a
        rank that has ended. An interrupt ends the wait, if it `may_stop`.
        """
        if self.has_ended:
            self._check_is_whole()
        number, answers = self.new_task(), dict[int, Message]()
        waiting = set(ranks)
        try:
            with Interrupts() as interrupts:  # one in the middle of a message would garble the next
                for rank in waiting:
                    with contextlib.suppress(OSError):
                        self.send(rank, {**message, "id": number}, data)
                heard = interrupts if may_stop else None
                self._collect(number, waiting, answers, limits.REPLY_TIMEOUT_S, heard)
            if heard is not None and heard.count:
                raise KeyboardInterrupt
            if silent := sorted(waiting - answers.keys()):
                self._give_up(number, silent)
            for rank, answer in sorted(answers.items()):
                if "error" in answer:
                    raise NbtrainError(f"rank {rank}: {answer['error'].partition(': ')[2]}")
        except BaseException as error:  # an interrupt too
            if isinstance(error, KeyboardInterrupt):
                self._interrupt(number, waiting - answers.keys())
            for answer in answers.values():
                _drop_data(answer)
            raise
        return answers

    def _collect(
        self,
        number: int,
        waiting: Collection[int],
        answers: dict[int, Message],
        patience: float,
        interrupts: Interrupts | None = None,
    ) -> None:
        """Add the answers to a question to `answers`, until all are there or time is up.

        `patience` is in seconds. Raises `RankDied` for a rank that has ended, and
        `KeyboardInterrupt` if `interrupts` has counted one.
        """
        deadline = time.monotonic() + patience
        while (left := set(waiting) - answers.keys()) and time.monotonic() < deadline:
            if interrupts is not None and interrupts.count:
                raise KeyboardInterrupt
            for rank, answer in self.receive(left, 0.1).items():
                if answer is None:
                    raise RankDied(f"rank {rank} has ended")
                if answer["done"] == number:
                    answers[rank] = answer

    def _interrupt(self, number: int, ranks: Iterable[int]) -> None:
        """Interrupt the question or task with this number on ranks."""
        for rank in ranks:
            with contextlib.suppress(OSError):
                self.send(rank, {"do": "interrupt", "id": number})

    def _give_up(self, number: int, silent: Sequence[int]) -> None:
        """Interrupt ranks that did not answer, wait up to 5 s for them, raise `NbtrainError`.

        If a rank ignores the interrupt, every later task is refused.
        """
        late: dict[int, Message] = {}
        self._interrupt(number, silent)
        self._collect(number, silent, late, UNRESPONSIVE_AFTER_S)
        for answer in late.values():
            _drop_data(answer)
        text = f"{format_ranks(silent)} did not answer within {limits.REPLY_TIMEOUT_S:g} s"
        if len(late) < len(silent):
            self._trouble = f"{text}, and did not react to an interrupt"
        raise NbtrainError(text)

    def __getitem__(self, name: str) -> list[Any]:
        """Return the variable `name` of every rank, as a list; one over 1 MiB is only described."""
        name = variable_name(name)
        values = self.variables.fetch([name], SMALL_FILE_BYTES, self._channels).values()
        return [of_rank[name] for of_rank in values]

    def push(self, *names: str, **values: Any) -> None:
        """Send variables of the notebook, and other values by name, to every rank.

        A model or an optimizer is loaded in place if the ranks have one with the same layout: what
        they built around it, such as DDP or an optimizer, continues to use it.

        Args:
            names: names of the notebook's variables.
            values: other values, as ``name=value``.

        Raises:
            PlanError: the notebook has no such variable, or an optimizer is sent without its model.
            NbtrainError: the ranks have ended, or one cannot load a value.
        """
        named = {variable_name(name): value for name, value in values.items()}
        self.variables.push(list(map(variable_name, names)), named, self._channels)

    def pull(self, *names: str, rank: int = 0) -> None:
        """Copy variables of a rank into the notebook, under the same names.

        A model, an optimizer or a scheduler is loaded in place into the notebook's one. Any other
        variable of the notebook is replaced.

        Args:
            names: names of the rank's variables.
            rank: the rank to copy from.

        Raises:
            PlanError: there is no such rank.
            NbtrainError: the rank has ended, has no such variable, or cannot send its value.
        """
        self._check_rank(rank)
        is_whole = not rank and not self.dead()
        self.variables.pull(
            list(map(variable_name, names)), rank, self._pull_in_place if is_whole else None
        )

    @_exclusive_use
    def _pull_in_place(self, names: Sequence[str], notebook: dict[str, Any]) -> None:
        cell = Cell("\n".join([*names, "None"]), "<pull>", notebook)
        title = f"pull {', '.join(names)}"
        plan = Plan(cell, title, sync=True, out=tuple(names), view="none", telemetry=())
        run_plan(plan, engine=LiveEngine(self, list(self._channels)))

    def describe(self) -> dict[int, list[dict[str, Any]]]:
        """Return what each rank reports about its variables."""
        answers = self._ask(self._channels, {"do": "describe"})
        return {rank: answer["variables"] for rank, answer in sorted(answers.items())}

    def end_when_idle(self, seconds: float) -> None:
        """End the ranks by themselves when they had nothing to do for so long."""
        watch = functools.partial(self._end_when_idle, seconds)
        threading.Thread(target=watch, name="nbtrain-idle", daemon=True).start()

    def _end_when_idle(self, seconds: float) -> None:
        """Wait until the ranks have had no task for so long, then end them.

        The body of the thread of `end_when_idle`. `seconds` is the time without a task.
        """
        while not self.has_ended:
            if self._is_stopped.wait(max(self._last_use + seconds - time.monotonic(), 0.0)):
                return
            with self._turn:
                if time.monotonic() - self._last_use < seconds or self.has_ended:
                    continue
                self._ended_by_idleness = (
                    f"The live ranks ended themselves after {seconds:g} s without a cell, as "
                    "--idle-timeout asks; variables that only they had are lost"
                )
                self._stop("because they were idle")

    def stop(self) -> None:
        """End the ranks. May be repeated."""
        self.was_stopped = True
        self._stop("by %nbtrain stop")

    def _stop(self, how: str) -> None:
        """End a task in the background, then all ranks, and wait until they have ended.

        Does nothing in a process that was forked from the notebook's.
        """
        if os.getpid() != self._pid:
            return
        self._is_stopped.set()
        if self._busy_with() and self._background_run is not None:
            self._background_run._watcher.request_stop(how)  # type: ignore[union-attr]
            self._is_free.wait(UNRESPONSIVE_AFTER_S)
        for rank in list(self._channels):
            self._channels.pop(rank).close()
        if not self._run.state.is_over:
            self._run.stop(how)
        atexit.unregister(self.stop)
