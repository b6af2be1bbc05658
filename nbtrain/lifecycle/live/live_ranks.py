"""Ranks that stay: `start` returns them, `LiveRanks.run` has them do something.

The ranks are a run in the background, whose function takes tasks (`nbtrain.worker.live.server`):
what watches, ends and reaps them is what does so for every such run. Each task is a run of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import secrets
import select
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from ... import engines
from ...engines import Exit
from ...engines.live import LiveEngine, Message
from ...errors import LaunchError, NbtrainError, PlanError, RankDied
from ...planning.findings import Finding
from ...planning.option_parser import IDLE_TIMEOUT, plan_fields
from ...planning.plan import Call, Cell, Plan
from ...planning.task_values import is_model, variables
from ...system.text import format_ranks, plural
from ...tracking import clock
from ...tracking.diagnosis.failures import is_secondary_failure
from ...transport import payload, result_pickler
from ...transport.channel import Channel, Listener
from ...ui.displays import prompt
from ...worker.debugging.hooks import look_again
from ...worker.live.server import serve
from .. import launcher
from ..run import Run, last_run, remember
from .snapshot import Snapshot

PATIENCE = 120.0
"""Seconds in which ranks have to begin: on a cluster, or a loaded host, imports take long."""

ANSWER = 30.0
"""Seconds in which ranks that are not busy have to answer."""

HEARD = 2.0
"""Seconds in which ranks that do not answer have to hear an interrupt."""

LARGE = 1 << 20
"""Bytes of a value that ``ranks["x"]`` brings; of a larger one, a description."""

_live: LiveRanks | None = None
_live_pid: int | None = None

_P = ParamSpec("_P")
_T = TypeVar("_T")


def start(
    num_processes: int | None = None, *, idle_timeout: float | None = None, **options: Any
) -> LiveRanks:
    """Start ranks that stay until `LiveRanks.stop`, or to the kernel's end; return them.

    While they live, ``%%distributed`` and ``%distributed`` run on them, and what a cell defines
    stays in the ranks for the next one. Forked ranks begin with the notebook's variables.

    Args:
        num_processes: how many ranks; None: one per GPU, or 2 on a host without any.
        idle_timeout: end the ranks after this many seconds without a task; None: never.
        options: `engine`, `mixed_precision`, `downcast_bf16`, `config` and `env`, as for
            `nbtrain.launch`.

    Raises:
        PlanError: an option that makes no sense, or ranks live already; nothing was started.
        PreflightError: the state of this process forbids the launch; nothing was started.
        LaunchError: the ranks could not be started.
    """
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise PlanError(
            f"nbtrain.start has no option {unknown[0]!r}; there are {', '.join(_OPTIONS)}"
        )
    IDLE_TIMEOUT.check(idle_timeout, "idle_timeout")
    if current() is not None:
        raise PlanError("live ranks are there already. End them first: %nbtrain stop")
    folder = Path(tempfile.mkdtemp(prefix=f"nbtrain-live-{os.getpid()}-"))
    secret = secrets.token_hex(16)
    before = last_run()
    try:
        listener = Listener(folder)
        call = Call(serve, (listener.address, secret))
        fields = plan_fields({"num_processes": num_processes, **options})
        fields |= {"background": True, "view": "none", "telemetry": (), "hang_after": None}
        plan = Plan(call, launcher.LIVE, is_live=True, **{**fields, "sync": False})
        _check_engine(plan)
        snapshot = Snapshot(_notebook())
        run = launcher.run_plan(plan)
        if before is not None:
            remember(before)
        ranks = _connected(run, listener, secret, folder, snapshot)
    except BaseException:  # an interrupt too: nothing stays behind
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if idle_timeout is not None:
        ranks.end_when_idle(idle_timeout)
    return ranks


def _check_engine(plan: Plan) -> None:
    """Refuse engines whose ranks nothing could reach. Raises `PlanError`."""
    if sys.platform != "linux":
        raise PlanError("live ranks need Linux so far")
    name = engines.choose(plan).name
    if name not in ("fork", "spawn"):
        raise PlanError(f"live ranks start with --engine fork or spawn so far, not with {name}")


_OPTIONS = ("engine", "mixed_precision", "downcast_bf16", "config", "env")


def _connected(
    run: Run, listener: Listener, secret: str, folder: Path, snapshot: Snapshot
) -> LiveRanks:
    """Wait until each rank has connected. Raises `LaunchError`, and then ends them."""
    global _live, _live_pid
    channels: dict[int, Channel] = {}
    names: dict[int, set[str]] = {}
    deadline = time.monotonic() + PATIENCE
    try:
        while len(channels) < run.state.world_size:
            if run.state.is_over or any(rank.is_over for rank in run.state.ranks):
                run.wait()
                raise run.exception or LaunchError(run.state.message)
            if time.monotonic() > deadline:
                missing = [r for r in range(run.state.world_size) if r not in channels]
                raise LaunchError(f"{format_ranks(missing)} did not begin within {PATIENCE:g} s")
            channel = listener.accept(0.1)
            if channel is not None:
                hello = _hello(channel, secret)
                if hello is not None:
                    channels[hello["rank"]], names[hello["rank"]] = channel, set(hello["new"])
    except BaseException:  # an interrupt too: no rank stays that nobody could reach
        for channel in channels.values():
            channel.close()
        run.stop("because the ranks could not be started")
        raise
    finally:
        listener.close()
    _live, _live_pid = LiveRanks(run, channels, names, folder, snapshot), os.getpid()
    atexit.register(_live.stop)
    return _live


def _hello(channel: Channel, secret: str) -> Message | None:
    """Return what a rank says first; None, and hang up, if it is none of ours."""
    with contextlib.suppress(EOFError, ValueError, KeyError):
        message, _ = channel.receive()
        if secrets.compare_digest(str(message["secret"]), secret):
            channel.wait_for_ever()
            return message
    channel.close()
    return None


def current() -> LiveRanks | None:
    """Return the ranks that live, if there are any."""
    if _live is not None and _live_pid == os.getpid() and not _live.has_ended:
        return _live
    return None


def parting() -> str:
    """Return, once, why the ranks ended themselves; '' if they did not."""
    if _live is None or _live_pid != os.getpid():
        return ""
    said, _live.parting = _live.parting, ""
    return said


def _in_use(
    method: Callable[Concatenate[LiveRanks, _P], _T],
) -> Callable[Concatenate[LiveRanks, _P], _T]:
    """Have the ranks do one thing at a time, and not be idle meanwhile."""

    @functools.wraps(method)
    def used(self: LiveRanks, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self._turn:
            try:
                return method(self, *args, **kwargs)
            finally:
                self._last_use = time.monotonic()

    return used


def _drop_data(message: Message) -> None:
    """Close what came with a message, if it is there still."""
    data = message.pop("data", None)
    if data is not None:
        os.close(data)


def _cause(run: Run | None) -> int:
    """Return the rank whose failure ended a run."""
    if run is None:
        return 0
    failed = [rank for rank in run.state.ranks if rank.status == "failed"]
    first = min(failed, key=lambda r: (is_secondary_failure(r.error or ""), r.ended), default=None)
    return 0 if first is None else first.rank


def _notebook() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


class LiveRanks:
    """Ranks that stay between cells; `start` makes them. ``with`` ends them behind its block."""

    def __init__(
        self,
        run: Run,
        channels: dict[int, Channel],
        names: dict[int, set[str]],
        folder: Path,
        snapshot: Snapshot,
    ) -> None:
        self._run, self._channels, self._folder = run, channels, folder
        self._names, self._snapshot = names, snapshot
        self._tasks = 0
        self._trouble = ""
        self.error: BaseException | None = None
        """What the last task raised."""
        self._failed = 0  # the rank that caused it
        self._generation = 0
        self._groups: dict[int, Mapping[str, Any]] = {}
        self._turn, self._last_use = threading.RLock(), time.monotonic()
        self._is_stopped = threading.Event()
        self._ended_by_idleness = ""
        self.parting = ""
        """Why the ranks ended themselves, until the user has read it."""
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
        return f"<LiveRanks: {plural(self.world_size, 'rank')}, {self._said()}>"

    def _said(self) -> str:
        if self.has_ended:
            return "stopped"
        dead = self.dead()
        return f"{format_ranks(dead)} ended" if dead else "ready"

    @property
    def has_ended(self) -> bool:
        """Whether all ranks are gone."""
        return self._run.state.is_over or not self._channels

    def dead(self) -> list[int]:
        """Return the ranks whose processes have ended."""
        return [rank for rank in range(self.world_size) if rank not in self._channels]

    # What the engine of a task needs

    @property
    def names(self) -> Mapping[int, Collection[str]]:
        """The variables of each rank."""
        return self._names

    @property
    def pids(self) -> Mapping[int, int]:
        """The process of each rank."""
        return {rank.rank: rank.pid for rank in self._run.state.ranks if rank.pid is not None}

    @property
    def nodes(self) -> Mapping[int, str]:
        """The host of each rank that is not on this one."""
        return {rank.rank: rank.node for rank in self._run.state.ranks if rank.node}

    def new_task(self) -> int:
        """Return a number that no other task has."""
        self._tasks += 1
        return self._tasks

    def send(self, rank: int, message: Message, data: int | None = None) -> None:
        """Send a message to a rank. Raises `OSError` for one that is gone."""
        if rank not in self._channels:
            raise OSError(f"rank {rank} has ended")
        self._channels[rank].send(message, data)

    def receive(self, ranks: Collection[int], timeout: float) -> dict[int, Message | None]:
        """Return the next message of each rank that has one; None for a rank that is gone."""
        ended = {rank: None for rank in ranks if rank not in self._channels}
        messages: dict[int, Message | None] = dict(ended)
        poller, by_descriptor = select.poll(), dict[int, int]()
        for rank in set(ranks) - ended.keys():
            by_descriptor[self._channels[rank].fileno()] = rank
            poller.register(self._channels[rank].fileno(), select.POLLIN)
        for descriptor, _ in poller.poll(0 if ended else 1000 * timeout) if by_descriptor else ():
            rank = by_descriptor[descriptor]
            messages[rank] = self._received(rank)
        return messages

    def _received(self, rank: int) -> Message | None:
        try:
            message, data = self._channels[rank].receive()
        except (EOFError, ValueError):
            self._channels.pop(rank).close()
            return None
        message["data"] = data
        if message["done"] != self._tasks:  # an answer that nobody waits for any more
            _drop_data(message)
        self._names[rank] |= set(message.get("new", ()))
        self._names[rank] -= set(message.get("deleted", ()))
        if "groups" in message:
            self._groups[rank] = message["groups"]
        return message

    def end_of(self, rank: int) -> Exit:
        """Return how the process of a rank ended, which its keeper learns at about this moment."""
        deadline = time.monotonic() + 2.0
        while not (state := self._run.state.ranks[rank]).is_over and time.monotonic() < deadline:
            time.sleep(0.01)
        return Exit(rank, state.returncode, clock.now(), state.cause)

    def end(self, how: str) -> None:
        """Have all processes ended, without waiting for it."""
        for rank in list(self._channels):
            self._channels.pop(rank).close()
        self._run._watcher.request_stop(how)  # type: ignore[union-attr]

    # What the user asks for

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run:
        """Run ``function(*args, **kwargs)`` on every rank, and return the finished `Run`.

        As `nbtrain.launch`: return values are in ``run.results``, models among the arguments are
        updated, and the causing rank's own exception is raised.
        """
        if not callable(function):
            raise PlanError(f"run needs a function to call, not a {type(function).__name__}")
        call = Call(function, args, kwargs)
        return self.run_plan(Plan(call, call.name))

    @_in_use
    def run_plan(self, plan: Plan, ranks: Sequence[int] | None = None) -> Run:
        """Run a plan's task on some ranks, all by default. Raises what `nbtrain.launch` does."""
        self._check_is_whole()
        targets = list(range(self.world_size)) if ranks is None else list(ranks)
        if isinstance(plan.task, Cell):
            plan = replace(plan, sync=False)
        engine = LiveEngine(self, targets)
        noticed = []
        if isinstance(plan.task, Cell) and (changed := self.changed(plan.task, targets)):
            names = ", ".join(f"`{name}`" for name in changed)
            remedy = f"%nbtrain push {', '.join(changed)} sends it."
            noticed.append(
                Finding(f"the notebook's {names} changed since the ranks got it.", remedy)
            )
        self.error = None
        try:
            run = launcher.run_plan(plan, noticed, engine=engine)
        except BaseException as error:
            self.error = error
            self._failed = _cause(last_run())
            raise
        finally:
            if isinstance(plan.task, Cell):
                self._snapshot.take(engine.sent, plan.task.namespace)
            self._recover()
        return run

    @_in_use
    def debug(self, rank: int | None = None) -> None:
        """Open the debugger where the last task failed: on its cause, or on a rank of your choice.

        Raises `PlanError` where nobody can type, or no task has failed.
        """
        if prompt.find() is None:
            raise PlanError("the debugger needs somebody who answers: nobody can type here")
        if self.error is None:
            raise PlanError("no cell has failed on these ranks since the last one that worked")
        self._check_is_whole()
        target = self._failed if rank is None else rank
        self._check_rank(target)
        call = Call(look_again)
        plan = Plan(call, "debug", looks_again=True, view="none", telemetry=(), sync=False)
        before = last_run()
        launcher.run_plan(plan, engine=LiveEngine(self, [target]))
        if before is not None:
            remember(before)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise PlanError(
                f"there is no rank {rank}: the live ranks are 0 to {self.world_size - 1}"
            )

    def changed(self, cell: Cell, ranks: Sequence[int] | None = None) -> list[str]:
        """Return the variables that a cell reads, and that the notebook has assigned anew."""
        has = set.intersection(*(self._names[r] for r in ranks or range(self.world_size)))
        read = variables(cell)
        return [name for name in read if name in has and self._snapshot.differs(name, read[name])]

    def _check_is_whole(self) -> None:
        """Raise `RankDied` if a rank has ended."""
        dead = self.dead()
        if self.has_ended:
            why = self._ended_by_idleness or "these ranks were stopped"
            raise NbtrainError(f"{why}. %nbtrain restart starts new ones")
        if dead:
            raise RankDied(
                f"{format_ranks(dead)} of the live ranks ended. The others still have their "
                "variables: fetch what you need with %nbtrain pull, then %nbtrain restart"
            )
        if self._trouble:
            raise NbtrainError(f"{self._trouble}. %nbtrain restart starts new ranks")

    def _recover(self) -> None:
        """Form the process group anew, where a task ended in the middle of what it shared."""
        states = [state for state in self._groups.values() if state["is_formed"]]
        is_needed = any(state["is_broken"] for state in states)
        is_needed = is_needed or len({state["count"] for state in states}) > 1
        is_needed = is_needed or 0 < len(states) < len(self._groups)
        if self.has_ended or self.dead() or not is_needed:
            return
        self._generation += 1
        message = {"do": "reform", "generation": self._generation}
        message["forms"] = len(states) == len(self._groups) == self.world_size
        try:
            answers = self._ask(self._channels, message)
        except NbtrainError as error:  # the cell's own error is the one to raise
            self._trouble = f"the ranks could not form their process group again: {error}"
            return
        lost = sorted({name for answer in answers.values() for name in answer["lost"]})
        names = ", ".join(f"`{name}`" for name in lost)
        rest = f"; {names} must be sharded again" if lost else ", and their variables are kept"
        print(f"The ranks formed their process group anew{rest}.", flush=True)

    @_in_use
    def _ask(
        self, ranks: Iterable[int], message: Message, data: int | None = None
    ) -> dict[int, Message]:
        """Send a message and return the answers. Raises `NbtrainError` for what went wrong."""
        if self.has_ended:
            self._check_is_whole()
        number, answers = self.new_task(), dict[int, Message]()
        waiting = set(ranks)
        try:
            for rank in waiting:
                with contextlib.suppress(OSError):
                    self.send(rank, {**message, "id": number}, data)
            self._collect(number, waiting, answers, ANSWER)
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
        self, number: int, waiting: Collection[int], answers: dict[int, Message], patience: float
    ) -> None:
        """Wait for the answers to a question. Raises `RankDied`."""
        deadline = time.monotonic() + patience
        while (left := set(waiting) - answers.keys()) and time.monotonic() < deadline:
            for rank, answer in self.receive(left, 0.5).items():
                if answer is None:
                    raise RankDied(f"rank {rank} has ended")
                if answer["done"] == number:
                    answers[rank] = answer

    def _interrupt(self, number: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(OSError):
                self.send(rank, {"do": "interrupt", "id": number})

    def _give_up(self, number: int, silent: Sequence[int]) -> None:
        """Raise `NbtrainError` for ranks that do not answer; no cell waits for them either."""
        late: dict[int, Message] = {}
        self._interrupt(number, silent)
        self._collect(number, silent, late, HEARD)
        for answer in late.values():
            _drop_data(answer)
        text = f"{format_ranks(silent)} did not answer within {ANSWER:g} s"
        if len(late) < len(silent):
            self._trouble = f"{text}, nor hear an interrupt"
        raise NbtrainError(text)

    def __getitem__(self, name: str) -> list[Any]:
        """Return a variable of every rank, as a list; of a large one, what it is."""
        return [values[name] for values in self._fetch([name], LARGE).values()]

    def _fetch(
        self, names: Sequence[str], limit: int | None, ranks: Iterable[int] | None = None
    ) -> dict[int, dict[str, Any]]:
        targets = list(self._channels) if ranks is None else list(ranks)
        answers = self._ask(targets, {"do": "get", "names": list(names), "limit": limit})
        fetched = {}
        for rank, answer in sorted(answers.items()):
            with open(answer.pop("data"), "rb") as file:
                file.seek(0)
                packed = pickle.load(file)
            fetched[rank] = {name: _value(*each) for name, each in packed.items()}
        return fetched

    def push(self, *names: str, **values: Any) -> None:
        """Send variables of the notebook, by name, or other values, to every rank."""
        notebook = _notebook()
        missing = [name for name in names if name not in notebook]
        if missing:
            raise PlanError(f"the notebook has no variable `{missing[0]}`")
        sent = {**{name: notebook[name] for name in names}, **values}
        cell = Cell("", "<push>", {})
        packed = payload.pack_values(Plan(cell, "push"), sent)
        try:
            self._ask(self._channels, {"do": "put", "sent": list(sent)}, packed.descriptors[0])
        finally:
            packed.close()
        self._snapshot.take(sent, sent)

    def pull(self, *names: str, rank: int = 0) -> None:
        """Bring variables of a rank into the notebook; a model, into the one of that name there."""
        notebook = _notebook()
        self._check_rank(rank)
        models = [name for name in names if is_model(notebook.get(name))]
        if models and rank:
            raise PlanError(
                f"`{models[0]}` is a model, which is pulled from rank 0 only. "
                f"ranks[{models[0]!r}][{rank}] is a copy of that of rank {rank}, if it is small"
            )
        for name in models:
            self._pull_model(name, notebook)
        rest = [name for name in names if name not in models]
        if rest:
            fetched = self._fetch(rest, None, [rank])[rank]
            for name, value in fetched.items():
                if isinstance(value, Unsent):
                    raise NbtrainError(f"`{name}` of rank {rank} cannot be sent: {value.reason}")
            notebook.update(fetched)
            self._snapshot.take(fetched, fetched)

    @_in_use
    def _pull_model(self, name: str, notebook: dict[str, Any]) -> None:
        cell = Cell(f"{name}\nNone", "<pull>", notebook)
        plan = Plan(cell, f"pull {name}", sync=True, view="none", telemetry=())
        launcher.run_plan(plan, engine=LiveEngine(self, list(self._channels)))

    def describe(self) -> dict[int, list[dict[str, Any]]]:
        """Return what each rank says of its variables."""
        answers = self._ask(self._channels, {"do": "describe"})
        return {rank: answer["variables"] for rank, answer in sorted(answers.items())}

    def end_when_idle(self, seconds: float) -> None:
        """End the ranks by themselves when they had nothing to do for so long."""
        watch = functools.partial(self._end_when_idle, seconds)
        threading.Thread(target=watch, name="nbtrain-idle", daemon=True).start()

    def _end_when_idle(self, seconds: float) -> None:
        while not self.has_ended:
            if self._is_stopped.wait(max(self._last_use + seconds - time.monotonic(), 0.0)):
                return
            with self._turn:
                if time.monotonic() - self._last_use < seconds or self.has_ended:
                    continue
                self._ended_by_idleness = self.parting = (
                    f"The live ranks ended themselves after {seconds:g} s without a cell, as "
                    "--idle-timeout asks; variables that only they had are gone"
                )
                self._stop("because they were idle")

    def stop(self) -> None:
        """End the ranks. May be repeated."""
        self._stop("by %nbtrain stop")

    def _stop(self, how: str) -> None:
        if os.getpid() != _live_pid:
            return
        self._is_stopped.set()
        for rank in list(self._channels):
            self._channels.pop(rank).close()
        if not self._run.state.is_over:
            self._run.stop(how)
        shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.stop)


def _value(data: bytes | None, reason: str) -> Any:
    """Return what a rank sent, or why there is nothing."""
    if data is None:
        return Unsent(reason)
    try:
        return result_pickler.loads(data)
    except Exception as error:  # a class that only the ranks have
        return Unsent(f"it cannot be read here: {type(error).__name__}: {error}")


class Unsent:
    """Stands for a value that was not sent, and says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"<not sent: {self.reason}>"
