"""A training cell as a script: what is in it, and that it trains as the notebook did."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nbtrain.commands import cli
from nbtrain.commands.export import export, slicing, statements
from nbtrain.errors import PlanError
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
    accelerator.end_training()  # else a process that ends as gloo's threads run may abort
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


ABORTED = "terminate called without an active exception"
"""What torch says when it ends a process whose gloo threads run: no launcher keeps it from that."""


def _run(script: Path, out: Path, *command: str) -> list[list[float]]:
    """Run a script; return the losses of its ranks."""
    environment = {**os.environ, "LOSSES": str(out), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *command, str(script)]
    for _ in range(4):
        told = subprocess.run(
            words, capture_output=True, text=True, env=environment, timeout=100, cwd=out.parent
        )
        if told.returncode == 0 or ABORTED not in told.stderr:
            break
    assert told.returncode == 0, told.stderr
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
    assert out.stdout == f"nbtrain: wrote {file}, train.nbtrain.safetensors\n"
    losses = notebook.value("nbtrain.last_run().results")
    assert [len(of_rank) for of_rank in losses] == [16 // ranks] * ranks
    static = file.with_name("static.py")
    export(_notebook(tmp_path, *CELLS, TRAIN), static)
    for number, launcher in enumerate(launchers):  # plain Python runs the one from the file
        script = file if launcher else static
        assert _run(script, tmp_path / f"losses{number}", *launcher) == losses


@pytest.mark.slow
def test_a_script_knows_accelerates_tracker_where_the_training_asks_for_it(tmp_path: Path) -> None:
    train = (
        "%%distributed -n 2\nimport os\nfrom accelerate import Accelerator\n"
        "def train():\n"
        "    accelerator = Accelerator(log_with='nbtrain')\n"
        "    accelerator.init_trackers('mine')\n"
        "    accelerator.log({'loss': 1.0}, step=1)\n"
        "    with open(os.environ['LOSSES'] + '-0', 'w') as file:\n"
        "        print([t.name for t in accelerator.trackers], file=file)\n"
    )
    assert "offer_tracker" in _script(tmp_path, train)
    assert _run(tmp_path / "train.py", tmp_path / "losses") == [["nbtrain"]]
    assert "nbtrain" not in _script(tmp_path, train.replace("'nbtrain'", "'all'")).split("\n", 2)[2]


def test_a_script_has_what_the_training_needs_and_no_more(tmp_path: Path) -> None:
    script = _script(tmp_path, *CELLS, TRAIN)
    tree = ast.parse(script)
    assert [ast.unparse(n) for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))] == [
        "import os",
        "import torch",
        "from torch import nn, optim",
        "from torch.utils.data import DataLoader, TensorDataset",
        "from accelerate import Accelerator",
        "from accelerate.utils import set_seed",
    ]
    defined = [n.name for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef))]
    assert defined == ["Net", "dataset", "make", "train"]
    for text in ("# how many\nepochs = 2  # enough", "        # two\n", "    # the loop\n"):
        assert text in script
    for text in ("\nrate = 0.1\n", "model = Net(8)\n", "torch.manual_seed(3)"):
        assert text in script
    for text in ("unused", "print(model)", "never_called", "load_ext", "hello"):
        assert text not in script
    assert "# !echo in the cell  #" in script
    assert script.endswith(
        'if __name__ == "__main__":\n    train(model=model, rate=rate, epochs=epochs)\n'
    )
    assert script.startswith("# Made by nbtrain from cell 6 of notes.ipynb, 20")
    assert "#     torchrun --nproc_per_node 2 train.py" in script


def _needed(source: str, *wanted: str) -> list[str]:
    found, missing = slicing.needed(statements.read(source, "In[1]"), wanted)
    return [*(s.text for s in found), *sorted(missing)]


@pytest.mark.parametrize(
    ("source", "wanted", "found"),
    [
        ("x = 1\ny = 2", ["y"], ["y = 2"]),
        ("x = 1\nx = 2", ["x"], ["x = 2"]),
        ("x = 1\nx += 2", ["x"], ["x = 1", "x += 2"]),
        ("x = 1\nif a:\n    x = 2", ["x"], ["x = 1", "if a:\n    x = 2", "a"]),
        (
            "def f():\n    return g()\ndef g(): pass",
            ["f"],
            ["def f():\n    return g()", "def g(): pass"],
        ),
        ("m = M()\nm.eval()\nm.show()\nprint(m)\nm", ["m"], ["m = M()", "m.eval()", "M"]),
        ("m = 1\nm.head = 2\nn = m", ["m"], ["m = 1", "m.head = 2"]),
        ("m = 1\nfreeze(m)", ["m"], ["m = 1", "freeze(m)", "freeze"]),
        ("m = 1\nold = m.half_()\nnew = m.copy()", ["m"], ["m = 1", "old = m.half_()"]),
        (
            "m = 1\nfor p in m.all():\n    p.ok = False\nfor p in m.all():\n    print(p)",
            ["m"],
            ["m = 1", "for p in m.all():\n    p.ok = False"],
        ),
        ("import a.b\nimport a.c\nx = a", ["x"], ["import a.b", "import a.c", "x = a"]),
        ("from a import *", ["b"], ["from a import *"]),
        ("import os\nos.environ['A'] = '1'", [], ["import os", "os.environ['A'] = '1'"]),
        (
            "def f():\n    global n\n    n = 1\nf()\ndef g(): pass\ng()",
            ["n"],
            ["def f():\n    global n\n    n = 1", "f()"],
        ),
        ("a = 1; b = 2", ["b"], ["b = 2"]),
        (
            "# why\n# so\na = 1  # here\n\n# not this\n\nb = 2",
            ["a"],
            ["# why\n# so\na = 1  # here"],
        ),
        ("@d\ndef f(): pass", ["f"], ["@d\ndef f(): pass", "d"]),
    ],
)
def test_the_statements_that_a_name_needs(source: str, wanted: list[str], found: list[str]) -> None:
    assert _needed(source, *wanted) == found


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["x = 1"], "no %%distributed cell"),
        (["%%distributed\ndef train(modle): pass"], "uses `modle`"),
        (["model = 1", "%%distributed\ndef train(modle): pass"], "there is `model`"),
        (["files = !ls", "%%distributed\nlen(files)"], "magic or a shell command"),
        (["%%distributed\nfiles = !ls\nlen(files)"], "magic or a shell command"),
        (["%%distributed\ndef f():\n    %time x = 1\nf()"], "'%time x = 1'"),
        (["import asyncio\nx = await asyncio.sleep(0)", "%%distributed\nprint(x)"], "`await`"),
        (["%%distributed\nawait nothing()"], "`await`"),
        (["%%distributed\ndef train(:"], "cell 1 of notes.ipynb, line 2"),
        (["%%distributed\ndef a(): pass", "%%distributed\ndef b(x): pass"], "--cell 2: def b(x)"),
    ],
)
def test_what_no_script_can_be_is_said(tmp_path: Path, cells: list[str], words: str) -> None:
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
    assert "torchrun" not in script.read_text()
    script.write_text("print('mine')\n")
    assert cli.main([*words, "1"]) == 1
    assert "nbtrain did not write it" in capsys.readouterr().err
    assert script.read_text() == "print('mine')\n"
    assert cli.main(["export", str(tmp_path / "none.ipynb")]) == 1
    (tmp_path / "bad.ipynb").write_text("{}")
    assert cli.main(["export", str(tmp_path / "bad.ipynb")]) == 1


def test_the_commands_quote_names_with_a_space(tmp_path: Path) -> None:
    notebook = _notebook(tmp_path, "%%distributed --config 'my file.yaml'\n1", "%%distributed\n2")
    script = tmp_path / "my train.py"
    words = ["export", str(notebook), "-o", str(script), "--cell"]
    assert cli.main([*words, "1"]) == 0
    command = "#     accelerate launch --config_file 'my file.yaml' 'my train.py'\n"
    assert command in script.read_text()
    assert cli.main([*words, "2"]) == 0
    assert "#     python 'my train.py'\n" in script.read_text()
    assert "#     torchrun --nproc_per_node 2 'my train.py'\n" in script.read_text()


def test_secrets_are_not_written(notebook: Notebook, tmp_path: Path) -> None:
    secret = "hf_0123456789abcdefghij"
    notebook.run(f"hub_token = '{secret}'; pad_token = '<pad>'; tokenizer = 'a-name-of-one-more'")
    script = tmp_path / "train.py"
    out = notebook.run(
        f"%%distributed -n 1 --env HF_TOKEN={{hub_token}} --env A=b --save {script}\n"
        "def train(): return len(hub_token), pad_token, tokenizer"
    )
    assert not out.ename, out.traceback
    text = script.read_text()
    assert secret not in text
    assert "# HF_TOKEN is secret and not written here: set it in the environment." in text
    assert "os.environ.setdefault('A', 'b')" in text
    assert "hub_token = os.environ['HUB_TOKEN']  # secret: not written here" in text
    assert "pad_token = '<pad>'" in text
    assert "tokenizer = 'a-name-of-one-more'" in text


def test_secrets_inside_of_a_configuration_are_not_written(
    notebook: Notebook, tmp_path: Path
) -> None:
    secret = "sk-0123456789abcdefghij"
    notebook.run(f"config = {{'lr': 0.1, 'hub': {{'api_key': '{secret}', 'pwd': 'abc'}}}}")
    script = tmp_path / "train.py"
    out = notebook.run(
        f"%%distributed -n 1 --env WANDB_API_KEY={secret} --save {script}\n"
        "def train(): return len(config['hub']['api_key']) + len(config['hub']['pwd'])"
    )
    assert not out.ename, out.traceback
    text = script.read_text()
    assert secret not in text
    assert "'abc'" not in text
    assert "'api_key': os.environ['API_KEY'], 'pwd': os.environ['PWD']" in text
    environment = {**os.environ, "API_KEY": "12", "PWD": "3", "WANDB_API_KEY": "x"}
    subprocess.run([sys.executable, str(script)], env=environment, check=True, timeout=100)


SAVED = """
import torch, collections, functools, pathlib, typing
import numpy as np
class Point(tuple): pass
def twice(x): return 2 * x
def outer(k):
    def inner(x): return k * x
    return inner
long, big, turn = 'a' * 300, 10**5000, 1j
names, empty, deep = ['a', 'b'], {}, {'a': [1, (2.5, None)]}
nan, kind, device, folder = float('nan'), torch.bfloat16, torch.device('cpu'), pathlib.Path('/x')
weights, turned = torch.arange(6.0), torch.arange(6.0).reshape(2, 3).T
parts = {'w': torch.ones(2), 'b': torch.zeros(1)}
array, points, counts = np.arange(3), [Point((1, 2))], collections.Counter('aab')
Path, Kind = 'no path', typing.TypeVar('Kind')
def same(x: Kind) -> Kind: return x
closure, half = outer(3), functools.partial(twice, x=4)
square = lambda x: x * x
layer = torch.nn.Linear(2, 2)
layer.bias.requires_grad = False
optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
"""
USED = """import math
def train(layer, optimizer):
    mine = optimizer.param_groups[0]['params'][0] is layer.weight
    return repr([len(long), big % 7, turn,
                 same(Path), names, empty, deep, nan, kind, device, folder,
                 weights, parts, array, points, counts, closure(2), half(), square(3),
                 layer.state_dict(), mine,
                 layer.bias.requires_grad, type(points[0]).__name__, math.pi, turned.stride()])
"""


@pytest.mark.slow
def test_values_of_the_notebook_go_along(notebook: Notebook, tmp_path: Path) -> None:
    assert not notebook.run(SAVED).ename
    script = tmp_path / "values.py"
    out = notebook.run(f"%%distributed -n 1 --save {script}\n{USED}")
    assert not out.ename, out.traceback
    assert out.stdout.endswith("/values.py, values.nbtrain.pkl, values.nbtrain.safetensors\n")
    text = script.read_text()
    for line in ("names = ['a', 'b']", "kind = torch.bfloat16", "nan = float('nan')"):
        assert f"\n{line}\n" in text
    assert "square = lambda x: x * x" in text
    script.write_text(re.sub(r"    (train\(layer=.*)", r"    print(\1)", text))
    told = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert told.stdout.strip() == notebook.value("nbtrain.last_run().value"), told.stderr


@pytest.mark.parametrize(
    ("setup", "cell", "words"),
    [
        (
            "import socket\ndef far(s):\n    def send(): return s\n    return send\n"
            "send = far(socket.socket())",
            "def train(send): pass",
            "socket.socket, cannot be exported",
        ),
        ("log = open('/dev/null')", "def train(log): pass", "`log`, a _io.TextIOWrapper"),
        ("lines = (i for i in [1])", "print(lines)", "`lines`, a generator"),
        ("fast = torch.compile(lambda x: x)", "def train(fast): pass", "`fast` was compiled"),
        ("w = torch.ones(1, requires_grad=True) * 2", "def train(w): pass", "`w`"),
        ("", "x = get_ipython()", "magic or a shell command"),
    ],
)
def test_what_cannot_be_exported_is_named_and_nothing_starts(
    notebook: Notebook, tmp_path: Path, setup: str, cell: str, words: str
) -> None:
    notebook.run(setup)
    before = notebook.value("str(nbtrain.last_run().folder)")
    out = notebook.run(f"%%distributed -n 1 --save {tmp_path}/t.py\n{cell}")
    assert out.ename == "PlanError", out
    assert words in out.evalue
    assert notebook.value("str(nbtrain.last_run().folder)") == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_without_a_seed_the_notebooks_random_numbers_go_on(
    notebook: Notebook, tmp_path: Path
) -> None:
    notebook.run("torch.manual_seed(torch.seed())\nmodel = torch.nn.Linear(3, 3)")
    script, out = tmp_path / "t.py", tmp_path / "out"
    cell = (
        f"%%distributed -n 1 --save {script}\nfrom pathlib import Path\ndef train(model):\n"
        f"    drawn = repr((model.weight.tolist(), torch.randn(3).tolist()))\n"
        f"    Path({str(out)!r}).write_text(drawn)\n    return drawn"
    )
    assert not notebook.run(cell).ename
    out.unlink()
    subprocess.run([sys.executable, str(script)], check=True, timeout=60)
    assert out.read_text() == notebook.value("nbtrain.last_run().value")
    seeded = cell.replace("    drawn", "    torch.manual_seed(1)\n    drawn", 1)
    assert not notebook.run(seeded).ename
    assert "set_rng_state" not in script.read_text()


def test_the_latest_definition_counts_and_a_changed_model_is_pickled(
    notebook: Notebook, tmp_path: Path
) -> None:
    notebook.run("def size():\n    return 1")
    notebook.run("def size():\n    return 2")
    notebook.run("model = torch.nn.Linear(size(), 2)\nsize_of_it = 2")
    script = tmp_path / "t.py"
    cell = f"%%distributed -n 1 --save {script}\ndef train(model):\n    return size()"
    told = notebook.run(cell).stdout
    assert told.endswith("t.py, t.nbtrain.safetensors\n")
    text = script.read_text()
    assert "return 2" in text
    assert "return 1" not in text
    assert "model = torch.nn.Linear(size(), 2)" in text
    assert "model.load_state_dict(" in text
    notebook.run("model.extra = 3")
    assert "t.nbtrain.pkl" in notebook.run(cell).stdout
    notebook.run("model = torch.nn.Linear(size(), 2)")
    assert ".pkl" not in notebook.run(cell).stdout
    notebook.run("alias = model.bias\nalias.requires_grad = False")  # seen in the model alone
    assert "t.nbtrain.pkl" in notebook.run(cell).stdout
