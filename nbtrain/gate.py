"""The calls that would initialise an accelerator here: noticed on their way, refused on demand.

torch initialises CUDA lazily, through one function, so its stack at that moment says who asked.
Everything patched here is put back by `close`: when nbtrain is unloaded, and in every rank.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import guard
from .errors import AcceleratorBlockedError
from .exceptions import Frame
from .imports import when_imported

_DEPTH = 12
_GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl", "/dev/kfd")
"""What a driver for NVIDIA's GPUs (Linux, WSL, Jetson) or AMD's leaves for processes to open."""
_undo: list[Callable[[], None]] = []
_blocking = False


def open_() -> None:
    """Notice, from now on, who makes torch initialise CUDA."""
    if not _undo:
        _undo.append(when_imported("torch", _watch_torch))
        _undo.append(when_imported("accelerate.state", _watch_accelerate))


def close() -> None:
    """Put back everything that `open_` replaced."""
    global _blocking
    _blocking = False
    while _undo:
        _undo.pop()()


def block(wanted: bool) -> bool:
    """Refuse those calls from now on, or let them pass again; return what was before."""
    global _blocking
    before, _blocking = _blocking, wanted
    return before


def _watch_torch(torch: ModuleType) -> None:
    # Seen in torch 2.4 to 2.13; the CPU builds have neither.
    for name, shown in (
        ("_cuda_init", "Initialising CUDA"),
        ("_cuda_getDeviceCount", "Asking CUDA itself for its devices"),
    ):
        if hasattr(torch._C, name):
            _pass_through(torch._C, name, shown, _can_be_initialized)
    if torch.version.cuda or torch.version.hip:
        _pass_through(torch.Tensor, "pin_memory", "pin_memory()", _can_be_initialized)


def _watch_accelerate(state: ModuleType) -> None:
    partial = state.PartialState
    _pass_through(
        partial,
        "__init__",
        "An Accelerator (or PartialState)",
        lambda: not partial._shared_state and (_blocking or _can_be_initialized()),
    )


def _can_be_initialized() -> bool:
    """Whether there is a GPU that nobody here has touched."""
    return any(map(os.path.exists, _GPU_FILES)) and not guard.initialized()


def _pass_through(owner: Any, name: str, shown: str, matters: Callable[[], bool]) -> None:
    """Have calls of ``owner.name`` pass by `_on_the_way` first, if they matter."""
    was_own = name in vars(owner)
    original = getattr(owner, name)

    @functools.wraps(original)
    def passing(*args: Any, **kwargs: Any) -> Any:
        if matters():
            _on_the_way(shown)
        return original(*args, **kwargs)

    def restore() -> None:
        if vars(owner).get(name) is passing:
            setattr(owner, name, original) if was_own else delattr(owner, name)

    setattr(owner, name, passing)
    _undo.append(restore)


def _on_the_way(shown: str) -> None:
    if _blocking:
        raise AcceleratorBlockedError(
            f"{shown} in the notebook itself would keep it from forking ranks. Do that inside the "
            "training function; `%nbtrain guard warn` lets it pass."
        )
    guard.note_calls(_calls())


def _calls() -> tuple[str, ...]:
    """Return who is calling, outermost first: from the user's own code on."""
    stack = traceback.extract_stack()[:-3]
    frames = [Frame(f.filename, f.lineno or 0, f.name, f.lineno or 0, 0) for f in stack]
    own = [i for i, frame in enumerate(frames) if not (frame.is_library or frame.is_own)]
    shown = [_told(frame) for frame in stack[own[0] if own else 0 :]]
    if len(shown) > _DEPTH:
        shown[_DEPTH - 4 : -4] = ["…"]
    return tuple(shown)


def _told(frame: traceback.FrameSummary) -> str:
    function = "" if frame.name.startswith(("<module", "<cell")) else f", in {frame.name}"
    return f"{_short(frame.filename)}, line {frame.lineno}{function}: {frame.line or ''}".rstrip()


def _short(filename: str) -> str:
    """Return a file's name as people know it: from its package on."""
    for folder in ("site-packages/", "dist-packages/"):
        if folder in filename:
            return filename.rpartition(folder)[2]
    return "a cell" if "ipykernel_" in filename or "<ipython" in filename else filename
