"""A run that lost what it trained says so, whatever is left of its reports."""

from __future__ import annotations

import errno
import os

import pytest

from nbtrain.hangs.lost_results import describe_lost_results
from nbtrain.tracking import events as ev
from nbtrain.tracking.reducers import fold
from nbtrain.tracking.state import RunState
from tests.support.runs import picture

DONE = ev.Exited(102, 0, 0, "done")
REPORTED = ev.Ended(101, 0, result="None")


def over(*events: ev.Event) -> RunState:
    return fold(picture(1), events)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EFBIG, "Raise the limit on the size of a file (ulimit -f)"),
        (errno.ENOSPC, "Free space there, or set NBTRAIN_HOME"),
        (errno.EROFS, "Set NBTRAIN_HOME to a folder that can be written"),
    ],
)
def test_why_it_could_not_be_saved_decides_what_to_do(number: int, remedy: str) -> None:
    reason = os.strerror(number)
    lost = ev.ArtifactSaved(
        100, 0, "model", "model", trouble=reason, code=errno.errorcode[number], lost=True
    )
    found = describe_lost_results(over(lost, REPORTED, DONE), ["model"])
    assert found is not None
    text = found.full_text
    assert text.startswith("results are lost: `model` could not be saved in the run's folder")
    assert f"({reason})" in text
    assert remedy in text
    assert "nbtrain.last_run().results" in text


def test_a_rank_that_broke_off_is_named_only_if_something_was_to_come() -> None:
    killed = over(ev.Exited(102, 0, -9, "done"))
    found = describe_lost_results(killed, ["model", "scores@all"])
    assert found is not None
    text = found.full_text
    assert "rank 0 was killed by SIGKILL" in text
    assert "before it reported that it had saved `model`, `scores`" in text
    assert describe_lost_results(killed, []) is None
    found = describe_lost_results(over(DONE), ["model"])
    assert found is not None
    assert "disk" in found.text


def test_a_run_that_is_right_or_failed_otherwise_lost_nothing() -> None:
    assert describe_lost_results(over(REPORTED, DONE), ["model"]) is None
    assert describe_lost_results(over(ev.Exited(102, 0, -9, "failed")), ["model"]) is None
    unfit = ev.ArtifactSaved(100, 0, "model", "model", trouble="its group was destroyed")
    assert describe_lost_results(over(unfit, REPORTED, DONE), ["model"]) is None
