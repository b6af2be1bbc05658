"""The process that tells others of a run, where the launcher or a receiver is gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence

import pytest

from nbtrain.parts.forwarding import forwarder
from nbtrain.parts.forwarding.forwarder import Forwarder
from nbtrain.tracking import events as ev
from nbtrain.tracking.state import RunState
from tests.support.runs import picture


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, other = socket.socketpair()
    yield ours, other
    ours.close()
    other.close()


def never() -> bool:
    return False


class Failing:
    """A receiver that fails at its start."""

    name = "failing"

    def start(self, state: RunState) -> None:
        raise ValueError("no such tracker")

    def take(self, events: Sequence[ev.Event], state: RunState) -> None:
        raise AssertionError("it has failed")

    def finish(self, state: RunState) -> None:
        raise AssertionError("it has failed")


def test_nothing_piles_up_for_a_receiver_that_failed(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, other = ends
    receiver = Failing()
    thread = forwarder._Thread(receiver, other)
    thread.put(thread.receiver.start, picture())
    thread.join()
    for _ in range(3):
        thread.put(thread.receiver.take, [], picture())
    assert thread._calls.empty()
    launcher = Forwarder(ours, [receiver.name])
    (note,) = launcher.notes()
    assert isinstance(note, ev.RunNote)
    assert note.text.startswith("failing: no such tracker. The training continues")
    assert launcher.finish(ev.Finished(2.0, -1, "succeeded"), lambda: True) == []  # told already


def test_the_end_of_the_process_is_noted_unless_the_run_is_over(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, other = ends
    other.close()
    died = Forwarder(ours)
    (note,) = died.notes()
    assert isinstance(note, ev.RunNote)
    assert "nothing more of this run is sent" in note.text
    assert died.notes() == []
    assert died.finish(ev.Finished(2.0, -1, "succeeded"), never) == []
    ours, other = socket.socketpair()
    alive, sent = Forwarder(ours), list[bytes]()
    thread = threading.Thread(target=lambda: (sent.append(other.recv(1 << 16)), other.close()))
    thread.start()
    assert alive.finish(ev.Finished(2.0, -1, "succeeded"), never) == []
    thread.join()
    assert b"succeeded" in sent[0]


@pytest.mark.parametrize(
    ("confirmed", "dies", "named"),
    [
        (b"", False, {"mlflow", "wandb"}),
        (b"\x06wandb\n", False, {"mlflow"}),
        (b"\x06mlflow\n", True, {"wandb"}),
    ],
)
def test_an_end_that_is_not_confirmed_is_a_note(
    confirmed: bytes,
    dies: bool,
    named: set[str],
    ends: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwarder, "END_TIMEOUT_S", 30.0 if dies else 0.01)
    ours, other = ends
    other.sendall(confirmed)
    thread = threading.Thread(target=lambda: (other.recv(1 << 16), other.close()))
    if dies:
        thread.start()
    (note,) = Forwarder(ours, ["mlflow", "wandb"]).finish(ev.Finished(2.0, -1, "succeeded"), never)
    if dies:
        thread.join()
    assert isinstance(note, ev.RunNote)
    assert note.code == "not-forwarded"
    assert {name for name in ("mlflow", "wandb") if name in note.text} == named
    assert ("died" in note.text) == dies


def test_who_presses_stop_at_the_end_waits_no_longer(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarder, "END_TIMEOUT_S", 1e6)
    (note,) = Forwarder(ends[0], ["mlflow"]).finish(
        ev.Finished(2.0, -1, "succeeded"), iter([False, True]).__next__
    )
    assert isinstance(note, ev.RunNote)
