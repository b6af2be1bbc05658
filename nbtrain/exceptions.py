"""A rank's exception on its way to the notebook: its type, chain, notes and frames.

Pickling drops tracebacks and chains, so they travel beside the exception, and are rebuilt around
small stand-in frames that carry the file, the line and the name of the real ones (the way of
``tblib``). IPython then shows the cell's own source lines, and ``except ValueError`` works.
"""

from __future__ import annotations

import ast
import builtins
import os
import pickle
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, cast

from . import serialize
from .errors import RankError

MARK = "__nbtrain_rank_frame__"
_PACKAGE = str(Path(__file__).parent) + os.sep
_WORKER = str(Path(__file__).with_name("worker.py"))
_ELSEWHERE = re.compile(r"Caught \w+ in (DataLoader worker process \d+)\.")
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


@dataclass(frozen=True)
class Frame:
    """One line of a traceback, with the span of the expression in it where Python knows it."""

    filename: str
    line: int
    function: str
    first_line: int
    end_line: int
    column: int = 0
    end_column: int = 0

    @property
    def is_own(self) -> bool:
        return self.filename.startswith(_PACKAGE)

    @property
    def is_library(self) -> bool:
        return self.filename.startswith((*_LIBRARIES, "<frozen ")) or "-packages/" in self.filename


@dataclass(frozen=True)
class Captured:
    """An exception as data. `pickled` is None where the instance itself cannot travel."""

    type_name: str
    text: str
    pickled: bytes | None
    frames: tuple[Frame, ...]
    notes: tuple[str, ...] = ()
    cause: Captured | None = None
    context: Captured | None = None
    suppress_context: bool = False
    members: tuple[Captured, ...] = ()
    """The exceptions of a group, in its order."""

    @property
    def headline(self) -> str:
        lines = self.text.strip().splitlines()
        if lines and (caught := _ELSEWHERE.fullmatch(lines[0])):  # torch: its own text comes last
            return f"{lines[-1].strip()} (in {caught[1]})"
        return f"{self.type_name}: {lines[0]}" if lines else self.type_name


def user_frames(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Keep the user's frames, and the last one where a library raised."""
    shown = tuple(f for f in frames if not f.is_own)
    kept = tuple(f for f in shown if not f.is_library)
    if not kept:
        return shown
    return kept if shown[-1] is kept[-1] else (*kept, shown[-1])


def capture(
    error: BaseException,
    shared: frozenset[type] = frozenset(),
    _seen: frozenset[int] = frozenset(),
) -> Captured:
    """Turn an exception into data; never raises, however hostile the exception is."""
    seen = _seen | {id(error)}

    def chained(other: BaseException | None) -> Captured | None:
        fits = other is not None and id(other) not in seen and len(seen) < 20
        return capture(other, shared, seen) if fits and other is not None else None

    return Captured(
        type_name=type(error).__name__,
        text=_text(error),
        pickled=_pickled(error, shared),
        frames=user_frames(_frames(error.__traceback__)),
        notes=_notes(error),
        cause=chained(error.__cause__),
        # `raise … from e` makes e both: sent twice, a chain would cost twice as much a link.
        context=None if error.__context__ is error.__cause__ else chained(error.__context__),
        suppress_context=error.__suppress_context__,
        members=tuple(member for e in _members(error) if (member := chained(e)) is not None),
    )


def _members(error: BaseException) -> tuple[BaseException, ...]:
    """Return the exceptions of a group (an `asyncio.TaskGroup` raises one), of no other class."""
    group: Any = getattr(builtins, "BaseExceptionGroup", ())  # not in Python 3.10
    return cast(Any, error).exceptions if issubclass(type(error), group) else ()


def _frames(tb: TracebackType | None) -> Iterator[Frame]:
    while tb is not None:
        code, line = tb.tb_frame.f_code, tb.tb_lineno or 1
        span = (line, line, 0, 0)
        if sys.version_info >= (3, 11) and tb.tb_lasti >= 0:
            known = next(islice(code.co_positions(), tb.tb_lasti // 2, None), (None,) * 4)
            if None not in known:
                span = cast("tuple[int, int, int, int]", known)
        yield Frame(code.co_filename, span[0], code.co_name, code.co_firstlineno, *span[1:])
        tb = tb.tb_next


def _notes(error: BaseException) -> tuple[str, ...]:
    notes = getattr(error, "__notes__", ())
    return tuple(str(note) for note in notes) if isinstance(notes, (list, tuple)) else ()


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as inner:  # a user's __str__ may raise anything
        return f"<{type(error).__name__}.__str__ raised {type(inner).__name__}>"


def _pickled(error: BaseException, shared: frozenset[type]) -> bytes | None:
    """Pickle the instance as it wishes, else without its ``__init__``; None where neither works."""
    for form in (error, _Parts(type(error), error.args, _state(error))):
        try:
            text = str(error)  # what cannot be shown is better told by a stand-in
            data = serialize.dumps(form, shared)
            rebuilt = _rebuilt(serialize.loads(data))  # tried out here, where it costs nothing
            if isinstance(rebuilt, BaseException) and str(rebuilt) == text:
                return data
        except Exception:  # a user's exception may refuse pickling in any way
            continue
    return None


@dataclass(frozen=True)
class _Parts:
    """What an exception is made of, where calling its class with its args does not remake it."""

    cls: type[BaseException]
    args: tuple[Any, ...]
    state: dict[str, Any]


def _state(error: BaseException) -> dict[str, Any]:
    return {k: v for k, v in getattr(error, "__dict__", {}).items() if k != "__notes__"}


def _rebuilt(value: Any) -> Any:
    if not isinstance(value, _Parts):
        return value
    error = value.cls.__new__(value.cls, *value.args)
    error.args = value.args
    vars(error).update(value.state)
    return error


def restore(captured: Captured) -> BaseException:
    """Rebuild the exception with its chain and a traceback of its own frames."""
    error = _instance(captured)
    if captured.notes:
        set_notes(error, list(captured.notes))
    error.__cause__ = restore(captured.cause) if captured.cause else None
    error.__context__ = restore(captured.context) if captured.context else error.__cause__
    error.__suppress_context__ = captured.suppress_context
    _restore_members(error, captured.members)
    return error.with_traceback(_traceback(captured.frames))


def _restore_members(error: BaseException, members: tuple[Captured, ...]) -> None:
    """Give the exceptions of a group, which came with it, what pickling took from them."""
    mine = _members(error)
    for member, captured in zip(mine, members, strict=False) if len(mine) == len(members) else ():
        told = restore(captured)
        set_notes(member, list(captured.notes))
        member.__cause__, member.__context__ = told.__cause__, told.__context__
        member.__suppress_context__ = told.__suppress_context__
        _restore_members(member, captured.members)
        member.__traceback__ = told.__traceback__


def set_notes(error: BaseException, notes: list[str]) -> None:
    """Give an exception its notes; Python 3.10 has no `add_note`, IPython shows them there too."""
    error.__notes__ = notes  # type: ignore[attr-defined,unused-ignore]


def _instance(captured: Captured) -> BaseException:
    if captured.pickled is not None:
        try:
            error = _rebuilt(serialize.loads(captured.pickled))
            if isinstance(error, BaseException):
                return error
        except (pickle.UnpicklingError, ImportError, AttributeError, KeyError, TypeError):
            pass  # e.g. reopened in a kernel that lacks the class
    return RankError(f"{captured.type_name}: {captured.text}", type_name=captured.type_name)


def _traceback(frames: tuple[Frame, ...]) -> TracebackType | None:
    tb: TracebackType | None = None
    for frame in reversed(frames):
        stub = _stub(frame)
        tb = TracebackType(tb, stub.tb_frame, stub.tb_lasti, frame.line)
    return tb


def _stub(frame: Frame) -> TracebackType:
    """Raise in code that says it is `frame`, and return the traceback of that."""
    try:
        exec(_stub_code(frame), {"__name__": frame.function, MARK: True})
    except StopIteration:
        tb = sys.exc_info()[2]
        assert tb is not None
        assert tb.tb_next is not None
        return tb.tb_next
    raise AssertionError("unreachable")


def _stub_code(frame: Frame) -> CodeType:
    """Return code that raises at the frame's very line, in a function that begins at its line."""
    tree = ast.parse("def stub(): raise StopIteration")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.lineno, node.end_lineno = min(frame.first_line, frame.line), frame.end_line
        elif isinstance(node, (ast.stmt, ast.expr)):
            node.lineno, node.end_lineno = frame.line, frame.end_line
            node.col_offset, node.end_col_offset = frame.column, frame.end_column
    module = compile(tree, frame.filename, "exec")
    code = next(const for const in module.co_consts if isinstance(const, CodeType))
    names: dict[str, Any] = {"co_name": frame.function}
    if sys.version_info >= (3, 11):
        names["co_qualname"] = frame.function
    return code.replace(**names)


def rank_frames(tb: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that happened in a rank; None where no part did."""
    found: TracebackType | None = None
    while tb is not None:
        if MARK in tb.tb_frame.f_globals:
            return tb
        if tb.tb_frame.f_code.co_filename == _WORKER:  # the inline engine: real frames follow
            found = tb.tb_next
        tb = tb.tb_next
    return found
