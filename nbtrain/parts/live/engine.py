"""The engine of a task on live ranks: it uses ranks that already run."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, Protocol

from ...part_api import (
    IDLE,
    Action,
    Cell,
    Engine,
    Exit,
    Finding,
    Job,
    Plan,
    Ranks,
    RunFolder,
    clock,
    payload,
)
from ...part_api import events as ev
from ...transport.weights.models import Part

Message = dict[str, Any]


class Members(Protocol):
    """Live ranks, as a task needs them."""

    engine: str
    device: str
    mixed_precision: str
    world_size: int

    @property
    def names(self) -> Mapping[int, Collection[str]]: ...
    @property
    def pids(self) -> Mapping[int, int]: ...
    @property
    def nodes(self) -> Mapping[int, str]: ...
    def send(self, rank: int, message: Message, data: int | None = None) -> None: ...
    def receive(self, ranks: Collection[int], timeout: float) -> dict[int, Message | None]: ...
    def end_of(self, rank: int) -> Exit: ...
    def new_task(self, folder: RunFolder | None = None) -> int: ...
    def end(self, how: str) -> None: ...
    def occupied(self) -> contextlib.AbstractContextManager[None]: ...
    def parts_there(self, sent: Mapping[str, Any], ranks: Sequence[int]) -> Mapping[int, Part]: ...


class LiveEngine(Engine):
    """Sends a task to ranks that wait for one, with the variables that they do not have."""

    ranks_stay = True
    checks_host = False

    def __init__(self, members: Members, ranks: Sequence[int]) -> None:
        self.name = members.engine
        self.on_cluster = bool(members.nodes)
        self.sent: list[str] = []
        self._members, self._targets = members, ranks
        self._parcel: payload.PackedPlan | None = None

    def resolve(self, plan: Plan) -> tuple[Plan, str]:
        """Return the plan with the number and the precision of the live ranks, and their device."""
        members = self._members
        plan = replace(plan, engine=self.name, num_processes=members.world_size)
        return replace(plan, mixed_precision=members.mixed_precision), members.device

    def prepare(self, plan: Plan) -> None:
        """Pack the task, and what ranks lack. Raises `PlanError` naming what cannot be sent."""
        task, there = plan.task, dict[int, Part]()
        if isinstance(task, Cell):
            has = set.intersection(*(set(self._members.names[rank]) for rank in self._targets))
            needed = payload.needed_variables(task)
            missing = {name: value for name, value in needed.items() if name not in has}
            self.sent = list(missing)
            self.notes = _sent_note(missing)
            there = dict(self._members.parts_there(missing, self._targets))
            plan = replace(plan, task=replace(task, namespace=missing))
        self._parcel = payload.pack(plan, is_fresh=False, there=there)

    def discard(self) -> None:
        """Delete the pickled plan."""
        if self._parcel is not None:
            self._parcel.close()

    def reserve(self) -> contextlib.AbstractContextManager[None]:
        """Keep the ranks for a task that the cell does not wait for."""
        return self._members.occupied()

    def start(self, job: Job) -> Ranks:
        """Send the task to its ranks, and return these ranks.

        Does not wait for them: `wait` reports a rank that has ended.
        """
        assert self._parcel is not None
        ranks = TaskRanks(self._members, self._targets, job.folder)
        message = {"do": "run", "folder": str(job.folder.path), "sent": self.sent}
        message["unanswered"] = job.unanswered
        for rank in self._targets:
            ranks.begin(rank, message, self._parcel.descriptors[0])
        return ranks


def _sent_note(sent: Mapping[str, Any]) -> list[Finding]:
    names = [f"`{n}`" for n, value in sent.items() if not issubclass(type(value), ModuleType)]
    text = f"sent to the ranks, which did not have it: {', '.join(names)}"
    return [Finding("sent", text)] if names else []


class TaskRanks(Ranks):
    """Live ranks that are busy with one task; `wait` returns those that have done it."""

    def __init__(self, members: Members, targets: Sequence[int], folder: RunFolder) -> None:
        self._members, self._task = members, members.new_task(folder)
        self._folder = folder
        self._targets = targets
        self._busy: set[int] = set()
        self._news: list[ev.Event] = []
        for rank in range(members.world_size):
            if rank not in targets:
                self._news.append(ev.Exited(clock.now(), rank, 0, IDLE))

    def begin(self, rank: int, message: Message, data: int) -> None:
        """Have a rank begin; one that is gone has ended at once."""
        self._busy.add(rank)
        with contextlib.suppress(OSError):
            self._members.send(rank, {**message, "id": self._task}, data)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: self._members.pids[rank] for rank in self._targets}

    @property
    def nodes(self) -> Mapping[int, str]:
        return self._members.nodes

    @property
    def alive(self) -> frozenset[int]:
        return frozenset(self._busy)

    def wait(self, timeout: float) -> list[Exit]:
        """Return the ranks that have done their task, or are gone; see `Ranks.wait`."""
        exits = []
        for rank, message in self._members.receive(self._busy, timeout).items():
            if message is None:
                exits.append(self._members.end_of(rank))
            elif message["done"] == self._task:
                # Without a code, the task did not start: the reply has the reason.
                cause = f"could not run the task: {message['error']}" if "error" in message else ""
                exits.append(Exit(rank, message.get("code", 1), clock.now(), cause))
        self._busy -= {ended.rank for ended in exits}
        return exits

    def news(self) -> list[ev.Event]:
        news, self._news = self._news, []
        return news

    def signal(self, ranks: Collection[int], action: Action) -> None:
        """Interrupt the task on these ranks. Any other action ends all live ranks.

        That is a second ■. The variables of the ranks are lost then.
        """
        if action != "interrupt":
            self._members.end("by a second interrupt")
            return
        message = {"do": "interrupt", "id": self._task}
        message["asked"] = self._folder.stopping_file.exists()
        for rank in self._busy.intersection(ranks):
            with contextlib.suppress(OSError):
                self._members.send(rank, message)

    def close(self) -> None:
        """Nothing is given back: the ranks stay."""
