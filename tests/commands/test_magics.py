"""``%%distributed`` through a real kernel: what a user types, and what they see."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.support.cells import must_run
from tests.support.kernel import Notebook

LAST_FOLDER = "str(getattr(nbtrain.last_run(), 'folder', None))"


def test_training_function_is_filled_from_notebook_variables(notebook: Notebook) -> None:
    notebook.run("model, epochs, rate = 'the model', 7, 0.5")
    must_run(
        notebook,
        "%%distributed -n 2\n"
        "def train(model, epochs=3, *, rate, depth=2):\n"
        "    return model, epochs, rate, depth, nbtrain.rank(), nbtrain.world_size()\n",
    )
    assert notebook.value("nbtrain.last_run().results") == [
        ("the model", 7, 0.5, 2, 0, 2),
        ("the model", 7, 0.5, 2, 1, 2),
    ]


def test_decorated_positional_only_and_async_functions_are_called(notebook: Notebook) -> None:
    notebook.run("def twice(f):\n    return lambda **kw: 2 * f(**kw)\nx = 21")
    notebook.run("%%distributed -n 1\n@twice\ndef train(x):\n    return x")
    assert notebook.value("nbtrain.last_run().value") == 42
    notebook.run("%%distributed -n 1\ndef train(x, /, y=1):\n    return x + y")
    assert notebook.value("nbtrain.last_run().value") == 22
    cell = "import asyncio\nasync def train(x):\n    await asyncio.sleep(0)\n    return x"
    notebook.run(f"%%distributed -n 1\n{cell}")
    assert notebook.value("nbtrain.last_run().value") == 21


def test_any_other_cell_runs_as_it_stands_and_its_expression_is_the_result(
    notebook: Notebook,
) -> None:
    notebook.run("base = 10\ndef helper(n):\n    return base + n")
    notebook.run("%%distributed -n 2\nhere = helper(nbtrain.rank())\nhere * 2")
    assert notebook.value("nbtrain.last_run().results") == [20, 22]
    assert notebook.run("here").ename == "NameError"


def test_a_cell_may_use_magics_shell_commands_and_await(notebook: Notebook) -> None:
    out = notebook.run(
        "%%distributed -n 1\nimport asyncio\nlines = !echo hello\nawait asyncio.sleep(0)\nlines[0]"
    )
    if notebook.run("lines = !echo hello").ename:  # IPython 7.34 on Python 3.12: in no cell
        assert "get_ipython().getoutput" in out.traceback
        out = notebook.run("%%distributed -n 1\nget_ipython().getoutput('echo hello')[0]")
    assert out.ename == "", out.traceback
    assert notebook.value("nbtrain.last_run().value") == "hello"


def test_line_magic_evaluates_the_expression_after_its_options(notebook: Notebook) -> None:
    notebook.run("run = %distributed -n 2 {'rank': nbtrain.rank(), 'text': f'{1 + 1}'}")
    assert notebook.value("run.results") == [{"rank": 0, "text": "2"}, {"rank": 1, "text": "2"}]
    notebook.run("n = 3\nrun = %distributed -n {n} -- -nbtrain.rank()")
    assert notebook.value("run.results") == [0, -1, -2]


def test_the_run_is_bound_and_shown_once(notebook: Notebook) -> None:
    out = notebook.run("%%distributed -n 1 --as mine\n'result'")
    assert notebook.value("mine.value, mine is nbtrain.last_run()") == ("result", True)
    assert out.results == []
    assert len(out.displays) == 1
    line = notebook.run("%distributed -n 1 'again'")
    assert line.results == []
    assert len(line.displays) == 1
    later = notebook.run("mine")
    assert "'result'" in later.displays[0]["text/plain"]
    assert "'result'" in later.displays[0]["text/html"].replace("&#x27;", "'")


def test_a_failing_run_is_bound_too(notebook: Notebook) -> None:
    out = notebook.run("%%distributed -n 1 --as broken\n1 / 0")
    assert out.ename == "ZeroDivisionError"
    assert notebook.value("type(broken.exception).__name__") == "ZeroDivisionError"


def test_missing_parameters_are_refused_together_with_lookalikes(notebook: Notebook) -> None:
    notebook.run("modle = learning_rate = 1\nglobals().pop('model', None)")
    before = notebook.value(LAST_FOLDER)
    out = notebook.run("%%distributed -n 2\ndef train(modell, learning_rat, zz, k=1):\n    pass")
    assert out.ename == "PlanError"
    assert "`modell` (there is `modle`)" in out.traceback
    assert "`learning_rat` (there is `learning_rate`)" in out.traceback
    assert "`zz`" in out.traceback
    assert "`k`" not in out.traceback
    assert len(out.traceback.splitlines()) == 1
    assert out.displays == []
    assert notebook.value(LAST_FOLDER) == before


def test_a_decorator_may_fill_parameters(notebook: Notebook) -> None:
    source = (
        "import functools\n"
        "def with_rank(function):\n"
        "    @functools.wraps(function)\n"
        "    def wrapper(*args, **kwargs):\n"
        "        return function(nbtrain.rank(), *args, **kwargs)\n"
        "    return wrapper\n"
        "@with_rank\n"
        "def train(rank, times=3):\n"
        "    return rank, times"
    )
    must_run(notebook, f"%%distributed\n{source}")
    assert notebook.value("str(nbtrain.last_run().results)") == "[(0, 3), (1, 3)]"
    must_run(notebook, f"{source}\nr = nbtrain.launch(train, 2, num_processes=2)")
    assert notebook.value("str(r.results)") == "[(0, 2), (1, 2)]"


def test_bad_options_are_one_clear_line_and_start_nothing(notebook: Notebook) -> None:
    before = notebook.value(LAST_FOLDER)
    for options, words in [
        ("-n -1", "--num-processes must be a whole number ≥ 1 or auto, not -1"),
        ("-n two", "must be a whole number ≥ 1 or auto, not 'two'"),
        ("--procs 2", "--procs"),
        ("-e thread", "thread"),
        ("-p int8", "int8"),
        ("--env NOVALUE", "KEY=VALUE"),
        ("--as 2x", "2x"),
        ("--timeout -1", "--timeout"),
        ("--timeout soon", "soon"),
        ("--view 3d", "3d"),
        ("-n 2 -e inline", "inline engine runs one rank"),
        ("-n 2 'open", "quotation"),
        ("-n 2 -p fp16", "fp16 needs a GPU"),
    ]:
        out = notebook.run(f"%%distributed {options}\n1")
        assert out.ename in ("PlanError", "PreflightError"), (options, out)
        assert words in out.traceback, (options, out.traceback)
        assert len(out.traceback.splitlines()) == 1, out.traceback
        assert out.displays == []
    assert notebook.run("%distributed -n 2").ename == "PlanError"
    assert "--max-restarts N" in notebook.run("%%distributed --help\n1").stdout
    assert notebook.run("%%distributed\n\n").ename == "PlanError"
    assert notebook.value(LAST_FOLDER) == before


def test_a_syntax_error_is_the_cells_own_with_its_line(notebook: Notebook) -> None:
    before = notebook.value(LAST_FOLDER)
    out = notebook.run("%%distributed -n 2\nx = 1\ndef train(:\n    pass")
    assert "SyntaxError" in out.traceback
    assert "line 3" in out.traceback
    assert "def train(:" in out.traceback
    assert "nbtrain" not in out.traceback
    assert "return" in notebook.run("%%distributed -n 2\nreturn 1").traceback
    assert notebook.value(LAST_FOLDER) == before


def test_environment_and_precision_reach_a_plain_accelerator(notebook: Notebook) -> None:
    notebook.run(
        "%%distributed -n 2 -p bf16 --env GREETING='hello there' --env EMPTY=\n"
        "from accelerate import Accelerator\n"
        "a = Accelerator()\n"
        "total = a.reduce(torch.ones(1))\n"
        "(str(a.distributed_type), a.num_processes, a.mixed_precision, a.device.type,\n"
        " os.environ['GREETING'], os.environ['EMPTY'], total.item())"
    )
    expected = ("DistributedType.MULTI_CPU", 2, "bf16", "cpu", "hello there", "", 2.0)
    assert notebook.value("nbtrain.last_run().results") == [expected, expected]
    assert notebook.value("'GREETING' in os.environ") is False


def test_output_of_ranks_is_kept_by_rank(notebook: Notebook) -> None:
    out = notebook.run(
        "%%distributed -n 2\n"
        "import sys, logging\n"
        "print('out', nbtrain.rank())\n"
        "print('err', file=sys.stderr)\n"
        "os.write(1, b'from C\\n')\n"
        "os.system('echo from a child')\n"
        "logging.warning('logged')\n"
        "display(torch.ones(2))\n"
        "None"
    )
    assert out.stdout == out.stderr == ""
    log = notebook.value("nbtrain.last_run().logs(1)")
    for words in ("out 1", "err", "from C", "from a child", "logged", "tensor([1., 1.])"):
        assert words in log
    assert "out 0" not in log
    assert notebook.value("nbtrain.last_run().logs(0, tail=1)") == "tensor([1., 1.])"
    assert "[rank 1] out 1" in notebook.value("nbtrain.last_run().logs()")


def test_bars_of_every_flavour_are_caught_and_nothing_is_printed_twice(notebook: Notebook) -> None:
    notebook.run(
        "from tqdm.auto import tqdm as bound_before\nimport tqdm\n"
        "made_before = bound_before(total=4, desc='made before'), tqdm.tqdm(total=4, desc='plain')"
    )
    out = must_run(
        notebook,
        "%%distributed -n 1\n"
        "import tqdm, tqdm.auto, tqdm.notebook\n"
        "for make in (tqdm.tqdm, tqdm.auto.tqdm, tqdm.notebook.tqdm, bound_before):\n"
        "    for _ in make(range(3), desc=make.__module__):\n"
        "        for _ in tqdm.trange(2, leave=False): pass\n"
        "bar = tqdm.tqdm(total=10, desc='by hand')\n"
        "bar.update(4); bar.close()\n"
        "for bar in made_before: bar.update(3); bar.close()\n"
        "tqdm.tqdm.write('beside the bars')\n"
        "list(nbtrain.progress(range(5), description='ours'))",
    )
    assert notebook.value("nbtrain.last_run().logs(0)") == "beside the bars"
    assert "ours: 5/5" in out.board
    events = notebook.value("(nbtrain.last_run().folder / 'rank-0000.jsonl').read_text()")
    last = re.findall(r'.*"description":"by hand".*', events)[-1]
    assert '"n":4,"total":10' in last
    for name in ("made before", "plain"):
        assert re.search(f'"n":3,"total":4,.*"description":"{name}"', events)
    assert '"closed":true' in last


def test_unloading_takes_the_magics_away(notebook: Notebook) -> None:
    notebook.run("%unload_ext nbtrain")
    assert "UsageError" in notebook.run("%distributed -n 1 1").stderr
    notebook.run("%load_ext nbtrain\n%reload_ext nbtrain")
    assert notebook.run("%distributed -n 1 1").ename == ""


@pytest.mark.parametrize("line", ["", "lint", "doctor please"])
@pytest.mark.part("memory", "scaling")
def test_what_nbtrain_cannot_be_asked_is_answered_with_what_it_can(
    notebook: Notebook, line: str
) -> None:
    out = notebook.run(f"%nbtrain {line}")
    assert out.ename == "PlanError"
    assert ("%nbtrain needs a command" in out.evalue) == (not line)
    for command in ("runs", "show", "stop", "stacks", "memory", "scaling", "guard", "doctor"):
        assert command in out.evalue


def test_loading_the_extension_binds_its_name_unless_the_notebook_has_it(
    start_kernel: Callable[..., Notebook],
) -> None:
    kernel = start_kernel()
    kernel.run("%load_ext nbtrain")
    out = kernel.run("nbtrain.launch(nbtrain.rank, num_processes=2).results")
    assert out.results[0]["text/plain"] == "[0, 1]"
    kernel.run("nbtrain = 'mine'\n%reload_ext nbtrain")
    assert kernel.value("nbtrain") == "mine"


def test_what_is_misspelt_is_guessed(notebook: Notebook) -> None:
    out = notebook.run("%nbtrain gaurd")
    assert "has no command 'gaurd' (did you mean guard?)" in out.evalue
    out = notebook.run("%%distributed --num_processes 2\n1")
    assert "--num_processes 2 (did you mean --num-processes?)" in out.evalue


def test_a_name_that_only_ranks_have_is_explained_where_it_is_missed(notebook: Notebook) -> None:
    notebook.run("%%distributed -n 2\ndef only_there(x): return x\nbest_there, both_there = 3, 4")
    number = notebook.value("len(In) - 2")
    for cell in ("only_there(1)", "%%distributed -n 2\nprint(best_there)"):
        name = "only_there" if "only" in cell else "best_there"
        out = notebook.run(cell)
        assert out.ename == "NameError", (cell, out)
        assert f"In[{number}] defined `{name}` in its ranks only. Define it" in out.stdout
    notebook.run("%%distributed -n 1\nmy_trainer = object()")
    out = notebook.run("my_trainer.predict(1)")
    assert "--out" not in out.stdout
    assert "trainer.predict(test_set) or trainer.state.log_history" in out.stdout
    assert "in its ranks only" not in notebook.run("unknown + 1").stdout
    out = notebook.run("%%distributed -n 2\nprint(early)\nearly = 1")
    assert (out.ename, "in its ranks only" in out.stdout) == ("NameError", False)
    notebook.run("both_there = 5")
    assert "in its ranks only" not in notebook.run("both_there + elsewhere").stdout


def test_a_training_that_is_called_in_place_of_passed_is_named_before_it_runs(
    notebook: Notebook,
) -> None:
    notebook.run(
        "class Trainer:\n    def train(self): print('trains'); return {'loss': 1.0}\n"
        "trainer = Trainer()"
    )
    first = "from nbtrain import notebook_launcher\n"
    for line, call in ((1, "nbtrain.notebook_launcher"), (2, f"{first}notebook_launcher")):
        out = notebook.run(f"{call}(trainer.train(), num_processes=2)")
        told = f"line {line} calls `trainer.train()`, which trains in this kernel"
        assert out.stdout.index(told) < out.stdout.index("trains\n")
        assert "needs a function, not a dict. If this is what a training returned" in out.evalue
    out = notebook.run("nbtrain.notebook_launcher(trainer.train, num_processes=2)")
    assert "calls `trainer" not in out.stdout
