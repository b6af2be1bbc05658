"""What more ranks bring: the arithmetic, what is typed, and real runs at one and two ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import nbtrain
from nbtrain.commands.scaling import measure
from nbtrain.commands.scaling.efficiency import (
    LOSSES,
    Size,
    StepTime,
    compare,
    step_time,
    typical,
)
from nbtrain.commands.scaling.measure import ScalingRequest
from nbtrain.commands.scaling.report import ScalingReport
from nbtrain.errors import NbtrainError, PlanError
from nbtrain.lifecycle import catalog
from tests.support.kernel import Notebook

ONE = StepTime(1, 0.010, data=0.001, communication=0.0, imbalance=0.0, samples=64)
WEAK = StepTime(2, 0.0125, data=0.002, communication=0.0005, imbalance=0.0005, samples=64, joined=2)
STRONG = replace(WEAK, step=0.006, samples=32)


def report(*taken: StepTime, room: int | None = None, kind: str | None = None) -> ScalingReport:
    found, rows, notes = compare({of.ranks: [of] for of in taken}, kind=kind, room=room)
    return ScalingReport("train", found, tuple(rows), cores=2, notes=tuple(notes))


def shares(size: Size) -> list[float | None]:
    return list(size.lost.values())


def test_weak_scaling_is_told_by_samples_a_second() -> None:
    found = report(ONE, WEAK)
    one, two = found.sizes
    assert found.kind == "weak"
    assert (one.speedup, one.efficiency, one.rate) == (1.0, 1.0, 6400)
    assert two.rate == pytest.approx(2 * 64 / 0.0125)
    assert two.efficiency == pytest.approx(0.8)
    assert two.speedup == pytest.approx(1.6) == pytest.approx((two.rate or 0) / 6400)
    assert shares(two) == pytest.approx([0.08, 0.04, 0.04, 0.04])
    assert "neither kept nor shared" not in repr(found)
    assert "n times the batch" in repr(found)


def test_strong_scaling_is_told_by_how_much_shorter_a_step_is() -> None:
    found = report(ONE, STRONG)
    two = found.sizes[1]
    assert found.kind == "strong"
    assert two.speedup == pytest.approx(0.010 / 0.006) == pytest.approx((two.rate or 0) / 6400)
    # An ideal rank would wait for half of the data, and compute half as long.
    assert shares(two) == pytest.approx([0.25, 1 / 12, 1 / 12, -0.25])


@pytest.mark.parametrize(
    "other",
    [
        WEAK,
        STRONG,
        replace(WEAK, samples=50),
        replace(WEAK, samples=None),
        replace(WEAK, communication=None, imbalance=None),
        replace(WEAK, step=0.0091),  # less than one rank takes for it
    ],
)
def test_what_is_lost_adds_up_to_the_loss(other: StepTime) -> None:
    two = report(ONE, other).sizes[1]
    assert two.efficiency is not None
    assert sum(share or 0.0 for share in shares(two)) == pytest.approx(1 - two.efficiency)


def test_what_kind_it_was_is_seen_or_said() -> None:
    unseen = report(replace(ONE, samples=None), replace(STRONG, samples=None))
    assert unseen.kind == "unknown"
    assert "Give --strong" in unseen.notes[0]
    assert unseen.sizes[1].efficiency == pytest.approx(0.010 / 0.006)
    said = report(replace(ONE, samples=None), replace(STRONG, samples=None), kind="strong")
    assert said.kind == "strong"
    assert not said.notes
    assert said.sizes[1].efficiency == pytest.approx(0.5 * 0.010 / 0.006)
    contrary = report(ONE, WEAK, kind="strong")
    assert "--strong was given, but the batches show weak" in contrary.notes[0]
    assert report(ONE, WEAK, replace(STRONG, ranks=4)).kind == "mixed"


def test_what_was_not_seen_is_not_guessed() -> None:
    hidden = report(ONE, replace(WEAK, communication=None, imbalance=None))
    assert shares(hidden.sizes[1])[1:3] == [None, None]
    assert "not separated" in repr(hidden)
    assert "slower compute" not in repr(hidden).split("\n")[1]
    alone = report(ONE, replace(WEAK, joined=1))
    assert "each trained alone" in repr(alone)


def test_ranks_that_share_cores_are_marked() -> None:
    found = report(ONE, WEAK, replace(WEAK, ranks=4, joined=4), room=2)
    assert [size.shares_cores for size in found.sizes] == [False, False, True]
    assert "does not predict GPUs" in repr(found)
    assert "does not predict GPUs" not in repr(report(ONE, WEAK, room=2))


def test_repeats_are_told_by_their_median_and_spread() -> None:
    twos = [replace(WEAK, step=step) for step in (0.0125, 0.0120, 0.0200)]
    kind, (one, two), _ = compare({1: [ONE], 2: twos})
    assert two.step == 0.0125
    assert (two.low, two.speedup, two.high) == pytest.approx((1.0, 1.6, 0.02 / 0.012))
    told = repr(ScalingReport("train", kind, (one, two), repeats=3))
    assert "1.60× (1.00–1.67)" in told
    assert "repeats differ widely" in told


def steps(waits: Sequence[float | None], samples: int | None = None) -> dict[str, Any]:
    """Return what a rank records, of a batch of `samples` in each step."""
    seen = [samples and i * samples for i in range(len(waits) + 1)]
    rows = [[0.01 * i, 0.001 * i, seen[i], wait] for i, wait in enumerate([None, *waits])]
    return {"rows": rows, "joined": 2}


def test_who_waits_longest_came_first_and_who_waits_least_waits_for_the_exchange() -> None:
    def together(*records: dict[str, Any]) -> StepTime:
        return step_time(records, warm_up=1)

    taken = together(steps([0.002] * 10, 64), steps([0.006] * 10, 64))
    assert (taken.communication, taken.imbalance) == pytest.approx((0.002, 0.002))
    assert (taken.step, taken.data) == pytest.approx((0.01, 0.001))
    assert taken.samples == 64
    turns = together(steps([0.002, 0.006] * 5), steps([0.006, 0.002] * 5))
    assert (turns.communication, turns.imbalance) == pytest.approx((0.002, 0.002))
    sampled = together(steps([None, 0.002] * 5), steps([None, 0.004] * 5))
    assert sampled.communication == pytest.approx(0.002)
    assert together(*[steps([None] * 10)] * 2).communication is None
    assert together(*[steps([0.0] * 10)] * 2).communication is None  # exchanged out of our sight
    assert together(steps([None] * 10)).communication == 0  # a single rank
    assert together(steps([0.002] * 10, 128), steps([0.002] * 10)).samples == 64  # rank 0 reads
    assert together(steps([0.002] * 10), steps([0.004] * 12)).imbalance == pytest.approx(0.001)


def test_a_pause_does_not_count_and_what_comes_back_does() -> None:
    assert typical([0.01] * 19 + [5.0]) == pytest.approx(0.01)
    assert typical([0.01, 0.01, 0.01, 0.05] * 5) == pytest.approx(0.02)


def test_the_warm_up_is_left_out() -> None:
    ends = [1.0, 1.5, 2.0, *(2.0 + 0.01 * i for i in range(1, 11))]
    rows = [[end, 0.0, i + 63 * max(0, i - 2), 0.0] for i, end in enumerate(ends)]
    record = {"rows": rows, "joined": 1}  # batches of 1, then of 64
    found = step_time([record])
    assert (found.step, found.samples) == (pytest.approx(0.01), 64)
    assert step_time([record], 8).samples == 64
    assert step_time([record], 2).samples == pytest.approx(641 / 11)
    with pytest.raises(NbtrainError, match="13 optimizer steps were seen, 9 of them warm-up"):
        step_time([record], 9)


def test_sizes_go_up_and_down_in_turn() -> None:
    assert measure._order(ScalingRequest((1, 4, 2), repeat=2)) == [1, 2, 4, 4, 2, 1]


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("this was called")


def test_a_line_names_what_to_call_and_calls_nothing() -> None:
    line = "--weak --ranks 1,2 -p bf16 --env A=1 --repeat 2 --as r train(model, *[1], steps=5 * 10)"
    plan, asked, name = measure.read(line, {"train": refuse, "model": "M"})
    assert plan.task == measure.Call(refuse, ("M", 1), {"steps": 50})
    assert asked == ScalingRequest((1, 2), 2, None, "weak")
    assert (plan.mixed_precision, plan.env, name) == ("bf16", {"A": "1"}, "r")
    assert plan.name == "train(model, *[1], steps=5 * 10)"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train", "is not a call"),
        ("", "in ''"),
        ("train(", "in 'train\\('"),
        ("trainn(1)", "no `trainn` .there is `train`."),
        ("model(1)", "needs a function to call, not a str"),
        ("train(1 / 0)", "ZeroDivisionError"),
        ("--ranks 1,x train(1)", "--ranks: '1,x' is not a list of numbers of ranks, such as 1,2,4"),
        ("--ranks 0,1 train(1)", "whole numbers ≥ 1"),
        ("--repeat 0 train(1)", "repeat must"),
        ("--weak --strong train(1)", "not allowed with"),
        ("-n 2 train(1)", "unrecognized arguments: -n 2"),
        ("--background train(1)", "unrecognized arguments: --background"),
        ("-e inline train(1)", "inline engine runs one rank"),
        ("--what 1 train(1)", "--what"),
    ],
)
def test_a_line_that_makes_no_sense_is_one_clear_error(line: str, words: str) -> None:
    before = nbtrain.last_run()
    with pytest.raises(PlanError, match=words):
        measure.ask(line, {"train": refuse, "model": "M"})
    assert nbtrain.last_run() is before


def train(model: Any, steps: int, how: str = "", ddp: bool = True, passes: int = 1) -> int:
    import time

    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    wrapped, two = model, nbtrain.world_size() == 2
    if two:
        dist.init_process_group("gloo")
        wrapped = torch.nn.parallel.DistributedDataParallel(model) if ddp else model
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    data = TensorDataset(torch.ones(4 * steps, 2))
    for i, (batch,) in enumerate(DataLoader(data, batch_size=4)):
        if i == 5 and two and how == "fails":
            raise ZeroDivisionError("as it was told")
        if i == 5 and two and how == "interrupts" and nbtrain.rank() == 0:
            os.kill(os.getppid(), signal.SIGINT)
        optimizer.zero_grad()
        for left in reversed(range(passes)):
            if how == "late" and nbtrain.rank() == 1 and not left:
                time.sleep(0.03)
            wrapped(batch).sum().backward()
        if two and not ddp:
            dist.all_reduce(model.weight.grad)
        optimizer.step()
    return torch.get_num_threads()


def model() -> Any:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch._dynamo")  # else each rank imports it, at its first step
    return torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("ddp", "passes"),
    [(True, 1), (True, 2), (False, 1)],  # late for the last pass of a step
    ids=["DDP", "DDP, gradients accumulated", "its own collectives"],
)
def test_waiting_for_a_late_rank_is_imbalance(ddp: bool, passes: int) -> None:
    late = model()
    before = late.weight.clone()
    found = nbtrain.scaling(train, late, 15, "late", ddp, passes, ranks=(1, 2), view="none")
    assert bool((late.weight == before).all()), "weights came home"
    one, two = found.sizes
    assert (found.kind, one.batch, two.batch) == ("weak", 4, 4)
    assert two.step is not None
    assert two.efficiency is not None
    assert two.step > 0.03
    assert (
        two.step * (two.lost["imbalance"] or 0.0) > 0.005
    )  # it would be 0.015 if nothing else ran
    assert sum(share or 0.0 for share in shares(two)) == pytest.approx(1 - two.efficiency)
    assert len(one.runs) == len(two.runs) == 1
    assert catalog.find_run(one.runs[0]).folder.name.endswith(
        ".scaling"
    )  # they count by themselves
    threads = [catalog.find_run(size.runs[0]).results for size in found.sizes]
    assert threads == [[found.threads], [found.threads] * 2]


@pytest.mark.parametrize("asked", ["0", "2,1"])
def test_threads_that_are_no_number_are_ours_in_the_ranks_and_the_report(asked: str) -> None:
    env = {"OMP_NUM_THREADS": asked}
    found = nbtrain.scaling(train, model(), 12, ranks=(1,), env=env, view="none")
    assert found.threads == measure.usable_cpus()
    assert catalog.find_run(found.sizes[0].runs[0]).results == [found.threads]


def test_a_size_that_fails_is_a_row_and_the_others_stay(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = nbtrain.scaling(train, model(), 15, "fails", ranks=(2, 1), repeat=2)
    assert [size.ranks for size in found.sizes] == [1, 2]
    assert found.measured == found.sizes[:1]
    assert "ZeroDivisionError: as it was told" in found.sizes[1].error
    assert "ZeroDivisionError" in repr(found)
    assert "ZeroDivisionError" in found._repr_html_()
    said = capsys.readouterr().out
    assert said.count("2 ranks: ZeroDivisionError") == 1
    assert said.count("1 rank: ") == 2
    with pytest.raises(ZeroDivisionError, match="as it was told"):
        nbtrain.scaling(train, model(), 15, "fails", ranks=(2,), view="none")
    with pytest.raises(NbtrainError, match="no optimizer step"):
        nbtrain.scaling(len, "x", ranks=(1,), view="none")


def fickle(model: Any, path: Path) -> None:
    mine = path / str(nbtrain.rank())
    if nbtrain.world_size() == 1 or mine.exists():
        raise ZeroDivisionError("this time")
    mine.touch()
    train(model, 15)


def test_repeats_from_before_a_failure_stay_and_another_base_is_told(tmp_path: Path) -> None:
    found = nbtrain.scaling(fickle, model(), tmp_path, ranks=(1, 2), repeat=3, view="none")
    assert [bool(size.speedup) for size in found.sizes] == [False, True]
    assert len(found.sizes[1].runs) == 1
    assert (
        "2 ranks: ZeroDivisionError: this time; its numbers are those of 1 repeat before"
        in repr(found)
    )
    assert "compared with 2 ranks: 1 rank could not be measured" in repr(found)


def test_an_interrupt_keeps_the_sizes_that_were_measured() -> None:
    found = nbtrain.scaling(train, model(), 15, "interrupts", ranks=(1, 2), view="none")
    assert [bool(size.speedup) for size in found.sizes] == [True, False]
    assert "It was stopped" in repr(found)
    assert found.sizes[1].error == "not measured"
    with pytest.raises(KeyboardInterrupt):
        nbtrain.scaling(train, model(), 15, "interrupts", ranks=(2,), view="none")


def test_the_report_is_a_table_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    failed = Size(8, error="ValueError: <b>no</b>")
    found = report(ONE, WEAK, replace(WEAK, ranks=4, joined=4), room=2)
    found = replace(found, sizes=(*found.sizes, failed))
    table = found.table
    assert table.index.tolist() == [1, 2, 4, 8]
    assert table.loc[2, "efficiency"] == pytest.approx(0.8)
    lost = [f"lost to {name}" for name in LOSSES]
    assert table.loc[2, lost].sum() == pytest.approx(0.2)
    drawing = found.plot()
    drawing.save(tmp_path / "scaling.svg")
    svg = ElementTree.parse(tmp_path / "scaling.svg")
    texts = [element.text for element in svg.iter() if element.tag.endswith("text")]
    assert {"speed-up, up to the ideal (* more ranks than cores)", "data", "4 *"} < set(texts)
    bars: dict[str, float] = {}
    for rect in svg.iter("{http://www.w3.org/2000/svg}rect"):
        if rect.get("width") != "9.0":  # the legend's
            bars[rect.get("x", "")] = bars.get(rect.get("x", ""), 0) + float(rect.get("height", 0))
    assert list(bars.values()) == pytest.approx([39, 78, 156], abs=0.5)  # of 1, 2 and 4 ranks
    assert drawing._repr_svg_() == (tmp_path / "scaling.svg").read_text()
    html = found._repr_html_()
    assert 'src="data:image/svg+xml;base64,' in html
    assert "<script" not in html
    assert "&lt;b&gt;no" in html


def test_the_magic_measures_a_notebooks_own_function(notebook: Notebook) -> None:
    import inspect

    notebook.run("import os, signal, nbtrain\nfrom typing import Any\n" + inspect.getsource(train))
    notebook.run(
        "import torch._dynamo\nmodel = torch.nn.Linear(2, 2); before = model.weight.clone()"
    )
    out = notebook.run(
        "two = 2\n%nbtrain scaling --ranks 1,{two} --as found train(model, steps={12}.pop())"
    )
    assert not out.ename, out.traceback
    assert "scaling 1/2: 1 rank: " in out.stdout
    assert "scaling 2/2: 2 ranks: " in out.stdout
    assert not out.displays  # no board
    assert "weak scaling" in out.results[0]["text/plain"]
    assert "data:image/svg+xml" in out.results[0]["text/html"]
    assert notebook.value("[s.ranks for s in found.measured]") == [1, 2]
    assert notebook.value("bool((model.weight == before).all())")
    assert "define it in an ordinary cell" in notebook.run("%nbtrain scaling other(1)").evalue


def test_a_split_that_contradicts_itself_is_refused() -> None:
    two = replace(WEAK, communication=0.006)
    found = report(two, replace(two, ranks=4, joined=4, step=0.013, communication=0.0005))
    assert set(found.sizes[1].lost.values()) == {None}
    assert "At 4 ranks it cannot be said what the speed was lost to: communication" in repr(found)
    assert "--repeat 3" in repr(found)
    assert found.sizes[1].efficiency == pytest.approx(0.0125 / 0.013)
    drawn = found._repr_html_()
    assert "not separated" in drawn
