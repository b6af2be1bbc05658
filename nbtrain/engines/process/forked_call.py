"""Calls a function in a forked copy of this process, so that its side effects happen to the copy.

Where there is a GPU, even a backward pass on the CPU looks for it and starts threads, after which
no rank can be forked (https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork); Adam's step asks
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

from ...errors import PlanError
from . import kernel_detach
from .forking import fork_process, ready_to_fork

T = TypeVar("T")

_HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_THREADS = "autograd's threading"
"""Part of torch's error in a process that was forked after a backward pass beside a GPU."""


def call_in_fork(function: Callable[[], T]) -> T:
    """Return what a function returns in a forked copy of this process, or raise what it raises.

    The function runs in this process itself if that cannot fork, or has run backward beside a GPU:
    then there is nothing left to protect.
    """
    if not hasattr(os, "fork"):
        return function()
    reader, writer = os.pipe()
    with open(reader, "rb") as pipe:
        try:
            with ready_to_fork():
                child = fork_process(partial(_answer, function, writer, os.getpid()))
        finally:
            os.close(writer)
        try:
            answer = pipe.read()
        finally:  # after an interrupt, too
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    if not answer:
        raise PlanError("the process that computes the needed memory died")
    value, error = pickle.loads(answer)
    if error is None:
        return value  # type: ignore[no-any-return]
    if _THREADS in str(error):
        return function()
    raise error


def _answer(function: Callable[[], Any], writer: int, parent: int) -> int:
    kernel_detach.leave_kernel(Path(os.devnull))
    kernel_detach.die_with(parent)
    gc.freeze()
    for name in _HIDDEN:
        os.environ[name] = ""
    try:
        answer = pickle.dumps((function(), None))
    except Exception as error:  # of any kind: the caller raises it
        try:
            answer = pickle.dumps((None, error))
        except Exception:  # an exception that cannot be pickled
            answer = pickle.dumps((None, PlanError(f"{type(error).__name__}: {error}")))
    with open(writer, "wb") as pipe:
        pipe.write(answer)
    return 0
