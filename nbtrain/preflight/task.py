"""What a task's own source says, and which of the notebook's models and loaders it refers to.

The user's values are looked at from outside: their types and instance dictionaries, never a
property or a method of theirs.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FunctionType, MethodType
from typing import Any

from ..plan import Cell, Task


@dataclass(frozen=True)
class Mentioned:
    """The source; bytes of trainable parameters referred to; DataLoader workers a rank."""

    source: str = ""
    weights: int = 0
    workers: int = 0


def read(task: Task) -> Mentioned:
    """Look at a task without running any of it."""
    source = task.source if isinstance(task, Cell) else _source(_function(task.function))
    tree = _tree(source)
    values = list(_values(task, tree))
    literals = _literal_workers(tree) if "num_workers" in source else ()
    workers = max([*literals, *_loader_workers(values)], default=0)
    return Mentioned(source, trainable_bytes(values), workers)


def _function(value: Any) -> FunctionType | None:
    """Return the Python function behind a callable; None for any other kind."""
    while type(value) in (functools.partial, MethodType):
        value = value.func if type(value) is functools.partial else value.__func__
    return value if type(value) is FunctionType else None


def _source(function: FunctionType | None) -> str:
    if function is None:
        return ""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError, SyntaxError, IndexError):  # typed at a prompt, or edited since
        return ""


def _tree(source: str) -> ast.AST:
    try:
        return ast.parse(source)
    except SyntaxError:  # a lambda in the middle of a call
        return ast.Module([], [])


def _values(task: Task, tree: ast.AST) -> Iterator[Any]:
    """Yield the notebook's values that a task is given or may look up by name."""
    if isinstance(task, Cell):
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {parameter.name for parameter in task.parameters}
        yield from (task.namespace[name] for name in names if name in task.namespace)
        return
    yield from task.args
    yield from task.kwargs.values()
    if type(task.function) is functools.partial:
        yield from task.function.args
        yield from task.function.keywords.values()
    function = _function(task.function)
    if function is not None:
        known = function.__globals__
        yield from (known[name] for name in _names(function.__code__) if name in known)
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not assigned yet
                continue


def _names(code: CodeType) -> set[str]:
    """Return the names a function looks up, its inner functions' included."""
    inner = [_names(part) for part in code.co_consts if isinstance(part, CodeType)]
    return set(code.co_names).union(*inner)


def _literal_workers(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.keyword(
                arg="num_workers" | "dataloader_num_workers", value=ast.Constant(value=int(count))
            ):
                yield count


def _loader_workers(values: Iterable[Any]) -> Iterator[int]:
    data = sys.modules.get("torch.utils.data")
    for value in values if data is not None else ():
        if issubclass(type(value), data.DataLoader):  # type: ignore[union-attr]
            count = vars(value).get("num_workers", 0)
            yield count if type(count) is int else 0


def trainable_bytes(values: Iterable[Any]) -> int:
    """Return the bytes of the parameters that training would change, each storage once.

    Only those on the CPU: a rank that writes to them copies the pages it inherited.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return 0
    kinds = (torch.Tensor, torch.nn.Parameter)
    sizes: dict[int, int] = {}
    for parameter in _parameters(torch, values):
        plain = type(parameter) in kinds  # a subclass may compute what it is asked
        if plain and parameter.requires_grad and parameter.device.type == "cpu":
            storage = parameter.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _parameters(torch: Any, values: Iterable[Any]) -> Iterator[Any]:
    waiting, seen = list(values), set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if issubclass(type(value), torch.nn.Module):
            inside = vars(value)
            waiting += (inside.get("_modules") or {}).values()
            yield from (inside.get("_parameters") or {}).values()
        elif type(value) in (list, tuple, dict):
            # The first few: a list may be a data set.
            items = islice(value.values() if type(value) is dict else value, 64)
            waiting += [item for item in items if issubclass(type(item), torch.nn.Module)]
