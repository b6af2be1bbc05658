"""Bars that are reported instead of drawn, of tqdm and of fastprogress."""

from __future__ import annotations

import pytest

from tests.support.kernel import Notebook

BARS = {
    "notebook": "from fastprogress.fastprogress import NBMasterBar as master, NBProgressBar as bar",
    "console": "from fastprogress.fastprogress import ConsoleMasterBar as master, "
    "ConsoleProgressBar as bar",
    "by default": "from fastprogress.fastprogress import master_bar as master, progress_bar as bar",
}


def train(notebook: Notebook, imports: str, body: str) -> list[tuple[float, float | None, bool]]:
    """Run a cell with bars; return what each bar came to, in the order in which they began."""
    notebook.run(
        "import json\ndef bars(run):\n"
        "    last = {}\n"
        "    for line in open(run.folder / 'rank-0000.jsonl'):\n"
        "        event = json.loads(line)\n"
        "        if event['kind'] == 'progress':\n"
        "            last[event['bar']] = event['n'], event['total'], event['closed']\n"
        "    return list(last.values())"
    )
    out = notebook.run(f"%%distributed -n 1\n{imports}\n{body}")
    assert not out.ename, out.traceback
    came: list[tuple[float, float | None, bool]] = notebook.value("bars(nbtrain.last_run())")
    return came


@pytest.mark.parametrize("kind", BARS)
def test_fastprogress_is_reported_and_draws_nothing(notebook: Notebook, kind: str) -> None:
    pytest.importorskip("fastprogress")
    came = train(
        notebook,
        BARS[kind],
        "both = master(range(3))\n"
        "for epoch in both:\n"
        "    for _ in bar(range(5), parent=both): pass\n"
        "    if not epoch: both.write(['epoch', 'loss'], table=True)\n"
        "    both.write([str(epoch), f'{0.5 / (epoch + 1):.2f}'], table=True)\n"
        "for _ in bar(range(4)): pass\n"
        "for _ in bar(iter('abc'), total='noinfer'): pass\n"
        "for _ in bar(range(7), display=False): pass",
    )
    assert came[:2] == [(3, 3, True), (5, 5, True)]
    assert came[2:] == [(5, 5, True), (5, 5, True), (4, 4, True), (3, 3, True)]
    log = notebook.value("nbtrain.last_run().logs(0)").split("\n")
    lines = [line.rpartition("\r")[2].split() for line in log]
    rows = [["epoch", "loss"], ["0", "0.50"], ["1", "0.25"], ["2", "0.17"]]
    assert [line for line in lines if line] == rows


@pytest.mark.parametrize("kind", BARS)
def test_an_error_in_a_bar_is_the_users_own(notebook: Notebook, kind: str) -> None:
    pytest.importorskip("fastprogress")
    out = notebook.run(
        f"%%distributed -n 1\n{BARS[kind]}\nboth = master(range(3))\n"
        "for epoch in both:\n    for n in bar(range(5), parent=both): 1 / (n - 3)"
    )
    assert out.ename == "ZeroDivisionError"
    assert "█" not in notebook.value("nbtrain.last_run().logs(0)").partition("Traceback")[0]


def test_the_bars_of_tqdm_are_reported(notebook: Notebook) -> None:
    came = train(
        notebook,
        "from tqdm.auto import tqdm, trange",
        "for _ in trange(3):\n    for _ in tqdm(range(5)): pass",
    )
    assert came[0] == (3, 3, True)
    assert set(came[1:]) == {(5, 5, True)}


def test_a_pool_of_tqdm_works_in_a_rank(notebook: Notebook) -> None:
    pool = "from tqdm.contrib.concurrent import process_map\n"
    came = train(notebook, pool, "print(process_map(abs, range(-3, 3), max_workers=2))")
    assert came == [(6, 6, True)]
