"""The gate that CI runs: with steps that fail in every way it must tell apart."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

STEPS = """
import shlex, sys
from real_steps import PRELUDE, Step

HERE = shlex.quote(sys.prefix)
VENV = f"VIRTUAL_ENV={HERE} PATH={HERE}/bin:$PATH\\n"
STEPS = (
    Step("lint", "passes", "echo fine"),
    Step("install", "fails", "echo 'no such package' >&2; exit 3"),
    Step("after", "needs what failed", "echo never", needs=("install",)),
    Step("absent", "leaves itself out", "echo 'SKIPPED: no browser here'"),
    Step("tests", "fail", VENV + "tests -n 1 toy/test_plain.py; tests -n 1 toy/test_more.py"),
    Step("after-tests", "needs what had tests that failed", "echo runs", needs=("tests",)),
    Step("mixed", "flaky, and another fault", VENV + "tests -n 0 toy/test_flaky.py; false"),
    Step("no-file", "cannot be imported", VENV + "tests -n 0 toy/test_import.py"),
    Step("death", "of a worker", VENV + "tests -n 1 toy/test_death.py"),
    Step("tests-hang", "too long", VENV + "tests -n 0 toy/test_hang.py", limit=12),
    Step("unused", "not in the gate", "exit 1"),
)
GATE = tuple(step.name for step in STEPS[:-1])
FULL = (*GATE, "unused")
"""
PLAIN = """
import pathlib, pytest
here = pathlib.Path(__file__).parent
def test_passes(): pass
def test_is_skipped(): pytest.skip("not here")
class TestIn:
    def test_a_class(self): assert 1 + 1 == 3, "arithmetic"
@pytest.mark.parametrize("name", ["a b::c[d]/e 'f'"])
def test_fails_at_first(name):
    mark = here / "was_here"
    if not mark.exists():
        mark.write_text("")
        raise OSError("lost a race")
@pytest.fixture
def dirty():
    yield
    raise OSError("not cleaned up")
def test_fails_and_is_not_cleaned_up(dirty): assert False
"""
FLAKY = """
import pathlib
def test_fails_at_first():
    mark = pathlib.Path(__file__).with_suffix(".mark")
    if not mark.exists():
        mark.write_text("")
        raise OSError("lost a race")
"""
TESTS = {
    "plain": PLAIN,
    "flaky": FLAKY,
    "more": "def test_more(): pass",
    "death": "import os\ndef test_before(): pass\ndef test_ends_its_worker(): os._exit(7)",
    "hang": "import time\ndef test_before(): pass\ndef test_hangs(): time.sleep(600)",
    "import": "import no_such_module",
}
VARIABLES = "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"


def gate(folder: Path, *arguments: str) -> tuple[int, str]:
    variables = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    place = folder.with_name("a 'folder' for what is temporary")
    place.mkdir(exist_ok=True)
    run = subprocess.run(
        [sys.executable, str(folder / ".ci/gate.py"), *arguments],
        env={**variables, "XDG_CACHE_HOME": str(place), "TMPDIR": str(place)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    return run.returncode, run.stdout


def a_checkout(folder: Path) -> Path:
    """Make a checkout in a folder of any name, with steps that fail."""
    (folder / "tests/requirements").mkdir(parents=True)
    (folder / "tests/requirements/tested.txt").write_text("# Resolved on 2026-11-25.\n")
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/gate.py", folder / ".ci/gate.py")
    shutil.copy(ROOT / ".ci/steps.py", folder / ".ci/real_steps.py")
    (folder / ".ci/steps.py").write_text(STEPS)
    (folder / "toy").mkdir()
    shutil.copy(ROOT / ".gitignore", folder / ".gitignore")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    for name, text in TESTS.items():
        (folder / f"toy/test_{name}.py").write_text(text)
    for words in ("init -q", "add .", "-c user.name=a -c user.email=b commit -qm c"):
        subprocess.run(["git", *words.split()], cwd=folder, check=True)
    return folder


def test_every_step_runs_and_each_way_to_fail_is_told_apart(tmp_path: Path) -> None:
    folder = a_checkout(tmp_path / "a 'checkout' of ours")
    code, out = gate(folder)
    table = {
        line.split()[0]: line.split() for line in out.splitlines() if re.match(r"[\w-]+ ", line)
    }
    assert code == 1
    assert table["lint"][2:] == ["ok", "1", "0", "0", "0"]
    assert table["install"][2:] == ["FAILED", "0", "1", "0", "0", "exit", "3"]
    assert table["after"][1:] == ["-", "skipped", "-", "-", "-", "1", "needs", "install"]
    assert table["absent"][2:7] == ["skipped", "0", "0", "0", "1"]
    assert table["tests"][2:] == ["FAILED", "3", "2", "1", "1", "exit", "99"]
    assert table["after-tests"][2:] == ["ok", "1", "0", "0", "0"]
    assert table["mixed"][2:] == ["FAILED", "0", "2", "0", "0", "exit", "1"]
    assert table["no-file"][2:7] == ["FAILED", "0", "2", "0", "0"]
    assert "FAILED toy/test_import.py (no-file)" in out
    assert table["death"][2:7] == ["FAILED", "1", "1", "0", "0"]
    assert table["tests-hang"][2:7] == ["FAILED", "1", "2", "0", "0"]  # the test, and the step
    assert "FAILED toy/test_plain.py::TestIn::test_a_class (tests)" in out
    assert "arithmetic" in out
    assert "flaky toy/test_plain.py::test_fails_at_first[a b::c[d]/e 'f'] (tests)" in out
    assert "FAILED toy/test_death.py::test_ends_its_worker (death)" in out
    assert "FAILED toy/test_hang.py::test_hangs (tests-hang)" in out
    assert "no such package" in out
    assert out.splitlines()[-1] == "7 passed, 10 failed, 3 skipped"
    assert [*tmp_path.glob("*/nbtrain-ci.*.*")] == []
    code, out = gate(folder, "status")
    assert code == 0
    assert "No commit has been green" in out
    assert "flaky" in out


def test_a_green_commit_is_remembered(tmp_path: Path) -> None:
    folder = a_checkout(tmp_path / "checkout")
    (folder / ".ci/steps.py").write_text(STEPS.replace("STEPS[:-1]", "STEPS[:1]"))
    code, out = gate(folder)
    assert (code, out.splitlines()[-1]) == (0, "1 passed, 0 failed, 0 skipped")
    assert "No commit" in gate(folder, "status")[1]  # what was checked is not what is committed
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", "commit", "-qam", "c"],
                   cwd=folder, check=True)  # fmt: skip
    assert gate(folder, "absent")[0] == 0
    assert "No commit" in gate(folder, "status")[1]  # nor is one step the gate
    assert gate(folder)[0] == 0
    assert "There are 0 commits since" in gate(folder, "status")[1]
    memory = json.loads(next(tmp_path.glob("*/nbtrain-ci.json")).read_text())
    assert memory["flaky"] == {}
    code, out = gate(folder, "typo")
    assert code == 1
    assert out.startswith("There is no step typo. The steps are: lint install")
