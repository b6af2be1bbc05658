"""Watching a run until its last rank is gone: events in, picture out, and who must be stopped.

The one loop of nbtrain. It never blocks on a rank, and it survives an interrupt at any moment,
because SIGINT only leaves a mark that the loop reads.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from types import FrameType
from typing import Any

from . import cards, host
from . import events as ev
from .deaths import Deaths
from .engines import Exit, Ranks
from .errors import NbtrainError
from .folder import RunFolder, asked_to_stop, leave_stop_request, make_anew
from .ladder import DEATH_BY, LADDERS, Rung
from .lookout import Lookout
from .outcome import is_echo
from .reader import Reader
from .resources import Sampler
from .state import RunState, fold
from .verdict import closing_words
from .writer import EventWriter

TICK = 0.1
"""Seconds between two looks at the run folder, where no rank ends earlier."""

REPORT_GRACE = 2.0
"""Seconds that a rank which is failing already has to tell why."""

ECHO_GRACE = 1.5
"""Seconds that the others have to fail, while all that is heard is that a rank lost its peers."""


LOOK = 2.0
"""Seconds between two looks at the disk of a launcher that has no ranks to look at."""

HOPELESS = 15.0
"""Seconds after which a rank that not even SIGKILL ended is given up."""

RESERVED = 1 << 16
"""Bytes that are kept free for what the launcher has to say."""

_LOST = (
    "What ranks print and report is lost as long as there is no room, and what they return may "
    "be; the training goes on."
)

_GONE = (
    "This run's folder was deleted while it went on, and made anew. What ranks had printed, "
    "reported and saved there is lost, and what they print from here on; what they return is not."
)

_LEFT = (
    "Stopped while what the ranks had saved came home from their nodes: the last checkpoint may "
    "be lost."
)


class Interrupts:
    """Counts SIGINTs instead of raising KeyboardInterrupt somewhere; puts the old handler back.

    Where it is not `wanted` (the rank is this process), an interrupt does what it always does.
    """

    def __init__(self, wanted: bool = True) -> None:
        self.count = 0
        self._wanted = wanted and threading.current_thread() is threading.main_thread()
        self._old: Any = signal.getsignal(signal.SIGINT)  # None: not Python's, cannot be restored

    def __enter__(self) -> Interrupts:
        if self._wanted and self._old is not None:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._wanted and self._old is not None:
            signal.signal(signal.SIGINT, self._old)

    def _note(self, _signum: int, _frame: FrameType | None) -> None:
        self.count += 1


class Supervisor:
    """Drives one run from its start to its end. `state` is always the present picture."""

    def __init__(
        self,
        folder: RunFolder,
        state: RunState,
        *,
        timeout: float | None = None,
        hang_after: float | None = None,
    ) -> None:
        self.state = state
        self.show: Callable[[RunState, float], None] = lambda _state, _now: None
        self.over = threading.Event()
        self._folder = folder
        self._timeout = timeout
        self._reader = Reader(folder, state.world_size)
        self._writer = EventWriter(folder.launcher_events, RESERVED)
        self._manifest: dict[str, Any] | None = None
        with contextlib.suppress(OSError, NbtrainError):
            self._manifest = folder.read_manifest()
        self._warned = False
        self._hang_after = hang_after
        self._lookout = Lookout(folder, state.world_size, hang_after)
        self._requested: str | None = None
        self._asked = 0
        self._hasty = False
        self._stopped_how = self._why_again = ""
        self._cause: str | None = None
        self._deaths = Deaths(folder)
        self._sent: dict[int, set[int]] = {}  # rank -> return codes that our signals give
        # Monotonic, all of them: a clock that is set, or a laptop that slept, ends no run.
        self._started = time.monotonic()
        self._stopping_since = 0.0
        self._held_back = 0.0  # seconds by which the ladder is late
        self._rungs: list[Rung] = []
        self._presses = 0

    def request_stop(self, how: str, *, hasty: bool = False) -> None:
        """Ask the loop to end the run; from any thread, any number of times. The first counts.

        `how` is kept with the run, and shown: "by the Stop button". `hasty` leaves the ranks one
        second, where nobody is there any more to wait for them.
        """
        self._requested = self._requested or how
        self._asked += 1
        if hasty:
            self._hasty = True

    def watch(self, ranks: Ranks, interrupts: Interrupts) -> None:
        """Watch until every rank is gone, and what they wrote is read."""
        while ranks.alive and not ranks.pids and not self._is_hopeless():  # other nodes are awaited
            self._turn(ranks, interrupts)
        now = time.time()
        nodes = ranks.nodes
        self._note(
            ev.Spawned(now, rank, pid, nodes.get(rank, "")) for rank, pid in ranks.pids.items()
        )
        here = {rank: pid for rank, pid in ranks.pids.items() if rank not in nodes}
        looks = 0.0
        with contextlib.closing(Sampler(here, self.state.device)) as sampler:
            while ranks.alive and not self._is_hopeless():
                if here:
                    self._sample(sampler)
                elif time.monotonic() >= looks:
                    looks = time.monotonic() + LOOK
                    self._look_at_disk()
                for ended in self._turn(ranks, interrupts):
                    sampler.forget(ended.rank)
                if self._cause is None and ranks.alive:
                    self._note(self._lookout.look(self.state, time.monotonic()))
        self._note(ev.Exited(time.time(), rank, -signal.SIGKILL, "stopped") for rank in ranks.alive)
        self._take(self._reader.read(gone=range(self.state.world_size)))

    def _turn(self, ranks: Ranks, interrupts: Interrupts) -> list[Exit]:
        self.show(self.state, time.time())
        exits = ranks.wait(TICK)
        self._keep_folder()
        self._note(ranks.news())
        self._take(self._reader.read())
        self._take_exits(exits)
        self._decide(ranks, interrupts)
        return exits

    def settle(self, ranks: Ranks, interrupts: Interrupts) -> None:
        """Wait for what ranks left on other hosts, unless somebody has enough of that."""
        known = self._asked if self._cause == "interrupted" else 0
        while not ranks.settle(TICK):
            self.show(self.state, time.time())
            self._note(ranks.news())
            if self._is_pressed(interrupts):
                self.request_stop("by an interrupt")  # no other attempt begins, either
            stopped = self._cause is None and asked_to_stop(self._folder)
            if stopped or self._hasty or self._asked > known:
                self._note([ev.Note(time.time(), -1, _LEFT)])
                return
        self._note(ranks.news())

    @property
    def has_failed(self) -> bool:
        """Whether the ranks that were watched are gone because one of them failed."""
        failed = any(r.status == "failed" for r in self.state.ranks)
        return self._cause == "failed" or (self._cause is None and failed)

    def begin_again(self, number: int, reason: str, wait: float, interrupts: Interrupts) -> bool:
        """Get ready for another attempt, `wait` seconds from now; False if that was stopped."""
        self._note([ev.Attempt(time.time(), -1, number, reason)])
        self._why_again = reason
        self._cause, self._sent, self._rungs = None, {}, []
        self._end_lookout()
        self._lookout = Lookout(self._folder, self.state.world_size, self._hang_after)
        begins = time.monotonic() + wait
        while self._cause is None and (now := time.monotonic()) < begins:
            self.show(self.state, time.time())
            time.sleep(min(TICK, begins - now))
            cause = self._cause_to_stop(self._is_pressed(interrupts), time.monotonic())
            if cause is not None:
                self._begin_stop(cause, time.monotonic())
        return self._cause is None

    def _end_lookout(self) -> None:
        self._lookout.close()
        for rank in range(self.state.world_size):  # nobody answers there; copies trip over sockets
            with contextlib.suppress(OSError):
                self._folder.recorder(rank).unlink()

    def _sample(self, sampler: Sampler) -> None:
        try:
            for event in sampler.sample():
                self._note([event])
                if isinstance(event, ev.Host):
                    self._look_at_disk()
        except Exception:  # a driver, a process list: not worth a training; the next look may do
            return

    def _keep_folder(self) -> None:
        """Make the run's folder anew if it was deleted: what ranks return has no other place."""
        if self._manifest is None or self._folder.manifest.exists():
            return
        with contextlib.suppress(OSError):  # no room for it there any more: the next look may do
            make_anew(self._folder, self._manifest)
            for rank in self.state.ranks:  # for who reads the folder from here on
                if rank.pid is not None:
                    self._writer.write(ev.Spawned(time.time(), rank.rank, rank.pid, rank.node))
            self._note([ev.Note(time.time(), -1, _GONE)])

    def _look_at_disk(self) -> None:
        """Warn, once, when what the ranks write is lost."""
        if self._warned:
            return
        left, trouble = host.space(self._folder.path), self._writer.trouble
        spare = RESERVED * (1 + self.state.world_size)  # what each gives back when it ends
        if trouble is not None or (left is not None and left.free < spare):
            self._warned = True
            why = trouble.strerror if trouble is not None else "the disk is full"
            self._note([ev.Note(time.time(), -1, f"{self._folder.path}: {why}. {_LOST}")])

    def look_at_cards(self) -> None:
        """Write what the GPUs hold: to be asked before the ranks start, and when they are gone."""
        if any(rank.node for rank in self.state.ranks):  # theirs are elsewhere
            return
        with contextlib.suppress(Exception):  # a driver in trouble: not worth a training
            before = self.state.cards
            self._note(cards.look(self.state.device, before[0] if before else None))

    def abort(self, message: str) -> None:
        """Write that the run could not start, or not be watched."""
        if self.over.is_set():
            return
        self._cause = "failed"
        self.finish(message)

    def _note(self, events: Iterable[ev.Event]) -> None:
        """Write events of the launcher's own, and fold them."""
        for event in events:
            self._writer.write(event)
            self._take([event])

    def _take(self, events: Sequence[ev.Event]) -> None:
        self._lookout.saw(events, time.monotonic())
        self.state = fold(self.state, events)

    def _take_exits(self, exits: list[Exit]) -> None:
        if exits:
            self._take(self._reader.read(gone={e.rank for e in exits}))
        for e in exits:
            verdict = e.verdict or self._verdict(e)
            cause, why = "", tuple[str, ...]()
            if verdict == "failed":
                ours = -signal.SIGKILL in self._sent.get(e.rank, set())
                cause, why = self._deaths.cause_of(e, self.state.ranks[e.rank], ours)
            self._note([ev.Exited(e.time, e.rank, e.returncode, verdict, cause, why)])

    def _verdict(self, ended: Exit) -> str:
        if self._folder.result(ended.rank).exists():
            return "done"
        asked = self._cause in ("interrupted", "timed out")
        if self._folder.failure(ended.rank).exists():
            error = self.state.ranks[ended.rank].error or ""
            obeyed = error.startswith("KeyboardInterrupt") or is_echo(error)
            return "stopped" if asked and obeyed else "failed"
        was_failing = self._cause == "failed" and self.state.ranks[ended.rank].status == "failing"
        sent = self._sent.get(ended.rank, set())
        ended_by_us = ended.returncode in sent or (ended.returncode is None and bool(sent))
        return "stopped" if ended_by_us and not was_failing else "failed"

    def _decide(self, ranks: Ranks, interrupts: Interrupts) -> None:
        now = time.monotonic()
        pressed = self._is_pressed(interrupts)
        if self._cause is None:
            cause = self._cause_to_stop(pressed, now) if ranks.alive or pressed else None
            if cause is not None:
                self._begin_stop(cause, now)
        elif self._hears_only_echoes() and (how := asked_to_stop(self._folder)):
            self._requested = self._stopped_how = how  # of another node, whose ranks these lost
            self._begin_stop("interrupted", now)
        elif pressed:  # a second time: no more patience; after a failure: and no other attempt
            self._requested = self._requested or "by an interrupt"
            self._signal(ranks, "kill", ranks.alive)
        if self._cause is not None:
            self._climb(ranks, now)

    def _is_pressed(self, interrupts: Interrupts) -> bool:
        """Whether ■ was pressed since this was last asked."""
        before, self._presses = self._presses, interrupts.count
        return interrupts.count > before

    def _cause_to_stop(self, pressed: bool, now: float) -> str | None:
        if any(r.status in ("failing", "failed") for r in self.state.ranks) or self.state.elsewhere:
            return "failed"
        if asked := asked_to_stop(self._folder):  # not in one assignment: another thread may ask
            self.request_stop(asked)
        if pressed or self._requested:
            self._stopped_how = "by an interrupt" if pressed else self._requested or ""
            return "interrupted"
        if self._timeout is not None and now - self._started > self._timeout:
            return "timed out"
        return None

    def _begin_stop(self, cause: str, now: float) -> None:
        self._cause, self._stopping_since = cause, now
        self._rungs = list(LADDERS["abandoned" if self._hasty else cause])
        self._held_back = 0.0
        if cause != "failed":
            leave_stop_request(self._folder)
        reason = {
            "failed": self.state.elsewhere.text
            if self.state.elsewhere
            else "a rank failed; the others are being stopped",
            "interrupted": f"stopped {self._stopped_how}: ranks have 2 s to save",
            "timed out": f"{self._timeout:g} s are over; ranks have 2 s to save"
            if self._timeout
            else "",
        }[cause]
        self._note([ev.Stopping(time.time(), -1, reason)])

    def _climb(self, ranks: Ranks, now: float) -> None:
        since = now - self._stopping_since
        if since < ECHO_GRACE and self._hears_only_echoes():
            self._held_back = since
        since -= self._held_back
        while self._rungs and since >= self._rungs[0].after:
            rung = self._rungs.pop(0)
            self._signal(ranks, rung.action, ranks.alive - self._reporting(since))
        if not self._rungs and since >= REPORT_GRACE:
            self._signal(ranks, "kill", ranks.alive)

    def _hears_only_echoes(self) -> bool:
        """Whether every rank that failed says it lost another, and none of those said why yet."""
        failed = [r for r in self.state.ranks if r.status in ("failing", "failed")]
        known = self._cause != "failed" or self.state.elsewhere is not None
        return not known and all(is_echo(r.error or "") for r in failed)

    def _signal(self, ranks: Ranks, action: str, targets: Collection[int]) -> None:
        """Take an action on ranks, and remember what they will die of if they do."""
        for rank in targets:
            self._sent.setdefault(rank, set()).add(DEATH_BY[action])
        getattr(ranks, action)(frozenset(targets))

    def _is_hopeless(self) -> bool:
        """Whether ranks outlived SIGKILL for long: in the grip of a driver or a file system."""
        return self._cause is not None and time.monotonic() - self._stopping_since > HOPELESS

    def _reporting(self, since: float) -> set[int]:
        """Return the ranks that are failing by themselves and are let tell why."""
        if self._cause != "failed" or since >= REPORT_GRACE:
            return set()
        return {r.rank for r in self.state.ranks if r.status == "failing"}

    def finish(self, message: str = "") -> None:
        """Write how the run ended."""
        self._end_lookout()
        self._take(self._reader.read(gone=range(self.state.world_size)))
        status = self._cause or "succeeded"
        failed = [r for r in self.state.ranks if r.status == "failed"]
        if self._cause is None and failed:
            status = "failed"
        self._look_at_disk()
        here = self.state.engine == "inline"  # there, the interrupt is the rank's own
        if here and any((r.error or "").startswith("KeyboardInterrupt") for r in failed):
            status = "interrupted"
        again = self._why_again if status == "succeeded" else ""
        message = message or again or closing_words(status, self.state)
        if status == "interrupted" and self._stopped_how:
            message = f"{self._stopped_how}; {message}"
        if status == "timed out":
            message = f"{self._timeout:g} s; {message}"
        self._note([ev.Finished(time.time(), -1, status, message)])
        self._writer.close()
        self.over.set()
