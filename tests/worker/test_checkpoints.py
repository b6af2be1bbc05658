"""Checkpoints that count only when every rank has left them."""

from __future__ import annotations

from pathlib import Path

import pytest

import nbtrain


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NBTRAIN_RUN", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    return tmp_path


def save(step: int, rank: int, monkeypatch: pytest.MonkeyPatch, **options: int) -> Path:
    monkeypatch.setenv("RANK", str(rank))
    with nbtrain.checkpoint(step, **options) as path:
        (path / f"of-{rank}").touch()
    return path


def test_a_checkpoint_is_whole_when_all_ranks_have_left_it(
    monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    assert nbtrain.last_checkpoint() is None
    assert not (run / "checkpoints").exists()  # who asks changes nothing
    first = save(10, 0, monkeypatch)
    assert nbtrain.last_checkpoint() is None
    assert save(10, 1, monkeypatch) == first
    assert nbtrain.last_checkpoint() == first
    save(20, 1, monkeypatch)
    assert nbtrain.last_checkpoint() == first
    assert first.parent == nbtrain.checkpoint_dir() == run / "checkpoints"


def test_one_that_a_rank_died_in_is_not_and_nor_is_one_begun_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for rank in (1, 0):
        save(1, rank, monkeypatch)
        last = save(2, rank, monkeypatch)
    assert nbtrain.last_checkpoint() == last
    with pytest.raises(OSError, match="full"), nbtrain.checkpoint(2):
        raise OSError("full")
    found = nbtrain.last_checkpoint()
    assert found is not None
    assert found.name == "step-00000001"


def test_parts_of_two_attempts_are_no_whole_and_fewer_ranks_find_that_of_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(1, 1, monkeypatch)  # rank 0 died before it came to that
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = save(1, 0, monkeypatch)
    assert nbtrain.last_checkpoint() is None
    save(1, 1, monkeypatch)
    assert nbtrain.last_checkpoint() == again
    monkeypatch.setenv("WORLD_SIZE", "1")  # a restart on fewer nodes
    assert nbtrain.last_checkpoint() == again
    later = save(2, 0, monkeypatch)
    assert again.exists()  # two are kept
    assert nbtrain.last_checkpoint() == later


def test_older_ones_go_once_newer_ones_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    (nbtrain.checkpoint_dir() / "mine.pt").touch()
    for step in range(5):
        for rank in (1, 0):
            save(step, rank, monkeypatch)
    left = sorted(path.name for path in nbtrain.checkpoint_dir().iterdir())
    assert left == ["mine.pt", "step-00000003", "step-00000004"]


def test_outside_a_run_they_are_in_the_working_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("NBTRAIN_RUN", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with nbtrain.checkpoint(3) as path:
        pass
    assert path == tmp_path / "checkpoints" / "step-00000003"
    assert nbtrain.last_checkpoint() == path
    assert nbtrain.attempt() == 1


@pytest.mark.parametrize(("step", "keep"), [(-1, 2), (1, 0)])
def test_nonsense_is_refused(step: int, keep: int) -> None:
    with pytest.raises(ValueError, match="checkpoint"), nbtrain.checkpoint(step, keep):
        pass


@pytest.mark.parametrize("who", ["rank 0", "every rank"])
def test_a_checkpoint_that_rank_0_alone_has_saved_is_noted(who: str) -> None:
    def train(who: str) -> None:
        if who == "every rank" or nbtrain.rank() == 0:
            with nbtrain.checkpoint(3):
                pass

    run = nbtrain.launch(train, who, num_processes=2, view="none")
    noted = [f.full_text for f in run.state.findings if f.code == "checkpoint-unfinished"]
    assert bool(noted) == (who == "rank 0")
    assert all("Not all ranks completed step-00000003" in text for text in noted)
