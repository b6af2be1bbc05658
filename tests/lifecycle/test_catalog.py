"""The runs that are kept: listed, and found by name."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nbtrain
from nbtrain.errors import PlanError
from nbtrain.lifecycle import catalog
from tests.support.cells import the_last_run
from tests.support.kernel import Notebook
from tests.support.runs import launch


@pytest.fixture
def runs() -> list[nbtrain.Run]:
    """One that succeeded and one that failed."""
    good = nbtrain.launch(lambda: 1, num_processes=1, view="none")
    with pytest.raises(ZeroDivisionError):
        nbtrain.launch(lambda: 1 / 0, num_processes=2, view="none")
    bad = the_last_run()
    return [good, bad]


def test_the_list_tells_of_each_run_in_a_line(runs: list[nbtrain.Run]) -> None:
    briefs = catalog.run_infos()
    assert [b.name for b in briefs] == [r.folder.name for r in runs]
    assert [(b.status, b.ranks) for b in briefs] == [("succeeded", 1), ("failed", 2)]
    assert [b.error for b in briefs] == ["", "ZeroDivisionError: division by zero"]
    assert all(b.seconds is not None for b in briefs)
    lines = catalog.page(briefs).splitlines()
    assert lines[0].split() == ["run", "began", "ranks", "took", "last", "result"]
    assert lines[1].startswith("✓  #")
    assert "1 rank " in lines[1]
    assert lines[2].startswith("✕  #")
    assert "2 ranks" in lines[2]
    assert "failed: ZeroDivisionError: division by zero" in lines[2]


def test_a_run_without_a_number_is_listed_by_its_name(runs: list[nbtrain.Run]) -> None:
    info = replace(catalog.run_infos()[0], number=None)
    assert catalog.page([info]).splitlines()[1].split()[1] == info.name


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave() -> None:
    os._exit(3)


class Slow(Exception):
    """Takes long to be sent to the notebook."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        time.sleep(2)
        return Slow, ("its own",)


def raise_slowly() -> None:
    raise Slow("its own")


def raise_much() -> None:
    raise ValueError("wrong " * 900)


@pytest.mark.parametrize(
    ("fail", "cause"),
    [
        (kill_itself, "rank 1 was killed by SIGKILL"),
        (crash, "rank 1 was killed by SIGSEGV"),
        (leave, "exited with code 3"),
        (raise_slowly, "Slow: its own"),
        (raise_much, "ValueError: wrong wrong"),
    ],
)
def test_a_run_failed_for_what_one_rank_did_and_not_for_what_the_others_raised(
    fail: Callable[[], None], cause: str
) -> None:
    def train() -> None:
        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
        if nbtrain.rank() == 1:
            fail()
        torch.distributed.barrier()

    with pytest.raises((nbtrain.RankDied, Slow, ValueError)):
        nbtrain.launch(train, num_processes=2, view="none")
    error = catalog.run_infos()[-1].error
    assert error.startswith(cause)
    assert len(error) <= 80


def test_a_damaged_run_is_a_row_that_says_so(run_root: Path) -> None:
    assert "No run is kept" in catalog.page(catalog.run_infos())
    for name, text in [("a", "{"), ("b", "[]"), ("c", '{"created": "x", "num_processes": 1}')]:
        folder = run_root / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(text)
    infos = catalog.run_infos()
    assert [(info.name, info.status) for info in infos] == [(n, "unreadable") for n in "abc"]
    assert len([line for line in catalog.page(infos).splitlines() if "run.json" in line]) == 3
    assert list(nbtrain.runs()["status"]) == ["unreadable"] * 3


def test_a_run_whose_kernel_is_gone_is_lost_and_one_that_is_watched_runs(
    runs: list[nbtrain.Run],
) -> None:
    folder = runs[0].folder
    manifest = json.loads((folder / "run.json").read_text())
    (folder / "launcher.jsonl").write_text("")
    for pid, status in [(os.getpid(), "running"), (2**22 + 1, "lost")]:
        (folder / "run.json").write_text(json.dumps({**manifest, "launcher": pid}))
        (brief,) = [b for b in catalog.run_infos() if b.name == folder.name]
        assert (brief.status, brief.seconds) == (status, None)
        assert catalog.page([brief]).splitlines()[1].endswith(status)


def test_a_run_is_found_by_name_by_its_beginning_and_by_default_the_last(
    runs: list[nbtrain.Run],
) -> None:
    good, bad = runs
    assert catalog.find_run() is bad
    assert catalog.find_run(bad.folder.name) is bad
    assert catalog.find_run(good.folder.name).value == 1
    different = next(
        i for i, (a, b) in enumerate(zip(good.folder.name, bad.folder.name, strict=True)) if a != b
    )
    assert catalog.find_run(good.folder.name[: different + 1]).folder == good.folder
    with pytest.raises(PlanError, match=r"2 kept runs begin.*%nbtrain runs"):
        catalog.find_run(good.folder.name[:2])
    with pytest.raises(PlanError, match="no kept run begins with 'zzz'"):
        catalog.find_run("zzz")


def test_in_a_cell_runs_are_listed_and_drawn_also_from_another_kernel(
    notebook: Notebook, run_root: Path
) -> None:
    notebook.run("%%distributed -n 1\n'first'")
    name = notebook.value("nbtrain.last_run().folder.name")
    notebook.run("%%distributed -n 1\n'second'")
    listed = notebook.run("%nbtrain runs").displays[0]
    assert name in listed["text/html"]
    assert listed["text/plain"].count("✓  #") == 2
    assert "'second'" in notebook.run("%nbtrain show").displays[0]["text/plain"]
    shown = notebook.run(f"%nbtrain show {name}").displays[0]
    assert "'first'" in shown["text/plain"]
    assert "succeeded" in shown["text/html"]
    assert "has ended: succeeded" in notebook.run("%nbtrain stop").stdout
    out = notebook.run("%nbtrain show nothing-like-it")
    assert out.ename == "PlanError"
    assert len(out.traceback.splitlines()) == 1


def test_the_entries_of_a_configuration_are_parameters() -> None:
    def train(config: dict[str, Any], steps: int = 3) -> None:
        pass

    first = launch(train, {"lr": 0.1, "net": {"depth": 2}, "api_key": "sk-4f9dQ81kzpW30aLm"})
    table = first.compare(launch(train, {"lr": 0.2}))
    assert list(table.loc["config.lr"]) == [0.1, 0.2]
    assert list(table.loc["steps"]) == [3, 3]
    assert not any("api_key" in row or row.startswith("config.net") for row in table.index)
    assert "config.lr" in nbtrain.runs().columns


def test_a_run_has_a_number_by_which_it_is_found_everywhere(runs: list[nbtrain.Run]) -> None:
    good, bad = runs
    first, second = (info.number for info in catalog.run_infos())
    assert first is not None
    assert second == first + 1
    for name in (str(first), f"#{first}", f"train #{first}"):
        assert catalog.find_run(name).folder == good.folder
        assert nbtrain.Run.open(name).folder == good.folder
    assert list(bad.compare(f"#{first}").columns) == [bad.folder.name, good.folder.name]
    assert f"#{second}" in catalog.page(catalog.run_infos())
    with pytest.raises(PlanError, match="no kept run"):
        nbtrain.Run.open("#999")


def test_a_run_is_found_by_the_name_that_the_user_gave_it(notebook: Notebook) -> None:
    for name in ("one", "two words", "twice", "twice"):
        notebook.run(f"%%distributed -n 1 --name {name!r} --as run\n{name!r}")
    for name in ("one", "two words"):
        assert repr(name) in notebook.run(f"%nbtrain show {name}").displays[-1]["text/plain"]
    out = notebook.run("%nbtrain show twice")
    assert out.ename == "PlanError"
    number = notebook.value("run.state.number")
    assert f"#{number}" in out.evalue
    assert "'twice'" in notebook.run(f"%nbtrain show #{number}").displays[-1]["text/plain"]
