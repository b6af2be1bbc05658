"""Calls a function in a fork of this process, so that its side effects stay in the fork.

On a host with a GPU, even a backward pass on the CPU initialises CUDA and starts threads, after
which no rank can be forked (https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork), and so does
a step of Adam. The fork has no GPU, and exits after the call.
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

from ...part_api import PlanError, fork_process, kernel_detach, ready_to_fork

T = TypeVar("T")

_HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_THREADS = "autograd's threading"
"""Part of torch's error in a process that was forked after a backward pass with a GPU."""


def call_in_fork(function: Callable[[], T]) -> T:
    """Call a function in a fork and wait; return its result, or raise its exception.

    The result must be picklable. Where this process cannot fork, or after a backward pass with a
    GPU, the function is called in this process. Raises `PlanError` if the fork dies, also by
    `SystemExit`, and in place of an exception that cannot be pickled.
    """
    if not hasattr(os, "fork"):
        return function()
    reader, writer = os.pipe()
    with open(reader, "rb") as pipe:
        try:
            with ready_to_fork():
                child = fork_process(partial(_send_result, function, writer, os.getpid()))
        finally:
            os.close(writer)
        try:
            reply = pipe.read()
        finally:  # including an interrupt
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    if not reply:
        raise PlanError("the process that computes the needed memory died")
    value, error = pickle.loads(reply)
    if error is None:
        return value  # type: ignore[no-any-return]
    if _THREADS in str(error):
        return function()
    raise error


def _send_result(function: Callable[[], Any], writer: int, parent: int) -> int:
    """Leave the kernel, hide the GPUs, call the function, and send its result or exception.

    In place of an exception that cannot be pickled, a `PlanError` is sent.
    """
    kernel_detach.leave_kernel(Path(os.devnull))
    kernel_detach.exit_with_parent(parent)
    gc.freeze()
    for name in _HIDDEN:
        os.environ[name] = ""
    try:
        reply = pickle.dumps((function(), None))
    except Exception as error:  # the caller raises it
        try:
            reply = pickle.dumps((None, error))
        except Exception:  # an exception that cannot be pickled
            reply = pickle.dumps((None, PlanError(f"{type(error).__name__}: {error}")))
    with open(writer, "wb") as pipe:
        pipe.write(reply)
    return 0
