"""The command ``nbtrain``, in this process and as one."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time

import pytest

import nbtrain
from nbtrain.commands import cli
from tests.support.paths import ROOT
from tests.support.runs import launch


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"nbtrain {nbtrain.__version__}\n"
    assert cli.main([]) == 0
    assert "doctor" in capsys.readouterr().out


def test_the_command_starts_without_torch_and_without_ipython() -> None:
    script = (
        "import sys\nfrom nbtrain.commands import cli\ncli.main(['--version'])\n"
        "print([m for m in ('torch', 'IPython', 'pynvml', 'psutil') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert out.stdout.splitlines()[1] == "[]", out.stderr


def test_no_escape_of_a_run_reaches_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        print("first")
        print("\x1b]0;title\x07\x1b[31mred\x1b[0m \x9b2J bell\x07 tab\tend")

    folder = nbtrain.launch(train, num_processes=1, view="none").folder
    manifest = json.loads((folder / "run.json").read_text())
    manifest |= {"name": "a\x1b[2Jb", "engine": "\x1b[31mfork", "mixed_precision": "no\x07"}
    (folder / "run.json").write_text(json.dumps(manifest))
    for command in ("logs", "show", "runs", "stop"):
        assert cli.main([command]) == 0
        printed = capsys.readouterr().out
        assert not {*printed} & {"\x1b", "\x07", "\x9b"}, command
        assert command != "logs" or "red 2J bell tab\tend" in printed
    assert cli.main(["logs", "--tail", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_programs_get_json(capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        nbtrain.log(loss=1.0 if nbtrain.rank() else float("nan"), accuracy=0.5)

    run = launch(train, n=2)
    assert cli.main(["show", "--json", run.folder.name]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(json.dumps(run.to_dict(), allow_nan=False)) | {
        "seconds": shown["seconds"]
    }
    assert (shown["schema"], shown["status"], shown["ranks"]) == (1, "succeeded", 2)
    assert shown["outcome"] == "finished, but the loss of rank 0 became nan"
    assert shown["metrics"] == {"loss": "nan", "accuracy": 0.5}
    assert [rank["status"] for rank in shown["rank_states"]] == ["done", "done"]
    assert cli.main(["runs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    (info,) = [info for info in listed["runs"] if info["name"] == run.folder.name]
    assert (info["status"], info["outcome"]) == (shown["status"], shown["outcome"])
    assert listed["schema"] == 1
    assert cli.main(["logs", "--json", "--rank", "1"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema": 1,
        "run": run.folder.name,
        "logs": {"1": []},
    }


def test_the_reference_lists_the_keys_that_programs_get(capsys: pytest.CaptureFixture[str]) -> None:
    launch(lambda: None, n=1)
    page = (ROOT / "notebooks/reference/magics.md").read_text()
    for command, part in (("runs", "runs"), ("show", ""), ("logs", "")):
        assert cli.main([command, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        keys = {*shown, *(shown[part][0] if part else {})}
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{command}` |")]
        assert set(re.findall(r"`(\w+)`", row.partition("|")[2].partition("|")[2])) == keys


def test_a_run_that_is_followed_ends_with_its_code() -> None:
    def fails() -> None:
        raise ValueError("oops")

    launch(lambda: None, n=1)
    assert cli.main(["show", "--follow"]) == 0
    with pytest.raises(ValueError, match="oops"):
        launch(fails, n=1)
    assert cli.main(["show", "--follow"]) == 1
    assert cli.main(["show"]) == 0


def test_a_terminal_that_is_not_utf_8_and_a_full_disk_get_no_traceback() -> None:
    def train() -> str:
        print("λ ✓ \ud800")
        nbtrain.log(λ=1.0)
        return "é"

    launch(train, n=1)
    nbtrain_ = [sys.executable, "-m", "nbtrain", "show"]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    out = subprocess.run(nbtrain_, capture_output=True, env=ascii_only, timeout=60)
    assert (out.returncode, out.stderr) == (0, b"")
    assert out.stdout.isascii()
    with open("/dev/full", "wb") as full:
        out = subprocess.run(nbtrain_, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert out.returncode == 1
    assert len(out.stderr.splitlines()) == 1
    with_nothing = ["sh", "-c", f"{shlex.join(nbtrain_)} >&-"]
    out = subprocess.run(with_nothing, stderr=subprocess.PIPE, timeout=60)
    assert out.stderr == b""


def test_who_stops_a_run_that_is_over_hears_which_others_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    going = launch(time.sleep, 600, n=1, background=True)
    over = launch(lambda: None, n=1)
    assert cli.main(["stop"]) == 0
    printed = capsys.readouterr().out
    assert over.folder.name in printed
    assert not going.state.is_over
    (remedy,) = re.findall(r"`nbtrain (stop \S+)`", printed)
    assert cli.main(remedy.split()) == 0
    assert going.wait().state.status == "interrupted"
    assert cli.main(["stop"]) == 0
    assert "`" not in capsys.readouterr().out.replace("`nbtrain stop`;", "")
