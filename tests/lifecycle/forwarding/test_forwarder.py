"""The process that tells others of a run, where the launcher or a receiver is gone."""

from __future__ import annotations

import fcntl
import queue
import resource
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from nbtrain.lifecycle.forwarding import forwarder
from nbtrain.lifecycle.forwarding.forwarder import Forwarder
from nbtrain.tracking import events as ev
from nbtrain.tracking.run_folder import RunFolder
from nbtrain.tracking.state import RunState
from tests.support.runs import picture


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, other = socket.socketpair()
    yield ours, other
    ours.close()
    other.close()


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
    thread = forwarder._Thread(Failing(), other)
    thread.put(thread.receiver.start, picture())
    thread.join()
    for _ in range(3):
        thread.put(thread.receiver.take, [], picture())
    assert thread._calls.empty()
    (note,) = Forwarder(ours).notes()
    assert isinstance(note, ev.RunNote)
    assert note.text.startswith("failing: no such tracker. The training goes on")


def test_a_launcher_that_hangs_up_without_a_word_has_lost_the_run(
    tmp_path: Path, ends: tuple[socket.socket, socket.socket]
) -> None:
    ours, other = ends
    ours.close()
    folder = RunFolder(tmp_path / "deleted")  # its launcher may live or not: nobody can know
    followed: queue.SimpleQueue[RunState] = queue.SimpleQueue()

    def follow() -> None:
        followed.put(forwarder._follow(folder, picture(), other, []))

    threading.Thread(target=follow, daemon=True).start()
    assert followed.get(timeout=30).status == "lost"


def test_a_process_with_thousands_of_descriptors_hears_of_trouble(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, other = ends
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        high = socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD, 1100))
        other.sendall(b"tensorboard: the tracker failed\n")
        with high:
            (note,) = Forwarder(high).notes()
        assert isinstance(note, ev.RunNote)
        assert note.text == "tensorboard: the tracker failed"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
