"""The steps that a launch names, and where recordings are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nbtrain.errors import PlanError
from nbtrain.parts.profile.files import Request, folder_of, read_steps, recordings
from nbtrain.tracking.run_folder import RunFolder

pytestmark = pytest.mark.part("profile")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (None, None),
        (False, None),
        (True, (2, 3)),
        (5, (2, 5)),
        ("5", (2, 5)),
        ("100:3", (100, 3)),
        ((7, 1), (7, 1)),
        ([7, 10], (7, 10)),
    ],
)
def test_steps_are_read(given: Any, read: tuple[int, int] | None) -> None:
    assert read_steps(given) == read
    if read is not None:
        assert read_steps(read) == read


@pytest.mark.parametrize(
    "given", ["", "3.0", "1:2:3", "-1:3", "0:1", (2, 11), (2, True), 0, 2.0, {}]
)
def test_other_values_are_refused(given: Any) -> None:
    with pytest.raises(PlanError):
        read_steps(given)


def test_a_request_is_checked() -> None:
    with pytest.raises(PlanError):
        Request(steps=11)


def test_recordings_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert list(recordings(run)) == []
    folders = [folder_of(run, attempt, step) for attempt, step in ((1, 3), (2, 3), (1, 20))]
    for folder in reversed(folders):
        folder.mkdir(parents=True)
    assert list(recordings(run)) == folders
