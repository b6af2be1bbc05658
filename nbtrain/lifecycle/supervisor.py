"""Watches a run until its last rank has ended: events in, state out, signals to ranks.

Its loop never blocks on a rank. An interrupt at any moment is safe, because the SIGINT handler only
counts, and the loop reads the count.
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
from ..hangs import limits as hang_limits
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
from ..tracking.limits import POLL_INTERVAL_S
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
    """Counts SIGINTs in its block, instead of raising `KeyboardInterrupt` anywhere in it.

    If it is not `wanted` (the rank is this process), an interrupt raises as usual.
    """

    def __init__(self, wanted: bool = True) -> None:
        self.count = 0
        self._wanted = wanted and threading.current_thread() is threading.main_thread()
        self._old: Any = signal.getsignal(signal.SIGINT)  # None: set by C code

    def __enter__(self) -> Interrupts:
        if self._wanted and self._old is not None:
            signal.signal(signal.SIGINT, self._count)
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._wanted and self._old is not None:
            signal.signal(signal.SIGINT, self._old)

    def _count(self, _signum: int, _frame: FrameType | None) -> None:
        self.count += 1


class Supervisor:
    """Watches one run from its start to its end, and keeps its `state`."""

    def __init__(
        self, folder: RunFolder, state: RunState, plan: Plan, *, ranks_stay: bool = False
    ) -> None:
        self.state = state
        self.show: Callable[[RunState, float], None] = lambda _state, _now: None
        self.companions: list[Companion] = []
        """The parts' objects that take part in the run."""
        self.over = threading.Event()
        self.interrupts = Interrupts(wanted=False)
        """The interrupts of the loop."""
        self._folder, self._plan, self._ranks_stay = folder, plan, ranks_stay
        self._reader = Reader(folder, state.world_size)
        self._writer = EventWriter(folder.launcher_events, limits.RESERVED_BYTES)
        self._disk = DiskWatch(folder, self._writer)
        self._watchdog = HangWatchdog(folder, state.world_size, plan.hang_after)
        self._work = WorkComparison(state.world_size, folder.cells)
        # Monotonic, so that setting the clock, or a laptop's sleep, does not end the run.
        self._stop = StopController(
            time.monotonic(),
            plan.timeout,
            sees_training="steps" in plan.telemetry,
            ranks_stay=ranks_stay,
            failures_end=not plan.takes_tasks,
        )
        self._exit_causes = ExitCauses(folder, ranks_stay=ranks_stay)
        self._retry_reason = ""
        self._presses = 0
        self._next_folder_check = 0.0
        # The ranks of other launches are not seen here, so no deadlock with them is certain.
        is_sure = plan.rendezvous is None or plan.on_hang != "deadlock"
        self._on_hang = plan.on_hang if is_sure else "report"
        self._places = ""
        self._has_warned_unresponsive = False

    def request_stop(self, how: str, *, hasty: bool = False) -> None:
        """Request that the loop end the run. Any thread may call this; the first call counts.

        `how` is recorded and shown: "by the Stop button". With `hasty`, the ranks have one second:
        the kernel has ended, so no user waits for them.
        """
        self._stop.request(how, hasty=hasty)

    def watch(
        self, ranks: Ranks, interrupts: Interrupts, begun: Callable[[], None] = lambda: None
    ) -> None:
        """Watch the ranks of one attempt until all have ended, and read what they wrote.

        Measures them, reports hangs, and stops the ranks as the stop policy decides. Ranks that
        outlive SIGKILL for `UNKILLABLE_AFTER_S` are given up and recorded as ended. After the first
        poll, `begun` is called, unless all ranks have ended by then.
        """
        while ranks.alive and not ranks.pids and not self._stop.is_unkillable(time.monotonic()):
            self._poll(ranks, interrupts)  # a cluster has no room for the ranks yet
        now, nodes = clock.now(), ranks.nodes
        self._record(
            ev.Spawned(now, rank, pid, nodes.get(rank, "")) for rank, pid in ranks.pids.items()
        )
        here = {rank: pid for rank, pid in ranks.pids.items() if rank not in nodes}
        has_begun = False
        first_sample_time = time.monotonic() + (2 * POLL_INTERVAL_S if self._ranks_stay else 0.0)
        with contextlib.closing(Sampler(here, self.state.device)) as sampler:
            while ranks.alive and not self._stop.is_unkillable(time.monotonic()):
                for ended in self._poll(ranks, interrupts):
                    sampler.forget(ended.rank)
                if not has_begun and ranks.alive:
                    has_begun = True
                    begun()
                if here and time.monotonic() >= first_sample_time:
                    # The driver may fail now; the next sample may work.
                    with contextlib.suppress(Exception):
                        self._record(sampler.sample())
                if self._stop.cause is None and ranks.alive:
                    self._record(self._watchdog.check(self.state, time.monotonic()))
                    if self._on_hang != "report" and self._watchdog.is_deadlock:
                        self._stop.give_up(DEADLOCK)
                    elif self._on_hang == "stop" and self._watchdog.is_certain:
                        self._stop.give_up(HANG)
                elif self._stop.is_unresponsive(time.monotonic()):
                    self._warn_unresponsive_ranks()
        for each in self.companions:
            each.ranks_ended()
        self._record(
            ev.Exited(clock.now(), rank, -signal.SIGKILL, "stopped") for rank in ranks.alive
        )
        self._record(ranks.news())
        if self.has_failed or ranks.alive:  # `finish` may not be called now
            self._fold(self._reader.read(ended=range(self.state.world_size)))

    def _poll(self, ranks: Ranks, interrupts: Interrupts) -> list[Exit]:
        """Wait for news of the ranks, act on it and draw it; return ranks that ended."""
        delays = [each.attend(self.state) for each in self.companions]
        # Before drawing, which would take a CPU from the ranks as they start.
        timeout = POLL_INTERVAL_S * (2 if host.is_crowded() else 1)
        exits = ranks.wait(min([timeout, *delays]))
        if time.monotonic() >= self._next_folder_check:
            self._next_folder_check = time.monotonic() + limits.FOLDER_CHECK_INTERVAL_S
            self._record(self._disk.recreate_folder(self.state))
            self._record(self._disk.check_space(self.state.world_size))
        self._record(ranks.news())
        self._fold(self._reader.read(ended={e.rank for e in exits}))
        self._record(self._work.check(self.state.findings))
        self._record(event for each in self.companions for event in each.notes())
        self._record_exits(exits)
        self._decide(ranks, interrupts)
        if ranks.alive and not any(each.holds_screen for each in self.companions):
            self.show(self.state, clock.now())
        return exits

    def _warn_unresponsive_ranks(self) -> None:
        """Warn once about ranks that ignore an interrupt and stay, and print how to end them."""
        if not self._has_warned_unresponsive:
            self._has_warned_unresponsive = True
            running = [rank.rank for rank in self.state.ranks if not rank.is_over]
            are_far = self._folder.questions.exists()
            where = describe_places(
                stacks.read_stacks(
                    self._folder, running, None if are_far else hang_limits.REPLY_TIMEOUT_S
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
        """Whether the attempt ended because a rank failed."""
        failed = any(r.status == "failed" for r in self.state.ranks)
        return self._stop.cause == "failed" or (self._stop.cause is None and failed)

    def begin_attempt(self, number: int, reason: str, wait: float, interrupts: Interrupts) -> bool:
        """Record another attempt and forget the last one's stop, then wait `wait` seconds.

        `reason` is why the last attempt failed. Returns False if the run is stopped before that.
        """
        self._record([ev.Attempt(clock.now(), -1, number, reason)])
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
        """Wait while `is_pending`, draw and accept stops; return False if the run was stopped.

        For times when no rank runs. The board shows `reason` if the wait does not end at once.
        `pause` is called between two calls of `is_pending`, with seconds.
        """
        shows_reason = reason and is_pending()
        if shows_reason:
            self._record([ev.Waiting(clock.now(), -1, reason)])
        is_waiting = True
        while is_waiting and self._stop.cause is None:
            is_waiting = is_pending()
            if is_waiting:
                for each in self.companions:  # one of them checks whether the kernel has ended
                    each.attend(self.state)
                self.show(self.state, clock.now())
                pause(POLL_INTERVAL_S)
            # Also after the last call of `is_pending`: ■ may have been pressed in it.
            pressed, asked = self._was_interrupted(interrupts), stop_request(self._folder) or ""
            now = time.monotonic()
            self._record_stop(self._stop.check(now, self.state, pressed=pressed, asked=asked))
        if shows_reason and self._stop.cause is None:
            self._record([ev.Waiting(clock.now(), -1)])
        return self._stop.cause is None

    def note(self, finding: Finding) -> None:
        """Show a finding on the board, and record it with the run."""
        self._record([ev.RunNote.of(finding)])

    def _end_watchdog(self) -> None:
        """Close the watchdog, and delete the ranks' recorder sockets from the run's folder."""
        self._watchdog.close()
        for rank in range(self.state.world_size):  # a copy of the folder would fail at a socket
            with contextlib.suppress(OSError):
                self._folder.recorder(rank).unlink()

    def sample_gpu_memory(self) -> None:
        """Record the GPUs' memory in use, before the ranks start and after they ended.

        The second call waits a moment until the memory is freed. Leaves out ranks on other hosts,
        and ignores errors of the driver.
        """
        if any(rank.node for rank in self.state.ranks):  # their GPUs are on other hosts
            return
        with contextlib.suppress(Exception):  # a driver that fails must not end the run
            before = self.state.gpu_memory
            self._record(
                resource_sampler.measure_gpus(self.state.device, before[0] if before else None)
            )

    def abort(self, message: str, code: str = "") -> None:
        """Finish the run as failed, because it could not be started or watched.

        Does nothing if the run has ended. `message` and `code` are as for `finish`.
        """
        if self.over.is_set():
            return
        self._stop.cause = "failed"
        self.finish(message, code)

    def _record(self, events: Iterable[ev.Event]) -> None:
        """Write events of the launcher, fold them, and log them."""
        events = list(events)
        for event in events:
            self._writer.write(event)
        if events:
            self._fold(events)
        for event in events:
            self._log(event)

    def _log(self, event: ev.Event) -> None:
        """Write an event about a process or an attempt into the launcher's log."""
        match event:
            case ev.Spawned(rank=rank, pid=pid, node=node):
                LOGGER.info("rank %d is process %d%s", rank, pid, node and f" on {node}")
            case ev.Exited(rank=rank, returncode=code, verdict=verdict):
                # Without the error's message, which may contain a secret.
                error = self.state.ranks[rank].error_type
                reason = f" ({error})" if error and verdict == "failed" else ""
                LOGGER.info("rank %d ended with exit code %s: %s%s", rank, code, verdict, reason)
            case ev.Attempt(number=number):
                LOGGER.info("attempt %d begins", number)

    def _fold(self, events: Sequence[ev.Event]) -> None:
        self._watchdog.observe(events, time.monotonic())
        self._work.observe(events)
        self.state = fold(self.state, events)

    def _record_exits(self, exits: list[Exit]) -> None:
        """Record how ranks ended, with the verdict and the cause that the host knows."""
        for e in exits:
            verdict = e.verdict or self._find_verdict(e)
            cause = Cause(e.cause, code=e.code) if verdict == "failed" else Cause()
            if verdict == "failed" and not cause.text:
                killed = self._stop.ended_by_our_signal(e.rank, -signal.SIGKILL)
                rank = self.state.ranks[e.rank]
                cause = self._exit_causes.find_cause(rank, e.returncode, killed)
            evidence = ((cause.code, cause.evidence),) if cause.evidence else ()
            end = e.rank, e.returncode, verdict, cause.text, evidence, cause.code
            self._record([ev.Exited(e.time, *end)])

    def _find_verdict(self, ended: Exit) -> str:
        """Return whether a rank that ended is done, failed or stopped."""
        if self._folder.result(ended.rank).exists():
            return "done"
        has_reported = self._folder.failure(ended.rank).exists()
        code = ended.returncode
        return self._stop.verdict(self.state, ended.rank, code, has_reported=has_reported)

    def _decide(self, ranks: Ranks, interrupts: Interrupts) -> None:
        """Carry out what the stop policy decides now."""
        reason, signals = self._stop.decide(
            time.monotonic(),
            self.state,
            ranks.alive,
            pressed=self._was_interrupted(interrupts),
            asked=stop_request(self._folder) or "",
        )
        if reason and self._stop.cause != "failed":
            self._places = self._describe_places()
        if reason and (self._stop.cause != "failed" or self._ranks_stay):
            mark_stopping(self._folder)  # first: by it, ranks know our SIGINT from Jupyter's
        for action, targets, _ in signals:
            ranks.signal(targets, action)
        self._record_stop(reason)
        for action, targets, why in signals:
            if targets:
                LOGGER.info("%s sent to %s (%s)", action, format_ranks(sorted(targets)), why)

    def _record_stop(self, reason: str) -> None:
        """Record and log that a stop has begun, which the stop policy decided; nothing for ""."""
        if not reason:
            return
        LOGGER.info("stopping the ranks: %s %s", self._stop.cause, self._stop.how)
        self._record([ev.Stopping(clock.now(), -1, reason)])

    def _describe_places(self) -> str:
        """Return why ranks hang, or the lines that they are at now; "" if neither is known.

        Signals the ranks, and waits up to `REPLY_TIMEOUT_S` for them.
        """
        if self.state.hang:
            return self.state.hang
        running = [rank.rank for rank in self.state.ranks if rank.status == "running"]
        with contextlib.suppress(Exception):  # the folder was deleted, or the host is gone
            # On a slow disk, a rank writes its stacks for seconds, and cannot react to a signal.
            if running and not self._folder.questions.exists():
                return describe_places(
                    stacks.read_stacks(self._folder, running, hang_limits.REPLY_TIMEOUT_S)
                )
        return ""

    def _was_interrupted(self, interrupts: Interrupts) -> bool:
        """Whether an interrupt came since the last call."""
        before, self._presses = self._presses, interrupts.count
        return interrupts.count > before

    def finish(self, message: str = "", code: str = "") -> None:
        """Judge and record the run's outcome, and close the supervisor; call it once, at the end.

        Reads the last events of the ranks, and runs what companions do at the end, which may take a
        while. A run that succeeded without its results counts as failed. A `message` is the reason
        that is recorded; without it, one is composed. `code` names its cause for programs. After
        this no event can be written, and `over` is set.
        """
        self._end_watchdog()
        self._fold(self._reader.read(ended=range(self.state.world_size)))
        self._record(self._work.check(self.state.findings))
        failed = [r for r in self.state.ranks if r.status == "failed"]
        status = self._stop.cause or ("failed" if failed else "succeeded")
        self._record(self._disk.check_space(self.state.world_size))
        # The rank of the inline engine is this process, and an interrupt is raised in it. A rank of
        # another host may have the same process number.
        here = [r for r in failed if r.pid == os.getpid() and not r.node]
        if any(r.error_type == KeyboardInterrupt.__name__ for r in here):
            status = "interrupted"
        lost = None
        if status == "succeeded":
            lost = describe_lost_results(self.state, self._disk.expected)
            status = "failed" if lost else status
        special = [self._retry_reason, *(c.describe_success(self.state) for c in self.companions)]
        success = "; ".join(filter(None, special)) if status == "succeeded" else ""
        remedy = ""
        if lost and not message:
            message, remedy, code = lost.text, lost.remedy, lost.code
        message = message or success or describe_endings(status, self.state)
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
        for each in self.companions:
            end = each.judge(end)
        pressed = self._stop.requests, self.interrupts.count
        old_request = stop_request(self._folder)

        def is_pressed() -> bool:
            has_new_request = stop_request(self._folder) != old_request
            return has_new_request or pressed != (self._stop.requests, self.interrupts.count)

        self._record(event for each in self.companions for event in each.finish(end, is_pressed))
        self._record([end])
        LOGGER.info("the run %s after %.1f s", self.state.outcome, self.state.elapsed(clock.now()))
        self._writer.close()
        self.over.set()


class DiskWatch:
    """Watches the folder of a run and its disk; returns events for what a user should know."""

    def __init__(self, folder: RunFolder, writer: EventWriter) -> None:
        self._folder, self._writer = folder, writer
        self._manifest: dict[str, Any] = {}
        with contextlib.suppress(OSError, NbtrainError):
            self._manifest = folder.read_manifest()
        self.expected = list(map(str, self._manifest.get("returns") or ()))
        """The names of the values that rank 0 sends to the notebook."""
        self._has_warned = False

    def recreate_folder(self, state: RunState) -> list[ev.Event]:
        """Make the folder again if it was deleted: the ranks need it for their results.

        Returns a note for the board, or an empty list if the folder is there or cannot be made.
        """
        if not self._manifest or self._folder.manifest.exists():
            return []
        with contextlib.suppress(OSError):  # the disk is full; the next check may succeed
            recreate(self._folder, self._manifest)
            for rank in state.ranks:  # for other readers of the new folder
                if rank.pid is not None:
                    self._writer.write(ev.Spawned(clock.now(), rank.rank, rank.pid, rank.node))
            return [ev.RunNote.of(_RECREATED)]
        return []

    def check_space(self, world_size: int) -> list[ev.Event]:
        """Return a warning if the disk has too little space for what the ranks write.

        It is returned once; every other call returns an empty list.
        """
        if self._has_warned:
            return []
        space, trouble = host.space(self._folder.path), self._writer.trouble
        reserved = limits.RESERVED_BYTES * (1 + world_size)  # it is free again as processes end
        if trouble is None and (space is None or space.free >= reserved):
            return []
        self._has_warned = True
        reason = trouble.strerror if trouble is not None else "the disk is full"
        return [ev.RunNote.of(Finding("disk-full", f"{self._folder.path}: {reason}.", _LOST))]
