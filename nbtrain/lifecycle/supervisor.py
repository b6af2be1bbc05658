"""Watches a run until its last rank has ended: events in, state out, signals to ranks.

The one loop of nbtrain. It never blocks on a rank, and it survives an interrupt at any moment,
because SIGINT only leaves a mark that the loop reads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

from ..checks.rank_comparison import WorkComparison
from ..engines import Exit, Ranks
from ..errors import NbtrainError
from ..findings import Finding
from ..hangs import stacks
from ..hangs.exit_causes import Cause, ExitCauses
from ..hangs.explain import describe_places
from ..hangs.lost_results import describe_lost_results
from ..hangs.verdict import DEADLOCK, HANG, describe_endings
from ..hangs.watchdog import HangWatchdog
from ..planning.plan import Plan
from ..system import host
from ..system.text import format_ranks
from ..tracking import clock, resource_sampler
from ..tracking import events as ev
from ..tracking.event_log import EventWriter, Reader
from ..tracking.launch_log import LOGGER
from ..tracking.reducers import fold
from ..tracking.resource_sampler import Sampler
from ..tracking.run_folder import RunFolder, mark_stopping, recreate, stop_request
from ..tracking.state import RunState
from . import limits
from .launch_sides import Companion
from .stop_policy import StopController

_LOST = (
    "The training continues. What the ranks print and report is lost until there is room again, "
    "and their results may be lost."
)
_RECREATED = Finding(
    "folder-deleted",
    "This run's folder was deleted during the run, and nbtrain made it again. What the ranks had "
    "printed, reported and saved there is lost, and what they print from now on is lost, too. "
    "Their results are not lost.",
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
        self, folder: RunFolder, state: RunState, plan: Plan, *, ranks_stay: bool = False
    ) -> None:
        self.state = state
        self.show: Callable[[RunState, float], None] = lambda _state, _now: None
        self.companions: list[Companion] = []
        """What goes along with the run."""
        self.over = threading.Event()
        self.interrupts = Interrupts(wanted=False)
        """Those of the loop that watches."""
        self._folder, self._plan, self._ranks_stay = folder, plan, ranks_stay
        self._reader = Reader(folder, state.world_size)
        self._writer = EventWriter(folder.launcher_events, limits.RESERVED_BYTES)
        self._disk = DiskWatch(folder, self._writer)
        self._watchdog = HangWatchdog(folder, state.world_size, plan.hang_after)
        self._work = WorkComparison(state.world_size, folder.cells)
        # Monotonic, as all times here: a clock that is set, or a laptop that slept, ends no run.
        self._stop = StopController(
            time.monotonic(),
            plan.timeout,
            sees_training="steps" in plan.telemetry,
            ranks_stay=ranks_stay,
            failures_end=not plan.is_live,
        )
        self._exit_causes = ExitCauses(folder, ranks_stay=ranks_stay)
        self._retry_reason = ""
        self._presses = 0
        self._restores = 0.0  # when the folder is looked for next
        # Of the ranks of other nodes nothing is known here: no deadlock is certain.
        is_sure = plan.nodes is None or plan.on_hang != "deadlock"
        self._on_hang = plan.on_hang if is_sure else "report"
        self._places = ""
        self._has_named = False

    def request_stop(self, how: str, *, hasty: bool = False) -> None:
        """Ask the loop to end the run; from any thread, any number of times. The first counts.

        `how` is kept with the run, and shown: "by the Stop button". `hasty` leaves the ranks one
        second, where nobody is there any more to wait for them.
        """
        self._stop.request(how, hasty=hasty)

    def watch(
        self, ranks: Ranks, interrupts: Interrupts, begun: Callable[[], None] = lambda: None
    ) -> None:
        """Watch until every rank is gone, and what they wrote is read.

        `begun` is called once the ranks had their first moment, unless they have ended by then.
        """
        while ranks.alive and not ranks.pids and not self._stop.is_hopeless(time.monotonic()):
            self._turn(ranks, interrupts)  # the nodes of a cluster have yet to come
        now, nodes = clock.now(), ranks.nodes
        self._note(
            ev.Spawned(now, rank, pid, nodes.get(rank, "")) for rank, pid in ranks.pids.items()
        )
        here = {rank: pid for rank, pid in ranks.pids.items() if rank not in nodes}
        has_begun = False
        measures = time.monotonic() + (limits.FIRST_SAMPLE_DELAY_S if self._ranks_stay else 0.0)
        with contextlib.closing(Sampler(here, self.state.device)) as sampler:
            while ranks.alive and not self._stop.is_hopeless(time.monotonic()):
                for ended in self._turn(ranks, interrupts):
                    sampler.forget(ended.rank)
                if not has_begun and ranks.alive:
                    has_begun = True
                    begun()
                if here and time.monotonic() >= measures:
                    with contextlib.suppress(Exception):  # a driver: the next look may do
                        self._note(sampler.sample())
                if self._stop.cause is None and ranks.alive:
                    self._note(self._watchdog.check(self.state, time.monotonic()))
                    if self._on_hang != "report" and self._watchdog.is_deadlock:
                        self._stop.give_up(DEADLOCK)
                    elif self._on_hang == "stop" and self._watchdog.is_certain:
                        self._stop.give_up(HANG)
                elif self._stop.is_ignored(time.monotonic()):
                    self._name_the_deaf()
        for each in self.companions:
            each.ranks_ended()
        self._note(ev.Exited(clock.now(), rank, -signal.SIGKILL, "stopped") for rank in ranks.alive)
        self._note(ranks.news())
        if self.has_failed or ranks.alive:  # `finish` comes later, or not before another attempt
            self._take(self._reader.read(ended=range(self.state.world_size)))

    def _turn(self, ranks: Ranks, interrupts: Interrupts) -> list[Exit]:
        attending = [each.attend(self.state) for each in self.companions]
        # First: drawing takes a CPU, and the ranks begin.
        patience = limits.POLL_INTERVAL_S * (2 if host.is_crowded() else 1)
        exits = ranks.wait(limits.DEBUGGER_POLL_S if any(attending) else patience)
        if time.monotonic() >= self._restores:
            self._restores = time.monotonic() + limits.FOLDER_CHECK_INTERVAL_S
            self._note(self._disk.restore(self.state))
            self._note(self._disk.check_room(self.state.world_size))
        self._note(ranks.news())
        self._take(self._reader.read(ended={e.rank for e in exits}))
        self._note(self._work.check(self.state.findings))
        self._note(event for each in self.companions for event in each.notes())
        self._take_exits(exits)
        self._decide(ranks, interrupts)
        if ranks.alive and not any(each.holds_screen for each in self.companions):
            self.show(self.state, clock.now())
        return exits

    def _name_the_deaf(self) -> None:
        """Say, once, which live ranks do not hear an interrupt, and how to be rid of them."""
        if not self._has_named:
            self._has_named = True
            running = [rank.rank for rank in self.state.ranks if not rank.is_over]
            are_far = self._folder.questions.exists()
            where = describe_places(
                stacks.read_stacks(
                    self._folder, running, None if are_far else limits.STOP_STACKS_TIMEOUT_S
                )
            )
            where = f"{where[:1].upper()}{where[1:]}"
            text = (
                f"{format_ranks(running)} did not react to the interrupt so far. {where}".rstrip()
            )
            remedy = "A second interrupt ends the ranks, and their variables are lost"
            self.note(Finding("deaf", f"{text}.", remedy))

    @property
    def has_failed(self) -> bool:
        """Whether the ranks that were watched are gone because one of them failed."""
        failed = any(r.status == "failed" for r in self.state.ranks)
        return self._stop.cause == "failed" or (self._stop.cause is None and failed)

    def begin_again(self, number: int, reason: str, wait: float, interrupts: Interrupts) -> bool:
        """Get ready for another attempt, `wait` seconds from now; False if that was stopped."""
        self._note([ev.Attempt(clock.now(), -1, number, reason)])
        self._retry_reason = reason
        self._end_watchdog()
        self._watchdog = HangWatchdog(self._folder, self.state.world_size, self._plan.hang_after)
        begins = time.monotonic() + wait
        self._stop.reset(begins)
        return self.wait_while(lambda: time.monotonic() < begins, interrupts)

    def wait_while(
        self,
        is_pending: Callable[[], bool],
        interrupts: Interrupts,
        reason: str = "",
        pause: Callable[[float], object] = time.sleep,
    ) -> bool:
        """Draw, and listen, while no rank runs; False if the run was stopped meanwhile.

        `reason` is shown, where it takes a while. `pause` waits for some seconds, or until it ends.
        """
        is_told = reason and is_pending()
        if is_told:
            self._note([ev.Waiting(clock.now(), -1, reason)])
        is_over = False
        while not is_over and self._stop.cause is None:
            is_over = not is_pending()
            if not is_over:
                for each in self.companions:  # the kernel may have ended
                    each.attend(self.state)
                self.show(self.state, clock.now())
                pause(limits.POLL_INTERVAL_S)
            # Also when the wait is over: ■ may have come just as it ended.
            pressed, asked = self._is_pressed(interrupts), stop_request(self._folder) or ""
            now = time.monotonic()
            self._begin_stop(self._stop.check(now, self.state, pressed=pressed, asked=asked))
        if is_told and self._stop.cause is None:
            self._note([ev.Waiting(clock.now(), -1)])
        return self._stop.cause is None

    def note(self, finding: Finding) -> None:
        """Show a finding on the board, and keep it with the run."""
        self._note([ev.RunNote.of(finding)])

    def _end_watchdog(self) -> None:
        self._watchdog.close()
        for rank in range(self.state.world_size):  # nobody answers there; copies trip over sockets
            with contextlib.suppress(OSError):
                self._folder.recorder(rank).unlink()

    def look_at_cards(self) -> None:
        """Write what the GPUs hold: to be asked before the ranks start, and when they are gone."""
        if any(rank.node for rank in self.state.ranks):  # theirs are elsewhere
            return
        with contextlib.suppress(Exception):  # a driver in trouble: not worth a training
            before = self.state.gpu_memory
            self._note(
                resource_sampler.measure_gpus(self.state.device, before[0] if before else None)
            )

    def abort(self, message: str, code: str = "") -> None:
        """Write that the run could not start, or not be watched."""
        if self.over.is_set():
            return
        self._stop.cause = "failed"
        self.finish(message, code)

    def _note(self, events: Iterable[ev.Event]) -> None:
        """Write events of the launcher's own, and fold them."""
        events = list(events)
        for event in events:
            self._writer.write(event)
        if events:
            self._take(events)
        for event in events:
            self._log(event)

    def _log(self, event: ev.Event) -> None:
        match event:
            case ev.Spawned(rank=rank, pid=pid, node=node):
                LOGGER.info("rank %d is process %d%s", rank, pid, node and f" on {node}")
            case ev.Exited(rank=rank, returncode=code, verdict=verdict):
                # Not its text, which may be a secret: "ValueError: …", or "sys.exit('…')".
                error = self.state.ranks[rank].error_type
                reason = f" ({error})" if error and verdict == "failed" else ""
                LOGGER.info("rank %d ended with exit code %s: %s%s", rank, code, verdict, reason)
            case ev.Attempt(number=number):
                LOGGER.info("attempt %d begins", number)

    def _take(self, events: Sequence[ev.Event]) -> None:
        self._watchdog.observe(events, time.monotonic())
        self._work.observe(events)
        self.state = fold(self.state, events)

    def _take_exits(self, exits: list[Exit]) -> None:
        for e in exits:
            verdict = e.verdict or self._verdict(e)
            cause = Cause(e.cause, code=e.code) if verdict == "failed" else Cause()
            if verdict == "failed" and not cause.text:
                killed = self._stop.was_sent(e.rank, -signal.SIGKILL)
                rank = self.state.ranks[e.rank]
                cause = self._exit_causes.find_cause(rank, e.returncode, killed)
            evidence = ((cause.code, cause.evidence),) if cause.evidence else ()
            end = e.rank, e.returncode, verdict, cause.text, evidence, cause.code
            self._note([ev.Exited(e.time, *end)])

    def _verdict(self, ended: Exit) -> str:
        if self._folder.result(ended.rank).exists():
            return "done"
        has_reported = self._folder.failure(ended.rank).exists()
        code = ended.returncode
        return self._stop.verdict(self.state, ended.rank, code, has_reported=has_reported)

    def _decide(self, ranks: Ranks, interrupts: Interrupts) -> None:
        """Carry out what the stop policy says of this moment."""
        begins, signals = self._stop.decide(
            time.monotonic(),
            self.state,
            ranks.alive,
            pressed=self._is_pressed(interrupts),
            asked=stop_request(self._folder) or "",
        )
        if begins and self._stop.cause != "failed":
            self._places = self._where()
        if begins and (self._stop.cause != "failed" or self._ranks_stay):
            mark_stopping(self._folder)  # before the signal, of which it says what that means
        for action, targets, _ in signals:
            ranks.signal(targets, action)
        self._begin_stop(begins)
        for action, targets, reason in signals:
            if targets:
                LOGGER.info("%s sent to %s (%s)", action, format_ranks(sorted(targets)), reason)

    def _begin_stop(self, reason: str) -> None:
        if not reason:
            return
        LOGGER.info("stopping the ranks: %s %s", self._stop.cause, self._stop.how)
        self._note([ev.Stopping(clock.now(), -1, reason)])

    def _where(self) -> str:
        """Say why ranks hang, or else where they are now, before they are told to stop."""
        if self.state.hang:
            return self.state.hang
        running = [rank.rank for rank in self.state.ranks if rank.status == "running"]
        with contextlib.suppress(Exception):  # a folder that was deleted, a host that is away
            # On a slow disk, a rank takes seconds to write its stacks, and hears nothing meanwhile.
            if running and not self._reader.is_slow and not self._folder.questions.exists():
                return describe_places(
                    stacks.read_stacks(self._folder, running, limits.STOP_STACKS_TIMEOUT_S)
                )
        return ""

    def _is_pressed(self, interrupts: Interrupts) -> bool:
        """Whether ■ was pressed since the last question."""
        before, self._presses = self._presses, interrupts.count
        return interrupts.count > before

    def finish(self, message: str = "", code: str = "") -> None:
        """Write how the run ended; `code` says why the message, where that is known."""
        self._end_watchdog()
        self._take(self._reader.read(ended=range(self.state.world_size)))
        self._note(self._work.check(self.state.findings))
        failed = [r for r in self.state.ranks if r.status == "failed"]
        status = self._stop.cause or ("failed" if failed else "succeeded")
        self._note(self._disk.check_room(self.state.world_size))
        # In this very process, the interrupt is the rank's own; another host has the same numbers.
        here = [r for r in failed if r.pid == os.getpid() and not r.node]
        if any(r.error_type == KeyboardInterrupt.__name__ for r in here):
            status = "interrupted"
        lost = None
        if status == "succeeded":
            lost = describe_lost_results(self.state, self._disk.expected)
            status = "failed" if lost else status
        retried = self._retry_reason if status == "succeeded" else ""
        remedy = ""
        if lost and not message:
            message, remedy, code = lost.text, lost.remedy, lost.code
        message = message or retried or describe_endings(status, self.state)
        if status == "interrupted" and self._stop.how:
            message = f"{self._stop.how}; {message}"
        if status == "timed out":
            message = f"{self._stop.how or f'{self._plan.timeout:g} s'}; {message}"
        if status in ("interrupted", "timed out") and self._places:
            message = f"{message}. {self._places[0].upper()}{self._places[1:]}"
        flaw = self.state.flaw if status == "succeeded" else ""
        code = self._stop.code if status == "timed out" else code
        code = ev.ABANDONED if status == "interrupted" and self._stop.is_hasty else code
        end = ev.Finished(clock.now(), -1, status, message, flaw, code, remedy)
        pressed = self._stop.requests, self.interrupts.count
        had_asked = stop_request(self._folder)

        def is_pressed() -> bool:
            is_asked = stop_request(self._folder) != had_asked
            return is_asked or pressed != (self._stop.requests, self.interrupts.count)

        self._note(event for each in self.companions for event in each.finish(end, is_pressed))
        self._note([end])
        LOGGER.info("the run %s after %.1f s", self.state.outcome, self.state.elapsed(clock.now()))
        self._writer.close()
        self.over.set()


class DiskWatch:
    """Watches one run's folder, and returns the events that report what befell it."""

    def __init__(self, folder: RunFolder, writer: EventWriter) -> None:
        self._folder, self._writer = folder, writer
        self._manifest: dict[str, Any] = {}
        with contextlib.suppress(OSError, NbtrainError):
            self._manifest = folder.read_manifest()
        self.expected = list(map(str, self._manifest.get("returns") or ()))
        """The names of what rank 0 is to send to the notebook."""
        self._has_warned = False

    def restore(self, state: RunState) -> list[ev.Event]:
        """Make the folder again if it was deleted: what ranks return has no other place."""
        if not self._manifest or self._folder.manifest.exists():
            return []
        with contextlib.suppress(OSError):  # no room for it there any more: the next look may do
            recreate(self._folder, self._manifest)
            for rank in state.ranks:  # for those who read the folder from here on
                if rank.pid is not None:
                    self._writer.write(ev.Spawned(clock.now(), rank.rank, rank.pid, rank.node))
            return [ev.RunNote.of(_RECREATED)]
        return []

    def check_room(self, world_size: int) -> list[ev.Event]:
        """Warn, once, when what the ranks write is lost."""
        if self._has_warned:
            return []
        left, trouble = host.space(self._folder.path), self._writer.trouble
        spare = limits.RESERVED_BYTES * (1 + world_size)  # what each gives back when it ends
        if trouble is None and (left is None or left.free >= spare):
            return []
        self._has_warned = True
        reason = trouble.strerror if trouble is not None else "the disk is full"
        return [ev.RunNote.of(Finding("disk-full", f"{self._folder.path}: {reason}.", _LOST))]
