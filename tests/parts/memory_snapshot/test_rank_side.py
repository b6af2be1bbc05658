"""Real ranks whose GPU is a pretence: torch for the CPU has nothing to record.

The private functions of torch are replaced in this process, and forked ranks inherit that.
"""

from __future__ import annotations

import inspect
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nbtrain
from nbtrain.engines import Engine
from nbtrain.errors import PlanError
from nbtrain.lifecycle import limits as lifecycle_limits
from nbtrain.parts.memory_snapshot import allocator, limits, rank_side
from nbtrain.system import gpus
from nbtrain.tracking.run_folder import RunFolder
from tests.parts.memory_snapshot.snapshots import CELL, MIB, full
from tests.support.kernel import Notebook
from tests.support.runs import launch

pytestmark = pytest.mark.part("memory_snapshot")

MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 96 MiB"


class Pretence:
    """A GPU as far as snapshots need one."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.observers: list[allocator.Observer] = []
        self.trouble: dict[str, Exception] = {}
        self.is_used = True

    def call(self, name: str, result: Any = None) -> Any:
        self.calls.append(name)
        if name in self.trouble:
            raise self.trouble[name]
        return result

    def call_when_ready(self, torch: Any, start: Callable[[], None]) -> None:
        if self.is_used:
            start()

    def observe(self, observer: allocator.Observer) -> None:
        self.call("observe")
        self.observers.append(observer)

    def run_out(self) -> None:
        """Do what torch's allocator does."""
        for observer in self.observers:
            observer(0, 20 * MIB, 96 * MIB, 1)
        raise torch.OutOfMemoryError(MESSAGE)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Pretence:
    """Return the GPU of the ranks that this test launches."""
    gpu = Pretence()
    monkeypatch.setattr(lifecycle_limits, "RESTART_DELAY_S", 0.01)
    monkeypatch.setattr(Engine, "checks_host", False)  # the host would be found to have no GPU
    monkeypatch.setattr(gpus, "gpu_count", lambda *_: 2)
    monkeypatch.setattr(allocator, "call_when_ready", gpu.call_when_ready)
    monkeypatch.setattr(allocator, "record_history", lambda most: gpu.call(f"record {most}"))
    monkeypatch.setattr(allocator, "observe", gpu.observe)
    monkeypatch.setattr(allocator, "stop_history", lambda: gpu.call("stop"))
    monkeypatch.setattr(allocator, "take_snapshot", lambda: gpu.call("take", full()))
    return gpu


def failing(function: Callable[..., Any], n: int = 1, **options: Any) -> nbtrain.Run:
    """Launch what ends with a lack of memory; return its run."""
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        launch(function, n=n, **options)
    run = nbtrain.last_run()
    assert run is not None
    assert run.failure is not None
    assert run.failure.kind == "cuda out of memory"
    return run


def notes(run: nbtrain.Run) -> list[str]:
    found = (each for each in run.state.findings if "memory-snapshot" in each.code)
    return [each.full_text for each in found]


def files(run: nbtrain.Run) -> list[str]:
    return sorted(path.name for path in (run.folder / "memory").glob("rank-*"))


def test_memory_that_runs_out_leaves_a_snapshot_and_one_note(gpu: Pretence) -> None:
    def train() -> None:
        time.sleep(0.3 * nbtrain.rank())
        gpu.run_out()

    run = failing(train, n=2, memory_snapshot=True)
    (note,) = notes(run)
    assert note.startswith("Rank 0 could not allocate 20 MiB on GPU 0 of 96 MiB: its tensors held")
    assert "3041.py, line 12: 50 MiB in 2 blocks" in note
    assert "Open `memory/rank-0000.pickle` of" in note
    assert "rank-0000.pickle" in files(run)
    assert pickle.loads((run.folder / "memory/rank-0000.pickle").read_bytes()) == full()


def test_pytorchs_viewer_reads_the_file(gpu: Pretence) -> None:
    viewer: Any = pytest.importorskip("torch.cuda._memory_viz")
    path = failing(gpu.run_out, memory_snapshot=True).folder / "memory/rank-0000.pickle"
    data = path.read_bytes()
    assert data[:2] == b"\x80\x04"  # the page refuses protocol 5
    assert path.stat().st_mode & 0o777 == 0o600
    loaded = pickle.loads(data)
    assert "segments: 6" in viewer.segsum(loaded)
    assert "raise OutOfMemoryError # 9.0MiB requested" in viewer.trace(loaded)
    for plot in (viewer.trace_plot, viewer.segment_plot):
        assert "MemoryViz.js" in plot(loaded)


def test_lines_of_cells_have_their_names(gpu: Pretence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunFolder, "cells", lambda _: {CELL: "In[5]"})
    (note,) = notes(failing(gpu.run_out, memory_snapshot=True))
    assert "In[5], line 12: 50 MiB in 2 blocks; In[5], line 30 (modeling_bert.py" in note


def test_a_restart_after_a_lack_of_memory_records_by_itself(gpu: Pretence) -> None:
    def train() -> list[str]:
        if nbtrain.attempt() < 3:
            gpu.run_out()
        return gpu.calls

    run = launch(train, max_restarts=2)
    assert run.value == ["record 50000", "observe"]  # a restart without a lack needs no file
    assert files(run) == ["rank-0000.attempt-2.pickle"]
    assert "Open `memory/rank-0000.attempt-2.pickle` of" in notes(run)[0]


def test_other_failures_and_first_attempts_record_nothing(
    gpu: Pretence, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(error: type[Exception]) -> list[str]:
        if nbtrain.attempt() == 1:
            raise error(MESSAGE if error is torch.OutOfMemoryError else "gone")
        return gpu.calls

    assert launch(train, OSError, max_restarts=1).value == []
    monkeypatch.setenv("NBTRAIN_DISABLE", "memory-snapshot")
    run = launch(train, torch.OutOfMemoryError, max_restarts=1)
    assert (run.value, files(run), notes(run)) == ([], [], [])
    with pytest.raises(PlanError, match="switched off on this host"):
        launch(train, OSError, memory_snapshot=True)


def test_a_run_that_succeeds_reports_its_peak_once(gpu: Pretence) -> None:
    run = launch(lambda: gpu.calls, n=2, memory_snapshot=True)
    assert run.value == ["record 50000", "observe", "take"]
    assert files(run) == ["rank-0000.pickle", "rank-0001.pickle"]
    (note,) = notes(run)
    assert "held 87 MiB on GPU 0 at most" in note


def test_code_that_tries_batch_sizes_is_not_held_up(
    gpu: Pretence, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(fails: bool) -> list[str]:
        for _ in range(5):
            with pytest.raises(torch.OutOfMemoryError):
                gpu.run_out()
        if fails:
            gpu.run_out()
        return gpu.calls

    run = launch(train, False, memory_snapshot=True)
    assert run.value.count("take") == 1
    assert "Rank 0 could not allocate 20 MiB on" in notes(run)[0]
    monkeypatch.setattr(limits, "SAVE_INTERVAL_S", -1.0)
    run = launch(train, False, memory_snapshot=True)
    assert run.value.count("take") == 5
    assert "(the last of 5 times)" in notes(run)[0]
    monkeypatch.setattr(limits, "SAVE_INTERVAL_S", 1000.0)
    run = failing(lambda: train(True), memory_snapshot=True)
    assert "(the last of 6 times)" in notes(run)[0]  # taken as the error came out


def test_a_rank_that_fails_is_reported_though_another_has_caught_the_error(gpu: Pretence) -> None:
    def train() -> None:
        if nbtrain.rank() == 0:
            with pytest.raises(torch.OutOfMemoryError):
                gpu.run_out()
        else:
            time.sleep(0.5)
            gpu.run_out()

    run = failing(train, n=2, memory_snapshot=True)
    assert sorted(note[:6] for note in notes(run)) == ["Rank 0", "Rank 1"]


def test_a_library_that_gets_no_memory_is_reported_too(gpu: Pretence) -> None:
    def train() -> None:
        raise RuntimeError("NCCL failed: CUDA error: out of memory")

    with pytest.raises(RuntimeError, match="NCCL failed"):
        launch(train, memory_snapshot=True)
    run = nbtrain.last_run()
    assert run is not None
    assert notes(run)[0].startswith("Rank 0 could not allocate memory on GPU 0: its tensors held")


class Hostile(torch.OutOfMemoryError):  # type: ignore[misc, name-defined]
    """An exception that cannot be read at the first attempt."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("name", "trouble", "reason"),
    [
        ("record 50000", RuntimeError("cudaMallocAsync does not support it"), "cudaMallocAsync"),
        ("take", RuntimeError("no snapshot"), "RuntimeError: no snapshot"),
        ("take", MemoryError(), "MemoryError"),
    ],
)
def test_trouble_with_the_allocator_keeps_the_users_error(
    gpu: Pretence, name: str, trouble: Exception, reason: str
) -> None:
    gpu.trouble = {name: trouble}
    run = failing(gpu.run_out, memory_snapshot=True)
    assert files(run) == []
    (note,) = notes(run)
    assert note.startswith("No memory snapshot was made: ")
    assert reason in note


def test_without_an_observer_the_snapshot_is_made_after_the_error(gpu: Pretence) -> None:
    gpu.trouble = {"observe": AttributeError("_cuda_attach_out_of_memory_observer")}
    run = failing(gpu.run_out, memory_snapshot=True)
    assert files(run) == ["rank-0000.pickle"]
    assert "could not allocate memory" in notes(run)[0]


def test_a_task_that_uses_no_gpu_has_a_note(gpu: Pretence) -> None:
    gpu.is_used = False
    ended = launch(lambda: 7, memory_snapshot=True)
    assert ended.value == 7
    assert notes(ended)[0].startswith("No memory snapshot was made: torch did not use a GPU in")


def test_a_torch_that_cannot_clear_its_history_records(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[tuple[str, dict[str, Any]]]()

    def record(enabled: str, context: str, stacks: str, max_entries: int) -> None:
        made.append((enabled, {"context": context, "stacks": stacks, "max": max_entries}))

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    allocator.record_history(50)
    assert made == [("all", {"context": "alloc", "stacks": "python", "max": 50})]


def test_a_full_disk_and_a_hostile_error_keep_the_users_error(
    gpu: Pretence, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def train() -> None:
        raise Hostile

    with pytest.raises(Exception, match=r"no text|Hostile"):
        launch(train, memory_snapshot=True)
    monkeypatch.setattr(rank_side, "write", write)
    run = failing(gpu.run_out, memory_snapshot=True)
    assert files(run) == []
    assert "could not be written (No space left on device)" in notes(run)[0]


def test_ranks_that_use_no_gpu_say_so_once(gpu: Pretence) -> None:
    gpu.is_used = False
    run = launch(lambda: gpu.calls, n=2, memory_snapshot=True)
    assert (run.value, len(notes(run))) == ([], 1)


def test_an_option_that_records_nothing_here_is_refused(run_root: Path) -> None:
    for engine in ("fork", "inline"):
        with pytest.raises(PlanError, match="and this launch has no such rank: leave it out"):
            launch(int, memory_snapshot=True, engine=engine)
    assert list(run_root.rglob("run.json")) == []


def test_live_ranks_attach_once_and_stop_recording_between_tasks(gpu: Pretence) -> None:
    side = rank_side.SnapshotRank()
    for _ in range(2):
        side._task = rank_side._Task(context=None)  # type: ignore[arg-type]
        side._start()
        side._start()
        side._stop()
        side._start()  # torch calls what an earlier task has left
    assert gpu.calls == ["record 50000", "observe", "stop", "record 50000", "stop"]
    gpu.observers[0](0, 1, 2, 3)  # between tasks
    assert "take" not in gpu.calls


def test_snapshots_are_copied_home_with_a_ranks_results(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.memory.mkdir()
    for name in ("1.pickle", "1.attempt-2.pickle", "2.pickle", "1.pickle.7-7.partial"):
        (folder.memory / f"rank-000{name}").touch()
    found = ["memory/rank-0001.attempt-2.pickle", "memory/rank-0001.pickle"]
    assert folder.list_result_files(1) == found


def test_torch_still_has_the_private_functions_that_are_used() -> None:
    from torch._dynamo import trace_rules

    parameters = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"enabled", "context", "stacks", "max_entries", "clear_history"} <= {*parameters}
    assert not inspect.signature(torch.cuda.memory._snapshot).parameters["device"].default
    known = inspect.getsource(trace_rules)  # torch for the CPU lacks the function itself
    assert '"torch._C._cuda_attach_out_of_memory_observer"' in known
    called: list[int] = []
    queued = torch.cuda._queued_calls.copy()
    allocator.call_when_ready(torch, lambda: called.append(1))
    try:
        assert not torch.cuda.is_initialized()
        assert called == []
        assert len(torch.cuda._queued_calls) == len(queued) + 1
    finally:
        torch.cuda._queued_calls[:] = queued


def test_live_ranks_without_a_gpu_refuse_the_option(notebook: Notebook) -> None:
    assert not notebook.run("%load_ext nbtrain").ename
    assert not notebook.run("%nbtrain start -n 2").ename
    try:
        out = notebook.run("%%distributed --memory-snapshot\nprint('ran')")
        assert out.ename == "PlanError"
        assert "ran" not in out.stdout
        assert not notebook.run("%%distributed\nprint('ran')").ename
    finally:
        notebook.run("%nbtrain stop")
