"""The files of requests, and the orders that come of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from nbtrain.errors import NbtrainError, PlanError
from nbtrain.parts.steering import requests
from nbtrain.parts.steering.launch_side import Steering, look_timeout_s
from nbtrain.parts.steering.orders import Action, Asked, Decided, Orders
from nbtrain.tracking import events as ev
from nbtrain.tracking.reducers import fold
from nbtrain.tracking.run_folder import RunFolder
from nbtrain.transport.orders import OrderReader
from tests.support.looked_models import alone, net
from tests.support.runs import launch, picture

pytestmark = pytest.mark.part("steering")

DAMAGED = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "no action": b'{"token": "a", "by": "b"}',
    "no name": b'{"token": "a", "by": "b", "action": {"name": 1, "settings": {}}}',
    "of a later version": b'{"token": "a", "by": "b", "action": {"name": "turn", "x": 1}}',
    "one beta": b'{"token": "", "by": "", "action": {"name": "turn", "settings": {"betas": [1]}}}',
}


def test_a_request_for_a_part_that_ranks_lack_is_called_off() -> None:
    run = launch(alone, net(), n=2, background=True)
    with pytest.raises(NbtrainError):
        requests.request_step(run, "fly", "fly", {}, "by the test")
    assert [each.status for each in run.state.steered] == ["called off"]
    run.finish()
    run.wait()
    assert run.state.status == "succeeded"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """The folder of a run that takes requests."""
    tmp_path.chmod(0o700)
    return RunFolder(tmp_path)


def test_requests_come_in_their_order_and_once(folder: RunFolder) -> None:
    steering = Steering(folder)
    assert list(requests.take(folder.path)) == []
    first = requests.write(folder, Action("finish", "epoch"), "by me")
    second = requests.write(folder, Action("turn", settings={"lr": 0.1, "betas": (0.5, 0.9)}), "")
    found = list(requests.take(folder.path))
    assert [each.token for each in found] == [first, second]
    assert found[0] == requests.Request(first, "by me", Action("finish", "epoch"))
    assert found[1].action.settings == {"lr": 0.1, "betas": (0.5, 0.9)}
    assert list(requests.take(folder.path)) == []
    steering.finish(ev.Finished(0.0, -1), lambda: False)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_request_is_dropped(folder: RunFolder, name: str) -> None:
    where = folder.path / "requests"
    where.mkdir()
    (where / "1.json").write_bytes(DAMAGED[name])
    assert list(requests.take(folder.path)) == []
    assert list(where.iterdir()) == []


def test_a_folder_of_an_older_version_or_of_others_takes_none(folder: RunFolder) -> None:
    with pytest.raises(NbtrainError, match="cannot be steered"):
        requests.write(folder, Action("finish"), "by me")
    Steering(folder).finish(ev.Finished(0.0, -1), lambda: False)
    folder.path.chmod(0o777)
    with pytest.raises(NbtrainError, match="other users"):
        requests.write(folder, Action("finish"), "by me")


def test_orders_are_read_as_they_were_written() -> None:
    turn = Action("turn", settings={"lr": "/3", "betas": (0.5, 0.9)}, optimizer="SGD", group=1)
    decided = Decided(1, Action("finish"), is_applied=True, ends_bars=True)
    orders = Orders(Asked(2, 17, turn), (decided,))
    assert Orders.decode(orders.encode()) == orders
    assert Orders.decode(b"") == Orders()
    with pytest.raises((ValueError, LookupError, TypeError)):
        Orders.decode(json.dumps({"asked": {"request": 1}}).encode())


def test_orders_that_a_full_disk_refused_are_written_later(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    steering, state = Steering(folder), picture(2)
    state = fold(state, [ev.Started(1.0, rank, 100 + rank) for rank in range(2)])
    reader = OrderReader(folder.path)
    requests.write(folder, Action("finish"), "by me")
    with monkeypatch.context() as full:
        full.setattr(steering._orders, "write", lambda data: (_ for _ in ()).throw(OSError(28, "")))
        steering.attend(state)
        assert reader.bell[0] == 0
    steering.attend(state)
    assert reader.bell[0] == 1
    asked = Orders.decode(reader.read()).asked
    assert asked is not None
    assert asked.action == Action("finish")
    reader.close()
    steering.finish(ev.Finished(0.0, -1), lambda: False)


def test_the_launcher_is_quick_while_ranks_may_wait(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    steering, state = Steering(folder), picture(2)
    state = fold(state, [ev.Started(1.0, rank, 100 + rank) for rank in range(2)])
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    assert steering.attend(state) == math.inf
    requests.write(folder, Action("finish"), "by me")
    delays = list[float]()
    while now < 101:
        delays.append(steering.attend(state))
        now += delays[-1]
    assert delays == sorted(delays)
    assert max(delays) <= 0.02
    assert sum(delays[:6]) <= 0.015
    state = fold(state, [ev.StepBoundary(2.0, rank, 1, 7, 7) for rank in range(2)])
    steering.attend(state)
    assert [each.status for each in steering.notes() if isinstance(each, ev.Steered)] == [
        "pending",
        "applied",
    ]
    assert steering.attend(state) == math.inf
    steering.finish(ev.Finished(0.0, -1), lambda: False)


def test_a_request_that_a_full_disk_refuses_leaves_nothing(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    steering = Steering(folder)
    monkeypatch.setattr(requests, "write_atomically", write)
    with pytest.raises(OSError, match="No space left"):
        requests.write(folder, Action("peek"), "by me")
    assert [*folder.peeks.iterdir()] == []
    steering.finish(ev.Finished(0.0, -1), lambda: False)


@pytest.mark.parametrize(
    ("counts", "timeout_s"), [({}, 3), ({0: 4, 1: 16}, 19), ({0: 4}, 7), ({0: 600}, 30)]
)
def test_a_click_on_look_waits_longer_if_steps_take_longer(
    counts: dict[int, float], timeout_s: float
) -> None:
    state = picture(2)
    for rank, elapsed in counts.items():
        state = fold(state, [ev.TrainingUpdate(1.0, rank, steps=2, elapsed=elapsed)])
    assert look_timeout_s(state) == timeout_s


def test_a_host_may_switch_steering_off(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBTRAIN_DISABLE", "steering")
    with pytest.raises(PlanError, match="switched off"):
        requests.write(folder, Action("finish"), "by me")
