"""A terminal IPython, driven through a real pseudo-terminal."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from nbtrain.ui.displays.terminal import can_redraw
from tests.support.waiting import wait_until


def _end(child: pexpect.spawn) -> None:
    """End a child, however busy the machine is: pexpect gives it a tenth of a second."""
    if child.isalive():
        child.kill(signal.SIGKILL)
    wait_until(lambda: not child.isalive(), 60)
    child.close()


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
    _end(child)


@pytest.mark.host(
    "IPython",
    works="a table that is redrawn in place, or lines; results, errors, ^C",
    tried="the real program in a pseudo-terminal",
)
def test_runs_show_lines_results_and_errors_and_end_at_ctrl_c(terminal: pexpect.spawn) -> None:
    terminal.sendline("%load_ext nbtrain")
    terminal.expect("In ?\\[2\\]:")
    terminal.sendline("import nbtrain, time; run = %distributed -n 2 ['res', print('said')]")
    terminal.expect("In ?\\[3\\]:")
    terminal.sendline("%distributed -n 2 ['res', print('said')]")
    terminal.expect(r"\[ranks? 0(–1)?\] said")
    terminal.expect(r"all ranks → \['res', None\]")
    terminal.expect("In ?\\[4\\]:")
    assert "all ranks" not in terminal.before
    terminal.sendline("%distributed -n 2 1 / 0")
    terminal.expect("ZeroDivisionError: division by zero")
    terminal.expect("In ?\\[5\\]:")
    terminal.sendline("nbtrain.last_run()")
    terminal.expect("failed")
    terminal.expect("In ?\\[6\\]:")
    terminal.sendline("%distributed -n 2 [print('ready'), __import__('time').sleep(60)]")
    terminal.expect(r"\[ranks? (0–)?1\] ready")
    terminal.sendintr()
    terminal.expect("interrupted")
    terminal.expect("KeyboardInterrupt")
    terminal.expect("In ?\\[7\\]:")
    terminal.sendline("%distributed -n 2 1 + 1")
    terminal.expect("all ranks → 2")


def _start_console(folder: Path) -> pexpect.spawn[str]:
    """Start jupyter_console, until it has run a first cell.

    It waits for "idle" of the cell, and may have subscribed to that too late if the host is busy;
    then it waits for ever, whatever the cell is.
    """
    variables = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")
    for _ in range(3):
        console = pexpect.spawn(
            sys.executable,
            ["-m", "jupyter_console", "--simple-prompt"],
            env={**os.environ, **dict.fromkeys(variables, str(folder)), "TERM": "dumb"},
            encoding="utf-8",
            timeout=60,
            dimensions=(24, 200),
        )
        if console.expect(["In ?\\[1\\]:", pexpect.TIMEOUT]) == 0:
            console.sendline("pass")
            if console.expect(["In ?\\[2\\]:", pexpect.TIMEOUT], timeout=30) == 0:
                return console
        _end(console)
    pytest.fail("jupyter_console did not run a first cell in three attempts")


@pytest.mark.host(
    "jupyter-console",
    works="lines while it runs, then the summary, as text",
    tried="the real program in a pseudo-terminal",
)
def test_jupyter_console_shows_lines_and_the_summary_but_no_board(tmp_path: Path) -> None:
    """It draws no HTML, and an output that is updated stays as it was at first."""
    pytest.importorskip("jupyter_console")
    console = _start_console(tmp_path)
    try:
        console.sendline("%load_ext nbtrain")
        console.expect("In ?\\[3\\]:")
        console.sendline("%distributed -n 2 ['res', print('said')]")
        console.expect("In ?\\[4\\]:")
        shown = console.before
        assert re.search(r"\[ranks? (0–)?1\] said", shown)
        assert "succeeded" in shown
        assert "all ranks → ['res', None]" in shown
        assert "rank 0: starting" not in shown
        console.sendline("exit")
        console.expect(pexpect.EOF)
    finally:
        _end(console)


def test_a_terminal_that_can_move_its_cursor_gets_a_table_in_place(tmp_path: Path) -> None:
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    code = (
        "import nbtrain, time\n"
        "def train():\n"
        "    print('said by a rank', nbtrain.rank(), flush=True)\n"
        "    for i in nbtrain.progress(range(30)): time.sleep(0.05)\n"
        "    return 'the result'\n"
        "nbtrain.launch(train, num_processes=2)\n"
    )
    child = pexpect.spawn(
        sys.executable, ["-c", code], env=environment, encoding="utf-8", dimensions=(24, 60)
    )
    try:
        child.expect(pexpect.EOF, timeout=60)
    finally:
        _end(child)
    lines = _screen(child.before)
    assert [line for line in lines if "said by a rank" in line] == [
        "[rank 0] said by a rank 0",
        "[rank 1] said by a rank 1",
    ]
    (done,) = [i for i, line in enumerate(lines) if "succeeded" in line]
    assert all("said" not in line for line in lines[done:])
    assert sum("rank 0: done" in line for line in lines) == 1
    assert not any("running" in line for line in lines)
    assert any("the result" in line for line in lines)
    assert child.before.count("rank 0:") > 3
    assert "\x1b[34mrunning\x1b[0m" in child.before


def _screen(text: str) -> list[str]:
    """Return what stands on a terminal's screen after a text: a few cursor movements are known."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\r\n)", text):
        if part == "\r\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part.endswith("F") and part.startswith("\x1b["):
            row -= int(part[2:-1])
        elif part == "\x1b[0J":
            lines = [*lines[:row], ""]
        elif not part.startswith("\x1b"):
            lines[row] += part
    return lines


@pytest.mark.parametrize(
    ("environment", "is_tty", "expected"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm"}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
    ],
)
def test_the_table_is_for_terminals_that_allow_it(
    environment: dict[str, str], is_tty: bool, expected: bool
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return is_tty

    assert can_redraw(Stream(), environment) is expected
