"""Asking in a copy of this process, so that whatever the answer takes happens to the copy.

Where there is a GPU, even a backward pass on the CPU looks for it and starts threads, which is the
end of forking ranks (https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork); Adam's step asks
whether a GPU is recording. The copy sees no GPU, and ends.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..engines import leave_kernel
from ..engines.fork import fork_process, ready_to_fork
from ..errors import PlanError

T = TypeVar("T")

_HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_THREADS = "autograd's threading"
"""From torch's words for a process that was forked after a backward pass beside a GPU."""


def apart(ask: Callable[[], T]) -> T:
    """Return what a function returns in a forked copy of this process, or raise what it raises.

    In this process itself, where it cannot fork or has run backward beside a GPU: then there is
    nothing left to keep clean.
    """
    if not hasattr(os, "fork"):
        return ask()
    reader, writer = os.pipe()
    with open(reader, "rb") as answers:
        try:
            with ready_to_fork():
                child = fork_process(partial(_answer, ask, writer, os.getpid()))
        finally:
            os.close(writer)
        try:
            answer = answers.read()
        finally:  # interrupted, say
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    if not answer:
        raise PlanError("the process that was to tell what memory is needed died")
    value, error = pickle.loads(answer)
    if error is None:
        return value  # type: ignore[no-any-return]
    if _THREADS in str(error):
        return ask()
    raise error


def _answer(ask: Callable[[], Any], writer: int, parent: int) -> int:
    leave_kernel.become_keeper(Path(os.devnull))
    leave_kernel.die_with(parent)
    gc.freeze()
    for name in _HIDDEN:
        os.environ[name] = ""
    try:
        answer = pickle.dumps((ask(), None))
    except Exception as error:  # all of it is told
        try:
            answer = pickle.dumps((None, error))
        except Exception:  # an exception that does not travel
            answer = pickle.dumps((None, PlanError(f"{type(error).__name__}: {error}")))
    with open(writer, "wb") as pipe:
        pipe.write(answer)
    return 0
