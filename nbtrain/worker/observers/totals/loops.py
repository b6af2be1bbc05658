"""Reads the loops around the running code: the current round of each, and their number.

Only what is certain counts: ``for epoch in range(start, args.epochs)``, a bar or `enumerate` around
one, a list whose members differ, ``while step < steps``. With any other loop, or if the source
cannot be read, the length of the training is unknown.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import inspect
import linecache
import operator
import sys
import textwrap
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ....planning.task_values import global_names
from ....system.source_files import RANK_BODY, is_library, is_own

_BARS = ("tqdm", "trange", "track", "progress", "progress_bar", "tqdm_notebook", "notebook_tqdm")
_NO_LOOPS = ("torch.", "accelerate.", "tqdm.", "contextlib", "functools", "threading")
"""Modules whose frames are between a training's loop and what it calls, and loop over other
things."""

_SEEN_ELSEWHERE = {"locals", "vars", "eval", "exec", "dir"}
"""Code that may use the dictionary of a function's variables, which reading would change."""

_FRAMES = {"_getframe", "currentframe"}
"""What gives a frame, and with it that dictionary."""


class Loop(NamedTuple):
    """A loop that is running."""

    name: str
    at: int
    """Its round, from 0."""
    rounds: int
    first: int
    """What people call its first round: 1, or 4 where epoch 4 is the first after a restart."""


class Loops(NamedTuple):
    """The loops around a step, from the outside in."""

    known: tuple[Loop, ...]
    has_inner: bool
    """Whether the innermost goes over something else, as over a loader's batches."""
    key: tuple[tuple[int, int], ...]
    """Which loops they are, by code and line."""


Statement = ast.For | ast.AsyncFor | ast.While

_statements: dict[int, tuple[CodeType, tuple[Statement, ...] | None]] = {}
"""The loops of each function that was looked at, by the id of its code."""


def loops_around(frame: FrameType | None) -> Loops | None:
    """Return the loops around a frame; None where what is around it is not all known."""
    known: list[Loop] = []  # from the inside out
    key: list[tuple[int, int]] = []
    has_inner = False
    for around in _frames(frame):
        statements = _enclosing(around)
        if statements is None:
            return None
        if not statements:
            continue
        for statement in reversed(statements):
            # ``for phase in ("train", "val")``: steps in one alone.
            if _iterates_literals(statement):
                continue
            if _is_retry_loop(statement):  # a round that succeeds is the last
                continue
            loop = _loop(statement, around)
            if loop is None and (has_inner or isinstance(statement, ast.While)):
                return None
            key.append((id(around.f_code), statement.lineno))
            if loop is None:  # over batches: what loops within it is a part of one
                has_inner, known = True, []
            else:
                known.append(loop)
    return Loops(tuple(reversed(known)), has_inner, tuple(reversed(key)))


def ends_with_loader(frame: FrameType) -> bool:
    """Return whether the loop that reads a loader ends when the loader gives no more batches.

    `frame` is called to get a batch. The loop does not end so where the user's code calls ``next``,
    which would raise `StopIteration`, and within a ``while`` loop, which may count steps.
    """
    frames = list(_frames(frame))
    if frames and not is_library(frames[0].f_code.co_filename) and not _is_for(frames[0]):
        return False
    loops = (each for around in frames for each in _enclosing(around) or ())
    return not any(_is_endless(each) and not _is_retry_loop(each) for each in loops)


def _is_for(frame: FrameType) -> bool:
    """Return whether a frame is at a ``for`` or ``yield from``, and not at a call such as ``next``.

    A loop over a generator gets faster after some rounds (``FOR_ITER_GEN``, Python 3.12). Then its
    frame is in the cache behind that operation.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    while dis.opname[code[at]] == "CACHE":
        at -= 2
    return dis.opname[code[at]] in ("FOR_ITER", "SEND", "YIELD_FROM")


def _is_endless(statement: Statement) -> bool:
    """Return whether a loop may end by nothing but its body: ``while``, ``for … in count()``."""
    if isinstance(statement, ast.While):
        return True
    over = _within_bar(statement.iter)
    names = "count", "repeat", "cycle", "iter"
    return isinstance(over, ast.Call) and _called_function(over) in names


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the user's code and of libraries that train, from the inside out."""
    while frame is not None and frame.f_code.co_filename not in RANK_BODY:
        module = str(frame.f_globals.get("__name__", ""))
        if not (is_own(frame.f_code.co_filename) or f"{module}.".startswith(_NO_LOOPS)):
            yield frame
        frame = frame.f_back


def _enclosing(frame: FrameType) -> list[Statement] | None:
    """Return the loops of its function that a frame is in, outermost first; None if unknown.

    The function's source is read once, and found by its code.
    """
    code, line = frame.f_code, frame.f_lineno
    if id(code) not in _statements:
        _statements[id(code)] = code, _read(code)
    every = _statements[id(code)][1]
    if every is None:
        return None
    return [each for each in every if each.body[0].lineno <= line <= (each.end_lineno or 0)]


def _read(code: CodeType) -> tuple[Statement, ...] | None:
    """Return the loops of a function, or of a cell, in the order of its source.

    None for a comprehension, and where the source cannot be read or parsed; empty for a lambda.
    """
    is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
    if code.co_name == "<lambda>":
        return ()
    if is_function and code.co_name.startswith("<"):  # a comprehension, whose line shows no round
        return None
    lines = linecache.getlines(code.co_filename)
    first = code.co_firstlineno - 1 if is_function else 0
    try:
        block = inspect.getblock(lines[first:]) if is_function else lines
        tree: ast.AST = ast.parse(textwrap.dedent("".join(block)))
    except (SyntaxError, IndexError):
        return None
    body = list(ast.iter_child_nodes(tree))
    if not body:
        return None
    ast.increment_lineno(tree, first)
    return tuple(_loops_in(body[0] if is_function else tree))


def _loops_in(node: ast.AST) -> Iterator[Statement]:
    """Yield the loops within a node, without those of functions within it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.For, ast.AsyncFor, ast.While)):
            yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield from _loops_in(child)


@contextlib.contextmanager
def _variables(frame: FrameType) -> Iterator[ChainMap[str, Any]]:
    """Yield the variables of a frame and then those of its module, without keeping them."""
    # Until 3.13 they are a copy that the frame keeps: a tensor in it would stay alive.
    is_copy = sys.version_info < (3, 13) and bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if is_copy and _may_hold_variables(frame.f_code):
        yield ChainMap()
        return
    local = frame.f_locals
    try:
        yield ChainMap(local, frame.f_globals)
    finally:
        if is_copy:
            local.clear()


def _may_hold_variables(code: CodeType) -> bool:
    """Whether a function may use the dictionary of its variables, as by ``locals()``."""
    if not _FRAMES.isdisjoint(code.co_names):
        return True
    # ``model.eval()`` has the name, too, but is no `eval`.
    called = _SEEN_ELSEWHERE.intersection(code.co_names)
    return not called.isdisjoint(global_names(code))


def _is_retry_loop(statement: Statement) -> bool:
    """Return whether only a failure leads to another round: ``for attempt in …: try: …; break``."""
    last = statement.body[-1]
    blocks = [last.orelse or last.body, last.finalbody] if isinstance(last, ast.Try) else []
    ends = [last, *(block[-1] for block in blocks if block)]
    has_handler = any(isinstance(each, ast.Try) for each in statement.body)
    return has_handler and any(isinstance(end, (ast.Break, ast.Return)) for end in ends)


def _iterates_literals(statement: Statement) -> bool:
    """Whether a loop goes over texts that are written out: parts of a round, not rounds."""
    if isinstance(statement, ast.While) or not isinstance(statement.iter, (ast.List, ast.Tuple)):
        return False
    members = statement.iter.elts
    return all(isinstance(m, ast.Constant) and isinstance(m.value, str) for m in members)


class _Unknown(Exception):
    """An expression whose value cannot be known without running the user's code."""


def _loop(statement: Statement, frame: FrameType) -> Loop | None:
    """Return where a loop stands; None if it is of another kind, or evaluating it raises."""
    try:
        with _variables(frame) as variables:
            if isinstance(statement, ast.While):
                loop = _while(statement, variables)
            else:
                loop = _for(statement, variables)
    except Exception:  # the user's objects may raise anything
        return None
    return loop if 0 <= loop.at < loop.rounds else None


def _while(statement: ast.While, variables: Mapping[str, Any]) -> Loop:
    """Return where ``while step < steps`` stands. Raises `_Unknown` for another condition."""
    match statement.test:
        case ast.Compare(
            ast.Name() | ast.Attribute() as left, [ast.Lt() | ast.LtE() as sign], [to]
        ):
            rounds = _whole(_value(to, variables)) + isinstance(sign, ast.LtE)
            at = _whole(_value(left, variables))
            at -= at == rounds  # in the last round, of a body that begins with ``step += 1``
            return Loop(_name(left), at, rounds, 1)
    raise _Unknown


def _for(statement: ast.For | ast.AsyncFor, variables: Mapping[str, Any]) -> Loop:
    """Return where a ``for`` loop stands, over a range or a list of plain values.

    Raises `_Unknown`, or ValueError if the list does not contain the loop's variable.
    """
    over, target = _within_bar(statement.iter), statement.target
    match over, target:
        case ast.Call(ast.Name("enumerate"), [inner, *start], keywords), ast.Tuple([index, _]):
            starts = [*start, *(keyword.value for keyword in keywords)]
            first = _whole(_value(starts[0], variables)) if starts else 0
            rounds = len(_evaluate_members(_within_bar(inner), variables))
            return Loop(_name(index), _whole(_value(index, variables)) - first, rounds, 1)
    members, value = _evaluate_members(over, variables), _value(target, variables)
    at = members.index(_whole(value) if isinstance(members, range) else value)
    return Loop(_name(target), at, len(members), _first(over, members))


def _within_bar(over: ast.expr) -> ast.expr:
    """Return what a bar goes over: ``tqdm(range(3))``, ``trange(3)``."""
    while isinstance(over, ast.Call) and _called_function(over) in _BARS and over.args:
        if _called_function(over) == "trange":
            return ast.Call(ast.Name("range", ast.Load()), over.args, [])
        over = over.args[0]
    return over


def _called_function(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _evaluate_members(over: ast.expr, variables: Mapping[str, Any]) -> Sequence[Any]:
    """Return what a loop goes over: a range, or at most 1,000 plain values that differ.

    Raises `_Unknown` for anything else, and what `_value` raises.
    """
    value = _value(over, variables)
    if type(value) is range:
        return value
    if type(value) in (list, tuple) and len(value) <= 1000:
        plain = all(type(member) in (int, float, str, type(None)) for member in value)
        if plain and len(set(value)) == len(value):
            return value  # type: ignore[no-any-return]
    raise _Unknown


def _first(over: ast.expr, members: Sequence[Any]) -> int:
    """Return the number of the first round: 1, unless a range continues after a restart."""
    if not isinstance(members, range) or members.step != 1:
        return 1
    match over:
        case ast.Call(args=[ast.Constant(1), _]):
            return members.start
        case ast.Call(args=[_, ast.BinOp(_, ast.Add(), ast.Constant(1))]):
            return members.start
    return members.start + 1


def _name(target: ast.expr) -> str:
    name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
    return str(name).strip("_")[:40]


def _whole(value: Any) -> int:
    if type(value) is int or (type(value) is float and value.is_integer()):
        return int(value)
    raise _Unknown


_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def _value(node: ast.expr, variables: Mapping[str, Any]) -> Any:
    """Return the value of an expression without calling the user's functions.

    Attributes are read, which runs properties, and so is the length in ``len(x)``. Operators are
    applied only to integers, because other objects would run their own methods. Raises `_Unknown`,
    and what a lookup that fails raises: KeyError, AttributeError, IndexError.
    """
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return variables[name]
        case ast.Attribute(owner, name):
            return getattr(_value(owner, variables), name)
        case ast.Subscript(owner, index):
            container = _value(owner, variables)
            if type(container) in (dict, list, tuple):
                return container[_value(index, variables)]
        case ast.List(members) | ast.Tuple(members):
            return [_value(member, variables) for member in members]
        case ast.BinOp(left, sign, right):
            numbers = (_whole(_value(each, variables)) for each in (left, right))
            return _OPERATORS[type(sign)](*numbers)
        case ast.Call(ast.Name("range"), bounds, []):
            return range(*(_whole(_value(bound, variables)) for bound in bounds))
        case ast.Call(ast.Name("len"), [inner], []):
            return len(_value(inner, variables))
        case ast.Call(ast.Name("int"), [inner], []):
            return _whole(_value(inner, variables))
    raise _Unknown
