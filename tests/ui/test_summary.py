"""`run.summary()`: what a run took and made, in numbers; of GPUs, from told values."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import nbtrain
from nbtrain.commands import cli
from nbtrain.system import gpus
from nbtrain.system.gpus import Gpu
from nbtrain.tracking import events as ev
from nbtrain.tracking import limits, resource_sampler
from nbtrain.tracking.event_log import read_events
from nbtrain.tracking.reducers import fold
from nbtrain.tracking.state import RankState, RunState
from nbtrain.ui import run_texts
from nbtrain.ui.board import board
from nbtrain.ui.summary import summary
from tests.support.kernel import Notebook
from tests.support.runs import launch

GIB = 1 << 30
NASTY = "<script>x</script>"


def on_gpus(*more: ev.Event, after: int | None = GIB) -> RunState:
    state = RunState("t()", "fork", (RankState(0), RankState(1)), created=100.0, device="cuda")
    told: list[ev.Event] = [
        ev.GpuMemory(100, -1, ((0, NASTY, GIB), (1, NASTY, GIB), (2, NASTY, GIB)))
    ]
    for rank in (0, 1):
        told += [
            ev.Started(101, rank, 7),
            ev.TensorMemory(110, rank, "cuda", GIB, GIB, 2 * GIB + rank * GIB),
            ev.Resources(111, rank, 1.0, GIB, rank, (9 + rank) * GIB),
            ev.Resources(112, rank, 1.0, GIB, rank, GIB),
            ev.TrainingUpdate(
                113, rank, 40, 10.0, 1.0 + rank, 80, 0.5, batch=40, peak=7 * GIB, reserved=8 * GIB
            ),
            ev.Metrics(113, rank, 40, {"accuracy": 0.5 + rank / 4, NASTY: 1}),
        ]
    if after is not None:
        told.append(
            ev.GpuMemory(120, -1, ((0, NASTY, GIB), (1, NASTY, after), (2, NASTY, 5 * GIB)))
        )
    return fold(state, [*told, *more])


def test_the_numbers_of_a_run_on_gpus() -> None:
    s = summary(on_gpus(ev.Finished(120, -1, "succeeded"), after=3 * GIB), 999.0)
    assert (s.status, s.seconds) == ("succeeded", 20)
    assert (s.seconds_to_first_step, s.seconds_training) == (3, 10)
    assert (s.steps, s.steps_per_second) == (40, 4)
    assert (s.samples, s.samples_per_second) == (160, 16)
    assert s.waiting_share == pytest.approx(0.15)
    assert s.metrics == {"loss": 0.5, "accuracy": 0.625, NASTY: 1}
    assert (s.memory_bytes, s.memory_ranks) == (10 * GIB, (1,))
    assert [(p.name, p.bytes // GIB, p.ranks) for p in s.memory_parts] == [
        ("weights", 1, (0, 1)),
        ("gradients", 1, (0, 1)),
        ("optimizer states", 3, (1,)),
        ("activations, temporary buffers", 3, (0,)),
        ("allocator's reserve", 1, (0, 1)),
        ("CUDA context", 2, (1,)),
    ]
    assert [(c.index, c.bytes_after, c.is_given_back) for c in s.cards] == [
        (0, GIB, True),
        (1, 3 * GIB, False),
    ]
    assert (
        "GPU 1     1.0 GiB in use before the run, 3.0 GiB after the run: 2.0 GiB more (other "
        in repr(s)
    )
    assert "optimizer states                3.0 GiB  on rank 1" in repr(s)


def test_the_board_says_what_the_memory_of_the_fullest_rank_holds() -> None:
    drawn = board.render(on_gpus(), 130.0).replace("\N{NO-BREAK SPACE}", " ")
    assert (
        "memory of rank 1: weights 1.0 GiB · gradients 1.0 GiB · optimizer states 3.0 GiB" in drawn
    )
    assert drawn.count('title="weights 1.0 GiB') == 2


ADAMW = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
n = sum(p.numel() for p in model.parameters())
"""
CELL = """%%distributed -n 2 --no-sync
def train(model, lr=0.1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for (x,) in DataLoader(TensorDataset(torch.randn(40, 256)), batch_size=4):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        nbtrain.log(accuracy=0.5)
        time.sleep(0.15)  # as long as a training whose memory is measured
"""


def test_times_add_up_if_the_ranks_begin_at_different_times() -> None:
    late = ev.TrainingUpdate(114, 1, 40, 9.0, 1.0, 80, 0.5, batch=40)  # since 105, not 103
    s = summary(on_gpus(late, ev.Finished(114, -1, "succeeded")), 999.0)
    assert (s.seconds_to_first_step, s.seconds_training, s.seconds) == (3, 10, 14)


def test_the_error_is_the_first_ranks_in_full_if_an_earlier_rank_raised_the_same() -> None:
    broken = [ev.Ended(at, rank, "ValueError: bad batch") for at, rank in ((114, 1), (115, 0))]
    s = summary(on_gpus(*broken), 999.0)
    assert s.error == "rank 1: ValueError: bad batch"


def test_a_real_run_in_a_notebook_and_reopened_elsewhere(
    notebook: Notebook, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook.run(ADAMW)
    assert notebook.run(CELL).ename == ""
    n = notebook.value("n")
    out = notebook.run("run = nbtrain.last_run()\nrun.summary()")
    (shown,) = out.results
    assert "optimizer states" in shown["text/plain"]
    assert "  steps     10 · " in shown["text/plain"]
    folder = Path(notebook.value("str(run.folder)"))
    s = nbtrain.Run.open(folder).summary()
    assert repr(s) == shown["text/plain"]
    parts = {part.name: part.bytes for part in s.memory_parts}
    assert parts["weights"] == parts["gradients"] == 4 * n
    assert parts["optimizer states"] == 8 * n + 4 * 4
    assert (s.status, s.steps, s.samples) == ("finished, but each rank trained alone", 10, 40)
    assert s.metrics["accuracy"] == 0.5
    assert 0 < s.seconds_training < s.seconds_to_first_step + s.seconds_training <= s.seconds
    assert s.cards == ()
    monkeypatch.setenv("NBTRAIN_HOME", str(folder.parents[1]))
    assert cli.main(["show", folder.name]) == 0
    assert capsys.readouterr().out.endswith(f"{s!r}\n")


def test_what_gpus_held_before_and_after_is_kept_with_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, ev.GpuMemory | None]] = []
    driver_words = [((0, "H200", GIB),), ((0, "H200", GIB + 1),)]

    def look(device: str, before: ev.GpuMemory | None) -> list[ev.GpuMemory]:
        asked.append((device, before))
        return [ev.GpuMemory(time.time(), -1, driver_words[len(asked) - 1])]

    monkeypatch.setattr(resource_sampler, "measure_gpus", look)
    run = nbtrain.launch(lambda: None, num_processes=1, view="none")
    assert [(device, before and before.gpus) for device, before in asked] == [
        ("cpu", None),
        ("cpu", ((0, "H200", GIB),)),
    ]
    for s in (run.summary(), nbtrain.Run.open(run.folder).summary()):
        (card,) = s.cards
        assert (card.bytes_before, card.bytes_after, card.is_given_back) == (GIB, GIB + 1, True)
    launcher = [event.kind for event in read_events(run.folder / "launcher.jsonl")]
    assert launcher.index("cards") < launcher.index("spawned")
    assert launcher[-2:] == ["cards", "finished"]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """MiB in use of a GPU, as they are told look after look; the last for good."""
    used: list[int] = []
    may_answer.set()

    def describe(_nvml: object) -> tuple[Gpu, ...]:
        may_answer.wait(60)
        return (Gpu(0, "GPU-a", "H200", used=used.pop(0) if len(used) > 1 else used[0]),)

    monkeypatch.setitem(__import__("sys").modules, "pynvml", Nvml())
    monkeypatch.setattr(gpus, "describe", describe)
    monkeypatch.setattr(resource_sampler, "_watches", {})
    return used


may_answer = threading.Event()


class Nvml:
    NVMLError = OSError

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlShutdown(self) -> None: ...  # noqa: N802


def test_gpus_are_looked_at_until_they_hold_no_more_than_before(
    driver: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RELEASE_TIMEOUT_S", 60.0)
    driver[:] = [600]
    (before,) = resource_sampler.measure_gpus("cuda", None)
    assert before.gpus == ((0, "H200", 600 << 20),)
    driver[:] = [9000, 5000, 610]
    (after,) = resource_sampler.measure_gpus("cuda", before)
    assert after.gpus == ((0, "H200", 610 << 20),)
    monkeypatch.setattr(limits, "RELEASE_TIMEOUT_S", 0.0)
    driver[:] = [9000]
    (kept,) = resource_sampler.measure_gpus("cuda", before)
    assert not resource_sampler.is_gpu_memory_released(before, kept)
    assert list(resource_sampler.measure_gpus("cpu", None)) == []


@pytest.mark.parametrize(
    ("result", "rows"),
    [
        ("torch.full((3,), float(rank % 2))", ["ranks 0, 2", "rank 1"]),
        ("{'loss': 0.5 + rank * 1e-9}", ["rank 0", "rank 1", "rank 2"]),
        ("'x' * 300 + str(min(rank, 1))", ["rank 0", "ranks 1–2"]),
    ],
)
def test_only_equal_results_share_a_row(result: str, rows: list[str]) -> None:
    def task() -> Any:
        return eval(result, {"rank": int(os.environ["RANK"]), "torch": torch})

    run = launch(task, n=3)
    assert [row.ranks for row in run_texts.results(run.state)] == rows
    assert [row.ranks for row in run_texts.results(nbtrain.Run.open(run.folder).state)] == rows
