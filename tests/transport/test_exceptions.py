"""Exceptions on their way home: what is kept, what stands in, and which one is the cause."""

from __future__ import annotations

import builtins
import pickle
import sys
import threading
import traceback
from typing import Any

import pytest

from nbtrain import errors
from nbtrain.hangs.failures import Failure, to_exception
from nbtrain.transport import exceptions, result_pickler


def raised(function: object) -> BaseException:
    try:
        function()  # type: ignore[operator]
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def round_trip(error: BaseException) -> BaseException:
    captured = exceptions.capture(error)
    return exceptions.restore(result_pickler.loads(result_pickler.dumps(captured)))


def test_type_arguments_notes_and_chain_are_kept() -> None:
    def fail() -> None:
        try:
            int("x")
        except ValueError as error:
            outer = KeyError("outer")
            outer.__notes__ = ["a note"]  # type: ignore[attr-defined]
            raise outer from error

    back = round_trip(raised(fail))
    assert isinstance(back, KeyError)
    assert back.args == ("outer",)
    assert getattr(back, "__notes__", None) == ["a note"]
    assert isinstance(back.__cause__, ValueError)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
def test_the_exceptions_of_a_group_keep_their_lines_and_causes() -> None:
    def fail(number: int) -> None:
        try:
            [][number]
        except IndexError as error:
            raise ValueError(number) from error

    def group(name: str, *members: BaseException) -> BaseException:
        made: BaseException = vars(builtins)["ExceptionGroup"](name, members)
        return made

    def raise_all() -> None:
        first, second = (raised(lambda n=n: fail(n)) for n in (1, 2))  # type: ignore[misc]
        second.__notes__ = ["of the second"]  # type: ignore[attr-defined]
        raise group("all", first, group("inner", second))

    told = "".join(traceback.format_exception(round_trip(raised(raise_all))))
    assert told.count("raise ValueError(number) from error") == 2
    assert told.count("[][number]") == 2
    assert "of the second" in told


def test_a_class_missing_here_is_told_by_a_stand_in() -> None:
    captured = exceptions.capture(ValueError("x"))
    broken = exceptions.CapturedException("Gone", "text", b"cnowhere\nGone\n.", captured.frames)
    back = exceptions.restore(broken)
    assert isinstance(back, errors.RankError)
    assert (str(back), back.type_name) == ("Gone: text", "Gone")


def test_every_error_survives_pickling() -> None:
    tree = [errors.NbtrainError]
    for cls in tree:
        tree.extend(cls.__subclasses__())
    assert len(tree) >= 9
    for cls in tree:
        error = cls("message")
        error.__dict__["extra"] = 1
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), str(back), back.__dict__) == (cls, "message", error.__dict__)
    died = errors.RankDied("m", rank=3, exitcode=2, log="l")
    assert pickle.loads(pickle.dumps(died)).__dict__ == died.__dict__


def test_a_death_becomes_rank_died() -> None:
    error = to_exception(Failure(1, 0.0, returncode=-9, log="last line\n"), "a note")
    assert isinstance(error, errors.RankDied)
    assert (error.rank, error.signal, error.exitcode, error.log) == (1, 9, None, "last line\n")
    assert "last line" in str(error)
    assert error.__notes__ == ["a note"]  # type: ignore[attr-defined]


class TwoArguments(Exception):
    """Its ``__init__`` takes other arguments than `args`."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"loss {loss} at {step}")
        self.step = step


class Leaves(Exception):
    """Unpickling it would end the process."""

    def __reduce__(self) -> tuple[object, ...]:
        return sys.exit, (3,)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TwoArguments(3, 0.5), "loss 0.5 at 3"),
        (Leaves("bye"), "bye"),
    ],
)
def test_an_odd_exception_keeps_its_type_its_message_and_its_attributes(
    error: Exception, text: str
) -> None:
    back = round_trip(error)
    assert (type(back), str(back)) == (type(error), text)
    assert getattr(back, "step", None) == getattr(error, "step", None)


class Locked(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock, self.step = threading.Lock(), 3


def test_what_cannot_be_copied_of_an_exception_stays_and_the_rest_arrives() -> None:
    back: Any = round_trip(Locked("at step 3"))
    assert (type(back), str(back), back.step) == (Locked, "at step 3", 3)
    assert [note.split("`")[1] for note in back.__notes__] == ["lock"]
    assert not hasattr(back, "lock")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("two lines\nthe rest", "RuntimeError: two lines"),
        ("In `before_fit`:\n\n  its cause\nmore", "RuntimeError: In `before_fit`: its cause"),
        ("nothing follows:\n", "RuntimeError: nothing follows:"),
    ],
)
def test_a_first_line_that_announces_the_cause_is_shown_with_it(text: str, expected: str) -> None:
    """fastai's messages are so; the board showed "Exception occured in … `before_fit`:"."""
    assert exceptions.capture(RuntimeError(text)).headline == expected
