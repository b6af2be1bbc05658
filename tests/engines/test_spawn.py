"""Fresh processes in place of forked ones: the same cell, the same loss, the same everything."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.support import runs
from tests.support.cells import must_run
from tests.support.kernel import Notebook

launch = functools.partial(runs.launch, engine="spawn")


SETUP = """
%load_ext nbtrain
import ctypes, torch, nbtrain, nbtrain.system.gpus
from torch import nn
nbtrain.system.gpus.gpu_count = lambda *_: 2
torch.manual_seed(5)
factor = 0.5
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    def forward(self, x):
        return scaled(self.layers(x))
def scaled(x):
    return x * factor
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(64, 8)
"""

TRAIN = """
factor = 0.25
def train(model, optimizer, data, steps=15):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    mine = data[nbtrain.rank()::nbtrain.world_size()]
    wrapped = nn.parallel.DistributedDataParallel(model)
    losses = []
    for _ in nbtrain.progress(range(steps)):
        noise = torch.randn_like(mine) * 0.1
        loss = (wrapped(mine + noise) - mine.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
"""


def test_a_dirty_kernel_trains_by_spawn_to_the_loss_of_a_clean_fork(
    start_kernel: Callable[..., Notebook],
    stub: Path,
) -> None:
    kernel = start_kernel()
    kernel.run(SETUP)
    state = "hash(torch.get_rng_state().numpy().tobytes())"
    before = kernel.value(state)
    assert kernel.run("%%distributed -n 2 --no-sync" + TRAIN).ename == ""
    forked = kernel.value("nbtrain.last_run().results")
    assert forked[0] != forked[1]
    assert forked[0][-1] < forked[0][0]

    kernel.run(f"ctypes.CDLL({str(stub)!r}).cuInit(0)")
    refused = kernel.run("%%distributed -n 2" + TRAIN)
    assert refused.ename == "AcceleratorInitializedError"
    assert "--engine spawn" in refused.traceback
    assert refused.displays == []

    out = must_run(kernel, "%%distributed -n 2 --engine spawn" + TRAIN)
    assert "spawn" in out.board
    assert kernel.value("nbtrain.last_run().results") == forked
    assert kernel.value(state) == before
    assert kernel.value("factor") == 0.5


def test_a_cell_in_a_fresh_process_is_still_a_cell_of_the_notebook(notebook: Notebook) -> None:
    notebook.run("class Odd(ValueError): pass\nfactor = 3\ndef helper(x): return factor * x")
    out = notebook.run(
        "%%distributed -n 1 -e spawn\n"
        "!echo from the shell\n"
        "%env NBTRAIN_TEST=magic\n"
        "display({'shown': 1})\n"
        "import inspect, os, sys\n"
        "print(inspect.getsource(helper), os.environ['NBTRAIN_TEST'])\n"
        "print('in the log', file=sys.stderr)\n"
        "raise Odd(f'{helper(14)}')"
    )
    assert (out.ename, out.evalue) == ("Odd", "42")
    assert "----> 8 raise Odd" in out.traceback
    log = notebook.run("print(nbtrain.last_run().logs(0))").stdout
    for said in ("from the shell", "{'shown': 1}", "return factor * x", "magic", "in the log"):
        assert said in log
    assert "raise Odd(f'{helper(14)}')" in log  # with its line, as the notebook knows it
    assert notebook.run(
        "try:\n    %distributed -n 1 -e spawn (_ for _ in ()).throw(Odd('again'))\n"
        "except Odd as error: print('caught', error)"
    ).stdout.startswith("caught again")


def test_an_error_in_a_helper_of_the_notebook_shows_its_cell_and_line(notebook: Notebook) -> None:
    notebook.run(
        "def divide(x):\n    def inner(): return x / 0\n    return inner()\n"
        "class Model:\n    def forward(self): return [divide(n) for n in (1, 2)]"
    )
    number = notebook.value("get_ipython().execution_count") - 2
    out = notebook.run("%%distributed -n 1 -e spawn\nModel().forward()")
    assert out.ename == "ZeroDivisionError"
    shown = out.traceback
    assert "----> 2     def inner(): return x / 0" in shown
    assert "----> 3     return inner()" in shown
    assert "----> 5     def forward(self): return [divide(n) for n in (1, 2)]" in shown
    cell = notebook.value("divide.__code__.co_filename")  # which older IPythons show
    assert re.search(rf"In ?\[{number}\]", shown) or cell in shown, shown


def test_instances_of_the_notebooks_classes_come_back_as_such(notebook: Notebook) -> None:
    notebook.run(
        "class Point:\n    made = 0\n    def __init__(self, x): self.x = x\n"
        "    class Inner:\n        def name(self): return 'here'\n"
        "p, q = Point(1), Point.Inner()"
    )
    notebook.run(
        "%%distributed -n 1 -e spawn\nPoint.made = 5\nPoint.Inner.name = lambda self: 'there'\n"
        "(p, Point(2), q)"
    )
    assert notebook.run("a, b, c = nbtrain.last_run().value").ename == ""
    assert notebook.value("(type(a) is Point, b.x, Point.made, q.name())") == (True, 2, 0, "here")


NAMED = {
    "def train(gate=Lock()): pass": "train(gate=…)",
    "gate = Lock()\ndef train():\n    def inner(): train, gate\n    return inner": "train → gate",
    "def train(): pass\ntrain.gate = Lock()": "train.gate",
}


def test_what_is_named_is_outside_of_the_function(notebook: Notebook) -> None:
    notebook.run("from threading import Lock")
    for source, named in NAMED.items():
        out = notebook.run(f"{source}\nnbtrain.launch(train, num_processes=1, engine='spawn')")
        assert out.ename == "PlanError", source
        assert f"`{named}`, a _thread.lock, " in out.evalue
        assert "Build it inside the training function." in out.evalue
    compiled = "@torch.compile\ndef step(): pass\ndef train(): step()\n"
    out = notebook.run(f"import torch\n{compiled}nbtrain.launch(train, engine='spawn')")
    assert "`train → step`, a " in out.evalue
    assert "Build it" not in out.evalue


def test_a_fresh_process_has_what_multiprocessing_sends_to_its_own(notebook: Notebook) -> None:
    must_run(
        notebook,
        "import multiprocessing as mp, os, sys\n"
        "argv = [*sys.argv]\n"
        "sys.argv += ['--rate', '0.5']\n"
        "key = bytes(mp.current_process().authkey)\nmanager = mp.Manager()\n"
        "seen, told = manager.dict(), manager.Queue()\n"
        "def train():\n    seen[os.environ['RANK']] = bytes(mp.current_process().authkey) == key\n"
        "    told.put(sys.argv)\n"
        "nbtrain.launch(train, num_processes=2, engine='spawn')\n"
        "arrived = dict(seen), [told.get(), told.get()] == 2 * [sys.argv]\n"
        "manager.shutdown()\nsys.argv[:] = argv",
    )
    assert notebook.value("arrived") == ({"0": True, "1": True}, True)


def test_what_cannot_be_loaded_there_is_told_as_the_ranks_failure(tmp_path: Path) -> None:
    (tmp_path / "vanishing_module.py").write_text("class K: pass\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import vanishing_module  # type: ignore[import-not-found]

        assert launch(lambda k: type(k).__module__, vanishing_module.K()).value
        (tmp_path / "vanishing_module.py").unlink()
        for cached in tmp_path.glob("__pycache__/*"):
            cached.unlink()
        with pytest.raises(ModuleNotFoundError, match="vanishing_module") as raised:
            launch(len, vanishing_module.K())
        assert "in a fresh process" in str(raised.value.__notes__)
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("vanishing_module", None)


def test_the_model_is_in_memory_once_however_many_ranks_read_it() -> None:
    model = torch.nn.Linear(4000, 4000)  # 64 MB

    def look(model: Any) -> tuple[int, int, float]:
        read = float(model.weight.detach().sum())
        mapped = [m for m in psutil.Process().memory_maps() if "memfd:nbtrain" in m.path]
        untouched = sum(m.anonymous for m in mapped)
        with torch.no_grad():
            model.weight.zero_()
        mapped = [m for m in psutil.Process().memory_maps() if "memfd:nbtrain" in m.path]
        return untouched, sum(m.anonymous for m in mapped), read

    for untouched, written, read in launch(look, model, n=2, sync=False).results:
        assert untouched < 1 << 20
        assert written > 60 << 20
        assert read == pytest.approx(float(model.weight.detach().sum()), abs=1e-2)


HOLDINGS = """
import collections, dataclasses, enum, functools, logging, warnings
import numpy as np, torch
from torch import nn
import torch.nn.functional as F

@functools.lru_cache(maxsize=7)
def cached(n): return n if n < 2 else cached(n - 1) + cached(n - 2)
class Colour(enum.Enum):
    RED = 1
@dataclasses.dataclass
class Point:
    x: int
    colour: Colour = Colour.RED
Pair = collections.namedtuple("Pair", "a b")
class Base:
    count = 0
    def __init__(self): type(self).count += 1
class Derived(Base):
    def __init__(self):
        super().__init__()
        self.where = here()
def here(): return place
def reads(): return steps * 2
place, steps = "notebook", 1
derived, pair, point = Derived(), Pair(1, [2]), Point(3)
leaf = torch.ones(3, requires_grad=True)
(leaf * 2).sum().backward()
words = torch.arange(6, dtype=torch.float32)
as_ints, strided = words.view(torch.int32), torch.arange(12).reshape(3, 4).t()
tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)); tied[1].weight = tied[0].weight
locked = np.zeros(20000); locked.flags.writeable = False
log = logging.getLogger("mine"); log.setLevel(logging.INFO)
warnings.filterwarnings("error", message="special")
torch.set_default_dtype(torch.float64); torch.set_grad_enabled(False)
torch.backends.cudnn.deterministic = True
big = [0] * 10
"""

LOOK = """
steps = 5
%time timed = steps + len(big)
del big
def look():
    try: warnings.warn("special"); warned = False
    except UserWarning: warned = True
    try: locked[0] = 1; wrote = True
    except ValueError: wrote = False
    return repr({
        "cached": (cached(20), cached.cache_parameters(), cached.cache_info().currsize),
        "enum": point.colour is Colour.RED, "point": point, "pair": pair,
        "class": (Derived.count, Derived().where, type(derived) is Derived, Base.count),
        "reads": reads(), "grad": (leaf.grad.tolist(), leaf.requires_grad),
        "views": (as_ints.tolist(), strided.stride(), strided.tolist()),
        "tied": tied[0].weight is tied[1].weight, "locked": wrote,
        "level": (log.level, logging.root.level), "warned": warned,
        "settings": (torch.get_default_dtype(), torch.is_grad_enabled(),
                     torch.backends.cudnn.deterministic),
        "F": F.relu(torch.tensor([-1.0])).tolist(), "timed": timed,
    })
"""


@pytest.mark.slow
def test_whatever_a_notebook_holds_is_what_a_forked_rank_would_find(
    start_kernel: Callable[..., Notebook],
) -> None:
    kernel = start_kernel()
    kernel.run("%load_ext nbtrain\nimport nbtrain")
    must_run(kernel, HOLDINGS)
    found = {}
    for engine in ("fork", "spawn"):
        must_run(kernel, f"%%distributed -n 1 -e {engine}{LOOK}")
        found[engine] = kernel.value("nbtrain.last_run().value")
    assert found["spawn"] == found["fork"]


def test_what_would_arrive_as_something_else_is_refused(notebook: Notebook) -> None:
    notebook.run(
        "leaf = torch.ones(2, requires_grad=True)\ncomputed = leaf * 2\n"
        "@torch.compile(backend='eager')\ndef compiled(x): return x"
    )
    for cell, said in (
        ("computed.sum()", "tensors that need gradients"),
        ("compiled(1)", "torch.compile in the training function"),
    ):
        out = notebook.run(f"%%distributed -n 1 -e spawn\n{cell}")
        assert out.ename == "PlanError"
        assert said in out.traceback


def test_a_module_of_the_folder_that_is_named_like_pythons_own_does_no_harm(
    start_kernel: Callable[..., Notebook],
) -> None:
    kernel = start_kernel()
    kernel.run("import nbtrain\n%load_ext nbtrain\nopen('json.py', 'w').close()")
    must_run(kernel, "%distributed -n 1 -e spawn 1 + 1")
