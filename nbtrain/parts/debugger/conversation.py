"""Connects the user with the debuggers that wait in ranks: one prompt for all of them."""

from __future__ import annotations

import contextlib
import math
import re
import select
import time
from collections.abc import Callable
from typing import Any

from ...part_api import (
    POLL_INTERVAL_S,
    Channel,
    Companion,
    Engine,
    Job,
    LaunchSide,
    RankState,
    RunState,
    connect,
    format_ranks,
)
from ...part_api import prompt as prompts
from ...ui.displays.prompt import Prompt

SAME_RANK_PROMPT_S = 1.0
"""A rank that runs one line keeps the prompt for so long before another rank's turn."""

HELP = "p x: show x · n: next line · c: continue · q: end the {what}"
_AFTERWARDS = "p x: show x · u: go up to the caller · d: go down again · q: leave"
_OTHERS = " · rank 1: look at rank 1 · all p x: ask every rank that waits"
_LIMIT = (
    "A rank that waits for this one in a collective gives up after 30 minutes (NCCL: 10). With "
    "--debug it keeps waiting."
)

_RANK = re.compile(r"rank\s+(\d+)")
_ALL = re.compile(r"all\s+(?![=.,+*/<>|&%\[-])(.+)")  # not what is done with a variable `all`

Message = dict[str, Any]


class DebuggerLaunch(LaunchSide):
    """Has the user talk with debuggers in ranks, where there is a user."""

    def companion(
        self, job: Job, engine: Engine, request_stop: Callable[[str], None]
    ) -> Companion | None:
        """Return the conversation with debuggers in ranks, if there is a prompt to type at."""
        prompt = None if job.unanswered else prompts.find()
        if prompt is None:
            return None
        return Conversation(
            prompt,
            request_stop,
            waits_for_ever=job.plan.debug or engine.ranks_stay,
            is_live=engine.ranks_stay,
        )


class Conversation(Companion):
    """The debuggers of one run, and the rank that has the prompt."""

    def __init__(
        self,
        prompt: Prompt,
        request_stop: Callable[[str], None],
        *,
        waits_for_ever: bool,
        is_live: bool,
    ) -> None:
        self._prompt, self._request_stop = prompt, request_stop
        self._limit = () if waits_for_ever else (_LIMIT,)
        self._help = HELP.format(what="cell" if is_live else "run")
        self._channels: dict[int, Channel] = {}
        self._waiting: dict[int, Message] = {}
        self._said: dict[int, Message] = {}  # since each got a line
        self._current: int | None = None
        self._is_asking = False
        self._goes_on_since: float | None = None  # the current rank, by a line
        self._has_helped = self._has_quit = False

    @property
    def holds_screen(self) -> bool:  # type: ignore[override]
        """Whether nothing else may be drawn now."""
        return self._is_asking and self._prompt.holds_screen

    def attend(self, state: RunState) -> float:
        """Exchange lines with the debuggers; return 20 ms if one is open.

        Connects to new ones, and prompts the user without waiting for a line. After ``all …`` it
        waits up to 2 s for the ranks' answers. A ``q`` in a debugger of code that still runs
        requests the stop of the run.
        """
        for rank in state.ranks:
            if rank.debugger and rank.rank not in self._channels:
                self._connect(rank)
        if not self._channels:
            return math.inf
        self._listen()
        if self._is_asking:
            self._pass_on(state)
        if not self._is_asking and self._waiting and not self._has_quit:
            self._ask(state)
        is_open = bool(self._waiting) or any(rank.debugger for rank in state.ranks)
        return POLL_INTERVAL_S / 5 if is_open else math.inf

    def ranks_ended(self) -> None:
        """Close the connections; debuggers that wait continue their code."""
        for channel in self._channels.values():
            channel.close()
        self._channels, self._waiting, self._is_asking = {}, {}, False

    def _connect(self, rank: RankState) -> None:
        with contextlib.suppress(OSError):  # it has just ended
            channel = connect(rank.debugger)
            channel.trust()
            self._channels[rank.rank] = channel

    def _listen(self) -> None:
        """Take the messages that ranks have sent, and forget ranks whose connection has ended."""
        poller = select.poll()
        by_descriptor = {channel.fileno(): rank for rank, channel in self._channels.items()}
        for descriptor in by_descriptor:
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(0):
            rank = by_descriptor[descriptor]
            try:
                self._take(rank, self._channels[rank].receive()[0])
            except EOFError:
                self._channels.pop(rank).close()
                self._waiting.pop(rank, None)
                if rank == self._current:
                    self._current, self._is_asking = None, False

    def _take(self, rank: int, message: Message) -> None:
        """Handle a rank's message: print its text, note its prompt, or end its turn.

        Only the text of the rank with the prompt is printed. The message of ``q`` requests the stop
        of the run, and nothing is asked from then on.
        """
        if rank == self._current:
            self._show(message.get("text", ""))
        self._said[rank] = message
        if message.get("quit"):
            self._has_quit = True
            self._request_stop("from the debugger")
        if "prompt" in message:
            self._waiting[rank] = message
        elif rank == self._current and not message.get("comes_back"):
            self._current = None
        elif rank == self._current:
            self._goes_on_since = time.monotonic()

    def _ask(self, state: RunState) -> None:
        """Prompt the user for the rank that had the prompt last, or for the first that waits.

        Does nothing while that rank handles a line, nor for 1 s after its code continues.
        """
        if self._current not in self._waiting:
            if self._current is not None:
                since = self._goes_on_since
                if since is None or time.monotonic() - since < SAME_RANK_PROMPT_S:
                    return  # it answers in a moment
                print(f"rank {self._current} is at work.", flush=True)
            self._turn_to(min(self._waiting), state)
        assert self._current is not None
        message = self._waiting[self._current]
        self._is_asking = True
        self._prompt.ask(f"(rank {self._current}) {message['prompt']}")

    def _turn_to(self, rank: int, state: RunState) -> None:
        """Begin to talk to a rank: print where it stopped, with help the first time."""
        self._current = rank
        message = self._waiting[rank]
        others = [each for each in self._waiting if each != rank]
        too = f" ({format_ranks(others)} too)" if others else ""
        text = f"rank {rank} stopped at {message.get('place', '')}{too}."
        if not self._has_helped:
            self._has_helped = True
            about = _AFTERWARDS if message.get("is_over") else self._help
            lines = [text, about]
            if sum(not each.is_over for each in state.ranks) > 1:
                lines = [text, about + _OTHERS, *self._limit]
            text = "\n".join(lines)
        print(text, flush=True)
        self._show(message.get("text", ""))

    def _pass_on(self, state: RunState) -> None:
        """Send what was typed to the rank with the prompt or to all ranks, or change the rank."""
        line = self._prompt.answer()
        if line is None:
            return
        self._is_asking = False
        if match := _RANK.fullmatch(line.strip()):
            self._change_rank(int(match[1]), state)
        elif match := _ALL.fullmatch(line.strip()):
            self._tell_all(match[1])
        elif self._current is not None:
            self._tell(self._current, line)

    def _change_rank(self, rank: int, state: RunState) -> None:
        """Turn to a rank that the user names, or print which ranks wait."""
        if rank in self._waiting:
            self._turn_to(rank, state)
            return
        known = rank < len(state.ranks)
        reason = f"Rank {rank} is not in the debugger" if known else f"There is no rank {rank}"
        print(f"{reason}. In the debugger: {format_ranks(sorted(self._waiting))}.", flush=True)

    def _tell_all(self, line: str) -> None:
        """Send a line to every rank that waits, and print each answer with its rank.

        Waits up to 2 s for the answers, and prints which ranks are busy after that.
        """
        ranks = sorted(self._waiting)
        for rank in ranks:
            self._tell(rank, line)
        deadline = time.monotonic() + 2 * SAME_RANK_PROMPT_S
        current, self._current = self._current, None
        open_ones = set(ranks)
        while open_ones and time.monotonic() < deadline:
            self._listen()
            open_ones = {r for r in open_ones if r in self._channels and r not in self._said}
            time.sleep(POLL_INTERVAL_S / 5 if open_ones else 0.0)
        for rank in ranks:  # in the order of ranks
            self._show_of(rank)
        for rank in sorted(open_ones):
            print(f"[rank {rank}] is busy. To see its answer later, type: rank {rank}")
        self._current = current if current in self._waiting else None

    def _show_of(self, rank: int) -> None:
        text = self._said.get(rank, {}).get("text", "").rstrip("\n")
        for line in text.split("\n") if text else ():
            print(f"[rank {rank}] {line}", flush=True)

    def _tell(self, rank: int, line: str) -> None:
        """Send a rank the line that the user has typed."""
        self._waiting.pop(rank, None)
        self._said.pop(rank, None)
        self._goes_on_since = None
        with contextlib.suppress(OSError, KeyError):  # it has ended: that is seen next
            self._channels[rank].send({"line": line})

    def _show(self, text: str) -> None:
        if text:
            print(text, end="", flush=True)
