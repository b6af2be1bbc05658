"""Why a run failed, from what its ranks left: pure, so told the same in every order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from nbtrain.hangs import verdict
from nbtrain.hangs.failures import Failure
from nbtrain.tracking import events as ev
from nbtrain.tracking.reducers import fold
from nbtrain.tracking.state import RankState, RunState
from nbtrain.transport import exceptions

ECHO = "[pair.cc:553] Connection closed by peer [127.0.0.1]:8427"
THROWN = "terminate called after throwing an instance of 'gloo::IoException'\n  what():  " + ECHO

CURE = (verdict._LOAD_ONCE,)


def run(
    *told: ev.Event, ranks: int = 3, status: str = "failed", message: str = "", code: str = ""
) -> RunState:
    state = RunState("train", "fork", tuple(map(RankState, range(ranks))), 0.0)
    return fold(state, [*told, ev.Finished(99.0, -1, status, message, code=code)])


def exited(rank: int, number: int | None = 1, status: str = "failed", **more: Any) -> ev.Exited:
    return ev.Exited(10.0 + rank, rank, number, status, **more)


def raised(rank: int, time: float, error: BaseException) -> Failure:
    return Failure(rank, time, exceptions.capture(error))


def explained(state: RunState, failures: Sequence[Failure]) -> verdict.FailureReport:
    found = verdict.explain_failure(state, failures)
    assert found is not None
    return found


def of_one(error: BaseException, *evidence: tuple[str, str]) -> verdict.FailureReport:
    ended = ev.Ended(1.0, 0, error="", evidence=evidence)
    return explained(run(ended, exited(0), ranks=1), [raised(0, 1.0, error)])


def death(
    number: int | None, log: str = "", *before: ev.Event, device: str = "cpu", **more: Any
) -> verdict.FailureReport:
    """Return why a run failed that one of its two ranks died in."""
    seen = [ev.Resources(1.0, 0, memory=3 << 30), *before]
    state = replace(run(*seen, exited(0, number, **more), ranks=2), device=device)
    return explained(
        state, [Failure(0, 1.0, None, number, log, verdict.describe_death(state.ranks[0]))]
    )


@pytest.mark.parametrize("cause_at", [9.0, 10.0, 10.001, 12.0])
@pytest.mark.parametrize("cause", ["exception", "death"])
def test_the_cause_is_named_whatever_comes_first(cause: str, cause_at: float) -> None:
    if cause == "exception":
        guilty = raised(2, cause_at, ValueError("bad luck"))
    else:
        guilty = Failure(2, cause_at, returncode=7, description="exited with code 7")
    echo = raised(0, 10.0, RuntimeError(ECHO))
    native = Failure(1, 10.0, returncode=-6, log=THROWN, description="was killed by SIGABRT")
    state = run(exited(0), exited(1, -6), exited(2, 1 if cause == "exception" else 7))
    for order in itertools.permutations([guilty, echo, native]):
        found = explained(state, order)
        assert (found.rank, found.kind) == (2, "exit" if cause == "death" else "exception")
        assert found.others == "ranks 0–1 failed because of it"


def test_a_timeout_is_a_failure_of_no_rank_and_an_interrupt_is_none() -> None:
    ended = [exited(0, -2, "stopped"), exited(1, -9, "stopped")]
    found = explained(run(*ended, ranks=2, status="timed out"), [])
    assert (found.kind, found.rank) == ("timeout", -1)
    assert str(found).splitlines()[-1] == "  · rank 1 had to be killed"
    assert verdict.explain_failure(run(*ended, ranks=2, status="interrupted"), []) is None
    assert (
        verdict.explain_failure(run(exited(0, 0, "done"), ranks=1, status="succeeded"), []) is None
    )
    assert verdict.explain_failure(RunState("train", "fork", (RankState(0),), 0.0), []) is None


@pytest.mark.parametrize(
    ("message", "code", "kind"),
    [
        ("LaunchError: only 3 of 8 processes could be forked.", "fork refused", "fork refused"),
        ("LaunchError: port 4711 cannot be used on this host", "", "launch"),
    ],
)
def test_a_run_that_could_not_start_says_why(message: str, code: str, kind: str) -> None:
    found = explained(run(message=message, code=code), [])
    assert (found.kind, found.rank, found.headline) == (kind, -1, message)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "out of memory"),
        (OSError(28, "No space left on device", "/mnt/x"), "disk full"),
        (RuntimeError("DataLoader worker (pid 3) is killed by signal: Bus error."), "data loader"),
        (RuntimeError("NCCL error: unhandled system error"), "communication"),
        (RuntimeError(ECHO), "communication"),
        (OSError(24, "Too many open files"), "exception"),
        (ValueError("timed out"), "exception"),
    ],
)
def test_exceptions_are_told_apart(error: BaseException, kind: str) -> None:
    assert of_one(error).kind.startswith(kind)


def test_a_cause_further_down_the_chain_counts() -> None:
    error = RuntimeError("could not save")
    error.__cause__ = OSError(28, "No space left on device")
    assert of_one(error).kind == "disk full"


def test_what_the_rank_saw_heads_what_does_not_say_it() -> None:
    saw = "a DataLoader worker (pid 7) was killed by SIGKILL"
    found = of_one(
        ConnectionResetError(104, "reset"),
        ("data loader worker", saw),
        ("", "/dev/shm has 64 MiB"),
    )
    assert found.kind == "data loader worker"
    assert found.headline.startswith(f"{saw} (ConnectionResetError")
    assert "/dev/shm has 64 MiB" in found.evidence
    assert any("num_workers=0" in line for line in found.evidence)
    assert found.advice


def test_gpu_memory_is_told_with_torchs_figures_and_who_holds_what() -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    text = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 139 GiB. 1 GiB is free."
    gpu = (0, "NVIDIA H200", 138 << 30, 140 << 30, 97.0)
    state = run(
        ev.Host(1.0, -1, gpus=(gpu,)),
        ev.Resources(1.0, 0, memory=1 << 30, gpu=0, gpu_memory=100 << 30),
        ev.TensorMemory(1.0, 0, on="cuda:0", weights=10 << 30),
        ev.TrainingUpdate(1.0, 0, steps=3, peak=60 << 30, reserved=90 << 30),
        ev.Resources(1.0, 1, gpu=0, gpu_memory=30 << 30),
        exited(0),
        ranks=2,
    )
    found = explained(state, [raised(0, 1.0, OutOfMemoryError(text))])
    assert found.kind == "cuda out of memory"
    assert found.headline.endswith("CUDA out of memory. Tried to allocate 20.00 GiB")
    assert "GPU 0 has 139 GiB" in found.evidence
    assert found.memory == (
        "rank 0 held 100 GiB of its GPU's memory (weights 10.0 GiB; activations, temporary "
        "buffers 50.0 GiB; allocator's reserve 30.0 GiB; CUDA context 10.0 GiB; last measured "
        "9.0 s before it ended)"
    )
    assert found.evidence[-2] == (
        "GPU 0 (NVIDIA H200), when last seen, held 138 of 140 GiB: "
        "rank 0 100 GiB, rank 1 30.0 GiB, others 8.0 GiB"
    )


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (death(7), "exit"),
        (death(-9, cause="was killed by SIGKILL", code=ev.NOT_MEMORY), "signal"),
        (death(-6, "std::bad_alloc"), "out of memory"),
        (
            death(-6, "[rank0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"),
            "communication",
        ),
    ],
)
def test_deaths_are_told_apart(found: verdict.FailureReport, kind: str) -> None:
    assert found.kind == kind


def test_a_kill_for_memory_is_told_with_whose_memory_grew() -> None:
    grown = [ev.Resources(2.0, rank, memory=size << 30) for rank, size in ((1, 1), (0, 9))]
    found = death(-9, "", *grown, cause="ran out of memory", code=ev.OUT_OF_MEMORY)
    assert (found.kind, found.headline) == ("out of memory", "ran out of memory")
    assert "rank 0 grew most, from 3.0 GiB to 9.0 GiB" in str(found)
    assert "no weights, gradients or optimizer states were counted in it" in str(found)


@pytest.mark.parametrize(
    ("number", "device", "code", "advice"),
    [
        (-9, "cuda", "", CURE),
        pytest.param(-11, "xla", "", CURE, marks=pytest.mark.part("tpu")),
        (-9, "xla", ev.NOT_MEMORY, ()),
    ],
)
def test_a_kill_that_may_be_for_memory_comes_with_how_ranks_share_a_model(
    number: int, device: str, code: str, advice: tuple[str, ...]
) -> None:
    found = death(number, device=device, code=code)
    assert found.advice == advice
    assert set(found.advice) <= set(found.evidence)


def test_a_crash_names_the_users_own_line() -> None:
    library = verdict.__file__.replace("verdict.py", "worker.py")
    log = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
        f'  File "{pytest.__file__}", line 3 in native\n'
        '  File "/tmp/ipykernel_7/12.py", line 5 in train\n'
        f'  File "{library}", line 9 in run_task\n'
    )
    found = death(-11, log)
    assert found.kind == "segfault"
    assert found.headline.endswith("in train at line 5")
    assert [line for line in found.evidence if line.startswith("at ")][-1] == "at line 5 in train"


def test_the_line_of_generated_code_is_no_line_of_the_cell() -> None:
    """A four-line cell was to be corrected at line 194, which was of a dataclass's `__init__`."""
    traceback = (
        "Traceback (most recent call last):",
        '  File "/tmp/ipykernel_12/345.py", line 4, in train',
        '  File "<string>", line 194, in __init__',
        '  File "<attrs generated init Config>", line 12, in __init__',
        "ValueError: no",
    )
    rank = RankState(0, log=(ev.TRACEBACK_FOLLOWS, *traceback))
    assert verdict.line_of_failure(rank) == "line 4 of the cell"
