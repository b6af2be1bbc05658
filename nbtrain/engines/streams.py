"""A rank's own stdout and stderr, as its Python code writes to them."""

from __future__ import annotations

import errno
import io
from typing import Any

_LOST = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE}
"""What a file answers that cannot be written to for no fault of who prints."""


class _Log(io.FileIO):
    """A rank's log. What does not fit on a full disk is lost: a print never ends a training."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _LOST:  # a pipe the user put there: its reader went away, say
                raise
            return memoryview(data).nbytes


def text_stream(descriptor: int) -> io.TextIOWrapper:
    """Return a stream that writes each line at once, and never closes its descriptor."""
    log = io.BufferedWriter(_Log(descriptor, "w", closefd=False))
    return io.TextIOWrapper(log, "utf-8", "backslashreplace", line_buffering=True)
