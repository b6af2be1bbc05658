"""Records calls that would initialise an accelerator in this process, or refuses them.

torch initialises CUDA lazily and through one function, so the stack at that call shows the cause.
`close` removes all patches: when nbtrain is unloaded, and in every rank.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from ..errors import AcceleratorBlockedError
from . import accelerator_guard
from .instrumentation import Undo, patch, when_imported
from .source_files import cell_name, is_library, is_own, source_line

_MAX_CALLS = 12
_GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl", "/dev/kfd")
"""Device files of NVIDIA's drivers (Linux, WSL, Jetson) and AMD's."""
_undo: list[Undo] = []
_blocking = False
_places: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def open_() -> None:
    """Patch torch and Accelerate to record which code initialises an accelerator.

    Also records where each Accelerator is made, for `place_of`. A library that is not imported yet
    is patched after its import. A second call does nothing.
    """
    if not _undo:
        _undo.append(when_imported("torch", _watch_torch))
        _undo.append(patch("accelerate.accelerator:Accelerator", "__init__", _note_place))
        _watch(
            "accelerate.state:PartialState",
            "__init__",
            "An Accelerator (or PartialState)",
            lambda state, *_: not state._shared_state and (_blocking or _can_be_initialized()),
        )


def close() -> None:
    """Remove the patches of `open_`, and end what `block` refuses."""
    block(False)
    while _undo:
        _undo.pop()()


def block(wanted: bool) -> bool:
    """Refuse calls that would initialise an accelerator, or allow them; return the old setting.

    A refused call raises `AcceleratorBlockedError`.
    """
    global _blocking  # it holds for the whole process
    before, _blocking = _blocking, wanted
    return before


def _watch_torch(torch: ModuleType) -> None:
    """Watch the functions of torch that initialise CUDA.

    They are its initialisation, the count of devices and, if torch was built for GPUs,
    `pin_memory`.
    """
    # Seen in torch 2.7 to 2.13; CPU builds lack the first two.
    _watch(torch._C, "_cuda_init", "Initialising CUDA")
    _watch(torch._C, "_cuda_getDeviceCount", "Asking CUDA itself for its devices")
    if torch.version.cuda or torch.version.hip:
        _watch(torch.Tensor, "pin_memory", "pin_memory()")


def _can_be_initialized(*_: Any) -> bool:
    """Return whether there is a GPU that this process has not initialised."""
    return any(map(os.path.exists, _GPU_FILES)) and not accelerator_guard.initialized_accelerators()


def _watch(
    owner: Any, name: str, action: str, matters: Callable[..., bool] = _can_be_initialized
) -> None:
    """Patch ``owner.name`` so that its calls go through `_notice`, until `close`.

    `matters` gets a call's positional arguments, and returns whether to record or refuse it.
    """
    _undo.append(patch(owner, name, functools.partial(_notice, action, matters)))


def _notice(action: str, matters: Callable[..., bool], original: Any, *args: Any, **kw: Any) -> Any:
    """Call a patched function; if `matters` is true of the call, keep its stack first.

    `note_calls` gets the stack. Raises `AcceleratorBlockedError` in place of such a call while
    `block` is on.
    """
    if matters(*args):
        if _blocking:
            raise AcceleratorBlockedError(
                f"{action} in the notebook would prevent it from forking ranks. Do that inside the "
                "training function, or allow it in the notebook with `%nbtrain guard warn`."
            )
        accelerator_guard.note_calls(_calls())
    return original(*args, **kw)


def _calls() -> tuple[str, ...]:
    """Return the calls that led here, outermost first, from the first line of the user's code on.

    All calls where the user has no code. nbtrain's own last ones are left out. Of many calls, "…"
    stands for those in the middle.
    """
    stack = traceback.extract_stack()
    while stack and is_own(stack[-1].filename):
        stack.pop()
    user = [i for i, frame in enumerate(stack) if not is_library(frame.filename)]
    calls = [_text(frame) for frame in stack[user[0] if user else 0 :]]
    if len(calls) > _MAX_CALLS:
        calls[_MAX_CALLS - 4 : -4] = ["…"]
    return tuple(calls)


def _text(frame: traceback.FrameSummary) -> str:
    function = "" if frame.name.startswith(("<module", "<cell")) else f", in {frame.name}"
    return f"{_short(frame.filename)}, line {frame.lineno}{function}: {frame.line or ''}".rstrip()


def _short(filename: str) -> str:
    """Return a file's path without its site-packages folder; "a cell" for a cell's file.

    A file outside such a folder keeps its whole path.
    """
    for folder in ("site-packages/", "dist-packages/"):
        if folder in filename:
            return filename.rpartition(folder)[2]
    return "a cell" if "ipykernel_" in filename or "<ipython" in filename else filename


def _note_place(original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> None:
    original(accelerator, *args, **kwargs)
    if place := _user_place(sys._getframe(2)):
        _places[accelerator] = place


def _user_place(frame: FrameType | None) -> str:
    """Return the innermost line of the user's code, as ``In[3], line 2: `Accelerator()` ``.

    Searches from `frame` outwards, past constructors: the line is the one that constructs. ""
    without a line of the user.
    """
    while frame is not None:
        filename = frame.f_code.co_filename
        is_generated = filename.startswith("<") and not filename.startswith("<ipython-input-")
        is_constructor = frame.f_code.co_name in ("__init__", "__post_init__")
        if not (is_generated or is_constructor or is_library(filename)):
            place = f"{cell_name(filename) or filename}, line {frame.f_lineno}"
            line = source_line(filename, frame.f_lineno)
            return f"{place}: `{line}`" if line else place
        frame = frame.f_back
    return ""


def place_of(accelerator: Any) -> str:
    """Return where an Accelerator was made; '' if that is unknown."""
    return _places.get(accelerator, "")
