"""What more ranks bring: the arithmetic, what is typed, and real runs at one and two ranks."""

from __future__ import annotations

import inspect
import os
import signal
from typing import Any
from xml.etree import ElementTree

import pytest

import nbtrain
from nbtrain.errors import NbtrainError, PlanError
from nbtrain.part import Typed
from nbtrain.parts.scaling import measure
from nbtrain.parts.scaling.report import ScalingReport, Size
from tests.support.cells import the_last_run
from tests.support.kernel import Notebook

ONE = Size(1, [0.010, 0.011, 0.0125], batch=64)
TWO = Size(2, [0.0125, 0.011, 0.022], batch=64)
FAILED = Size(8, error="ValueError: <b>no</b>")


def report(*sizes: Size) -> ScalingReport:
    return ScalingReport("train", sizes, tuple(measure._doubts(list(sizes))))


def test_the_speed_up_is_in_samples_a_second_and_of_the_medians() -> None:
    _, two = report(ONE, TWO).rows
    assert two["speedup"] == pytest.approx(2 * 0.011 / 0.0125)
    assert two["efficiency"] == pytest.approx(0.011 / 0.0125)
    assert (two["low"], two["high"]) == pytest.approx((1.0, 2.0))
    shared = report(ONE, Size(2, [0.006], batch=32)).rows[1]
    assert shared["speedup"] == pytest.approx(0.011 / 0.006)
    unseen = report(Size(1, [0.01]), Size(2, [0.01])).rows[1]
    assert unseen["speedup"] == 2


def test_what_limits_the_meaning_is_said() -> None:
    found = repr(report(ONE, TWO))
    assert "1.76× (1.00–2.00)" in found
    assert "n ranks train on n times the batch" in found
    assert "differ widely" in found
    assert "(" not in repr(report(Size(1, [0.01], batch=8)))
    assert "nbtrain saw no batches" in repr(report(Size(1, [0.01]), Size(2, [0.01])))
    assert report(ONE).notes == report(Size(2, [0.01], batch=8)).notes == ()


def test_the_report_is_a_table_and_a_picture() -> None:
    pytest.importorskip("pandas")
    found = report(ONE, TWO, FAILED, Size(16))
    assert found.table.index.tolist() == [1, 2, 8, 16]
    assert found.table.loc[2, "speedup"] == pytest.approx(1.76)
    assert found.table.loc[8, "error"] == FAILED.error
    svg = ElementTree.fromstring(found.svg)
    texts = [element.text for element in svg.iter() if element.tag.endswith("text")]
    assert {"speed-up (dashed: ideal)", "ranks", "1", "2"} < set(texts)
    html = found._repr_html_()
    assert 'src="data:image/svg+xml;base64,' in html
    assert "&lt;b&gt;no" in html
    assert "not measured" in html


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("this was called")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train", "it is not a call"),
        ("", "in ''|'' is not a call"),
        ("train(", "'train\\(' is not a call such as"),
        ("trainn(1)", "no `trainn` .there is `train`."),
        ("model(1)", "needs a function to call, not a str"),
        ("train(1 / 0)", "ZeroDivisionError"),
        ("--ranks 1,x train(1)", "--ranks: '1,x' is not a list of numbers of ranks, such as 1,2,4"),
        ("--repeat 0 train(1)", "whole numbers ≥ 1"),
        ("-n 2 train(1)", "unrecognized arguments: -n 2"),
        ("-e inline train(1)", "inline engine runs one rank"),
        ("--what 1 train(1)", "--what"),
    ],
)
def test_a_line_that_makes_no_sense_is_one_clear_error(line: str, words: str) -> None:
    before = nbtrain.last_run()
    with pytest.raises(PlanError, match=words):
        measure.command(Typed("scaling", line, {"train": refuse, "model": "M"}, str))
    assert nbtrain.last_run() is before


def train(model: Any, steps: int, how: str = "") -> None:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    wrapped, two = model, nbtrain.world_size() == 2
    if two and how != "alone":
        dist.init_process_group("gloo")
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    data = TensorDataset(torch.ones(4 * steps, 2))
    for i, (batch,) in enumerate(DataLoader(data, batch_size=4)):
        if i == 5 and two and how == "fails":
            raise ZeroDivisionError("as it was told")
        if i == 5 and two and how == "interrupts" and nbtrain.rank() == 0:
            os.kill(os.getppid(), signal.SIGINT)
        optimizer.zero_grad()
        wrapped(batch).sum().backward()
        optimizer.step()


def model() -> Any:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch._dynamo")  # else each rank imports it, at its first step
    return torch.nn.Linear(2, 2)


def test_each_size_runs_from_the_same_weights_and_no_weights_come_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = model()
    before = own.weight.clone()
    found = nbtrain.scaling(train, own, 15, ranks=(2, 1), repeat=2)
    assert bool((own.weight == before).all())
    assert [(size.ranks, len(size.steps), size.batch) for size in found.sizes] == [
        (1, 2, 4),
        (2, 2, 4),
    ]
    assert [row["ranks"] for row in found.rows] == [1, 2]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["1 rank", "2 ranks", "2 ranks", "1 rank"]
    run = the_last_run()
    assert run.folder.name.endswith(".scaling")  # they count by themselves
    assert "did not join" not in repr(found)


def test_ranks_that_train_alone_are_named() -> None:
    found = nbtrain.scaling(train, model(), 15, "alone", ranks=(1, 2), repeat=1, view="none")
    assert "At 2 ranks, the ranks did not join one process group" in repr(found)


def test_a_size_that_fails_is_a_row_and_the_others_stay(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = nbtrain.scaling(train, model(), 15, "fails", ranks=(2, 1), repeat=2)
    assert [len(size.steps) for size in found.sizes] == [2, 0]
    assert "ZeroDivisionError: as it was told" in found.sizes[1].error
    assert "ZeroDivisionError" in repr(found)
    assert "ZeroDivisionError" in found._repr_html_()
    assert capsys.readouterr().out.count("1 rank: ") == 2
    with pytest.raises(ZeroDivisionError, match="as it was told"):
        nbtrain.scaling(train, model(), 15, "fails", ranks=(2,), view="none")
    with pytest.raises(NbtrainError, match="8 steps of a torch optimizer, and saw 0"):
        nbtrain.scaling(len, "x", ranks=(1,), view="none")


def test_an_interrupt_keeps_the_sizes_that_were_measured() -> None:
    found = nbtrain.scaling(train, model(), 15, "interrupts", ranks=(1, 2), view="none")
    assert [len(size.steps) for size in found.sizes] == [1, 0]
    assert "was interrupted" in repr(found)
    assert "not measured" in repr(found)
    with pytest.raises(KeyboardInterrupt):
        nbtrain.scaling(train, model(), 15, "interrupts", ranks=(2,), view="none")


def test_the_magic_measures_a_notebooks_own_function(notebook: Notebook) -> None:
    notebook.run("import os, signal, nbtrain\nfrom typing import Any\n" + inspect.getsource(train))
    notebook.run(
        "import torch._dynamo\nmodel = torch.nn.Linear(2, 2); before = model.weight.clone()"
    )
    out = notebook.run(
        "two = 2\n%nbtrain scaling --ranks 1,{two} --repeat 1 --as found "
        "train(model, steps={12}.pop())"
    )
    assert not out.ename, out.traceback
    assert "scaling 1/2: 1 rank: " in out.stdout
    assert "scaling 2/2: 2 ranks: " in out.stdout
    assert not out.displays  # no board
    assert "efficiency" in out.results[0]["text/plain"]
    assert "data:image/svg+xml" in out.results[0]["text/html"]
    assert notebook.value("[s.ranks for s in found.sizes]") == [1, 2]
    assert notebook.value("bool((model.weight == before).all())")
    assert "define it in an ordinary cell" in notebook.run("%nbtrain scaling other(1)").evalue
