"""The lines of the user's code that a training thread is in."""

from __future__ import annotations

import inspect
import json
import sys
import threading
import time

import pytest

from nbtrain.parts.profile.ranks.sampler import Sampler
from tests.support.waiting import wait_until

pytestmark = pytest.mark.part("profile")


def work_in_a_library(sampler: Sampler) -> str:
    """Call a library until that was sampled; return the line of the call."""
    text, deadline = json.dumps(list(range(10_000))), time.monotonic() + 10
    frame = inspect.currentframe()
    assert frame is not None
    line = f"{__file__}:{frame.f_lineno + 2}"
    while line not in {sample.line for sample in sampler.samples}:
        json.loads(text)
        assert time.monotonic() < deadline, sampler.samples
    return line


def test_the_innermost_line_of_the_users_code_is_noted() -> None:
    sampler = Sampler(0.001, 10_000)
    sampler.start()
    line = work_in_a_library(sampler)
    sampler.stop()
    files = {sample.line.rpartition(":")[0] for sample in sampler.samples}
    assert line in {sample.line for sample in sampler.samples}
    assert files == {__file__}  # neither the library nor nbtrain
    times = [sample.time_ns for sample in sampler.samples]
    assert times == sorted(times)
    assert 0 <= time.time_ns() - times[-1] < 60e9


def count_in_python() -> int:
    """Run Python for some milliseconds, and release its lock."""
    count = 0
    for number in range(200_000):
        count += number
    time.sleep(1e-6)
    return count


def test_lines_that_run_python_are_noted_as_often_as_they_run() -> None:
    sampler, usual = Sampler(0.001, 10_000), sys.getswitchinterval()
    sampler.start()
    deadline = time.monotonic() + 30
    while len(sampler.samples) < 100:
        count_in_python()
        assert time.monotonic() < deadline
    sampler.stop()
    assert sys.getswitchinterval() == usual
    lines, first = inspect.getsourcelines(count_in_python)
    sleeps = first + next(i for i, line in enumerate(lines) if "sleep" in line)
    sampled = [int(sample.line.rpartition(":")[2]) for sample in sampler.samples]
    # Of a thread that Python lets run for 5 ms, one in twenty would be of the loop.
    assert sum(line < sleeps for line in sampled) > 0.2 * len(sampled)


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
