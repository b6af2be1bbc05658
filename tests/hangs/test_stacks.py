"""Python stacks of ranks: read from what faulthandler writes, asked of processes that hang."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import nbtrain
from nbtrain.hangs import stack_dumps, stacks
from nbtrain.hangs.stacks import RankStack, StackFrame, Stacks
from nbtrain.lifecycle.run import Run
from nbtrain.system.processes import process_identity
from nbtrain.tracking.run_folder import RunFolder
from tests.support.kernel import Notebook
from tests.support.waiting import wait_until

DUMP = """\
Thread 0x00007fef (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007fee (most recent call first):
  File "/tmp/ipykernel_1/99.py", line 41 in train
  File "/tmp/ipykernel_1/99.py", line 50 in <module>
"""


def test_a_dump_is_read_with_the_main_thread_first() -> None:
    main, other = stacks.parse_stacks(DUMP)
    assert [(f.line, f.function) for f in main] == [(41, "train"), (50, "<module>")]
    assert other[0].file.endswith("threading.py")
    assert stacks.parse_stacks("") == []
    assert (
        stacks.parse_stacks("Thread 0x1 [a name] (most recent call first):\n  <no Python frame>\n")
        == []
    )


def test_stacks_name_the_users_own_line_and_print_themselves() -> None:
    frame = StackFrame("In[5]", 41, "train", "time.sleep(600)")
    library = StackFrame("/lib/python3.11/site-packages/torch/x.py", 9, "wait")
    assert RankStack(0, frames=(library, frame)).location == frame
    assert RankStack(0, frames=(library,)).location == library
    assert RankStack(0).location is None
    assert frame.place == "In[5], line 41: time.sleep(600)"
    told = Stacks([RankStack(0, 7, (frame,), ((frame,),)), RankStack(1, trouble="has ended")])
    assert (
        str(told)
        == repr(told)
        == (
            "rank 0 (pid 7):\n"
            "  In[5], line 41, in train: time.sleep(600)\n"
            "  thread 2:\n"
            "    In[5], line 41, in train: time.sleep(600)\n"
            "\n"
            "rank 1: has ended"
        )
    )


def _folder(tmp_path: Path, **manifest: object) -> RunFolder:
    folder = RunFolder(tmp_path)
    known = {"host": platform.node(), "engine": "fork", "launcher": os.getpid()}
    folder.manifest.write_text(json.dumps({**known, **manifest}))
    return folder


def _head(of: psutil.Process, **other: object) -> str:
    number = stack_dumps.signal_number()
    identity = {"pid": of.pid, "process": process_identity(of.pid)}
    return json.dumps({**identity, "signal": number, "last": "x", **other}) + "\n"


def test_a_process_that_would_die_of_the_signal_is_not_sent_it(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as stranger:
        process = psutil.Process(stranger.pid)
        assert "not started" in stacks.read_stacks(folder, [0])[0].trouble
        folder.stacks(0).write_text(_head(process))
        assert "no longer listens" in stacks.read_stacks(folder, [0])[0].trouble
        # The number went round: the rank's process is gone, and another has its number.
        folder.stacks(0).write_text(_head(process, process="that of another"))
        folder.stacks(1).write_text("no JSON at all\n")
        told = stacks.read_stacks(folder, [0, 1])
        assert told[0].trouble == "has ended"
        assert "cannot be asked" in told[1].trouble
        assert stranger.poll() is None
        stranger.kill()


def test_a_run_of_another_host_is_not_asked_here(tmp_path: Path) -> None:
    folder = _folder(tmp_path, host="elsewhere")
    assert "elsewhere" in stacks.read_stacks(folder, [0])[0].trouble


SPINNING = """%%distributed -n 2 --hang-after off
import ctypes
def train():
    print("at it", flush=True)
    if nbtrain.rank() == 0:
        while True:
            pass
    pipe, _ = os.pipe()
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)  # keeps the GIL
"""


def test_another_process_reads_the_stacks_of_a_notebooks_run(notebook: Notebook) -> None:
    home = Path(notebook.value("os.environ['NBTRAIN_HOME']")) / "runs"
    printed: list[Stacks] = []

    def are_at_it(stacks: Stacks) -> bool:
        printed[:] = [stacks]  # a rank on a busy host may not answer each time
        return all(one.frames and one.frames[0].line > 3 for one in stacks)

    def ask(_outputs: object) -> None:
        folders = sorted(home.glob("*/launcher.jsonl"))
        if not folders or printed:
            return
        run = Run.open(folders[-1].parent)
        if all("at it" in run.logs(rank) for rank in (0, 1)):
            wait_until(lambda: are_at_it(run.stacks()))
            notebook.manager.interrupt_kernel()

    assert notebook.run(SPINNING, during=ask).ename == "KeyboardInterrupt"
    spinning, blocked = (one.location for one in printed[0])
    assert spinning is not None
    assert blocked is not None
    assert spinning.file == blocked.file
    assert spinning.file.startswith("In[")
    assert spinning.line in (6, 7)
    assert blocked.line == 9
    assert [f.function for f in printed[0][0].frames] == ["train"]  # nothing of the launcher's
    told = notebook.run("%nbtrain stacks").stdout
    assert told.count("has ended") == 2


def test_an_inline_rank_is_asked_in_the_kernel_which_gets_no_signal(notebook: Notebook) -> None:
    cell = "%%distributed -n 1 -e inline\nprint(nbtrain.last_run().stacks())"
    first = notebook.run(cell).stdout.splitlines()
    assert first[0].startswith("rank 0")
    assert "In[" in first[1]
    assert "line 2, in <module>: print(nbtrain.last_run().stacks())" in first[1]
    notebook.run("%distributed -n 1 1")
    caught = "int(open('/proc/self/status').read().split('SigCgt:')[1].split()[0], 16)"
    if sys.platform == "linux":
        assert not notebook.value(caught) >> (stack_dumps.signal_number() - 1) & 1


@pytest.mark.parametrize("depth", [3, 300])
def test_an_answer_is_whole_however_deep_the_stack_is(depth: int, run_root: Path) -> None:

    def ask(left: int) -> Stacks:
        folder = RunFolder(Path(os.environ["NBTRAIN_RUN"]))
        return stacks.read_stacks(folder, [0]) if left == 0 else ask(left - 1)

    run = nbtrain.launch(ask, depth, num_processes=1, view="none")
    frames = run.value[0].frames
    assert frames[0].function == "_send_signal"
    assert [f.function for f in frames].count("ask") >= min(depth, 90)
