"""Runs that real trackers get, read back from their own files."""

from __future__ import annotations

import inspect
import json
import re
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nbtrain
from nbtrain.errors import MissingExtra, PlanError
from nbtrain.parts.forwarding import trackers
from nbtrain.parts.forwarding.trackers import StepMeans
from nbtrain.planning.option_types import TRACKERS
from nbtrain.tracking import events as ev
from nbtrain.tracking.run_folder import RunFolder
from tests.support.runs import launch
from tests.support.waiting import wait_until


def train(lr: float = 0.1, fails: bool = False) -> None:
    torch.manual_seed(nbtrain.rank())
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for step in range(20):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        nbtrain.log(step=step, accuracy=float(nbtrain.rank() + step))
    torch.distributed.barrier()
    if fails:
        raise ValueError("oops")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers that write beside the notebook write here, and none asks the network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def tracked(name: str, **options: Any) -> nbtrain.Run:
    run = launch(train, n=2, lr=0.05, track=name, **options)
    assert run.state.notes == ()
    return run


MEANS = [step + 0.5 for step in range(20)]


def test_tensorboard_gets_one_run_of_means_and_of_each_rank_on_request() -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tracked("tensorboard@all")
    (folder,) = Path("runs").iterdir()
    assert folder.name == run.folder.name
    read = EventAccumulator(str(folder))
    read.Reload()
    points = {tag: [(p.step, p.value) for p in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert points["accuracy"] == list(enumerate(MEANS))
    assert [value for _, value in points["accuracy/rank 1"]] == [m + 0.5 for m in MEANS]
    assert len(points["loss"]) >= 3
    assert "nbtrain/outcome/text_summary" in read.Tags()["tensors"]
    config = next(folder.glob("*/hparams.yml")).read_text()
    assert "lr: 0.05" in config
    assert f"nbtrain/folder: {run.folder}" in config


def test_mlflow_gets_one_run_with_params_metrics_and_how_it_ended() -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    import mlflow

    run = tracked("mlflow")
    with pytest.raises(ValueError, match="oops"):
        launch(train, n=2, fails=True, track="mlflow")
    client = mlflow.MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'nbtrain'")
    failed, good = client.search_runs([experiment.experiment_id])
    assert (failed.info.status, good.info.status) == ("FAILED", "FINISHED")
    assert good.info.run_name == run.folder.name
    assert (good.data.params["lr"], good.data.params["nbtrain/ranks"]) == ("0.05", "2")
    history = client.get_metric_history(good.info.run_id, "accuracy")
    assert [(m.step, m.value) for m in sorted(history, key=lambda m: m.step)] == list(
        enumerate(MEANS)
    )
    assert good.data.tags["nbtrain/outcome"] == "succeeded"
    assert "oops" in failed.data.tags["nbtrain/reason"]


def pieces(content: bytes) -> Iterator[bytes]:
    """Return what a file of W&B has: LevelDB's log, after a header of 7 bytes."""
    place, piece = 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        piece += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or a last part
            yield piece
            piece = b""


def test_wandb_gets_one_run_offline() -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto import wandb_internal_pb2

    run = tracked("wandb")
    (file,) = Path("wandb").glob("offline-run-*/*.wandb")
    records: list[Any] = []

    def is_whole() -> bool:  # on a busy machine, the rest is sent behind the run's end
        records[:] = map(wandb_internal_pb2.Record.FromString, pieces(file.read_bytes()))
        return any(record.HasField("exit") for record in records)

    wait_until(is_whole)
    (begun,) = [record.run for record in records if record.HasField("run")]
    assert (begun.project, begun.display_name) == ("nbtrain", run.folder.name)
    rows = [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in r.history.item
        }
        for r in records
        if r.HasField("history")
    ]
    assert [row["accuracy"] for row in rows if "accuracy" in row] == MEANS
    assert [r.exit.exit_code for r in records if r.HasField("exit")] == [0]
    assert b"nbtrain/folder" in file.read_bytes()


def test_trackio_gets_one_run_in_its_local_files() -> None:
    pytest.importorskip("gradio_client", reason="trackio is not installed")
    pytest.importorskip("trackio", reason="trackio is not installed")
    run = tracked("trackio")
    (file,) = Path("trackio").rglob("nbtrain*.db")
    with sqlite3.connect(file) as data:
        rows = data.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert {name for name, _, _ in rows} == {run.folder.name}
    got = [(step, json.loads(text).get("accuracy")) for _, step, text in rows]
    assert [pair for pair in got if pair[1] is not None] == list(enumerate(MEANS))


def test_a_tracker_that_fails_leaves_the_run_alone_and_one_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").write_text("a file where the tracker wants a folder")
    run = launch(train, n=2, track="tensorboard")
    assert run.state.status == "succeeded"
    (note,) = run.state.notes
    assert note.startswith("tensorboard: the tracker failed (")
    assert note.endswith("The training continues; nothing more of this run is sent there.")


def test_a_note_of_a_tracker_shows_no_secret(tmp_path: Path) -> None:
    failed = ConnectionError("GET http://me:hunter2@host:5000/api?token=hunter2x&n=1: refused")
    note = trackers.RunTracker("mlflow", RunFolder(tmp_path)).explain(failed)
    assert "host:5000/api" in note
    assert "hunter2" not in note


def test_the_kernel_s_process_imports_no_tracker() -> None:
    before = set(sys.modules)
    tracked("tensorboard")
    assert not {m for m in set(sys.modules) - before if m.startswith("torch.utils.tensorboard")}


def test_a_tracker_that_is_none_or_not_installed_is_refused_before_the_start() -> None:
    with pytest.raises(PlanError, match="must be trackers"):
        launch(train, track="tensorbord")
    with pytest.raises(MissingExtra, match="--track clearml needs the package clearml: pip inst"):
        launch(train, track="clearml")


def test_the_trackers_are_those_that_accelerate_has() -> None:
    from accelerate import tracking

    assert set(TRACKERS) == set(tracking.LOGGER_TYPE_TO_CLASS)


def logged(rank: int, *steps: int, at: float = 100.0) -> list[ev.Event]:
    return [ev.Metrics(at + s, rank, s, {"loss": float(s + rank)}) for s in steps]


def test_a_step_waits_for_the_slowest_rank_and_steps_are_sent_in_order() -> None:
    means = StepMeans()
    assert means.add(logged(0, 0, 1, 2), 2) == []
    assert means.add(logged(1, 0, 1), 2) == [(0, {"loss": 0.5})]
    assert means.add(logged(0, 40), 2) == [(1, {"loss": 1.5}), (2, {"loss": 2.0})]
    assert means.rest() == [(40, {"loss": 40.0})]


def test_the_logger_of_trackers_has_all_that_accelerate_calls() -> None:
    from accelerate import tracking

    called = set(re.findall(r"\blogger\.(\w+)\(", inspect.getsource(tracking)))
    assert called
    assert not {name for name in called if not hasattr(trackers._Logger("test"), name)}
