"""A rank reports the installed modules it had to import, and nobody else does."""

import json
from pathlib import Path

import pytest

import nbtrain
from nbtrain.lifecycle.preload.importer import Importer
from nbtrain.worker.telemetry import import_report


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(import_report.SWITCH, "on")
    importer = Importer()
    importer._has_given_up = True  # on trials: what is reported is enough
    monkeypatch.setattr("nbtrain.lifecycle.restarts.importer", importer)


def test_a_forked_rank_reports_installed_modules_only(tmp_path: Path) -> None:
    (tmp_path / "a_module_of_mine.py").write_text("import this")

    def train() -> None:
        import sys

        sys.path.insert(0, str(tmp_path))
        import a_module_of_mine  # type: ignore[import-not-found]  # noqa: F401

        if nbtrain.rank() == 1:
            import antigravity  # type: ignore[import-not-found]  # noqa: F401

    run = nbtrain.launch(train, num_processes=2, view="none", env={"BROWSER": "true"})
    names = json.loads((run.folder / "rank-0000.imports").read_text())
    assert "this" in names
    assert "a_module_of_mine" not in names
    assert not (run.folder / "rank-0001.imports").exists()


def test_what_was_stopped_after_its_first_step_has_reported() -> None:
    import torch

    def train() -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1)).sum().backward()
        import this  # noqa: F401

        optimizer.step()
        import os

        os._exit(3)

    with pytest.raises(nbtrain.RankDied):
        nbtrain.launch(train, num_processes=1, engine="fork", view="none")
    run = nbtrain.last_run()
    assert run is not None
    assert "this" in json.loads((run.folder / "rank-0000.imports").read_text())


def test_a_process_that_is_no_rank_reports_nothing(tmp_path: Path) -> None:
    import_report.report()
    assert not [*tmp_path.iterdir()]
