"""Progress for Kubeflow Trainer: what is posted of a run, and that no server delays it."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nbtrain
from nbtrain.parts.kubernetes.progress import StatusReporter, describe_status, status_address
from nbtrain.tracking import events as ev
from tests.support.board_states import over, with_bars
from tests.support.runs import launch, picture
from tests.support.status_server import StatusServer, check_status
from tests.support.waiting import wait_until


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatusServer]:
    """A server, and the variables by which a TrainJob names it."""
    folder = tmp_path / "kubeflow"
    folder.mkdir()
    server = StatusServer(folder)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


@pytest.mark.parametrize(
    ("env", "address"),
    [
        ({}, None),
        ({"KUBEFLOW_TRAINER_SERVER_TOKEN": "t"}, None),
        ({"KUBEFLOW_TRAINER_SERVER_URL": ""}, None),
        ({"KUBEFLOW_TRAINER_SERVER_URL": "a"}, ("a", "", "")),
        ({"KUBEFLOW_TRAINER_SERVER_URL": "a", "PET_NODE_RANK": "0"}, ("a", "", "")),
        ({"KUBEFLOW_TRAINER_SERVER_URL": "a", "PET_NODE_RANK": "1"}, None),
        (
            {f"KUBEFLOW_TRAINER_STATUS_{name}": name for name in ("URL", "TOKEN", "CA_CERT")},
            ("URL", "TOKEN", "CA_CERT"),
        ),
    ],
)
def test_the_address_is_that_of_the_variables(
    env: dict[str, str], address: tuple[str, str, str] | None
) -> None:
    assert status_address(env) == address


def posted(status: dict[str, Any]) -> dict[str, Any]:
    """Check a status, and return it with its metrics by their names."""
    check_status({"trainerStatus": {**status, "lastUpdatedTime": "2026-11-30T10:00:00Z"}})
    metrics = {each["name"]: each["value"] for each in status.get("metrics", ())}
    assert len(metrics) == len(status.get("metrics", ()))
    return {**status, "metrics": metrics}


def test_a_status_has_what_is_known() -> None:
    assert describe_status(picture()) == {}
    status = posted(describe_status(with_bars(2)))
    assert 0 < status["progressPercentage"] < 100
    assert status["estimatedRemainingSeconds"] > 0
    assert float(status["metrics"]["loss"]) > 0
    assert (
        posted(describe_status(over(with_bars(2)), has_succeeded=True))["progressPercentage"] == 100
    )


def test_metrics_fit_the_limits_of_kubeflow() -> None:
    state = picture(1)
    metrics = {
        "acc": 1 / 3,
        "n": 3,
        "bad": math.nan,
        "x" * 100: 1.0,
        "text": "é" * 100,
        "empty": "",
    }
    state = replace(state, ranks=(replace(state.ranks[0], metrics=metrics),))
    values = posted(describe_status(state))["metrics"]
    assert values["acc"] == "0.333333"
    assert (values["n"], values["bad"], values["text"]) == ("3", "nan", "é" * 64)


def test_a_status_passes_the_models_of_kubeflow() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    status = {**describe_status(with_bars(2)), "lastUpdatedTime": "2026-11-30T10:00:00Z"}
    request = models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict({"trainerStatus": status})
    sent = request.to_dict()["trainerStatus"]
    assert sent.pop("lastUpdatedTime")
    assert sent == describe_status(with_bars(2)) | {"metrics": status["metrics"]} | {
        "estimatedRemainingSeconds": status["estimatedRemainingSeconds"]
    }


def train(steps: int) -> None:
    for step in range(steps):
        nbtrain.log(loss=1 / (step + 1))


def fail() -> None:
    nbtrain.log(loss=3.0)
    raise ValueError("no")


def test_a_run_is_posted_and_complete_at_its_end(server: StatusServer) -> None:
    launch(train, 4, n=2)
    last = posted({k: v for k, v in server.statuses[-1].items() if k != "lastUpdatedTime"})
    assert last == {
        "progressPercentage": 100,
        "estimatedRemainingSeconds": 0,
        "metrics": {"loss": "0.25"},
    }
    assert not server.refused


def test_a_run_that_failed_is_not_complete(server: StatusServer) -> None:
    with pytest.raises(ValueError, match="no"):
        launch(fail, n=1)
    assert server.statuses[-1].get("progressPercentage", 0) < 100
    assert server.statuses[-1]["metrics"] == [{"name": "loss", "value": "3"}]


def test_nothing_is_posted_where_it_is_switched_off(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBTRAIN_DISABLE", "kubernetes")
    launch(train, 1)
    assert not server.statuses


def test_a_server_that_refuses_is_in_the_log_of_the_run(server: StatusServer) -> None:
    server.answer = 403
    run = launch(train, 1)
    wait_until(lambda: "HTTP 403" in (run.folder / "launcher.log").read_text())
    assert run.to_dict()["status"] == "succeeded"
    assert not run.to_dict()["findings"]


@pytest.mark.parametrize(("status", "limit"), [("succeeded", 3.0), ("interrupted", 1.0)])
def test_a_server_that_hangs_does_not_delay_a_run(
    status: str, limit: float, server: StatusServer, tmp_path: Path
) -> None:
    server.hangs.set()
    reporter = StatusReporter(server.address, tmp_path / "launcher.log")
    state = with_bars(2)
    began = time.monotonic()
    for _ in range(1_000):
        reporter._next_report = 0.0
        reporter.attend(state)
    assert time.monotonic() - began < 2
    began = time.monotonic()
    reporter.finish(ev.Finished(1.0, -1, status), lambda: False)
    assert time.monotonic() - began < limit
    server.hangs.clear()
    wait_until(lambda: reporter._process.poll() is not None)


def test_a_process_that_does_not_read_delays_nothing(tmp_path: Path) -> None:
    reporter = StatusReporter(("", "", ""), tmp_path / "launcher.log")
    reporter._process.send_signal(signal.SIGSTOP)
    state = with_bars(2)
    for _ in range(1_000):  # more than the pipe holds
        reporter._next_report = 0.0
        reporter.attend(state)
    reporter._process.kill()
    reporter._process.wait()
    reporter.attend(state)
    assert not reporter.finish(ev.Finished(1.0, -1, "succeeded"), lambda: False)


def test_many_metrics_are_written_in_one_piece(server: StatusServer, tmp_path: Path) -> None:
    state = picture(1)
    metrics = {f"{'m' * 60}{number}": float(number) for number in range(200)}
    state = replace(state, ranks=(replace(state.ranks[0], metrics=metrics),))
    reporter = StatusReporter(server.address, tmp_path / "launcher.log")
    reporter.attend(state)
    reporter.finish(ev.Finished(1.0, -1, "failed"), lambda: False)
    assert 10 < len(server.statuses[0]["metrics"]) < 200
