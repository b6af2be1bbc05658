"""Sends a message when a run ends or hangs: the board's headline and three lines, by apprise.

An address may hold a password: it is in no event, file, log or message of nbtrain's.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

from ...hangs import verdict
from ...part_api import RunFolder, RunState, clock, mask_text, run_texts, shorten
from ...part_api import events as ev
from ...tracking.limits import MAX_NOTE_CHARS
from ...ui import rank_texts


class Notifier:
    """One address. A run that the user stops is not reported, but one whose kernel died is."""

    name = "--notify"

    def __init__(self, url: str, folder: RunFolder) -> None:
        self._url = url
        self._folder = folder
        self._hang = ""

    def start(self, state: RunState) -> None:
        """Load apprise and check the address.

        Raises `ValueError` if apprise does not know the form of the address.
        """
        import apprise

        self._service = apprise.Apprise()
        if not self._service.add(self._url):
            raise ValueError("apprise does not know an address of this form")

    def take(self, _events: Sequence[ev.Event], state: RunState) -> None:
        """Send a message when the run begins to hang.

        Raises `ConnectionError` if the service refuses it.
        """
        if state.hang and not self._hang:
            self._send(state)
        self._hang = state.hang

    def finish(self, state: RunState) -> None:
        """Report how the run ended."""
        if state.status != "interrupted" or state.code == ev.ABANDONED:
            self._send(state)

    def explain(self, error: BaseException) -> str:
        """Describe an error without the address; of errors of libraries, only the type."""
        if type(error) in (ValueError, ConnectionError):
            return f"the message was not delivered: {error}"
        return f"the message was not delivered ({type(error).__name__})"

    def _send(self, state: RunState) -> None:
        """Send a message about the run. Raises `ConnectionError` if the service refuses it."""
        headline, text = message(state, clock.now(state.clock_offset), self._folder)
        kind = "failure" if state.is_over else "warning"
        if state.status == "succeeded":
            kind = "warning" if state.flaw else "success"
        if not self._service.notify(title=headline, body=text, notify_type=kind):
            raise ConnectionError("the service did not answer, or refused it")


def message(state: RunState, now: float, folder: RunFolder) -> tuple[str, str]:
    """Return a headline and three lines: the reason, the progress and device, and the next step."""
    why = reason(state)
    if state.status == "succeeded" and state.flaw:
        why = next(iter(state.notes), state.flaw)
    elif state.status == "succeeded":
        numbers = rank_texts.metrics(state.ranks[0])
        why = numbers or "; ".join(map(str, run_texts.results(state))) or "no metrics"
    place = f"nbtrain show {folder.path.name} · {folder.path} on {platform.node()}"
    lines = (why, run_texts.facts(state, now), place)
    text = "\n".join(shorten(line, MAX_NOTE_CHARS) for line in lines)
    return run_texts.sentence(state, now), text


def reason(state: RunState) -> str:
    """Return why a run failed, was stopped, or hangs, without secrets; "" for one that is well."""
    culprit = verdict.find_culprit(state)
    if culprit is not None and state.status == "failed":
        return f"rank {culprit.rank}: {mask_text(verdict.describe_rank_failure(culprit, state))}"
    return state.explanation or state.hang
