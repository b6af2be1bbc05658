"""The command ``%nbtrain profile``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import nbtrain
from nbtrain.__main__ import main
from nbtrain.errors import PlanError
from nbtrain.part import Typed
from nbtrain.parts.profile.commands import profile_magic
from tests.support.looked_models import alone, net
from tests.support.runs import launch

pytestmark = [
    pytest.mark.part("profile"),
    pytest.mark.part("steering"),
    pytest.mark.filterwarnings("ignore"),
]


def typed(text: str) -> Typed:
    return Typed("profile", text, {}, lambda text: text)


def test_it_records_a_run_that_trains_and_shows_one_that_has_ended() -> None:
    run = launch(alone, net(), n=2, background=True)
    made = profile_magic(typed("--steps 2"))
    assert [len(rank.steps) for rank in made.comparison.ranks] == [2, 2]
    run.finish()
    run.wait()
    assert profile_magic(typed(run.folder.name)).folder == made.folder
    assert [p.folder for p in nbtrain.Run.open(run.folder).profiles] == [made.folder]


def test_a_terminal_records_prints_and_saves(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = launch(alone, net(), n=2, background=True)
    assert main(["profile", run.folder.name, "--steps", "2"]) == 0
    assert "steps" in capsys.readouterr().out
    run.finish()
    run.wait()
    assert main(["profile", run.folder.name, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["steps"]) == 2
    assert main(["profile", run.folder.name, "--save", str(tmp_path / "trace.json")]) == 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_nothing_is_recorded_where_the_host_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = launch(alone, net(), n=1, background=True)
    monkeypatch.setenv("NBTRAIN_DISABLE", "profile")
    with pytest.raises(PlanError):
        run.profile()
    with pytest.raises(PlanError):
        profile_magic(typed(""))
    with pytest.raises(PlanError):
        launch(alone, net(), profile=True)
    assert run.state.steered == ()
    monkeypatch.undo()
    run.finish()
    run.wait()


@pytest.mark.parametrize("text", ["--steps 11", "--steps many", "--fast"])
def test_wrong_options_are_refused(text: str) -> None:
    run = launch(alone, net(), n=1, background=True)
    with pytest.raises(PlanError):
        profile_magic(typed(text))
    run.finish()
    run.wait()


def test_a_run_that_has_ended_without_a_profile_is_an_error() -> None:
    run = launch(abs, -1)
    with pytest.raises(PlanError):
        profile_magic(typed(run.folder.name))
