"""The command ``nbtrain``, in this process and as one."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nbtrain
from nbtrain import cli


def test_doctor_prints_its_page_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"nbtrain {nbtrain.__version__} · ")
    assert "A launch now" in printed


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"nbtrain {nbtrain.__version__}\n"
    assert cli.main([]) == 0
    assert "doctor" in capsys.readouterr().out


def test_a_command_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["nurse"])
    assert left.value.code == 2
    assert "nurse" in capsys.readouterr().err


def test_the_command_starts_without_torch_and_without_ipython() -> None:
    script = (
        "import sys\nfrom nbtrain import cli\ncli.main(['--version'])\n"
        "print([m for m in ('torch', 'IPython', 'pynvml', 'psutil') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert out.stdout.splitlines()[1] == "[]", out.stderr


def test_it_is_a_module_to_run_too() -> None:
    command = [sys.executable, "-m", "nbtrain", "--version"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (out.returncode, out.stdout) == (0, f"nbtrain {nbtrain.__version__}\n"), out.stderr
