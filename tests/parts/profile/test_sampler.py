"""The lines of the user's code that a training thread is in."""

from __future__ import annotations

import inspect
import json
import threading
import time

import pytest

from nbtrain.parts.profile.ranks.sampler import Sampler
from tests.support.waiting import wait_until

pytestmark = pytest.mark.part("profile")


def work_in_a_library(sampler: Sampler) -> int:
    """Call the library until it was sampled; return the line of the call."""
    text = json.dumps(list(range(10_000)))
    while len(sampler.samples) < 3:
        json.loads(text)
    return inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]


def test_the_innermost_line_of_the_users_code_is_noted() -> None:
    sampler = Sampler(0.001, 100)
    sampler.start()
    line = work_in_a_library(sampler)
    sampler.stop()
    lines = {sample.line for sample in sampler.samples[1:3]}
    assert lines <= {f"{__file__}:{line}", f"{__file__}:{line - 1}"}
    times = [sample.time_ns for sample in sampler.samples]
    assert times == sorted(times)
    assert 0 <= time.time_ns() - times[-1] < 60e9


def test_it_takes_no_more_samples_than_allowed() -> None:
    sampler = Sampler(0.0001, 5)
    sampler.start()
    wait_until(lambda: len(sampler.samples) == 5)
    wait_until(lambda: "nbtrain-sampler" not in {t.name for t in threading.enumerate()})
    assert len(sampler.samples) == 5


def test_new_samples_begin_empty() -> None:
    sampler = Sampler(0.001, 100)
    sampler.start()
    wait_until(lambda: sampler.samples)
    sampler.stop()
    first = sampler.samples
    sampler.start()
    assert sampler.samples is not first
    sampler.stop()
    wait_until(lambda: "nbtrain-sampler" not in {t.name for t in threading.enumerate()})
