"""What another user could have put among the runs is neither read nor deleted."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import nbtrain
from nbtrain.errors import LaunchError, NbtrainError
from nbtrain.lifecycle import catalog
from nbtrain.lifecycle.run import Run
from nbtrain.tracking import limits, pruning, run_folder
from tests.support.cells import the_last_run

is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
STRANGER = 12345


def made(name: str = "run") -> run_folder.RunFolder:
    run = run_folder.create(name, {"name": name, "created": 1.0, "num_processes": 1})
    run.launcher_events.write_bytes(
        b'{"kind":"finished","time":2,"rank":-1,"status":"succeeded"}\n'
    )
    return run


class Planted:
    """What runs when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (os.environ["NBTRAIN_HOME"] + "/executed",)


def _of_another_user(run: run_folder.RunFolder) -> None:
    os.chown(run.path, STRANGER, -1)


def _writable(run: run_folder.RunFolder) -> None:
    run.path.chmod(0o777)


@pytest.mark.parametrize("how", [pytest.param(_of_another_user, marks=is_root), _writable])
def test_a_planted_run_is_neither_listed_nor_opened_nor_unpickled_nor_deleted(
    how: Callable[[run_folder.RunFolder], None], run_root: Path
) -> None:
    planted, own = made("planted"), made("own")
    planted.result(0).write_bytes(pickle.dumps(Planted()))
    planted.weights.mkdir()
    how(planted)
    assert [run.path for run in run_folder.runs()] == [own.path]
    with pytest.raises(NbtrainError, match=r"other user.*so nbtrain does not open it"):
        Run.open(planted.path)
    with pytest.raises(NbtrainError, match="no kept run begins"):
        catalog.find_run(planted.path.name)
    assert planted.path.name in catalog.page(catalog.run_infos())
    if how is _of_another_user:
        pruning.prune(keep=1)
        assert planted.weights.exists()
    assert not (run_root / "executed").exists()


def test_a_link_among_the_runs_deletes_nothing_where_it_leads(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (victim / "weights").mkdir(parents=True)
    (victim / "run.json").write_text('{"created": 1, "num_processes": 1}')
    for _ in range(limits.MAX_RUNS_WITH_WEIGHTS + 1):
        made()
    link = run_folder.root() / "20200101-000000-link"
    link.symlink_to(victim)
    (run_folder.root() / f"{run_folder.DELETED}x").symlink_to(victim)
    pruning.prune(keep=1)
    assert (victim / "weights").exists()
    assert run_folder.foreign()[link.name] == "is a link"


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_what_a_run_writes_is_private_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("NBTRAIN_HOME", str(tmp_path / "new"))

    def train(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        nbtrain.log(loss=1.0)

    run = nbtrain.launch(train, torch.nn.Linear(2, 2), num_processes=2, view="none")
    places = [tmp_path / "new", tmp_path / "new" / "runs", run.folder, *run.folder.rglob("*")]
    open_to_others = {
        str(place): oct(mode)
        for place in places
        if (mode := place.lstat().st_mode) & 0o077 and not stat.S_ISSOCK(mode)
    }
    assert open_to_others == {}


def test_what_is_open_to_others_is_deleted_in_its_turn() -> None:
    first, second = made(), made()
    first.path.chmod(0o777)
    pruning.prune(keep=1)
    assert list(run_folder.root().iterdir()) == [second.path]


@is_root
def test_root_tells_its_runs_from_those_of_the_folders_owner() -> None:
    """In a container, whose home is a folder of the host."""
    root = run_folder.root()
    root.mkdir(parents=True)
    os.chown(root, STRANGER, -1)
    planted = made("planted")
    os.chown(planted.path, STRANGER, -1)
    own = nbtrain.launch(lambda: 1, num_processes=1, view="none").folder
    assert [run.path for run in run_folder.runs()] == [own]


@is_root
def test_a_runs_folder_of_another_user_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = run_folder.root()
    root.mkdir(parents=True)
    os.chown(root, STRANGER, -1)
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER + 1)
    with pytest.raises(LaunchError, match=r"another user.*Set NBTRAIN_HOME"):
        nbtrain.launch(lambda: 1, num_processes=1, view="none")
    assert list(root.iterdir()) == []


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


READERS: dict[str, Callable[[Path], object]] = {
    "open": lambda folder: repr(Run.open(folder)),
    "logs": lambda folder: Run.open(folder).logs(),
    "value": lambda folder: Run.open(folder).value,
    "out": lambda folder: Run.open(folder).out,
    "failure": lambda folder: Run.open(folder).failure,
    "history": lambda folder: Run.open(folder).history,
    "stacks": lambda folder: Run.open(folder).stacks(),
    "load": lambda folder: Run.open(folder).load(torch.nn.Linear(2, 1)),
    "runs": lambda _: catalog.page(catalog.run_infos()),
    "prune": lambda _: pruning.prune(keep=1),
}


@pytest.mark.timeout(60)  # each of these waited for ever for somebody who writes to the pipe
@pytest.mark.parametrize(("plant", "ends"), [(_pipe, "well"), (_device, "badly")])
def test_a_pipe_or_a_device_in_place_of_any_file_of_a_run_holds_nobody(
    ends: str, plant: Callable[[Path], None], tmp_path: Path
) -> None:
    """As in a copy of a colleague's run, made by ``cp -a``."""
    model = torch.nn.Linear(2, 1)

    def train() -> str:
        nbtrain.log(loss=1.0)
        print("printed", model.weight.data.add_(1.0))
        if ends == "badly":
            raise ValueError("bad luck")
        return "returned"

    with contextlib.suppress(ValueError):
        nbtrain.launch(train, num_processes=1, view="none")
    run = the_last_run()
    names = [path.name for path in run.folder.iterdir() if path.is_file()]
    assert {"launcher.jsonl", "rank-0000.jsonl", "rank-0000.log"} < {*names}
    whole = shutil.copytree(run.folder, tmp_path / "whole")
    for name in [*names, "rank-0000.stacks", "rank-0000.out", "stop-wish"]:
        planted = run.folder.with_name(f"20260101-000000-{name.replace('.', '-')}")
        shutil.copytree(whole, planted)
        (planted / name).unlink(missing_ok=True)
        plant(planted / name)
        for read in READERS.values():
            with contextlib.suppress(OSError, NbtrainError):  # which name the file
                read(planted)
        shutil.rmtree(planted, ignore_errors=True)
    assert nbtrain.launch(lambda: 1, num_processes=1, view="none").value == 1


@pytest.mark.usefixtures("open_umask")
def test_a_runs_folder_that_was_open_to_others_is_closed_and_its_parent_is_left(
    run_root: Path,
) -> None:
    root = run_folder.root()
    root.mkdir(parents=True)
    root.chmod(0o2777)
    run_root.chmod(0o2775)
    made()
    assert stat.S_IMODE(root.stat().st_mode) == 0o2700
    assert stat.S_IMODE(run_root.stat().st_mode) == 0o2775
