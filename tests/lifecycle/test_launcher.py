"""The doors of plain Python: `launch` and `notebook_launcher`, and what they refuse."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest

import nbtrain
from nbtrain.errors import PlanError, PreflightError
from nbtrain.lifecycle import launch_sides, launcher
from nbtrain.lifecycle.launch_sides import Companion, LaunchSide
from nbtrain.lifecycle.run import Run
from nbtrain.planning import option_types
from nbtrain.planning.plan import Call, Plan
from nbtrain.tracking import pruning, run_folder
from tests.support.cells import the_last_run


def test_notebook_launcher_has_accelerates_exact_signature() -> None:
    def head(function: object) -> list[tuple[str, object]]:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
        return [(p.name, p.default) for p in parameters]

    assert head(nbtrain.notebook_launcher) == head(accelerate.notebook_launcher)


def test_one_process_is_forked_too_and_none_means_auto() -> None:
    import os

    assert nbtrain.notebook_launcher(os.getpid, (), 1).value != os.getpid()
    assert len(nbtrain.notebook_launcher(lambda: 1).results) == 2
    named = functools.partial(functools.partial(max, 2), 3)
    assert nbtrain.launch(named, num_processes=1, view="none").state.name == "max"
    assert nbtrain.launch(lambda: 1, num_processes=1, view="none").state.name == "lambda"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_restarts": -1}, "restarts"),
        ({"num_processes": 2.5}, "≥ 1"),
        ({"mixed_precision": "fp4"}, "fp4"),
        ({"use_port": "70000"}, "70000"),
        ({"num_processes": True}, "≥ 1"),
        ({"env": {"A=B": "1"}}, "environment variables"),
    ],
)
def test_what_a_launch_cannot_do_is_refused(
    options: dict[str, object], words: str, run_root: Path
) -> None:
    with pytest.raises(PlanError, match=words):
        (nbtrain.launch if "env" in options else nbtrain.notebook_launcher)(lambda: 1, **options)  # type: ignore[operator]
    with pytest.raises(PlanError, match="function"):
        nbtrain.launch("not a function")  # type: ignore[arg-type]
    assert list(run_root.rglob("run.json")) == []


@pytest.mark.parametrize("name", ["config", "out"])
@pytest.mark.part("scaling")
def test_an_argument_that_is_called_as_an_option_is_shown_its_way(name: str) -> None:
    def train(**given: object) -> dict[str, object]:
        return given

    class Own:
        pass

    words = rf"`{name}` is an option of nbtrain, and a value of type Own .*functools.partial"
    with pytest.raises(PlanError, match=words):
        nbtrain.launch(train, view="none", **{name: Own()})  # type: ignore[arg-type]
    if name in ("config", "env"):
        with pytest.raises(PlanError, match=words):
            nbtrain.scaling(train, view="none", **{name: Own()})  # type: ignore[arg-type]
    bound = functools.partial(train, **{name: 3})
    assert nbtrain.launch(bound, num_processes=1, view="none").value == {name: 3}


def test_telemetry_is_named_as_in_a_cell() -> None:
    assert option_types.read_sources("all") == option_types.SOURCES
    assert option_types.read_sources("none") == option_types.read_sources(()) == ()
    assert (
        option_types.read_sources("loss, bars")
        == option_types.read_sources(["bars", "loss"])
        == ("bars", "loss")
    )
    assert option_types.read_sources("-loss") == tuple(
        s for s in option_types.SOURCES if s != "loss"
    )
    assert option_types.read_sources(["all"]) == option_types.SOURCES
    assert option_types.read_sources("all,-loss") == option_types.read_sources("-loss")
    assert option_types.read_sources("bars,steps,-bars") == ("steps",)
    with pytest.raises(PlanError, match=r"no telemetry 'speed'.*all, none, bars"):
        nbtrain.launch(int, view="none", telemetry="speed")


def test_only_the_last_twenty_runs_are_kept(run_root: Path) -> None:
    for number in range(23):
        made = run_folder.create(f"run {number}", {"created": number})
        made.launcher_events.write_text('{"kind":"finished"}\n')
        pruning.prune()
    kept = [made.read_manifest()["created"] for made in run_folder.runs()]
    assert kept == list(range(3, 23))


def test_a_run_that_is_still_watched_is_not_pruned() -> None:
    import os

    alive = run_folder.create("alive", {"launcher": os.getpid()})
    for number in range(25):
        run_folder.create(f"run {number}", {}).launcher_events.write_text('{"kind":"finished"}\n')
    pruning.prune()
    assert alive.path.exists()


def test_logs_results_and_repr_of_a_run() -> None:
    def train() -> int:
        print("first", nbtrain.rank())
        print("second")
        return nbtrain.rank()

    run = nbtrain.launch(train, num_processes=2, view="none")
    assert run.logs(1) == "first 1\nsecond"
    assert run.logs(0, tail=1) == "second"
    assert run.logs(tail=1) == "[rank 0] second\n[rank 1] second"
    with pytest.raises(IndexError, match="no rank 2"):
        run.logs(2)
    assert repr(run).startswith("<Run train: succeeded, 2 ranks, ")
    assert "succeeded" in run._repr_html_()
    assert run.wait() is run
    assert run.exception is None


def test_a_run_is_reopened_with_its_results_and_its_failure() -> None:
    def train() -> str:
        if nbtrain.rank() == 1:
            raise ValueError("kept")
        return "also kept"

    with pytest.raises(ValueError, match="kept"):
        nbtrain.launch(train, num_processes=2, view="none")
    run = the_last_run()
    again = Run.open(run.folder)
    assert again.results in (["also kept", None], [None, None])  # stopped before or after
    assert isinstance(again.exception, ValueError)
    assert again.state == run.state
    with pytest.raises(FileNotFoundError):
        Run.open(run.folder / "nothing")


def test_a_view_that_fails_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from nbtrain.ui import text_summary

    monkeypatch.setattr(text_summary, "summary", lambda *_: 1 / 0)
    with pytest.warns(RuntimeWarning, match="the display failed"):
        run = nbtrain.launch(lambda: 7, num_processes=1, view="text")
    assert run.value == 7


@pytest.mark.parametrize("method", ["complete_job", "companion", "display"])
def test_a_part_that_fails_leaves_no_run_without_an_end(
    method: str, monkeypatch: pytest.MonkeyPatch, run_root: Path
) -> None:
    ends = []

    class Watching(Companion):
        def finish(self, end: Any, is_pressed: Any) -> Any:
            ends.append(end.status)
            return ()

    class Before(LaunchSide):
        def companion(self, *_: Any) -> Companion:
            return Watching()

    class Failing(LaunchSide):
        pass

    def fail(*_: object) -> None:
        raise ValueError("the part failed")

    setattr(Failing, method, fail)
    everywhere = lambda: (Before(), Failing())  # noqa: E731
    for module in (launch_sides, launcher):
        monkeypatch.setattr(module, "launch_sides", everywhere)
    if method == "display":  # which only shows the run
        assert nbtrain.launch(int, num_processes=1, view="none").state.status == "succeeded"
        return
    with pytest.raises(ValueError, match="the part failed"):
        nbtrain.launch(int, num_processes=1, view="none")
    if method == "complete_job":  # before the run begins
        assert not [*run_root.rglob("run.json")]
        return
    run = nbtrain.last_run()
    assert (run.state.status, run.state.explanation) == ("failed", "ValueError: the part failed")
    assert ends == ["failed"]


def test_a_result_that_is_damaged_is_named() -> None:
    run = nbtrain.launch(lambda: 3, num_processes=2, view="none")
    reopened = nbtrain.Run.open(run.folder)
    (run.folder / "rank-0001.result").write_bytes(b"\x80\x05garbage")
    with pytest.raises(nbtrain.NbtrainError, match=r"rank-0001\.result is damaged"):
        _ = reopened.results


@pytest.mark.parametrize(
    ("other", "device", "options", "is_refused"),
    [
        ("cuda", "cuda", {}, True),
        ("cuda", "cuda", {"env": {"CUDA_VISIBLE_DEVICES": "1"}}, False),
        ("cpu", "cuda", {}, False),
        ("cuda", "cpu", {}, False),
        ("xla", "xla", {}, True),
    ],
)
def test_a_run_in_the_background_stands_in_the_way_of_one_on_the_same_device(
    other: str,
    device: str,
    options: dict[str, Any],
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = SimpleNamespace(
        state=SimpleNamespace(device=other, takes_tasks=False, is_submitted=False),
        folder=SimpleNamespace(name="20261129-train"),
    )
    monkeypatch.setattr(launcher, "background_runs", lambda: [run])
    plan = Plan(Call(len, ()), "test", **options)
    if is_refused:
        with pytest.raises(PreflightError):
            launcher._check_other_runs(plan, device)
    else:
        codes = [finding.code for finding in launcher._check_other_runs(plan, device)]
        assert codes == ["run-in-background"]
    run.state.is_submitted = True  # its job is elsewhere
    assert launcher._check_other_runs(plan, device) == []
