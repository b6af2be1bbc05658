"""How runs end badly, through a real kernel: what is raised, what is said, what is left."""

from __future__ import annotations

import pytest

from tests.support.kernel import Notebook, by_all

RETURNCODES = "[r.returncode for r in nbtrain.last_run().state.ranks]"
WAIT = "    time.sleep(60)\n"


def test_the_failing_ranks_own_exception_is_raised_with_the_cells_line(notebook: Notebook) -> None:
    out = notebook.run(
        "%%distributed -n 2\n"
        "def helper(x):\n"
        "    raise ValueError(f'bad {x}')\n"
        "def train():\n"
        "    if nbtrain.rank() == 1:\n"
        "        helper('luck')\n"
        f"{WAIT}"
    )
    assert out.ename == "ValueError"
    assert "----> 6         helper('luck')" in out.traceback
    assert "----> 3     raise ValueError" in out.traceback
    assert "from rank 1 of 2; rank 0 was stopped" in out.traceback
    for launcher in ("run_cell_magic", "worker.py", "launcher.py", "interactiveshell"):
        assert launcher not in out.traceback


def test_the_users_exception_type_can_be_caught(notebook: Notebook) -> None:
    out = notebook.run(
        "class MyError(Exception):\n"
        "    def __init__(self, a, *, b):\n"
        "        super().__init__(a); self.b = b\n"
        "    def __reduce__(self):\n"
        "        return (make, (self.args[0], self.b))\n"
        "def make(a, b): return MyError(a, b=b)\n"
        "def fail(): raise MyError('why', b=3)\n"
        "try:\n"
        "    nbtrain.launch(fail, num_processes=2, view='none')\n"
        "except MyError as error:\n"
        "    print(error.b, error.__notes__[0])"
    )
    assert out.stdout.startswith("3 nbtrain: this is from rank")
    assert "failed too (MyError)" in out.stdout


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("os._exit(3)", "exited with code 3 (os._exit(3) at In[{}], line 5)"),
        (
            "os._exit(0)",
            "exited with code 0 before its function had returned",
        ),
        ("__import__('sys').exit('sorry')", "exited with code 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("__import__('ctypes').string_at(0)", "was killed by SIGSEGV"),
    ],
)
def test_a_death_is_told_with_the_ranks_last_words(
    notebook: Notebook, code: str, words: str
) -> None:
    out = notebook.run(
        "%%distributed -n 2\n"
        "def train():\n"
        "    print('last words of', nbtrain.rank())\n"
        "    if nbtrain.rank() == 1:\n"
        f"        {code}\n"
        f"{WAIT}"
    )
    assert out.ename == "RankDied"
    number = notebook.value("len(In) - 2")
    assert f"rank 1 {words.format(number)}" in out.traceback
    assert "last words of 1" in out.traceback
    assert "rank 0 was stopped" in out.traceback
    if "string_at" in code:  # faulthandler's Python stack of the moment
        assert "Fatal Python error: Segmentation fault" in out.traceback
        assert f"In[{number}], line 5 in train" in out.traceback
        log = notebook.value("[line for r in nbtrain.last_run().state.ranks for line in r.log]")
        for shown in (out.evalue, "\n".join(log)):
            assert "/nbtrain/worker/" not in shown
            assert "/IPython/" not in shown
    if "sorry" in code:
        assert "sorry" in out.traceback


def test_the_cause_is_raised_not_the_echo_in_a_collective(notebook: Notebook) -> None:
    out = notebook.run(
        "%%distributed -n 3\n"
        "import torch.distributed as dist\n"
        "def train():\n"
        "    dist.init_process_group('gloo')\n"
        "    dist.barrier()\n"
        "    if nbtrain.rank() == 2:\n"
        "        raise ValueError('cause')\n"
        "    while True:\n"
        "        dist.all_reduce(torch.ones(1))\n"
    )
    assert out.ename == "ValueError", out.traceback
    assert "rank 2" in out.traceback
    # The others met the echo, or were stopped before they could: never another failure.
    assert "failed too" not in out.traceback


def test_a_question_to_a_rank_is_refused_with_the_way_out(notebook: Notebook) -> None:
    out = notebook.run("%%distributed -n 1\ninput('name? ')\nprint('asked')")
    assert out.ename == "StdinNotImplementedError"
    assert "a rank cannot read what you type" in out.evalue
    assert "pass the answer to the function" in out.evalue
    assert notebook.value("input.__self__ is get_ipython().kernel")


def test_classes_and_tensors_come_back_as_what_they_are(notebook: Notebook) -> None:
    notebook.run(
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Score:\n"
        "    value: float\n"
        "run = %distributed -n 1 (Score(0.5), torch.arange(3), torch.nn.Linear(2, 1), lambda: 7)"
    )
    notebook.run("score, tensor, module, function = run.value")
    assert notebook.value("isinstance(score, Score), tensor.tolist(), function()") == (
        True,
        [0, 1, 2],
        7,
    )
    assert notebook.value("module(torch.ones(1, 2)).shape == (1, 1)") is True


def test_interrupt_lets_ranks_save_and_raises_keyboard_interrupt(notebook: Notebook) -> None:
    out = notebook.run(
        "%%distributed -n 2\n"
        "def train():\n"
        "    nbtrain.log(step=1, loss=0.25)\n"
        "    print('ready')\n"
        "    try:\n"
        "        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        print('saving')\n"
        "        time.sleep(0.3)\n"
        "        print('saved')\n"
        "        raise\n",
        interrupt_on=by_all("ready"),
    )
    assert out.ename == "KeyboardInterrupt"
    assert "interrupted" in out.board
    assert "loss 0.25" in out.board
    assert notebook.value("nbtrain.last_run().logs(1)").startswith("ready\nsaving\nsaved")
    assert notebook.value("nbtrain.last_run().state.status") == "interrupted"
    assert notebook.run("%distributed -n 2 nbtrain.rank()").ename == ""


def test_a_rank_that_catches_the_interrupt_may_return_its_result(notebook: Notebook) -> None:
    out = notebook.run(
        "%%distributed -n 2\n"
        "def train():\n"
        "    try:\n"
        "        print('ready'); time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        return 'saved'\n",
        interrupt_on=by_all("ready"),
    )
    assert out.ename == "KeyboardInterrupt"
    assert notebook.value("nbtrain.last_run().results") == ["saved", "saved"]


def test_a_second_interrupt_kills_at_once(notebook: Notebook) -> None:
    presses = []

    def press_again(out: object) -> None:
        if "ranks have 2 s to save" in str(out) and not presses:
            presses.append(notebook.manager.interrupt_kernel())

    out = notebook.run(
        "%%distributed -n 2\n"
        "def train():\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "    print('deaf')\n"
        f"{WAIT}",
        interrupt_on=by_all("deaf"),
        during=press_again,
    )
    assert out.ename == "KeyboardInterrupt"
    assert presses
    assert notebook.value(RETURNCODES) == [-9, -9]  # not SIGTERM, which comes after 2 s


def test_an_interrupt_is_not_lost_in_a_finalizer_or_a_fork(notebook: Notebook) -> None:
    out = notebook.run(
        "%%distributed -n 2\n"
        "from torch.utils.data import DataLoader\n"
        "def train():\n"
        "    try:\n"
        "        for i in range(10_000):\n"
        "            next(iter(DataLoader([1, 2], num_workers=1)))\n"
        "            if i == 3: print('ready')\n"
        "    except KeyboardInterrupt:\n"
        "        print('saved')\n"
        "        raise\n",
        interrupt_on=by_all("ready"),
    )
    assert out.ename == "KeyboardInterrupt"
    for rank in (0, 1):
        assert "saved" in notebook.value(f"nbtrain.last_run().logs({rank})")


_PAD = "write x = accelerator.pad_across_processes(x, dim=…) before it"
_REDUCE = "Every rank must take part in a reduce, with a tensor of the same shape"
_UNEQUAL = {
    "rows": ("accelerator.gather(torch.ones(2 + rank, 3))", _PAD),
    "a sum": ("accelerator.reduce(torch.ones(2 + rank))", _REDUCE),
}
_GATHERING = (
    "%%distributed -n 2 --timeout 50 --on-hang stop\n"
    "import torch.distributed as dist\n"
    "from accelerate import Accelerator\n"
    "def train():\n"
    "    accelerator = Accelerator()\n"
    "    rank = accelerator.process_index\n"
    "    {}\n"
)


@pytest.mark.parametrize("call", _UNEQUAL)
def test_what_to_do_about_unequal_shapes_is_beside_the_line(notebook: Notebook, call: str) -> None:
    code, remedy = _UNEQUAL[call]
    out = notebook.run(_GATHERING.format(code))
    assert out.ename in ("RankDied", "RuntimeError"), out.traceback
    assert out.traceback.count(remedy) == 1, out.traceback
    assert "line 7" in out.traceback or "----> 7 " in out.traceback


@pytest.mark.part("live")
def test_the_cell_of_an_exit_is_named_where_the_rank_does_not_have_it(notebook: Notebook) -> None:
    notebook.run("import sys\ndef leaves():\n    sys.exit(3)")
    number = notebook.value("len(In) - 2")
    out = notebook.run("nbtrain.launch(leaves, num_processes=1, engine='spawn')")
    if notebook.value("hasattr(get_ipython().compile, '_filename_map')"):  # not IPython 7
        assert f"(sys.exit(3) at In[{number}], line 3)" in out.evalue
    assert not notebook.run("%nbtrain start -n 1").ename
    try:
        out = notebook.run("%%distributed\nimport sys\nsys.exit(4)")
        number = notebook.value("len(In) - 2")
        assert out.evalue == f"sys.exit(4) at In[{number}], line 3, which does not end live ranks"
    finally:
        notebook.run("%nbtrain stop")
