"""Makes IPython show a rank's exception with the frames of the rank instead of the launcher's."""

from __future__ import annotations

import contextlib
from typing import Any

from ...errors import NbtrainError
from ...transport.exceptions import rank_frames
from .html_display import ipython_shell


class _RankTraceback:
    """The ``_render_traceback_`` of an exception, which IPython calls to draw it."""

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error

    def __call__(self) -> list[str] | None:
        """Return the lines of the rank's traceback, with notes; None without IPython or error."""
        shell, error = ipython_shell(), self._error
        if shell is None or error is None:
            return None
        frames = rank_frames(error.__traceback__)
        lines = [f"{type(error).__name__}: {error}"]
        if frames is not None:  # else an interrupt, which no frame of the user's code raised
            draw = shell.InteractiveTB.structured_traceback
            lines = draw(type(error), error, frames, tb_offset=0)
        drawn = "\n".join(lines)
        notes = [note for note in getattr(error, "__notes__", ()) if note not in drawn]
        return [*lines, *notes]

    def __reduce__(self) -> tuple[Any, ...]:
        return _RankTraceback, ()


def show_rank_traceback(error: BaseException) -> BaseException:
    """Make IPython draw `error` without the frames between the cell and the rank; return it.

    Does nothing outside IPython, for nbtrain's own errors without frames of a rank, and for a class
    that forbids attributes.
    """
    is_ours = isinstance(error, NbtrainError) and rank_frames(error.__traceback__) is None
    if not is_ours and ipython_shell() is not None:
        with contextlib.suppress(AttributeError, TypeError):  # a class may forbid attributes
            error._render_traceback_ = _RankTraceback(error)  # type: ignore[attr-defined]
    return error
