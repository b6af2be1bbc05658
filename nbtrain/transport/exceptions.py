"""Copies a rank's exception to the notebook: its type, chain, notes and frames.

Pickling drops tracebacks and chains, so they are sent beside the exception. In the notebook they
are rebuilt around stand-in frames with the file, line and name of the real ones, as ``tblib`` does.
IPython then shows the cell's own source lines, and ``except ValueError`` works.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import CodeType, TracebackType
from typing import Any, cast

from ..errors import RankError
from ..system import source_files
from . import result_pickler
from .limits import CHUNK_BYTES, MAX_EXCEPTION_CHAIN, MAX_TEXT_CHARS

RANK_FRAME_MARK = "__nbtrain_rank_frame__"
"""A global that marks the stand-in frames for `rank_frames`."""

_CAUGHT_IN_WORKER = re.compile(r"Caught \w+ in (DataLoader worker process \d+)\.")


@dataclass(frozen=True)
class TracebackFrame:
    """One line of a traceback, with the span of the expression if Python records it."""

    filename: str
    line: int
    function: str
    first_line: int
    end_line: int
    column: int = 0
    end_column: int = 0

    @property
    def is_own(self) -> bool:
        return source_files.is_own(self.filename)

    @property
    def is_library(self) -> bool:
        return source_files.is_library(self.filename)


@dataclass(frozen=True)
class CapturedException:
    """An exception as data."""

    type_name: str
    text: str
    pickled: bytes | None
    """None if the instance cannot be pickled."""
    frames: tuple[TracebackFrame, ...]
    notes: tuple[str, ...] = ()
    cause: CapturedException | None = None
    context: CapturedException | None = None
    suppress_context: bool = False
    members: tuple[CapturedException, ...] = ()
    """The exceptions of a group, in its order."""

    @property
    def headline(self) -> str:
        """Return the exception in one line: its type and the first line of its text.

        The type alone if there is no text. The next line is added if the first ends with a colon.
        For an exception of a DataLoader's worker, the worker's own last line, with its number.
        """
        lines = self.text.strip().splitlines()
        if lines and (caught := _CAUGHT_IN_WORKER.fullmatch(lines[0])):
            # torch puts the exception of a worker, with its traceback, into a message of its own
            return f"{lines[-1].strip()} (in {caught[1]})"
        if lines and lines[0].endswith(":"):  # the reason is in the next line
            lines[0] += next((f" {line.strip()}" for line in lines[1:] if line.strip()), "")
        return f"{self.type_name}: {lines[0]}" if lines else self.type_name


def user_frames(frames: Iterable[TracebackFrame]) -> tuple[TracebackFrame, ...]:
    """Return the user's frames, and the last frame if a library raised.

    Frames of nbtrain are left out. Without a frame of the user, returns all others.
    """
    every = tuple(f for f in frames if not f.is_own)
    user = tuple(f for f in every if not f.is_library)
    if not user:
        return every
    return user if every[-1] is user[-1] else (*user, every[-1])


def capture(
    error: BaseException,
    shared: frozenset[type] = frozenset(),
    *,
    pickles: bool = True,
    _seen: frozenset[int] = frozenset(),
) -> CapturedException:
    """Turn an exception into data. Never raises, even if the exception's own methods do.

    Its cause, context and the members of a group are captured too, up to MAX_EXCEPTION_CHAIN. A
    note names each attribute that cannot be copied. Without `pickles`, the instances are left out:
    pickling may take long, and run the user's code. `shared` are classes that the notebook has,
    too. `_seen` has the ids of the exceptions that led here.
    """
    seen = _seen | {id(error)}

    def capture_other(other: BaseException | None) -> CapturedException | None:
        if other is None or id(other) in seen or len(seen) >= MAX_EXCEPTION_CHAIN:
            return None
        return capture(other, shared, pickles=pickles, _seen=seen)

    pickled, left_out = _pickle_exception(error, shared) if pickles else (None, ())
    return CapturedException(
        type_name=type(error).__name__,
        text=_safe_str(error),
        pickled=pickled,
        frames=user_frames(_list_frames(error.__traceback__)),
        notes=(*_read_notes(error), *left_out),
        cause=capture_other(error.__cause__),
        # `raise … from e` sets both. Sent twice, each link would double the size of the chain.
        context=None if error.__context__ is error.__cause__ else capture_other(error.__context__),
        suppress_context=error.__suppress_context__,
        members=tuple(m for e in _group_members(error) if (m := capture_other(e)) is not None),
    )


def _group_members(error: BaseException) -> tuple[BaseException, ...]:
    """Return the first MAX_EXCEPTION_CHAIN exceptions of a group; () if it is not a group."""
    group: Any = getattr(builtins, "BaseExceptionGroup", ())  # not in Python 3.10
    if not issubclass(type(error), group):
        return ()
    members: tuple[BaseException, ...] = cast(Any, error).exceptions
    return members[:MAX_EXCEPTION_CHAIN]


def _list_frames(tb: TracebackType | None) -> Iterator[TracebackFrame]:
    """Yield the frames of a traceback, outermost first, with the exact place in each line.

    The columns are 0 if Python does not record them (before 3.11, or with ``-X no_debug_ranges``).
    """
    while tb is not None:
        code, line = tb.tb_frame.f_code, tb.tb_lineno or 1
        span = (line, line, 0, 0)
        if sys.version_info >= (3, 11) and tb.tb_lasti >= 0:
            known = next(islice(code.co_positions(), tb.tb_lasti // 2, None), (None,) * 4)
            if None not in known:
                span = cast("tuple[int, int, int, int]", known)
        yield TracebackFrame(
            code.co_filename, span[0], code.co_name, code.co_firstlineno, *span[1:]
        )
        tb = tb.tb_next


def _read_notes(error: BaseException) -> tuple[str, ...]:
    notes = getattr(error, "__notes__", ())
    return tuple(map(_safe_str, notes)) if isinstance(notes, (list, tuple)) else ()


def _safe_str(value: object) -> str:
    """Return the text of a value, cut after MAX_TEXT_CHARS. Never raises.

    If the text cannot be computed, returns ``<T.__str__ raised ValueError>``. Also swallows a
    KeyboardInterrupt that arrives during the call.
    """
    try:
        text = str(value)
        if len(text) <= MAX_TEXT_CHARS:
            return text
        return f"{text[:MAX_TEXT_CHARS]}… ({len(text):,} characters)"
    except BaseException as inner:  # a user's __str__ may raise anything
        return f"<{type(value).__name__}.__str__ raised {type(inner).__name__}>"


def _strip_addresses(value: object) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", str(value))  # a copy has other addresses


def _pickle_exception(
    error: BaseException, shared: frozenset[type]
) -> tuple[bytes | None, tuple[str, ...]]:
    """Pickle an exception by its own reducer, else without its ``__init__``, else only in part.

    Returns the bytes, if a form can be rebuilt here, and a note for each attribute that was
    left out, because it cannot be pickled. Does not change the exception. Never raises.
    """
    if (data := _dump_checked(error, error, shared)) is not None:
        return data, ()
    state = {k: v for k, v in getattr(error, "__dict__", {}).items() if k != "__notes__"}
    left_out = [name for name, value in state.items() if not _is_portable(value, shared)]
    for name in left_out:
        del state[name]
    data = _dump_checked(error, _Parts(type(error), error.args, state), shared)
    note = "The attribute `{}` of this exception stayed in the rank: it cannot be copied."
    return data, tuple(map(note.format, left_out))


def _dump_checked(error: BaseException, form: Any, shared: frozenset[type]) -> bytes | None:
    """Pickle a form of an exception; return the bytes if they rebuild the same text here.

    None if the form cannot be pickled or rebuilt, is longer than CHUNK_BYTES, or rebuilds to
    another text; addresses in the texts are ignored, and types are not compared. Raises no
    `Exception`.
    """
    try:
        text = _strip_addresses(error)  # an exception without a text is shown by a stand-in
        data = result_pickler.dumps(form, shared, limit=CHUNK_BYTES)
        copy = _rebuild(result_pickler.loads(data))
        is_same = isinstance(copy, BaseException) and _strip_addresses(copy) == text
    except Exception:  # a user's exception may refuse pickling in any way
        return None
    return data if is_same else None


def _is_portable(value: Any, shared: frozenset[type]) -> bool:
    """Return whether a value can be pickled here and unpickled again.

    False also if it takes more than CHUNK_BYTES. Does both to find out.
    """
    try:
        result_pickler.loads(result_pickler.dumps(value, shared, limit=CHUNK_BYTES))
    except Exception:  # from its reducer
        return False
    return True


@dataclass(frozen=True)
class _Parts:
    """The parts of an exception that calling its class with its args does not rebuild."""

    cls: type[BaseException]
    args: tuple[Any, ...]
    state: dict[str, Any]


def _rebuild(value: Any) -> Any:
    """Return an exception made of `_Parts` without its ``__init__``; any other value as it is."""
    if not isinstance(value, _Parts):
        return value
    error = value.cls.__new__(value.cls, *value.args)
    error.args = value.args
    vars(error).update(value.state)
    return error


def restore(captured: CapturedException) -> BaseException:
    """Rebuild the exception with its notes, its chain and a traceback of its own frames.

    If the instance cannot be unpickled here, the result is a `RankError` with its text.
    """
    error = _unpickle_instance(captured)
    if captured.notes:
        set_notes(error, list(captured.notes))
    error.__cause__ = restore(captured.cause) if captured.cause else None
    error.__context__ = restore(captured.context) if captured.context else error.__cause__
    error.__suppress_context__ = captured.suppress_context
    _restore_members(error, captured.members)
    return error.with_traceback(_make_traceback(captured.frames))


def _restore_members(error: BaseException, members: tuple[CapturedException, ...]) -> None:
    """Give the exceptions of a group, which were pickled with it, what pickling drops.

    These are notes, chains and tracebacks, in groups inside it, too. Does nothing if the numbers of
    exceptions differ.
    """
    own = _group_members(error)
    for member, captured in zip(own, members, strict=False) if len(own) == len(members) else ():
        restored = restore(captured)
        set_notes(member, list(captured.notes))
        member.__cause__, member.__context__ = restored.__cause__, restored.__context__
        member.__suppress_context__ = restored.__suppress_context__
        _restore_members(member, captured.members)
        member.__traceback__ = restored.__traceback__


def set_notes(error: BaseException, notes: list[str]) -> None:
    """Set the notes of an exception. Python 3.10 has no `add_note`, but IPython shows them."""
    error.__notes__ = notes  # type: ignore[attr-defined,unused-ignore]


def _unpickle_instance(captured: CapturedException) -> BaseException:
    """Unpickle the exception, without its chain; if that fails, make a `RankError` of its text."""
    if captured.pickled is not None:
        try:
            error = _rebuild(result_pickler.loads(captured.pickled))
            if isinstance(error, BaseException):
                return error
        except Exception:  # the class is not in this kernel, or only a rank can build it
            pass
    return RankError(f"{captured.type_name}: {captured.text}", type_name=captured.type_name)


def _make_traceback(frames: tuple[TracebackFrame, ...]) -> TracebackType | None:
    """Make a traceback of stand-in code that raises at the place of each frame.

    Without frames, there is no traceback. The globals of each stand-in frame have RANK_FRAME_MARK.
    """
    tb: TracebackType | None = None
    for frame in reversed(frames):
        try:
            exec(_compile_stub(frame), {"__name__": frame.function, RANK_FRAME_MARK: True})
        except StopIteration as raised:
            stub: Any = raised.__traceback__
            tb = TracebackType(tb, stub.tb_next.tb_frame, stub.tb_next.tb_lasti, frame.line)
    return tb


def _compile_stub(frame: TracebackFrame) -> CodeType:
    """Compile code that raises `StopIteration` at the frame's place.

    Its file, function name and first line are the frame's. The module's code is not returned, only
    that of the function.
    """
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
    """Return the part of a traceback that happened in a rank; None if no part did.

    It begins at the first stand-in frame of `restore`, else below the last frame of nbtrain's code
    that runs a rank in the kernel.
    """
    inner: TracebackType | None = None
    while tb is not None:
        if RANK_FRAME_MARK in tb.tb_frame.f_globals:
            return tb
        if tb.tb_frame.f_code.co_filename in source_files.RANK_BODY:
            inner = tb.tb_next  # the inline engine: real frames follow
        tb = tb.tb_next
    return inner
