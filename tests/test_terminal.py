"""A terminal IPython, driven through a real pseudo-terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[pexpect.spawn]:
    child = pexpect.spawn(
        sys.executable,
        ["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"],
        env={**os.environ, "IPYTHONDIR": str(tmp_path), "TERM": "dumb", "COLUMNS": "200"},
        encoding="utf-8",
        timeout=60,
    )
    child.setecho(False)
    child.expect("In ?\\[1\\]:")
    yield child
    child.close(force=True)


def test_runs_show_lines_results_and_errors(terminal: pexpect.spawn) -> None:
    terminal.sendline("%load_ext nbtrain")
    terminal.expect("In ?\\[2\\]:")
    terminal.sendline("import nbtrain, time; run = %distributed -n 2 ['res', print('said')]")
    terminal.expect("In ?\\[3\\]:")
    terminal.sendline("%distributed -n 2 ['res', print('said')]")
    terminal.expect(r"\[rank 0\] said")
    terminal.expect(r"all ranks → \['res', None\]")
    terminal.expect("In ?\\[4\\]:")
    assert "all ranks" not in terminal.before
    terminal.sendline("%distributed -n 2 1 / 0")
    terminal.expect("ZeroDivisionError: division by zero")
    terminal.expect("In ?\\[5\\]:")
    terminal.sendline("nbtrain.last_run()")
    terminal.expect("failed")
    terminal.expect("In ?\\[6\\]:")


def test_control_c_ends_the_ranks(terminal: pexpect.spawn) -> None:
    terminal.sendline("%load_ext nbtrain")
    terminal.expect("In ?\\[2\\]:")
    terminal.sendline("%distributed -n 2 [print('ready'), __import__('time').sleep(60)]")
    terminal.expect(r"\[rank 1\] ready")
    terminal.sendintr()
    terminal.expect("interrupted")
    terminal.expect("KeyboardInterrupt")
    terminal.expect("In ?\\[3\\]:")
    terminal.sendline("%distributed -n 2 1 + 1")
    terminal.expect("all ranks → 2")
