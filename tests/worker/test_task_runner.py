"""The body of a rank: running a task, and telling of its result."""

from __future__ import annotations

from typing import Any

import pytest

from nbtrain.planning import cell
from nbtrain.planning.plan import Call
from nbtrain.worker import task_runner


def run(source: str, namespace: dict[str, Any] | None = None) -> Any:
    return task_runner.run_task(
        cell.read_cell(source, "<cell>", {} if namespace is None else namespace)
    )


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
        value: int = task_runner.run_task(Call(train))
        await asyncio.sleep(0)
        return value

    assert asyncio.run(notebook()) == 5


def test_a_missing_parameter_is_a_type_error_in_the_rank() -> None:
    with pytest.raises(TypeError, match="train\\(\\) missing 1 required positional argument: 'x'"):
        run("from math import *\ndef train(x): ...")
