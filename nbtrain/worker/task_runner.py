"""Runs the user's task: a call, or a cell and the training function it ends in."""

from __future__ import annotations

import inspect
from ast import Expr, Expression, Module, PyCF_ALLOW_TOP_LEVEL_AWAIT, parse
from collections.abc import Coroutine
from itertools import takewhile
from types import CodeType
from typing import Any, NoReturn

from ..planning.plan import Call, Cell, Plan, Task
from ..planning.task_values import arguments
from ..transport.exceptions import set_notes


def run_task(task: Task) -> Any:
    """Call the task's function, or run its cell, and return the value; a coroutine is awaited."""
    if isinstance(task, Call):
        value = task.function(*task.args, **task.kwargs)
    else:
        codes = _compile_cell(task)
        if any(code.co_flags & inspect.CO_COROUTINE for code in codes):
            return _run_in_loop(_run_cell_awaiting(task, codes))
        value = None
        for code in codes:
            value = eval(code, task.namespace)
        value = _call(task, value)
    return _run_in_loop(_await_value(value)) if inspect.iscoroutine(value) else value


def failing_plan(error: Exception, place: str) -> Plan:
    """Return a plan that raises `error`, so that it is reported as a failure of the rank.

    The error comes from loading the task's own values. It loses its traceback, and gets `place` as
    its only note.
    """
    set_notes(error.with_traceback(None), [place])
    return Plan(Call(_fail, (error,)), name="load")


def _fail(error: Exception) -> NoReturn:
    raise error


async def _run_cell_awaiting(cell: Cell, codes: list[CodeType]) -> Any:
    """Run a cell with a top-level await: all of it in one event loop."""
    value = None
    for code in codes:
        value = eval(code, cell.namespace)
        if code.co_flags & inspect.CO_COROUTINE:
            value = await value
    value = _call(cell, value)
    return await value if inspect.iscoroutine(value) else value


def _call(cell: Cell, value: Any) -> Any:
    """Call the cell's training function and return its value; without one, return `value`.

    Each parameter gets the variable of its name. A parameter without a variable keeps its default.
    """
    if cell.function is None:
        return value
    given = arguments(cell)
    first = takewhile(lambda p: p.positional_only and p.name in given, cell.parameters)
    positional = [given.pop(parameter.name) for parameter in first]
    return cell.namespace[cell.function](*positional, **given)


async def _await_value(value: Any) -> Any:
    return await value


def _run_in_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, also where a loop runs already (inline, in a kernel)."""
    import asyncio  # which takes 10 ms

    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return asyncio.run(coroutine)
    finally:
        asyncio._set_running_loop(running)
        if running is not None:
            asyncio.set_event_loop(running)


def _compile_cell(cell: Cell) -> list[CodeType]:
    """Compile the cell's statements, and a trailing expression apart from them."""
    tree = parse(cell.source, cell.filename)
    last = tree.body[-1]
    if not isinstance(last, Expr):
        return [_compile(tree, cell, "exec")]
    body = Module(tree.body[:-1], type_ignores=[])
    return [_compile(body, cell, "exec"), _compile(Expression(last.value), cell, "eval")]


def _compile(tree: Module | Expression, cell: Cell, mode: str) -> CodeType:
    flags = PyCF_ALLOW_TOP_LEVEL_AWAIT | cell.flags
    code: CodeType = compile(tree, cell.filename, mode, flags=flags, dont_inherit=True)
    return code
