"""A training cell as a script: what is in it, and that it trains as the notebook did."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nbtrain.commands import cli
from nbtrain.errors import PlanError
from nbtrain.parts.export.export import export
from tests.support.kernel import Notebook

CELLS = [
    "%load_ext nbtrain\n!echo hello\nimport os, math\nimport torch, json as js\n"
    "from torch import nn, optim\nfrom torch.utils.data import DataLoader, TensorDataset\n"
    "from accelerate import Accelerator\nfrom accelerate.utils import set_seed",
    "# how many\nepochs = 2  # enough\nrate = 0.1; unused = 3\ntorch.manual_seed(3)",
    "class Net(nn.Module):\n    def __init__(self, width):\n        super().__init__()\n"
    "        # two\n        self.layers = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))\n"
    "    def forward(self, x):\n        return self.layers(x)\n\n"
    "def dataset():\n    return make(64)",
    "def make(n):\n    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(0))\n"
    "    return TensorDataset(x, x.sum(1, keepdim=True))\n\n"
    "@torch.no_grad()\ndef never_called():\n    return js.dumps({})",
    "%%time\nmodel = Net(8)\nprint(model)",
]
TRAIN = """%%distributed -n 2
# nbtrain: ignore
!echo in the cell
batch = 8
def train(model, rate, epochs=1, momentum=0.5):
    # the loop
    set_seed(0)
    accelerator = Accelerator()
    loader = DataLoader(dataset(), batch_size=batch)
    optimizer = optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    if out := os.environ.get("LOSSES"):
        with open(f"{out}-{accelerator.process_index}", "w") as file:
            print(losses, file=file)
        accelerator.wait_for_everyone()
        os._exit(0)  # torch 2.13 may wait for ever, or abort, as it destroys gloo's process group
    return losses
"""


def _notebook(folder: Path, *cells: str) -> Path:
    made = [{"cell_type": "markdown", "source": "# A title"}]
    made += [{"cell_type": "code", "source": cell, "outputs": []} for cell in cells]  # type: ignore[dict-item]
    path = folder / "notes.ipynb"
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": made}))
    return path


def _script(folder: Path, *cells: str) -> str:
    export(_notebook(folder, *cells), folder / "train.py")
    return (folder / "train.py").read_text()


def _run(script: Path, out: Path, *command: str) -> list[list[float]]:
    """Run a script; return the losses of its ranks."""
    environment = {**os.environ, "LOSSES": str(out), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *command, str(script)]
    done = subprocess.run(
        words, env=environment, cwd=out.parent, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return [ast.literal_eval(file.read_text()) for file in sorted(out.parent.glob(f"{out.name}-*"))]


TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
ACCELERATE += ("--main_process_port", "0")
# Accelerate starts one process for --cpu, whatever it is asked for.
ACCELERATE_ALONE = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2")


@pytest.mark.slow
@pytest.mark.timeout(240)  # each of the processes imports torch
@pytest.mark.parametrize(
    ("ranks", "launchers"), [(2, (TORCHRUN, ACCELERATE)), (1, (ACCELERATE_ALONE, ()))]
)
def test_the_launchers_train_as_the_notebook_did(
    ranks: int, launchers: tuple[tuple[str, ...], ...], notebook: Notebook, tmp_path: Path
) -> None:
    for cell in CELLS:
        assert not notebook.run(cell).ename
    file = tmp_path / "scripts" / "train.py"
    file.parent.mkdir()
    head = f"%%distributed -n {ranks} --env OMP_NUM_THREADS=1 --save '{file}'\n"
    out = notebook.run(head + TRAIN.partition("\n")[2])
    assert not out.ename, out.traceback
    assert out.stdout.startswith(f"nbtrain: wrote {file}")
    losses = notebook.value("nbtrain.last_run().results")
    assert [len(of_rank) for of_rank in losses] == [16 // ranks] * ranks
    static = file.with_name("static.py")
    export(_notebook(tmp_path, *CELLS, TRAIN), static)
    for number, launcher in enumerate(launchers):  # plain Python runs the one from the file
        script = file if launcher else static
        assert _run(script, tmp_path / f"losses{number}", *launcher) == losses


def test_a_script_has_the_cells_in_order_with_their_comments(tmp_path: Path) -> None:
    script = _script(tmp_path, *CELLS, "%%time\nx = 1; y = 2", TRAIN)
    assert script.startswith("# Made by nbtrain from cell 7 of notes.ipynb, 20")
    assert "#     torchrun --nproc_per_node 2 train.py" in script
    parts = [
        "# cell 1 of notes.ipynb\n# %load_ext nbtrain  # left out: only IPython can run it",
        "# !echo hello  #",
        "# how many\nepochs = 2  # enough\nrate = 0.1; unused = 3\ntorch.manual_seed(3)",
        "        # two\n",
        "# cell 5 of notes.ipynb\nmodel = Net(8)\nprint(model)",
        "# cell 6 of notes.ipynb\nx = 1; y = 2",
        "# !echo in the cell  #",
        "    # the loop\n",
    ]
    places = [script.index(part) for part in parts]
    assert places == sorted(places)
    call = 'if __name__ == "__main__":\n    train(model=model, rate=rate, epochs=epochs)\n'
    assert f"    return losses\n\n\n{call}" in script


@pytest.mark.parametrize("head", ["def train():", "async def train():", "if True:"])
def test_a_script_leaves_the_process_group_before_python_ends(head: str, tmp_path: Path) -> None:
    """Otherwise gloo's threads may abort it, which other nodes' torchrun learns after minutes."""
    form = 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)'
    _script(
        tmp_path,
        "import atexit\nimport torch.distributed as dist\n"
        "atexit.register(lambda: print('in a group:', dist.is_initialized()))",
        f"%%distributed\n{head}\n    {form}; print('trained')",
    )
    out = subprocess.run(
        [sys.executable, str(tmp_path / "train.py")], capture_output=True, text=True, timeout=100
    )
    assert out.stdout == "trained\nin a group: False\n", out.stderr


@pytest.mark.parametrize(
    ("cells", "lines"),
    [
        (["%%bash\nrm x"], ["# This %%bash cell is left out."]),
        (["%%distributed -n 3\n1"], ["# This %%distributed cell is left out."]),
        (
            ["files = !ls", "files[0]", "first = files[0]", "print(first)"],
            [
                "# files = !ls  # left out: only IPython can run it",
                "# files[0]  # left out: it needs `files` (cell 1 of notes.ipynb: only IPython can",
                "# print(first)  # left out: it needs `first` (cell 3 of notes.ipynb: it needs",
            ],
        ),
        (
            [
                "import math, nbtrain\nfrom nbtrain import launch\nrun = launch(print)\nrun.value",
                "math.pi",
            ],
            [
                "import math, nbtrain\nfrom nbtrain import launch\n",
                "\nmath.pi\n",
                "# run = launch(print)  # left out: it calls nbtrain\n",
                "# run.value  # left out: it needs `run` (cell 1 of notes.ipynb: it calls nbtrain)",
            ],
        ),
        (
            ["async def load():\n    await ready()\nasync with lock:\n    x = 1\nprint(x)"],
            [
                "    await ready()\n# async with lock:  # left out: it awaits outside a function\n",
                "# print(x)  # left out: it needs `x` (cell 1 of notes.ipynb: it awaits outside",
            ],
        ),
        (["done.value"], ["# done.value  # left out: no cell assigns `done`"]),
        (
            ["x = 1\ndef later():\n    return x", "x = nbtrain.launch(print)", "later()"],
            ["# def later():  # left out: it needs `x`", "# later()  # left out: it needs `later`"],
        ),
        (["import x\nprint("], []),
        (["from __future__ import annotations\nx = 1", "display(x)"], ["\nx = 1", "display(x)"]),
        (["%env API_KEY=abcdefgh12\n!login hf_0123456789abcdefghij"], ["# (a line with a secret)"]),
    ],
)
def test_what_a_script_cannot_run_becomes_a_comment(
    tmp_path: Path, cells: list[str], lines: list[str]
) -> None:
    notebook, path = (
        _notebook(tmp_path, *cells, "%%distributed\ndef train(): pass"),
        tmp_path / "t.py",
    )
    export(notebook, path, None if "%%distributed" not in cells[0] else 2)
    script = path.read_text()
    for line in lines:
        assert line in script
    assert "print(\n" not in script
    assert "abcdefgh" not in script
    assert script.partition("\n\n")[2].startswith("from __future__") == ("__future__" in str(cells))


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["x = 1"], "no %%distributed cell"),
        (["%%distributed\ndef train(modle): pass"], "`def train(modle): pass` cannot be in"),
        (["model = 1", "%%distributed\ndef train(modle): pass"], "(there is `model`)"),
        (["files = !ls", "%%distributed\nlen(files)"], "1 of notes.ipynb: only IPython can run it"),
        (["model = 1", "model = nbtrain.launch(len)", "%%distributed\nmodel"], "it calls nbtrain"),
        (["%%distributed\nfiles = !ls\nlen(files)"], "`files = !ls` cannot be in a script"),
        (["x = await print()", "%%distributed\nprint(x)"], "awaits outside a function"),
        (["%%distributed\nawait nothing()"], "nothing"),
        (["%%distributed\ndef train(:"], "cell 1 of notes.ipynb, line 2"),
        (["%%distributed\n# nothing"], "the cell is empty"),
        (["%%distributed\ndef a(): pass", "%%distributed\ndef b(x): pass"], "--cell 2: def b(x)"),
    ],
)
def test_what_cannot_be_exported_is_one_error(tmp_path: Path, cells: list[str], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        _script(tmp_path, *cells)
    assert words in str(caught.value)
    assert not (tmp_path / "train.py").exists()


def test_the_command_writes_the_chosen_cell_and_replaces_only_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = ["%%distributed -n 4 -p bf16\ndef a(): pass", "%%distributed --config c.yaml\n1"]
    notebook, script = _notebook(tmp_path, *cells), tmp_path / "out.py"
    words = ["export", str(notebook), "-o", str(script), "--cell"]
    assert cli.main([*words, "1"]) == 0
    assert f"wrote {script}" in capsys.readouterr().out
    text = script.read_text()
    assert "--num_processes 4 --mixed_precision bf16 out.py" in text
    assert "os.environ.setdefault('ACCELERATE_MIXED_PRECISION', 'bf16')" in text
    assert cli.main([*words, "2"]) == 0
    assert "#     accelerate launch --config_file c.yaml out.py\n\n" in script.read_text()
    assert "torchrun --" not in script.read_text()
    script.write_text("print('mine')\n")
    assert cli.main([*words, "1"]) == 1
    assert "nbtrain did not write it" in capsys.readouterr().err
    assert script.read_text() == "print('mine')\n"
    assert cli.main(["export", str(tmp_path / "none.ipynb")]) == 1
    (tmp_path / "bad.ipynb").write_text("{}")
    assert cli.main(["export", str(tmp_path / "bad.ipynb")]) == 1


def test_no_way_to_write_a_secret_gets_it_into_a_script(tmp_path: Path) -> None:
    cells = (
        "password: str = 'hunter2'\nraw = r'hf_hunter2hunter2hunter2xx'",
        "pem = '''-----BEGIN PRIVATE KEY-----\nhunter2\n'''\nkey = b'hf_hunter2hunter2hunter2xx'",
        "auth = ('me', 'hunter2')\ntoken = ('hf_'\n    'hunter2hunter2hunter2xx')",
        "import os\nos.environ.setdefault('DB_PASSWORD', 'hunter2')",
        "db_password = 222222\n# token hunter2hunter2\nurl = 'db://me:' + 'hunter2@' + 'host'",
        "!login hunter2hunter2hunter2\n%env X_TOKEN=hunter2hunter2",
        "again = 'hf_hunter2hunter2hunter2xx'; await x",
        "%%distributed\ndef train(): print(password, key, auth, token, db_password, url, pem)",
    )
    text = _script(tmp_path, *cells)
    assert "hunter2" not in text
    assert "222222" not in text
    names = re.findall(r"# Set (\w+) in the environment", text)
    values = {name: f"{at}-{name}" for at, name in enumerate(names)} | {"DB_PASSWORD_2": "234567"}
    command, env = [sys.executable, tmp_path / "train.py"], {**os.environ, **values}
    ran = subprocess.run(command, env=env, check=True, timeout=100, capture_output=True, text=True)
    for name in ("PASSWORD", "AUTH", "AUTH_2", "TOKEN", "KEY", "URL", "PEM"):
        assert values[name] in ran.stdout
    assert " 234567 " in ran.stdout


def test_secrets_are_not_written(notebook: Notebook, tmp_path: Path) -> None:
    secret = "hf_0123456789abcdefghij"
    config = f"config = {{'lr': 0.1, 'hub': {{'api_key': '{secret}', 'pwd': 'abc'}}}}"
    notebook.run(f"{config}; pad_token = '<pad>'")
    script = tmp_path / "train.py"
    out = notebook.run(
        f"%%distributed -n 1 --env HF_TOKEN={secret} --env A=b --save {script}\n"
        "def train(): return len(config['hub']['api_key']) + len(config['hub']['pwd']), pad_token"
    )
    assert not out.ename, out.traceback
    text = script.read_text()
    assert secret not in text
    for line in (
        "# Set API_KEY in the environment first: it is a secret.",
        "# Set HF_TOKEN in the environment first: it is a secret.",
        "os.environ.setdefault('A', 'b')",
        "'api_key': os.environ['API_KEY'], 'pwd': os.environ['PASSWORD']",
        "pad_token = '<pad>'",
    ):
        assert line in text


def test_a_kernels_script_leaves_out_what_failed_and_has_the_latest(
    start_kernel: Callable[[], Notebook], tmp_path: Path
) -> None:
    notebook = start_kernel()
    notebook.run("%load_ext nbtrain")
    notebook.run("def size():\n    return 1")
    notebook.run("width = 3\n\nheight = [][width]\nnever = 1")
    notebook.run("%%time\ndepth = 2\n1 / 0")
    notebook.run("def size():\n    return width + depth")
    script = tmp_path / "t.py"
    cell = f"%%distributed -n 1 --save {script}\ndef train(width): return size()"
    out = notebook.run(cell)
    assert out.stdout == f"nbtrain: wrote {script} without 3 statements (marked: left out)\n"
    text = script.read_text()
    assert "\nwidth = 3\n\n# height = [][width]  # left out: the cell failed here\n# never" in text
    assert "\ndepth = 2\n# 1 / 0  # left out: the cell failed here\n" in text
    script.write_text(text.replace("    train(width=width)", "    print(train(width=width))"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "5\n", done.stderr


@pytest.mark.parametrize(
    ("setup", "cell", "words"),
    [
        ("exec('hidden = 1')", "def train(hidden): pass", "no cell assigns `hidden`"),
        ("exec('hidden = 1')", "def train(hidden=2): pass", "no cell assigns `hidden`"),
        ("late = [][0]\nlate = 1", "def train(late=2): return late", ""),
        ("", "x = get_ipython()", "only IPython can run it"),
    ],
)
def test_what_cannot_be_exported_is_named_and_nothing_starts(
    notebook: Notebook, tmp_path: Path, setup: str, cell: str, words: str
) -> None:
    notebook.run(setup)
    before = notebook.value("str(nbtrain.last_run().folder)")
    out = notebook.run(f"%%distributed -n 1 --save {tmp_path}/t.py\n{cell}")
    assert out.ename == ("PlanError" if words else ""), out
    assert words in out.evalue
    if words:
        assert notebook.value("str(nbtrain.last_run().folder)") == before
        assert list(tmp_path.iterdir()) == []


def test_no_name_of_a_file_is_code_in_the_script(tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    notebook = _notebook(folder, "x = 1\n!pwd", "%%distributed\ndef train(): pass")
    odd = notebook.rename(folder / "notes\nraise SystemExit(7)\n\udc80\u2028.ipynb")
    script = folder / "a\rraise SystemExit(8)\n.py"
    export(odd, script)
    tree = ast.parse(script.read_bytes())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]


@pytest.mark.parametrize("option", ["--start-from 'no such/run 7'", "--start-from=7", ""])
def test_a_comment_says_that_no_checkpoint_is_loaded(tmp_path: Path, option: str) -> None:
    """The checkpoint need not exist here; the other options count as well."""
    script = _script(tmp_path, f"%%distributed {option} -n 4\n1 + 1")
    assert "torchrun --nproc_per_node 4" in script
    assert ("# The checkpoint of --start-from is not loaded." in script) == bool(option)
