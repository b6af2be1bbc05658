"""What a failing rank sees of its failure: in this process, with real limits where there are."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from faults import Unavailable, small_disk

from nbtrain import witness


def caught(do: object) -> BaseException:
    try:
        do()  # type: ignore[operator]
    except BaseException as error:
        return error
    raise AssertionError("it did not fail")


def test_of_an_ordinary_exception_nothing_is_seen() -> None:
    assert witness.seen(caught(lambda: 1 / 0)) == ()


def test_a_full_disk_is_named_with_what_is_free() -> None:
    def fill(path: Path) -> None:
        with open(path, "wb") as file:
            file.write(bytes(8 << 20))

    try:
        with small_disk("2m") as disk:
            (found,) = witness.seen(caught(lambda: fill(disk / "deep")))
            assert found == f"no space left on {disk}: 0 KiB free of 2 MiB"
    except Unavailable as why:
        pytest.skip(str(why))


def test_a_disk_with_room_is_not_accused(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "x"))

    assert witness.seen(caught(fail)) == ()


def test_a_refused_thread_is_told_with_the_limit() -> None:
    def fail() -> None:
        raise RuntimeError("can't start new thread")

    assert witness.seen(caught(fail))[0] == "the system refused a new thread"


def test_a_refused_fork_is_told_apart_from_a_socket_that_is_not_ready() -> None:
    def fork(refuse: bool) -> None:
        if refuse:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        os.fork()

    def receive() -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    assert witness.seen(caught(lambda: fork(True)))[0] == "the system refused a new process"
    assert witness.seen(caught(receive)) == ()


def test_hostile_exceptions_do_no_harm() -> None:
    class Hostile(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert witness.seen(caught(lambda: (_ for _ in ()).throw(Hostile()))) == ()
    loop = ValueError("x")
    loop.__context__ = KeyError("y")
    loop.__context__.__context__ = loop
    assert witness.seen(loop) == ()


def test_no_handler_raises_into_the_report() -> None:
    def handler(*_args: object) -> None:
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

    before = signal.signal(signal.SIGCHLD, handler)
    try:
        with witness.undisturbed():
            os.kill(os.getpid(), signal.SIGCHLD)
        assert signal.getsignal(signal.SIGCHLD) is handler
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_elsewhere_than_in_the_main_thread_it_does_nothing() -> None:
    done: list[bool] = []

    def look() -> None:
        with witness.undisturbed():
            done.append(True)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert done == [True]
