"""The body of a rank: running a task, and telling of its result."""

from __future__ import annotations

from typing import Any

import pytest

from nbtrain import cell, worker
from nbtrain.plan import Call
from nbtrain.preview import preview


def run(source: str, namespace: dict[str, Any] | None = None) -> Any:
    return worker.run_task(cell.read_cell(source, "<cell>", {} if namespace is None else namespace))


def test_a_cell_with_await_runs_in_one_event_loop() -> None:
    source = (
        "import asyncio\n"
        "async def f(): return 9\n"
        "t = asyncio.create_task(f())\n"
        "await asyncio.sleep(0)\n"
        "await t"
    )
    assert run(source) == 9
    assert run("import asyncio\nx = await asyncio.sleep(0, 4)\nasync def train(x): return x") == 4


def test_coroutines_run_where_a_loop_runs_already() -> None:
    import asyncio

    async def train() -> int:
        await asyncio.sleep(0)
        return 5

    async def notebook() -> int:
        value: int = worker.run_task(Call(train))
        await asyncio.sleep(0)
        return value

    assert asyncio.run(notebook()) == 5


def test_the_future_of_earlier_cells_holds() -> None:
    import __future__

    source = "def f(x: Undefined): ...\nf.__annotations__['x']"
    flags = __future__.annotations.compiler_flag
    assert worker.run_task(cell.read_cell(source, "<cell>", {}, flags)) == "Undefined"


def test_a_missing_parameter_is_a_type_error_in_the_rank() -> None:
    with pytest.raises(TypeError, match="train\\(\\) is missing x"):
        run("from math import *\ndef train(x): ...")


class _Hostile:
    @property
    def shape(self) -> Any:
        raise RuntimeError("no shape yet")


class _BadKey:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_previews_never_raise_and_stay_short() -> None:
    import torch

    loop: dict[str, Any] = {}
    loop["self"] = loop
    for value in (loop, _Hostile(), {_BadKey(): 1}, 10**6000, "x" * 10**6, [[[[[1]]]]] * 99):
        assert len(preview(value)) <= 200
    shown = preview({"accuracy": 0.97, "w": torch.ones(2, 3)})
    assert shown == "{'accuracy': 0.97, 'w': Tensor[2, 3]}"
    assert preview((1, "a", None)) == "(1, 'a', None)"
