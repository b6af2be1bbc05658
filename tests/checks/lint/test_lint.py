"""Lint: what it finds, at which line and column, and that correct code is left in peace."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import json
import linecache
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.compilerop import CachingCompiler
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from nbtrain.checks import lint
from nbtrain.lifecycle.launcher import run_plan
from nbtrain.planning import accelerate_config
from nbtrain.planning.cell import read_cell
from nbtrain.planning.plan import Call, Cell, Plan
from tests.support.loops import CORRECT, PLAIN, UNCERTAIN
from tests.support.paths import NOTEBOOKS, ROOT

NOT_LOOPS = (  # wrong on purpose, plain on purpose, for one rank
    "loops.py",
    "test_catalog.py",
    "test_summary.py",
    "test_lint.py",
    "test_uncalled_function.py",
    "test_training_meter.py",
    "test_work_sample.py",
    "test_data_loading.py",
    "telemetry.py",
    "test_state_io.py",
    "test_not_copied_back.py",
    "test_folds.py",
    "test_hooks.py",
    "check_system.py",
    "gpu",
)


def cell(source: str, **namespace: Any) -> Cell:
    return read_cell(source, "<cell>", namespace)


def found(source: str, host: str = "cpu", **namespace: Any) -> list[Any]:
    """Return (code, line, column) of every finding."""
    findings = lint.lint(cell(source, **namespace), device=host)
    return [(finding.code, finding.place.line, finding.place.column) for finding in findings]


def defined(source: str, filename: str, **namespace: Any) -> dict[str, Any]:
    """Run a cell as IPython does: its source in linecache, its names in the notebook."""
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    namespace["__name__"] = "__main__"
    exec(compile(source, filename, "exec"), namespace)
    return namespace


# No false finding


@pytest.mark.parametrize("name", CORRECT)
@pytest.mark.parametrize("host", ["cpu", "cuda"])
def test_correct_cells_are_left_in_peace(name: str, host: str) -> None:
    assert found(CORRECT[name], host) == []
    model = nn.Linear(1, 1)
    data = TensorDataset(torch.zeros(4, 1), torch.zeros(4, 1))
    values = {"model": model, "loader": DataLoader(data), "data": data, "teacher": model}
    assert found(CORRECT[name], host, train_loader=DataLoader(data), **values) == []


def test_every_cell_of_the_notebooks_is_left_in_peace() -> None:
    count = 0
    for path in NOTEBOOKS.glob("*.ipynb"):
        # A later cell on live ranks may call a function: `launcher` leaves the note out.
        are_live = {"not-called"} if "%nbtrain start" in path.read_text() else set[str]()
        for each in json.loads(path.read_text())["cells"]:
            if each["cell_type"] != "code":
                continue
            lines = "".join(each["source"]).splitlines()
            source = "\n".join("" if line.startswith("%") else line for line in lines)
            for host in ("cpu", "cuda"):
                notes = lint.lint(Cell(source, "<cell>", {}), device=host)
                # The kernel itself runs a cell without the magic.
                left_out = are_live if "%%distributed" in lines else {"not-called", "save"}
                assert [note for note in notes if note.code not in left_out] == []
            count += 1
    assert count > 8


def _texts(path: Path) -> list[str]:
    """Return a file's own source if it trains, and the strings in it that are cells."""
    tree = ast.parse(path.read_text())
    texts = [path.read_text()] if "backward" in path.read_text() else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            texts.append(node.value.replace("%%distributed", "#"))
    return texts


@pytest.mark.parametrize(
    "path",
    [p for p in (ROOT / "tests").rglob("*.py") if not {*p.parts} & {*NOT_LOOPS}],
    ids=lambda p: p.name,
)
def test_every_cell_of_the_tests_is_left_in_peace(path: Path) -> None:
    for text in _texts(path):
        # Some texts are no Python.
        with contextlib.suppress(SyntaxError, ValueError, lint.SourceTooLongError):
            notes = lint.lint(Cell(text, "<cell>", {}))
            assert [note for note in notes if note.code != "not-called"] == []


# The rules


HEAD = "accelerator = Accelerator()\nmodel, opt, dl = accelerator.prepare(model, opt, dl)\n"
STEP = HEAD + "for x in dl:\n    {}\n    opt.step()\n"
BASELINE = """
def train_baseline():
    accelerator = Accelerator()
    model, optimizer, loader = get_utilities()
    model.to(accelerator.device)
    for batch in loader:
        loss = model(batch)
        loss.backward()
        optimizer.step()

def train():
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(*get_utilities())
    for batch in loader:
        loss = model(batch)
        accelerator.backward(loss)
        optimizer.step()

train_baseline()
train()
"""
UNPREPARED = BASELINE.replace("accelerator.prepare(*get_utilities())", "get_utilities()")

BACKWARD = {
    "a loss": (STEP.format("loss = model(x)\n    loss.backward()"), [(5, 5)]),
    "a mean": (STEP.format("model(x).mean().backward()"), [(4, 5)]),
    "a quotient": (STEP.format("(model(x) / 2).backward()"), [(4, 5)]),
    "a scaled loss": (STEP.format("s.scale(x).backward(retain_graph=True)"), [(4, 5)]),
    "an output's loss": (STEP.format("out = model(x)\n    out.loss.backward()"), [(5, 5)]),
    "in a function that gets the Accelerator": (
        "def step(accelerator, loss, opt):\n    loss.backward()\n    opt.step()\n"
        "def train(model):\n    acc = Accelerator()\n    step(acc, model(1), 2)",
        [(2, 5)],
    ),
    "in a function that gets none": (
        "def step(loss, opt):\n    loss.backward()\n    opt.step()\n"
        "def train(model):\n    acc = Accelerator()\n    step(model(1), 2)",
        [],
    ),
    "one of two": (
        STEP.format("d = model(x)\n    d.backward()\n    opt.step()\n    accelerator.backward(d)"),
        [(5, 5)],
    ),
    "no optimizer steps": (f"{HEAD}for x in dl:\n    loss = model(x)\n    loss.backward()", []),
    "a step beside a function that needs gradients for itself": (
        "def attack(x):\n    model(x).sum().backward()\n    return x.grad.sign()\n"
        + STEP.format("accelerator.backward(model(x))"),
        [],
    ),
    "a default that the call replaces": (
        f"{HEAD}def fit(backward=lambda loss: loss.backward()):\n"
        "    for x in dl:\n        backward(model(x))\n        opt.step()\n"
        "fit(accelerator.backward)",
        [],
    ),
    "a loop for comparison": (BASELINE, []),
    "a loop beside one for comparison": (
        BASELINE.replace("accelerator.backward(loss)", "loss.backward()"),
        [(16, 9)],
    ),
    "two loops, neither prepared": (UNPREPARED, []),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_past_accelerate_is_found(name: str) -> None:
    source, places = BACKWARD[name]
    assert [place for code, *place in found(source) if code == "backward"] == [[*p] for p in places]


def test_a_finding_says_where_it_is_and_what_to_write() -> None:
    (finding,) = lint.lint(cell(BACKWARD["one of two"][0]))
    assert "accelerator.backward(d)" in finding.text
    assert finding.full_text == f"line 5, column 5: {finding.text} [backward]"


@pytest.mark.parametrize(
    ("line", "column"),
    [
        ('model.to("cuda")', 10),
        ('model = model.to("cuda:0", non_blocking=True)', 18),
        ("model.cuda()", 1),
        ("é = x.cuda(0)", 5),
        ('y = "é", x.to(torch.device("cuda"))', 28),
        ('z = torch.zeros(3, 4, device="cuda")', 30),
        ('d = torch.device("cuda:1" if fast else "cpu")', 18),
        ("torch.cuda.set_device(0)", 1),
        ('device = "cuda"; model.to(device)', 10),
        ('device = "cuda" if fast else "cpu"\nx.to(device)', 10),
        ('x = x.to(device="xpu")', 17),
    ],
)
@pytest.mark.parametrize("start", ["accelerator = Accelerator()", "dist.init_process_group()"])
def test_a_device_that_all_ranks_would_share_is_found(start: str, line: str, column: int) -> None:
    assert found(f"{start}\n{line}") == [("device", 2, column)]


_IF_THERE = 'd = torch.device("cuda" if torch.cuda.is_available() else "cpu")\n'
_IF_THERE += 'if torch.cuda.is_available():\n    model.to("cuda")'
_CHOSEN = 'torch.cuda.set_device(local_rank)\nmodel.to("cuda")\nx.cuda()\n'
_OLD_TORCH = (
    'device = torch.accelerator.x if hasattr(torch, "accelerator") else "cuda"\nx.to(device)'
)


@pytest.mark.parametrize(
    ("source", "on_gpus", "on_cpus"),
    [
        (_IF_THERE, [(1, 18), (3, 14)], []),
        (_CHOSEN, [], []),
        (_CHOSEN + 'x.to("cuda:0")', [(4, 6)], [(4, 6)]),
        ('os.environ["CUDA_VISIBLE_DEVICES"] = str(i)\nmodel.to("cuda:0")', [], []),
        ('if rank == 0:\n    x.to("cuda:0")', [], []),
        ('mesh = init_device_mesh("cuda", (2,))\nmodel.to("cuda")', [], []),
        ('torch.accelerator.set_device_index(local_rank)\nx.to("cuda")', [], []),
        (_OLD_TORCH, [], []),
        ("class A(nn.Module):\n    def forward(self, x):\n        x.cuda()\nA()", *[[(3, 9)]] * 2),
        *(
            (f"state = {maker}\nx.to({device!r})", [(2, 6)] if ":" in device else [], [(2, 6)])
            for maker in ("Accelerator()", "PartialState()", "TrainingArguments('out')")
            for device in ("cuda", "cuda:0")
        ),
    ],
)
def test_a_plain_cuda_is_the_ranks_own_where_something_chose_it(
    source: str, on_gpus: list[Any], on_cpus: list[Any]
) -> None:
    assert found(source, "cuda") == [("device", *place) for place in on_gpus]
    assert found(source) == [("device", *place) for place in on_cpus]


@pytest.mark.parametrize(
    ("value", "on_gpus", "on_cpus"),
    [
        (torch.device("cuda:0"), True, True),
        ("cuda", True, True),
        ("cpu", True, False),
        (torch.device("cpu"), True, False),
        (3, False, False),
    ],
)
def test_a_device_of_the_notebook_is_found_where_there_is_another(
    value: Any, on_gpus: bool, on_cpus: bool
) -> None:
    source = "accelerator = Accelerator()\nx = x.to(device)\ny.to(device)"
    assert found(source, "cuda", device=value) == [("device", 2, 10)] * on_gpus
    assert found(source, "cpu", device=value) == [("device", 2, 10)] * on_cpus
    assert found("device = accelerator.device\nx.to(device)", "cuda", device=value) == []


LOOP = """
def train(model):
    accelerator = Accelerator()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    dl = DataLoader(data, batch_size=4, shuffle=True)
    {prepare}
    for epoch in range(3):
        for i, (x, y) in enumerate(tqdm(dl, desc="x")):
            opt.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            opt.step()
"""
LOADER, MODEL, OPTIMIZER = ("prepare", 8, 41), ("prepare", 10, 50), ("prepare", 11, 13)
WITHOUT_LOADER = LOOP.format(prepare="model, opt = accelerator.prepare(model, opt)")


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        ("model, opt, dl = accelerator.prepare(model, opt, dl)", []),
        ("model, opt = accelerator.prepare(model, opt)", [LOADER]),
        ("opt, dl = accelerator.prepare(opt, dl)", [MODEL]),
        ("model, dl = accelerator.prepare(model, dl)", [OPTIMIZER]),
        ("pass", [LOADER, MODEL, OPTIMIZER]),
        ("model = model.to(accelerator.device)", [LOADER, MODEL, OPTIMIZER]),
        ("accelerator.prepare(model, opt, dl)", [LOADER, MODEL, OPTIMIZER]),
        ("model, opt, dl = setup(accelerator, model, opt, dl)", []),
        ("model, opt, dl = map(accelerator.prepare, (model, opt, dl))", []),
        ("model, opt, dl = accelerator.prepare(*things)", []),
        ("model = opt = dl = helper(accelerator)", []),
        ("things = accelerator.prepare([model, opt, dl])", []),
    ],
)
def test_what_never_goes_through_prepare_is_found(prepare: str, expected: list[Any]) -> None:
    assert found(LOOP.format(prepare=prepare)) == expected


@pytest.mark.parametrize(
    "own",
    [
        "DataLoader(data, sampler=mine)",
        "DataLoader(data.shard(8, accelerator.process_index))",
        "DataLoader(data[accelerator.process_index :: 2])",
        "DataLoader(split_dataset_by_node(data, 0, 2))",
    ],
)
def test_a_loader_of_the_ranks_own_part_is_left_in_peace(own: str) -> None:
    made = "DataLoader(data, batch_size=4, shuffle=True)"
    assert found(WITHOUT_LOADER) == [LOADER]
    assert found(WITHOUT_LOADER.replace(made, own)) == []


def test_loaders_handed_in_are_judged_by_what_they_are() -> None:
    source = WITHOUT_LOADER.replace("    dl = DataLoader(data, batch_size=4, shuffle=True)\n", "\n")
    given = source.replace("train(model)", "train(model, dl)")
    for each in (source, given):
        assert found(each, dl=DataLoader([1, 2])) == [LOADER]
        assert found(each, dl=[1, 2]) == []
    assert found(given) == [LOADER]
    assert found(given.replace("dl", "batches")) == []


KEEP = "def keep(m):\n    torch.save(m, 'm.pt')\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('def train(model):\n    torch.save(model.state_dict(), "m.pt")', [(2, 5)]),
        ("def train(m, out):\n    if best:\n        m.save_pretrained(out)", [(3, 9)]),
        ('path = Path("out") / "m.pt"\ntorch.save(m, path)', [(2, 1)]),
        ('from safetensors.torch import save_file\nsave_file(w, f"{epoch}.st")', [(2, 1)]),
        ('np.save("x.npy", x)', [(1, 1)]),
        ('with open("x.pkl", "wb") as f:\n    pickle.dump(x, f)', [(2, 5)]),
        ('joblib.dump(x, os.path.join(out, "x"))', [(1, 1)]),
        (KEEP + "def train(m):\n    if rank == 0:\n        keep(m)\n    keep(m)", [(2, 5)]),
        ("if rank == 0:\n    print(1)\ntorch.save(m, 'm.pt')", [(3, 1)]),
        ("def train(m):\n    if rank == 0: print(1)\n    m.save_pretrained('x')", [(3, 5)]),
        (KEEP, [(2, 5)]),  # the last function: all ranks call it
        ("me = 3\nif me == 0:\n    torch.save(x, 'x.pt')", [(3, 5)]),
        ("me = nbtrain.rank()\nif me == 0:\n    torch.save(x, 'x.pt')", []),
        ("class A:\n    def keep(self):\n        torch.save(1, 'x.pt')\nA().keep()", []),
        (KEEP + "def train(m):\n    if rank == 0:\n        keep(m)", []),
        (KEEP + "x = 1", []),
        ("def a():\n    b()\ndef b():\n    torch.save(1, 'x')\n    a()\nx = 1", []),
        ("with on_rank_zero():\n    torch.save(x, 'x.pt')", []),
        *(
            (f'accelerator = Accelerator()\nmodel.save_pretrained("out")\n{sharding}', [])
            for sharding in ("model = FSDP(model)", "fully_shard(model)", "c = ParallelismConfig()")
        ),
    ],
)
def test_a_file_that_all_ranks_write_is_found(source: str, expected: list[Any]) -> None:
    assert found(source) == [("save", *place) for place in expected]


def test_a_save_is_right_for_a_sharded_model_and_for_one_rank() -> None:
    task = cell("torch.save(1, 'x.pt')")
    assert len(lint.lint(task, ranks=2)) == 1
    assert lint.lint(task, ranks=1) == lint.lint(task, sharded=True) == ()
    assert accelerate_config.is_sharded({"ACCELERATE_USE_FSDP": "true"})
    assert not accelerate_config.is_sharded({"ACCELERATE_USE_FSDP": "false"})


def test_functions_that_nobody_mentions_are_left_in_peace() -> None:
    plain = PLAIN["called in the cell"]
    assert found(plain) != []
    assert found(plain.replace("main(model)\n", "print(model)\n")) == [("not-called", 2, 1)]


def test_lines_are_counted_as_python_counts_them() -> None:
    source = "x = 1\x0c\ny = '\u2028\x1c'\naccelerator = Accelerator()\nx.cuda()"
    assert found(source + "  # nbtrain: ignore") == []
    assert found(source) == [("device", 4, 1)]
    assert found("accelerator = Accelerator()\r\nx.cuda()\r\n") == [("device", 2, 1)]


# Where the source is


def test_functions_of_earlier_cells_are_read_if_the_cell_calls_them_itself() -> None:
    helper = (
        "import torch\n\ndef helper(x):\n    x.cuda()\n    return deeper(x)\n\n"
        "def deeper(x):\n    x.cuda()\n"
    )
    names = defined(helper, "<ipython-input-3-abcdef012345>")
    (finding,) = lint.lint(cell("def train():\n    helper(1)", **names))
    assert (finding.code, str(finding.place)) == ("device", "In[3], line 4")
    assert finding.full_text.startswith("In[3], line 4, column 5: ")
    (direct,) = lint.lint(cell("deeper(1)", **names))
    assert str(direct.place) == "In[3], line 8"


def test_the_shell_says_which_cell_a_file_name_is() -> None:
    filename = "/tmp/ipykernel_7/123.py"
    task = cell("go(1)", **defined("\n\ndef go(x):\n    x.cuda()\n", filename))
    (finding,) = lint.lint(task, name_cell={filename: "In[12]"}.get)
    assert str(finding.place) == "In[12], line 4"
    (finding,) = lint.lint(task)
    assert str(finding.place) == "an earlier cell, line 4"


def test_cells_that_ipython_compiled_are_found() -> None:
    compiler = CachingCompiler()
    source = "def place(x):\n    x.cuda()\n"
    filename = compiler.cache(source, 3)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, filename, "exec"), names)
    known = getattr(compiler, "_filename_map", {})  # IPython 7 has the number in the name instead

    def name_cell(name: str) -> str | None:
        return f"In[{known[name]}]" if name in known else None

    (finding,) = lint.lint(cell("place(1)", **names), name_cell=name_cell)
    assert str(finding.place) == "In[3], line 2"


def test_the_guide_lists_the_codes() -> None:
    guide = (NOTEBOOKS / "guides" / "lint.md").read_text()
    for code, meaning in lint.CODES.items():
        assert f"| `{code}` | " in guide, code
        assert meaning in guide or code == "accelerator", code
    sources = "".join(p.read_text() for p in Path(lint.__file__).parent.glob("*.py"))
    assert all(sources.count(f'"{code}"') >= 2 for code in lint.CODES)


def test_no_other_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is not installed looks like the user's file, and may be of any size."""
    (tmp_path / "beside.py").write_text("def place(x):\n    x.cuda()\n")
    monkeypatch.syspath_prepend(tmp_path)
    beside = importlib.import_module("beside")
    read: list[str] = []
    real = linecache.getlines
    monkeypatch.setattr(linecache, "getlines", lambda name: read.append(name) or real(name))
    source = "beside.place(1)\nplace(1)\ndumps(1)\nDataLoader(1)"
    names = {"beside": beside, "place": beside.place, "dumps": json.dumps}
    assert lint.lint(cell(source, **names, DataLoader=DataLoader)) == ()
    assert read == []
    (finding,) = lint.lint(Call(beside.place))  # what is launched itself
    assert str(finding.place) == "beside.py, line 2"
    assert lint.lint(Call(json.dumps)) == ()


def test_decorators_partials_and_caches_are_seen_through() -> None:
    source = (
        "import functools\n\n"
        "def loud(f):\n    @functools.wraps(f)\n    def inner(*a):\n        return f(*a)\n"
        "    return inner\n\n"
        "@loud\n@loud\ndef a(x):\n    x.cuda()\n\n"
        "@functools.cache\ndef b(x):\n    x.cuda()\n\n"
        "c = functools.partial(lambda x: x.cuda(), 1)\n\n"
        "async def d(x):\n    x.cuda()\n"
    )
    names = defined(source, "<ipython-input-1-abc>")
    lines = {"a": 12, "b": 16, "c": 18, "d": 21}
    for name, line in lines.items():
        (finding,) = lint.lint(cell(f"{name}(1)", **names))
        assert str(finding.place) == f"In[1], line {line}"
        (same,) = lint.lint(Call(names[name]))
        assert same == finding


def test_a_call_knows_what_it_hands_in() -> None:
    def train(a: Any, b: Any = 1, *, c: Any = None) -> None:
        a.to(b)
        a.to(c)

    line = train.__code__.co_firstlineno
    (finding,) = lint.lint(Call(train, (1, "cuda")))
    assert (finding.code, str(finding.place)) == ("device", f"test_lint.py, line {line + 1}")
    (finding,) = lint.lint(Call(functools.partial(train, 1), (), {"c": torch.device("cuda:1")}))
    assert finding.place.line == line + 2
    assert lint.lint(Call(train, (1, 2))) == ()
    captured = "cuda"
    (finding,) = lint.lint(Call(lambda x: x.to(captured)))
    assert finding.code == "device"


def test_a_bound_method_is_read() -> None:
    class Runner:
        def place(self, x: Any) -> None:
            x.cuda()

    (finding,) = lint.lint(Call(Runner().place, (1,)))
    assert finding.code == "device"


# Silencing


def test_notes_are_silenced_by_line_and_by_cell() -> None:
    source = "accelerator = Accelerator()\nx.cuda(){}\nx.cuda()"
    for comment in ("# nbtrain: ignore", "# nbtrain: ignore[device]", "#nbtrain:ignore[a, device]"):
        assert found(source.format("  " + comment)) == [("device", 3, 1)]
        assert found(f"\n# mine\n{comment}\n" + source.format("")) == []
    for comment in ("# nbtrain: ignore[save]", "# ignore", "# nbtrain: ignore[]"):
        assert len(found(source.format("  " + comment))) == 2
    assert len(found("x = 1\n# nbtrain: ignore\n" + source.format(""))) == 2


# Hostile input


class Hostile:
    """Raises, or worse, at every question."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("asked for " + name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __bool__(self) -> bool:
        raise RuntimeError("asked for truth")

    __hash__ = None  # type: ignore[assignment]


class Meta(type):
    """A class of classes that raises, too."""

    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError("asked for " + name)

    def __instancecheck__(cls, instance: object) -> bool:
        raise RuntimeError("asked for instances")


class Worse(metaclass=Meta):
    """An object of it."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("asked for its class")


def test_objects_of_the_user_are_not_touched() -> None:
    source = (
        "accelerator = Accelerator()\nfor x in h:\n    h.backward()\n    h(x).to(h)\n"
        "    w.x.step()\n    w().save_pretrained(h)\n    c(device=w)\n"
        "def train(h, w, c):\n    h.to(w); c(h)\n"
    )
    lint.lint(cell(source, h=Hostile(), w=object.__new__(Worse), c=Worse))
    lint.lint(Call(Hostile.__eq__, (Hostile(), Hostile())))
    lint.lint(Call(Hostile()))  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ["", "# only", "-" * 1000 + "1"])
def test_what_is_hardly_a_program_has_no_notes(source: str) -> None:
    assert lint.lint(Cell(source, "<cell>", {})) == ()


@pytest.mark.parametrize(
    "function", [print, len, int, dict.get, functools.partial(print), str.join]
)
def test_functions_without_source_have_no_notes(function: Callable[..., Any]) -> None:
    assert lint.lint(Call(function)) == ()
    assert lint.lint(cell("f(1)", f=function)) == ()


def test_a_function_whose_source_is_gone_or_changed_has_no_notes() -> None:
    names = defined("def f(x):\n    x.cuda()\n", "<ipython-input-9-f>")
    for lines in (["x = 1\n"], ["def f(\n"], []):
        linecache.cache["<ipython-input-9-f>"] = (1, None, lines, "<ipython-input-9-f>")
        assert lint.lint(cell("f(1)", **names)) == ()


def test_functions_that_call_each_other_are_read_once() -> None:
    source = "def a(x):\n    b(x)\n    x.cuda()\n\ndef b(x):\n    a(x)\n    a(x)\n"
    names = defined(source, "<ipython-input-4-abc>")
    assert [str(n.place) for n in lint.lint(cell("a(1); b(2); a(3)", **names))] == ["In[4], line 3"]


def test_odd_shapes_do_no_harm() -> None:
    source = (
        "from math import *\n"
        "f = lambda m: (lambda: m.cuda())()\n"
        "class A:\n    class B:\n        x = [y.cuda() for y in z]\n"
        "async def g():\n    async for x in y:\n        async with w as v:\n            await v\n"
        "match a:\n    case {'k': [b, *c]}:\n        pass\n"
        "def h(*a, b=1, **c):\n    global q\n    q = 1\n    def i():\n        nonlocal b\n"
        "        b = q\n    return i\n"
    )
    assert found(source) == [("device", 2, 24)]


_LINES = 'x.cuda()\ntorch.save(x, "x")\n(x + y).backward()\nopt.step()\n'


def test_what_is_too_long_is_not_read() -> None:
    with pytest.raises(lint.SourceTooLongError):
        lint.lint(Cell(_LINES * 2000, "<cell>", {}))


@pytest.mark.parametrize(
    "lines", [_LINES, "x.cuda();", "x = x.to(x)\n", "x = x\ntorch.save(x, x)\n"]
)
@pytest.mark.timing
def test_a_source_of_ten_times_the_length_takes_ten_times_as_long(lines: str) -> None:
    def seconds(chars: int) -> float:
        start = time.thread_time()
        lint.lint(Cell(lines * (chars // len(lines)), "<cell>", {}))
        return time.thread_time() - start

    # A hundred times as long if it looked from each line at all others.
    assert min(seconds(50_000) for _ in range(3)) < 50 * min(seconds(5_000) for _ in range(3))


@pytest.mark.parametrize("error", [RecursionError, lint.SourceTooLongError, RuntimeError])
def test_no_launch_ends_by_what_its_advice_meets(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error("with a value of the user's")

    monkeypatch.setattr(lint, "read", fail)
    run = run_plan(Plan(cell("3"), "train", num_processes=1, view="none"))
    assert run.value == 3
    log = (run.folder / "launcher.log").read_text()
    assert f"the lint was given up: {error.__name__}\n" in log


def test_a_cell_that_is_too_long_to_be_read_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    source = f"x = '{'.' * 10**6}'\nlen(x)"
    run = run_plan(Plan(cell(source), "train", num_processes=1, view="none"))
    assert run.value == 10**6
    assert "the lint was given up: SourceTooLongError" in (run.folder / "launcher.log").read_text()


# Migration


class Noisy(Dataset[Any]):
    """Data that no two processes see the same."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(os.getpid() * 100 + place)
        x = torch.randn(3, generator=generator)
        return x, x.sum(0, keepdim=True)


def things() -> dict[str, Any]:
    """Return what a notebook holds before it trains."""
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    return {
        "__name__": "__main__",
        "torch": torch,
        "DataLoader": DataLoader,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "dataset": Noisy(),
        "loader": DataLoader(Noisy(), batch_size=4),
        "criterion": nn.MSELoss(),
    }


def edited(findings: tuple[lint.Finding, ...], source: str) -> str:
    (finding,) = (finding for finding in findings if finding.code == "migrate")
    return lint.apply_edits(source, finding.edits)


def trained(task: Cell | Call) -> tuple[bool, bool]:
    """Train on two ranks; return whether they have the same parameters, and saw the same."""
    run = run_plan(Plan(task, "train", num_processes=2, view="none"))
    (first, seen), (second, also_seen) = run.results
    assert len(first) == len(second) == 4
    return all(map(torch.equal, first, second)), seen == also_seen


def test_the_canonical_loop_takes_three_lines_and_changes_two() -> None:
    source = PLAIN["model handed in"]
    findings = lint.lint(cell(source, **things()), device="cuda")
    assert {finding.code for finding in findings} == {"migrate"}
    (finding,) = findings
    edits = finding.edits
    assert [(edit.line, edit.insert) for edit in edits if edit.insert is not None] == [
        (2, "from accelerate import Accelerator"),
        (7, "    accelerator = Accelerator()"),
        (11, "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"),
        (16, "            accelerator.backward(loss)"),
        (7, "    model.to(accelerator.device)"),
    ]
    lines = source.split("\n")
    gone = [(edit.line, lines[edit.line - 1].strip()) for edit in edits if edit.delete]
    assert gone == [(16, "loss.backward()"), (7, 'model.to("cuda")')]
    assert (finding.place.line, finding.place.column) == (16, 13)
    assert finding.text == (
        "this loop does not use the other ranks: each rank would train a separate model, on all "
        "of the data; `%%nbtrain migrate` on top of its cell shows what to change, as a diff"
    )


@pytest.mark.parametrize("name", PLAIN)
def test_ranks_train_one_model_with_the_edits_and_their_own_without(name: str) -> None:
    source = PLAIN[name]
    findings = lint.lint(cell(source, **things()), device="cuda")
    assert {finding.code for finding in findings} == {"migrate"}
    result = edited(findings, source)
    assert "cuda" not in result.replace(', device="cuda"):', "")
    assert lint.lint(cell(result, **things()), device="cuda") == ()
    assert trained(cell(result, **things())) == (True, False)
    plain = source.replace('"cuda"', '"cpu"').replace(".cuda()", ".cpu()")
    assert trained(cell(plain, **things())) == (False, False)


def test_a_function_of_an_earlier_cell_is_migrated_in_its_cell() -> None:
    source = PLAIN["model handed in"]
    names = defined(source, "<ipython-input-5-abc>", **things())
    findings = lint.lint(Call(names["train"], (names["model"],)))
    assert [str(finding.place) for finding in findings] == ["In[5], line 16"]
    result = edited(findings, source)
    names = defined(result, "<ipython-input-6-abc>", **things())
    assert lint.lint(Call(names["train"], (names["model"],))) == ()
    assert trained(Call(names["train"], (names["model"],))) == (True, False)


def test_odd_ways_of_placing_are_migrated() -> None:
    source = (
        'device = "cuda"\n'
        "def train(model, loader):\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    model.to(device)\n"
        "    for batch in loader:\n"
        '        batch = {k: v.to("cuda") for k, v in batch.items()}\n'
        "        loss = model((batch + 1).cuda(non_blocking=True).half()).loss\n"
        "        loss.backward()  # ß\n"
        "        optimizer.step()\n"
        "        mask = torch.zeros(1).to(device)\n"
    )
    result = edited(lint.lint(cell(source)), source)
    assert result == (
        "from accelerate import Accelerator\n"
        'device = "cuda"\n'
        "def train(model, loader):\n"
        "    accelerator = Accelerator()\n"
        "    device = accelerator.device\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    model.to(device)\n"
        "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
        "    for batch in loader:\n"
        "        batch = {k: v.to(accelerator.device) for k, v in batch.items()}\n"
        "        loss = model((batch + 1).to(accelerator.device, non_blocking=True).half()).loss\n"
        "        accelerator.backward(loss)  # ß\n"
        "        optimizer.step()\n"
        "        mask = torch.zeros(1).to(device)\n"
    )
    assert found(source) == [("migrate", 8, 9)]


def test_devices_within_the_loss_are_migrated_with_it() -> None:
    source = PLAIN["model handed in"].replace("loss = criterion(model(x), y)\n", "pass\n")
    source = source.replace(
        "loss.backward()", "criterion(model(x.cuda()), y.to('cuda')).backward()"
    )
    result = edited(lint.lint(cell(source, **things())), source)
    rank = "accelerator.device"
    assert f"accelerator.backward(criterion(model(x.to({rank})), y.to({rank})))\n" in result


def test_a_loader_that_the_cell_makes_beside_the_function_is_not_asked_of_the_notebook() -> None:
    source = "loader = DataLoader(d)\ndef train(model, optimizer):\n    for x in loader:\n"
    source += "        loss = model(x)\n        loss.backward()\n        optimizer.step()"
    assert found(source) == []
    (first, *_) = lint.lint(cell(source.partition("\n")[2], **things()))
    assert first.edits


def test_another_variable_of_the_models_name_stays_as_it_is() -> None:
    helper = "def head(net):\n    return net.head\n\n"
    source = helper + PLAIN["no function"].lstrip("\n") + "head(net)\n"
    result = edited(lint.lint(cell(source, **things())), source)
    assert "    return net.head\n" in result
    assert result.endswith("head(accelerator.unwrap_model(net))\n")


def test_only_what_the_loop_has_goes_through_prepare() -> None:
    def prepare(name: str) -> str:
        result = edited(lint.lint(cell(PLAIN[name], **things())), PLAIN[name])
        return next(line.strip() for line in result.split("\n") if ".prepare(" in line)

    names = "net, opt, train_loader, scheduler"
    assert prepare("no function") == f"{names} = accelerator.prepare({names})"
    # A scheduler that steps once an epoch would step once a rank if it were prepared.
    names = "model, opt, loader"
    assert prepare("loaded weights, evaluation") == f"{names} = accelerator.prepare({names})"


def test_a_device_that_is_used_elsewhere_is_the_accelerators() -> None:
    source = PLAIN["no function"]
    result = edited(lint.lint(cell(source, **things())), source)
    assert "\naccelerator = Accelerator()\ndevice = accelerator.device\nnet = " in result
    assert "    inputs = inputs.to(device)\n" in result
    assert "accelerator.clip_grad_norm_(net.parameters(), max_norm=1.0)" in result
    only = PLAIN["model handed in"].replace(
        'model.to("cuda")', 'device = "cuda"\n    model = model.to(device)'
    )
    result = edited(lint.lint(cell(only, **things())), only)
    assert "    device = accelerator.device\n    model = model.to(device)\n" in result
    inside = "def train(model):\n    model.to(device)"
    captured = PLAIN["model handed in"].replace("(model(x)", "(model(x.to(device))")
    task = cell(captured, device="cuda", **things())
    result = edited(lint.lint(task, device="cuda"), captured)
    assert "    accelerator = Accelerator()\n    device = accelerator.device\n" in result
    assert found(inside, device="cuda") == [("device", 2, 14)]


def test_a_plain_loop_is_found_whatever_its_own_names_are() -> None:
    source = PLAIN["everything handed in"]
    torchs = f"device = torch.accelerator.current_accelerator()\n{source}"
    own = f"class Trainer:\n    pass\nTrainer()\n{source}"
    for each in (torchs, own):
        assert [code for code, *_ in found(each)] == ["migrate"]
    for each in (own.replace("Trainer:", "Trainer(Base):"), f"import keras\n{source}"):
        assert "migrate" not in [code for code, *_ in found(each)]


@pytest.mark.parametrize("name", UNCERTAIN)
def test_a_loop_that_cannot_be_migrated_with_certainty_is_left_in_peace(name: str) -> None:
    assert found(UNCERTAIN[name].replace("cuda", "cpu")) == []


ON_THE_CPU = PLAIN["everything handed in"].replace("cuda", "cpu")


@pytest.mark.parametrize(
    "source",
    [
        ON_THE_CPU.replace(".backward(retain_graph=True)", ""),
        ON_THE_CPU.replace("optimizer.step", "env.step"),
        "import torch.distributed as dist\n" + ON_THE_CPU,
        ON_THE_CPU.replace("seen = 0.0", "seen = nbtrain.rank()"),
        ON_THE_CPU.replace("seen = 0.0", "seen = int(os.environ['RANK'])"),
        "# nbtrain: ignore[migrate]\n" + ON_THE_CPU,
    ],
)
def test_what_is_not_certain_to_train_alone_is_left_in_peace(source: str) -> None:
    assert [code for code, *_ in found(ON_THE_CPU)] == ["migrate"]
    assert found(source) == []


def test_a_loop_is_left_as_it_is_where_that_is_asked_for_and_on_one_rank() -> None:
    source = PLAIN["model handed in"].replace(
        "loss.backward()", "loss.backward() # nbtrain: ignore"
    )
    assert lint.lint(cell(source, **things())) == ()
    assert lint.lint(cell(PLAIN["model handed in"], **things()), ranks=1) == ()


def test_edits_are_made_by_line() -> None:
    edits = [
        lint.Edit(1, insert="first"),
        lint.Edit(1, insert="second"),
        lint.Edit(2, delete=True),
        lint.Edit(3, delete=True, insert="C"),
        lint.Edit(9, insert="last"),
    ]
    assert lint.apply_edits("a\nb\nc", edits) == "first\nsecond\na\nC\nlast"
    assert lint.apply_edits("a\n", []) == "a\n"
