"""Every way in which an import may change a process is seen."""

import sys
from pathlib import Path

import pytest

from nbtrain.lifecycle.preload.trial import Trial, try_imports

CHANGES = {
    "starts a thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
        "the number of threads",
    ),
    "opens a file": ("keep = open('/dev/null')", "the number of open files"),
    "starts a process": (
        "import subprocess\nkeep = subprocess.Popen(['sleep', '60'])",
        "the child processes",
    ),
    "prints": ("print('hello')", "what is printed"),
    "prints from C": ("import os\nos.write(2, b'hello')", "what is printed"),
    "changes a variable": ("import os\nos.environ['HOME'] = '/'", "environment variables"),
    "takes a signal": (
        "import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)",
        "it raises ValueError",  # outside the main thread, where the importer works, too
    ),
    "hooks forks": (
        "import os\nos.register_at_fork(before=lambda: None)",
        "what runs in the kernel at a fork",
    ),
    "leaves the folder": ("import os\nos.chdir('/')", "the working directory"),
    "looks elsewhere": ("import sys\nsys.path.append('/nowhere')", "where Python looks"),
    "hooks exceptions": ("import sys\nsys.excepthook = print", "Python's hooks"),
    "logs": ("import logging\nlogging.basicConfig()", "logging"),
    "silences logging": ("import logging\nlogging.disable(50)", "logging"),
    "recurses deeper": ("import sys\nsys.setrecursionlimit(5000)", "Python's limits"),
    "times out": ("import socket\nsocket.setdefaulttimeout(1.5)", "Python's limits"),
    "keeps garbage": ("import gc\ngc.disable()", "Python's limits"),
    "opens new files": ("import os\nos.umask(0)", "the mode of new files"),
    "seeds": ("import random\nrandom.seed(1)", "random numbers"),
    "is of one rank": ("import os\nos.environ.get('LOCAL_RANK')", "it reads LOCAL_RANK"),
    "raises": ("raise RuntimeError('no')", "it raises RuntimeError"),
    "leaves Python": ("raise SystemExit", "it raises SystemExit"),
}


def tried(folder: Path, monkeypatch: pytest.MonkeyPatch, **sources: str) -> Trial:
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return try_imports([*sources], [], ["RANK", "LOCAL_RANK"])


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_changes_the_process_is_refused(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, reason = CHANGES[change]
    trial = tried(tmp_path, monkeypatch, quiet_one="x = 1", loud_one=source, later_one="")
    # Of what comes after, nothing can be said; what raises is put off until others are there.
    later = ["later_one"] if change in ("raises", "leaves Python") else []
    assert [*trial.harmless] == ["quiet_one", *later]
    assert [*trial.refused] == ["loud_one"]
    assert reason in trial.refused["loud_one"]


def test_a_module_that_changes_nothing_is_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "import os, json, sys\nos.register_at_fork(after_in_child=lambda: None)\n"
        "sys.meta_path.append(sys.meta_path[-1])\n"
        "for_users = os.environ.get('SETTING')\nos.environ['NEW_ONE'] = '1'"
    )
    trial = tried(tmp_path, monkeypatch, first_one=source, second_one="import first_one")
    assert trial.harmless == ("first_one", "second_one")
    assert not trial.refused
    assert "SETTING" in trial.reads


def test_a_circle_is_entered_from_the_side_that_a_rank_entered_it_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = tried(
        tmp_path,
        monkeypatch,
        left_one="import right_one\nx = 1",
        right_one="from left_one import x",
    )
    assert (trial.harmless, trial.refused) == (("right_one", "left_one"), {})


def test_what_others_need_is_a_piece_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "whole_one"
    package.mkdir()
    (package / "__init__.py").write_text("import whole_one.part, leaf_one")
    (package / "part.py").touch()
    (tmp_path / "leaf_one.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    trial = try_imports(["whole_one.part", "leaf_one", "whole_one"], [], [])
    assert trial.harmless == ("leaf_one", "whole_one.part", "whole_one")


def test_a_copy_of_the_environment_reads_no_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    copies = "import os\na = os.environ.copy(), dict(os.environ), [*os.environ.items()]"
    trial = tried(tmp_path, monkeypatch, copies=copies, reads="import os\nos.environ.get('SHELL')")
    assert trial.harmless == ("copies", "reads")
    assert trial.reads == ("SHELL",)
