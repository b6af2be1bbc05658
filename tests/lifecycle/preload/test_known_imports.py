"""What is known holds for the packages that were tried, and for no other version of them."""

import json
import sys
from pathlib import Path

import pytest

from nbtrain.lifecycle.preload import known_imports
from nbtrain.lifecycle.preload.known_imports import KnownImports
from nbtrain.lifecycle.preload.trial import Trial


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that can be imported, and that nobody has imported."""
    folder = tmp_path / "tried_one"
    folder.mkdir()
    (folder / "__init__.py").write_text("x = 1")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return folder


def test_what_is_known_is_read_again(package: Path) -> None:
    trial = Trial(("tried_one", "tried_one.part"), {"tried_one.bad": "it raises"}, ("HOME",))
    known = KnownImports().with_trial(trial)
    known_imports.write(known)
    assert known_imports.read() == known
    assert known.untried(["tried_one", "tried_one.bad.part", "other"]) == ["other"]
    assert "tried_one" not in sys.modules


def test_a_package_that_was_installed_again_is_unknown(package: Path) -> None:
    known_imports.write(KnownImports().with_trial(Trial(("tried_one",))))
    (package / "__init__.py").write_text("x = 22")
    assert known_imports.read() == KnownImports()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"harmless": 3}', '{"stamps": 1}', '{"stamps": {}, "other": 1}']
)
def test_a_broken_file_is_no_knowledge(content: str, run_root: Path) -> None:
    known_imports.write(KnownImports())
    (path,) = (run_root / "imports").iterdir()
    path.write_text(content)
    assert known_imports.read() == KnownImports()


def test_trials_add_up(package: Path) -> None:
    known = KnownImports().with_trial(Trial(("a",), {"b": "why"}, ("X",), 1.0, 2))
    known = known.with_trial(Trial(("a", "c"), {}, ("Z",), 1.0, 2))
    assert known.harmless == ("a", "c")
    assert (known.reads, known.refused) == (("X", "Z"), {"b": "why"})
    assert json.dumps(known.stamps) == "{}"
