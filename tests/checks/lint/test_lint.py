"""Lint: what it finds, at which line and column, and that correct code is left in peace."""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
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
    "test_reports.py",
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


def test_every_cell_of_the_tests_is_left_in_peace() -> None:
    files = [p for p in (ROOT / "tests").rglob("*.py") if not {*p.parts} & {*NOT_LOOPS}]
    for path, text in ((file, text) for file in files for text in _texts(file)):
        # Some texts are no Python.
        with contextlib.suppress(SyntaxError, ValueError, lint.SourceTooLongError):
            notes = lint.lint(Cell(text, "<cell>", {}))
            assert [note for note in notes if note.code != "not-called"] == [], path


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
        ("model.cuda()", 1),
        ('z = torch.zeros(3, 4, device="cuda")', 30),
        ("torch.cuda.set_device(0)", 1),
        ('device = "cuda"; model.to(device)', 10),
        ('x = x.to(device="xpu")', 17),
    ],
)
@pytest.mark.parametrize("start", ["accelerator = Accelerator()", "dist.init_process_group()"])
def test_a_device_that_all_ranks_would_share_is_found(start: str, line: str, column: int) -> None:
    assert found(f"{start}\n{line}") == [("device", 2, column)]


_IF_THERE = 'd = torch.device("cuda" if torch.cuda.is_available() else "cpu")\n'
_IF_THERE += 'if torch.cuda.is_available():\n    model.to("cuda")'
_CHOSEN = 'torch.cuda.set_device(local_rank)\nmodel.to("cuda")\nx.cuda()\n'


@pytest.mark.parametrize(
    ("source", "on_gpus", "on_cpus"),
    [
        (_IF_THERE, [(1, 18), (3, 14)], []),
        (_CHOSEN, [], []),
        (_CHOSEN + 'x.to("cuda:0")', [(4, 6)], [(4, 6)]),
        ('os.environ["CUDA_VISIBLE_DEVICES"] = str(i)\nmodel.to("cuda:0")', [], []),
        ('if rank == 0:\n    x.to("cuda:0")', [], []),
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
        (torch.device("cpu"), True, False),
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
        ("accelerator.prepare(model, opt, dl)", [LOADER, MODEL, OPTIMIZER]),
        ("model, opt, dl = setup(accelerator, model, opt, dl)", []),
        ("model, opt, dl = map(accelerator.prepare, (model, opt, dl))", []),
    ],
)
def test_what_never_goes_through_prepare_is_found(prepare: str, expected: list[Any]) -> None:
    assert found(LOOP.format(prepare=prepare)) == expected


@pytest.mark.parametrize(
    "own",
    [
        "DataLoader(data, sampler=mine)",
        "DataLoader(split_dataset_by_node(data, 0, 2))",
    ],
)
def test_a_loader_of_the_ranks_own_part_is_left_in_peace(own: str) -> None:
    made = "DataLoader(data, batch_size=4, shuffle=True)"
    assert found(WITHOUT_LOADER) == [LOADER]
    assert found(WITHOUT_LOADER.replace(made, own)) == []


KEEP = "def keep(m):\n    torch.save(m, 'm.pt')\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('def train(model):\n    torch.save(model.state_dict(), "m.pt")', [(2, 5)]),
        ("def train(m, out):\n    if best:\n        m.save_pretrained(out)", [(3, 9)]),
        ('path = Path("out") / "m.pt"\ntorch.save(m, path)', [(2, 1)]),
        ('from safetensors.torch import save_file\nsave_file(w, f"{epoch}.st")', [(2, 1)]),
        ('with open("x.pkl", "wb") as f:\n    pickle.dump(x, f)', [(2, 5)]),
        (KEEP + "def train(m):\n    if rank == 0:\n        keep(m)\n    keep(m)", [(2, 5)]),
        ("if rank == 0:\n    print(1)\ntorch.save(m, 'm.pt')", [(3, 1)]),
        (KEEP, [(2, 5)]),  # the last function: all ranks call it
        ("me = nbtrain.rank()\nif me == 0:\n    torch.save(x, 'x.pt')", []),
        (KEEP + "def train(m):\n    if rank == 0:\n        keep(m)", []),
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


def test_the_guide_lists_the_codes() -> None:
    guide = (NOTEBOOKS / "guides" / "launching.md").read_text()
    for code, meaning in lint.CODES.items():
        assert f"| `{code}` | " in guide, code
        assert meaning in guide or code == "accelerator", code
    sources = "".join(p.read_text() for p in Path(lint.__file__).parent.glob("*.py"))
    assert all(sources.count(f'"{code}"') >= 2 for code in lint.CODES)


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


_LINES = 'x.cuda()\ntorch.save(x, "x")\n(x + y).backward()\nopt.step()\n'


@pytest.mark.timing
def test_a_source_of_ten_times_the_length_takes_ten_times_as_long() -> None:
    def seconds(chars: int) -> float:
        start = time.thread_time()
        lint.lint(Cell(_LINES * (chars // len(_LINES)), "<cell>", {}))
        return time.thread_time() - start

    # A hundred times as long if it looked from each line at all others.
    assert min(seconds(50_000) for _ in range(3)) < 50 * min(seconds(5_000) for _ in range(3))


def test_no_launch_ends_by_what_its_advice_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RecursionError("with a value of the user's")

    monkeypatch.setattr(lint, "read", fail)
    run = run_plan(Plan(cell("3"), "train", num_processes=1, view="none"))
    assert run.value == 3
    log = (run.folder / "launcher.log").read_text()
    assert "the lint was given up: RecursionError\n" in log


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


def test_one_rank_writes_the_file_of_a_migrated_loop(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    saves = f'    torch.save(model.state_dict(), "{path}")\n    return'
    source = PLAIN["model handed in"].replace("    return", saves)
    findings = lint.lint(cell(source, **things()), device="cuda")
    assert [finding.code for finding in findings] == ["migrate", "save"]
    result = edited(findings, source)
    assert "accelerator.save(accelerator.unwrap_model(model).state_dict()," in result
    assert lint.lint(cell(result, **things()), device="cuda") == ()
    assert trained(cell(result, **things())) == (True, False)
    assert sorted(torch.load(path)) == ["0.bias", "0.weight", "2.bias", "2.weight"]


@pytest.mark.parametrize(
    "save",
    [
        "torch.save(seen, io.BytesIO())",
        "torch.save(seen, 'm.pt', _use_new_zipfile_serialization=0)",
        "torch.save(seen, 'm.pt', pickle)",
        "torch.save(seen, open('m.pt', 'wb'))",  # each rank would still empty the file
        "file = open('m.pt', 'wb'); torch.save(seen, file)",
        "with open('m.pt', 'wb') as file: torch.save(seen, file)",
        "torch.save(seen, 'm.pt'); torch.load('m.pt')",  # which may not be there yet
    ],
)
def test_what_the_accelerator_cannot_save_stays_as_it_is(save: str) -> None:
    source = PLAIN["model handed in"].replace("    return", f"    {save}\n    return")
    findings = lint.lint(cell(source, **things()), device="cuda")
    assert save in edited(findings, source)


def test_a_save_outside_of_the_migrated_function_stays_as_it_is() -> None:
    source = PLAIN["called in the cell"] + 'torch.save(model.state_dict(), "m.pt")\n'
    findings = lint.lint(cell(source, **things()), device="cuda")
    assert [finding.code for finding in findings] == ["migrate", "save"]
    assert source.splitlines()[-1] in edited(findings, source)


def test_a_function_of_an_earlier_cell_is_migrated_in_its_cell() -> None:
    source = PLAIN["model handed in"]
    names = defined(source, "<ipython-input-5-abc>", **things())
    findings = lint.lint(Call(names["train"], (names["model"],)))
    assert [str(finding.place) for finding in findings] == ["In[5], line 16"]
    result = edited(findings, source)
    names = defined(result, "<ipython-input-6-abc>", **things())
    assert lint.lint(Call(names["train"], (names["model"],))) == ()
    assert trained(Call(names["train"], (names["model"],))) == (True, False)


@pytest.mark.parametrize("name", UNCERTAIN)
def test_a_loop_that_cannot_be_migrated_with_certainty_is_left_in_peace(name: str) -> None:
    assert found(UNCERTAIN[name].replace("cuda", "cpu")) == []


ON_THE_CPU = PLAIN["everything handed in"].replace("cuda", "cpu")


@pytest.mark.parametrize(
    "source",
    [
        ON_THE_CPU.replace(".backward(retain_graph=True)", ""),
        "import torch.distributed as dist\n" + ON_THE_CPU,
        ON_THE_CPU.replace("seen = 0.0", "seen = nbtrain.rank()"),
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
