"""Recorded steps: the same on all ranks, from any kind of training, and never at its expense."""

from __future__ import annotations

import gzip
import json
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nbtrain
from nbtrain.errors import NbtrainError, PlanError
from nbtrain.parts.profile.ranks.recorder import Recorder
from nbtrain.parts.profile.reading.comparison import PARTS, WAITS
from nbtrain.system import instrumentation
from nbtrain.worker import hooks
from tests.support.looked_models import alone, batches, net
from tests.support.runs import launch
from tests.support.steered_trainings import TRAININGS, Steps

pytestmark = [
    pytest.mark.part("profile"),
    pytest.mark.part("steering"),
    pytest.mark.filterwarnings("ignore"),
]


def fit(model: nn.Module, steps: int | None = None) -> int:
    """Train with DDP for some steps, or until the run is asked to finish; return the steps."""
    torch.distributed.init_process_group()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    made = 0
    for x in batches():
        wrapped(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        made += 1
        if made == steps:
            break
    return made


def finish(run: nbtrain.Run) -> None:
    run.finish()
    run.wait()
    assert run.state.status == "succeeded", run.state.message


def check_steps(profile: Any, ranks: int, steps: int) -> list[int]:
    """Check that all ranks have recorded the same steps; return their numbers."""
    compared = profile.comparison
    assert [rank.rank for rank in compared.ranks] == list(range(ranks))
    numbers = [step.number for step in compared.ranks[0].steps]
    assert len(numbers) == steps
    for rank in compared.ranks:
        assert [step.number for step in rank.steps] == numbers
        for step in rank.steps:
            assert sum(step.parts_ns.values()) == pytest.approx(step.end - step.begin, rel=0.02)
    # All ranks leave a step's collective together, so a step of one overlaps that of another.
    for steps_of_ranks in zip(*(rank.steps for rank in compared.ranks), strict=True):
        assert max(s.begin for s in steps_of_ranks) < min(s.end for s in steps_of_ranks)
    return numbers


@pytest.mark.parametrize("engine", ["fork", "spawn"])
def test_a_launch_records_the_steps_that_it_names(engine: str) -> None:
    run = launch(fit, net(), 12, n=2, profile="4:2", engine=engine)
    (profile,) = run.profiles
    assert check_steps(profile, 2, 2) == [5, 6]
    assert run.results == [12, 12]
    rows = profile.table()
    assert list(rows.columns) == ["step", *PARTS, "hidden"]
    assert (rows[list(PARTS)].sum(axis=1) / rows["step"]).tolist() == pytest.approx([1, 1])
    assert (rows["backward"] > 0).all()
    assert (rows["optimizer"] > 0).all()
    assert {"all_reduce"} <= {each.name for each in profile.comparison.traffic}
    assert [path.name for path in profile.folder.iterdir() if path.name.startswith(".")] == []
    with gzip.open(profile.folder / "rank-0001.trace.json.gz") as file:
        assert json.load(file)["distributedInfo"]["rank"] == 1


def test_what_operations_allocate_is_recorded_on_request() -> None:
    run = launch(fit, net(), n=2, background=True)
    plain, with_memory = run.profile(steps=1), run.profile(steps=1, memory=True)
    finish(run)
    for rank in plain.comparison.ranks:
        assert not any(each.allocated_bytes for each in rank.operations)
    for rank in with_memory.comparison.ranks:
        (square,) = (each for each in rank.operations if each.name == "aten::pow")
        assert square.allocated_bytes >= 4 * square.calls


def test_the_default_is_three_steps_after_two() -> None:
    run = launch(fit, net(), 8, n=2, profile=True)
    assert check_steps(run.profiles[0], 2, 3) == [3, 4, 5]


def test_a_launch_can_record_from_the_second_step_on() -> None:
    run = launch(fit, net(), 3, n=1, profile=(1, 2))
    assert check_steps(run.profiles[0], 1, 2) == [2, 3]


def test_a_run_that_trains_is_recorded_again_and_again() -> None:
    run = launch(fit, net(), n=2, background=True)
    first = run.profile()
    second = run.profile(steps=1, shapes=True)
    finish(run)
    assert check_steps(first, 2, 3)[-1] < check_steps(second, 2, 1)[0]
    assert {each.size_bytes for each in first.comparison.traffic} == {None}
    weights = sum(p.numel() for p in net().parameters())
    sizes = {each.name: each.size_bytes for each in second.comparison.traffic}
    assert sizes["all_reduce"] == 4 * weights
    assert [p.title for p in run.profiles] == [first.title, second.title]
    labels = [each.label for each in run.state.steered if each.action == "profile"]
    assert labels == ["profile of 3 steps", "profile of 1 step"]


@pytest.mark.slow
def test_steps_are_the_same_at_any_moment() -> None:
    run = launch(fit, net(), n=2, background=True)
    chance = random.Random(0)
    for _ in range(50):
        time.sleep(chance.random() / 20)
        steps = chance.randint(1, 4)
        check_steps(run.profile(steps), 2, steps)
    finish(run)


def fit_by_hand(model: nn.Module, steps: int) -> list[float]:
    """Return how long the collectives of each step took, by the clock."""
    torch.distributed.init_process_group()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    gradients, times = torch.zeros(16_000_000), []
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        began = time.perf_counter()
        torch.distributed.all_reduce(gradients)
        times.append(time.perf_counter() - began)
        optimizer.step()
    return times


@pytest.mark.slow
@pytest.mark.timing
def test_the_time_of_collectives_is_that_of_the_clock() -> None:
    run = launch(fit_by_hand, net(), 8, n=2, profile="2:5")
    (profile,) = run.profiles
    for rank, times in zip(profile.comparison.ranks, run.results, strict=True):
        recorded = sum(each.end - each.begin for each in rank.collectives) / 1e9
        exposed = sum(step.parts_ns["communication"] for step in rank.steps) / 1e9
        assert recorded == pytest.approx(sum(times[2:7]), rel=0.05)
        assert exposed == pytest.approx(sum(times[2:7]), rel=0.05)


def test_without_a_request_nothing_is_notified_of_steps() -> None:
    assert "profile" not in launch(listeners, n=1).value


def listeners() -> list[str]:
    """Return the purposes of what is notified of a step."""
    return [purpose for purpose, _ in hooks.notify.on_step.listeners]


def test_a_training_that_ends_too_early_has_no_profile() -> None:
    run = launch(fit, net(), 4, n=2, profile="3:5")
    assert run.profiles == []
    assert run.state.status == "succeeded"
    assert {f.code for f in run.state.findings} >= {"no-profile"}


def test_a_request_that_the_training_ends_before_is_an_error() -> None:
    run = launch(fit_slowly, net(), 8, n=2, background=True)
    with pytest.raises(NbtrainError):
        run.profile(steps=10)
    run.wait()
    assert run.state.status == "succeeded"


def fit_slowly(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.2)


def fail_at(model: nn.Module, step: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for at in range(20):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if at == step and nbtrain.rank() == 1:
            raise ValueError("of the test")


def test_a_failure_while_steps_are_recorded_is_reported_as_without() -> None:
    with pytest.raises(ValueError, match="of the test"):
        launch(fail_at, net(), 4, n=2, profile="2:10")


def step_of(model: nn.Module) -> Any:
    """Return a function that makes a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    return step


def profiles_itself(model: nn.Module, begin: int, steps: int, options: dict[str, int]) -> int:
    """Record steps with a profiler of the training's own; return how many events it has."""
    step = step_of(model)
    for _ in range(begin):
        step()
    schedule = torch.profiler.schedule(**options) if options else None
    with torch.profiler.profile(schedule=schedule) as own:
        for _ in range(steps):
            step()
            own.step()
    count = len(own.events())
    for _ in range(5):
        step()
    return count


LATER = {"wait": 1, "warmup": 1, "active": 3, "repeat": 1}
WARMS = {"wait": 0, "warmup": 4, "active": 3, "repeat": 1}


@pytest.mark.parametrize(
    ("begin", "options"), [(0, {}), (0, LATER), (0, WARMS), (1, {}), (2, LATER), (3, {})]
)
def test_the_profiler_of_the_training_is_left_alone(begin: int, options: dict[str, int]) -> None:
    run = launch(profiles_itself, net(), begin, 9, options, n=1, profile="2:4")
    assert run.value > 10
    assert run.profiles == []
    assert "no-profile" in {f.code for f in run.state.findings}


def fails_while_it_profiles_itself(model: nn.Module) -> None:
    step, own = step_of(model), torch.profiler.profile()
    step()
    own.start()
    step()
    raise ValueError("of the test")


def test_a_failure_beside_the_trainings_own_profiler_is_reported() -> None:
    with pytest.raises(ValueError, match="of the test"):
        launch(fails_while_it_profiles_itself, net(), n=1, profile=True)


def steps_in_two_threads(model: nn.Module) -> int:
    step = step_of(model)
    for _ in range(2):
        thread = threading.Thread(target=lambda: [step() for _ in range(4)])
        thread.start()
        thread.join()
    return 8


def test_steps_from_several_threads_are_not_recorded() -> None:
    run = launch(steps_in_two_threads, net(), n=1, profile="2:4")
    assert run.value == 8
    assert run.profiles == []
    assert "no-profile" in {f.code for f in run.state.findings}


def test_a_recording_that_is_due_later_is_made_also_after_another() -> None:
    run = launch(fit, net(), 60, n=2, background=True, profile="50:2")
    first = run.profile(steps=1)
    run.wait()
    assert [p.folder for p in run.profiles] == [first.folder, run.folder / "profiles/step-00000051"]
    assert not run.state.findings


@pytest.mark.parametrize("name", ["_start", "_end"])
def test_what_fails_in_a_recording_ends_it_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("of the test")

    monkeypatch.setattr(Recorder, name, fail)
    run = launch(fit, net(), n=2, background=True)
    with pytest.raises(NbtrainError, match="of the test"):
        run.profile()
    assert not run.state.is_over
    run.turn(lr=1e-4)  # other requests are carried out as before
    finish(run)


def fit_with_small_files(model: nn.Module, steps: int) -> int:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    return fit(model, steps)


def test_a_disk_that_is_full_costs_only_the_profile() -> None:
    run = launch(fit_with_small_files, net(), 12, n=2, profile=True)
    assert run.results == [12, 12]
    assert run.profiles == []
    assert [f.code for f in run.state.findings].count("no-profile") == 1
    left = {path.name.rpartition(".")[2] for path in run.folder.glob("profiles/*/.*")}
    assert left == set()


def fit_beside_collectives(model: nn.Module, steps: int) -> None:
    """Sum something up beside Python, which takes longer; nobody waits."""
    torch.distributed.init_process_group()
    step, numbers = step_of(model), torch.zeros(10)
    for _ in range(steps):
        if nbtrain.rank() == 1:
            time.sleep(0.02)
        work = torch.distributed.all_reduce(numbers, async_op=True)
        time.sleep(0.1 if nbtrain.rank() == 0 else 0.08)
        work.wait()
        step()


def test_a_collective_beside_python_is_not_waited_for() -> None:
    run = launch(fit_beside_collectives, net(), 6, n=2, profile=True)
    (profile,) = run.profiles
    assert profile.advice.code == "waits-for-python"
    for rank in profile.comparison.ranks:
        shares = profile.comparison.shares(rank)
        assert shares["python"] > shares["communication"]


def fit_by_functional_collectives(model: nn.Module, steps: int) -> None:
    """Sum gradients up as DTensor does, with a rank that comes late."""
    from torch.distributed import _functional_collectives as functional

    torch.distributed.init_process_group()
    step, numbers = step_of(model), torch.zeros(10)
    for _ in range(steps):
        if nbtrain.rank() == 1:
            time.sleep(0.1)
        total = functional.all_reduce(numbers, "sum", torch.distributed.group.WORLD)
        assert (total + 1 > 0).all()
        step()


def test_functional_collectives_are_waited_for() -> None:
    (profile,) = launch(fit_by_functional_collectives, net(), 6, n=2, profile=True).profiles
    assert profile.comparison.late_rank == 1
    assert profile.advice.rank == 1
    shares = profile.comparison.shares(profile.comparison.ranks[0])
    assert shares["communication"] + shares[WAITS] > 0.5


def fit_and_list_patches(model: nn.Module) -> list[str]:
    fit(model)
    return [each.name for each in instrumentation.patches() if "profile" in each.by]


def test_patches_are_made_once() -> None:
    run = launch(fit_and_list_patches, net(), n=1, background=True)
    for _ in range(3):
        run.profile(steps=1)
    finish(run)
    assert run.value.count("backward") == 1
    assert run.value.count("wait") == 1


def test_modules_of_the_users_folder_are_not_imported_to_read_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "dataclasses", "gzip"):
        (tmp_path / f"{name}.py").write_text("raise ValueError('of the user')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path, tmp_path])
    run = launch(fit, net(), 8, n=1, profile=True)
    assert check_steps(run.profiles[0], 1, 3) == [3, 4, 5]


def test_ranks_in_the_kernel_are_not_recorded() -> None:
    with pytest.raises(PlanError):
        launch(alone, net(), profile=True, engine="inline")


def test_what_a_training_computes_is_the_same(tmp_path: Path) -> None:
    plain, recorded = net(), net()
    launch(fit, plain, 8, n=2)
    launch(fit, recorded, 8, n=2, profile=True)
    pairs = zip(plain.parameters(), recorded.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_nothing_is_printed() -> None:
    run = launch(fit, net(), 8, n=2, profile=True)
    assert run.logs() == ""


@pytest.mark.parametrize("kind", ["transformers", "trl", "lightning", "fastai"])
def test_trainers_are_recorded_unchanged(kind: str, tmp_path: Path) -> None:
    pytest.importorskip(kind)
    make, fit_by, _ = TRAININGS[kind]
    run = launch(fit_by, make(), Steps(None), str(tmp_path), n=2, profile="4:3")
    assert check_steps(run.profiles[0], 2, 3) == [5, 6, 7]


@pytest.mark.parametrize("profile", ["-3", "0:3", "2:11", "2:0", (1, 2, 3), 0, 11, 1.5, "a:b"])
def test_steps_that_cannot_be_are_refused(profile: Any) -> None:
    with pytest.raises(PlanError):
        launch(alone, net(), profile=profile)


def test_without_steps_in_the_telemetry_nothing_can_be_recorded() -> None:
    with pytest.raises(PlanError):
        launch(alone, net(), profile=True, telemetry="loss")
