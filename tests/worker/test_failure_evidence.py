"""What a failing rank sees of its failure: in this process, with real limits where there are."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from nbtrain.worker import failure_evidence, main
from tests.support.runs import launch
from tests.tools.faults import Unavailable, small_disk


def caught(do: object) -> BaseException:
    try:
        do()  # type: ignore[operator]
    except BaseException as error:
        return error
    raise AssertionError("it did not fail")


def test_a_full_disk_is_named_whatever_the_language_and_wherever_its_path_is_written() -> None:
    def fill(path: Path) -> None:
        with open(path, "wb") as file:
            file.write(bytes(8 << 20))

    def fail(path: Path) -> None:
        raise RuntimeError("saving failed") from OSError(errno.ENOSPC, "kein Platz", str(path))

    try:
        with small_disk("2m") as disk:
            file, cell = disk / "file", {"os": os}
            expected = (("disk full", f"no space left on {disk}: 0 B free of 2 MiB"),)
            assert failure_evidence.evidence(caught(lambda: fill(file))) == expected
            literal = f"fd = os.open({str(file)!r}, os.O_WRONLY | os.O_APPEND); os.write(fd, b'x')"
            code = compile(literal, "<cell>", "exec")
            assert failure_evidence.evidence(caught(lambda: exec(code, cell))) == expected
            os.close(cell["fd"])  # type: ignore[arg-type]
            assert failure_evidence.evidence(caught(lambda: fail(file))) == expected
    except Unavailable as reason:
        pytest.skip(str(reason))


def test_a_disk_with_room_is_not_accused(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "x"))

    assert failure_evidence.evidence(caught(fail)) == ()


def test_a_refused_fork_is_not_confused_with_a_socket_that_is_not_ready() -> None:
    def start() -> None:
        raise RuntimeError("can't start new thread")

    def fork(refuse: bool) -> None:
        if refuse:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        os.fork()

    def receive() -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    for refused, what in (start, "thread"), (lambda: fork(True), "process"):
        line = failure_evidence.evidence(caught(refused))[0]
        assert line == ("fork refused", f"the system refused a new {what}")
    assert failure_evidence.evidence(caught(receive)) == ()


def raise_again(*_: object) -> None:
    raise RuntimeError("DataLoader worker is killed")


def fail_after_a_loader_has_taken_the_signal() -> None:
    signal.signal(signal.SIGCHLD, raise_again)
    raise ValueError("on purpose")


def test_a_worker_that_ends_while_a_failure_is_reported_does_not_replace_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loader's handler of SIGCHLD raises wherever the rank is: that was exit code 70 once."""

    def sides(_job: object) -> list[object]:
        signal.raise_signal(signal.SIGCHLD)
        return []

    monkeypatch.setattr(main, "sides_of", sides)
    with pytest.raises(ValueError, match="on purpose"):
        launch(fail_after_a_loader_has_taken_the_signal)
