"""Imports in the kernel, once, what every rank would otherwise import at its first step.

The first step of torch 2.13 imports 800 modules: a second or two of CPU in each rank of each run.
Forked ranks have what their kernel has imported. `NAMES` is a fixed list, of torch and of two
packages that torch needs: none of them touches a device, starts a thread or changes a setting, and
what they leave besides (a variable of the environment, a filter of warnings) is put back. Nothing
else is imported ahead of time, above all nothing of the user's, and not `transformers.trainer`:
that imports whatever tracker, TensorFlow or torch_xla is installed.

The main thread imports, a module at a time: while the kernel is idle (`commands.idle_imports`), and
what is left before ranks are forked. Where two threads enter torch's circle of imports from two
sides, Python hands out half modules. No process is forked from another thread meanwhile: the copy
would wait for ever for the lock of a module that nobody in it imports.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from types import FrameType

from ..system.source_files import is_library
from ..tracking.launch_log import LOGGER
from . import limits

SWITCH = "NBTRAIN_PRELOAD"
"""The environment variable that turns imports ahead of time off: ``0`` or ``off``."""

IMPORTING = "Importing, once for all ranks of this kernel, what they need."
"""What the board says before a launch that has to wait for imports."""

NAMES = (
    "mpmath",
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
)
"""What is imported, if torch is. `torch._dynamo` alone imports all; the others make it shorter.

After them, a first step by DistributedDataParallel, Accelerate and the Trainer imported one module
of torch more (2.13, CPU). Seconds on two cores: 0.07, 0.2, 0.03, 0.2, 0.04, 0.4.
"""

OWN = (
    *("nbtrain.planning.option_parser", "nbtrain.tracking.replay", "nbtrain.ui.displays.select"),
    *("nbtrain.worker.main", "nbtrain.engines.fork", "nbtrain.lifecycle.launcher"),
)
"""What the first launch of a kernel imports of nbtrain, in pieces."""

_READ = ("TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE", "TORCH_DYNAMO_")
"""How the environment variables begin that these modules read once, when they are imported."""

_READ_LATER = "TORCHINDUCTOR_CACHE_DIR"
"""The one that is read at each use; torch sets it, too."""

_importing = threading.RLock()
"""Held while a module is imported, and around every fork."""

_seen: dict[str, str] | None = None
"""The variables of `_READ` when the first of these modules was imported here."""

_SET = ("TORCH", "TRITON_")
"""How the variables begin that these modules set."""

_failed: set[str] = set()


def is_on() -> bool:
    """Whether modules may be imported ahead of time."""
    wanted = os.environ.get(SWITCH, "").strip().lower()
    return wanted not in ("0", "off", "no", "false") and hasattr(os, "register_at_fork")


def pieces(own: bool = False) -> Iterator[str]:
    """Yield the name of a module, and import it when the next one is asked for; see `NAMES`.

    Nothing is imported outside the main thread, or where torch is not. With `own`, the modules of
    nbtrain that a launch needs come first. Raises `KeyboardInterrupt` where an import hung.
    """
    if not is_on() or threading.current_thread() is not threading.main_thread():
        return
    # After TensorFlow's libraries, triton's end the process by SIGSEGV (2.21, then 3.7.1).
    is_fatal = "tensorflow" in sys.modules and "triton" not in sys.modules
    for name in (*(OWN if own else ()), *NAMES):
        if is_fatal and name == "torch._dynamo":  # which imports triton
            continue
        if name not in sys.modules and name not in _failed and "torch" in sys.modules:
            yield name
            _import(name)


def are_for_ranks(variables: Mapping[str, str]) -> bool:
    """Whether one of a run's own environment variables is read when the modules are imported."""
    return any(map(_is_read, variables))


def changed_variables(variables: Mapping[str, str]) -> list[str]:
    """Return what ranks with these variables will not see, since the modules were imported here."""
    before, now = _seen, _read_variables({**os.environ, **variables})
    if before is None:
        return []
    return sorted(n for n in {*before, *now} if before.get(n) != now.get(n))


def of_fresh_process() -> list[str]:
    """Return what ranks need that are not forked from this process, in the order of import."""
    loaded = [n for n in ("transformers", "transformers.trainer") if is_library(_file(n))]
    return ["accelerate", "IPython", "torch.utils.serialization", *NAMES, *loaded]


def _file(name: str) -> str:
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None) or ""


def _import(name: str) -> None:
    global _seen
    _guard_forks()
    before = {*os.environ}
    if _seen is None and name.startswith("torch."):
        _seen = _read_variables(os.environ)
    is_collecting = gc.isenabled()
    gc.disable()  # nothing that is imported is garbage, and to look takes a quarter of the time
    try:
        with _importing, _interrupted_if_it_hangs(), warnings.catch_warnings():
            importlib.import_module(name)
    except Exception as error:  # broken, or not in this version: what needs it will say so
        _failed.add(name)
        LOGGER.info("%s was not imported ahead of time: %r", name, error)
    except KeyboardInterrupt:
        _failed.update((*OWN, *NAMES))
        raise
    finally:
        if is_collecting:
            gc.enable()
        for variable in {*os.environ} - before:  # not what a thread of the user's has set
            if variable.startswith(_SET):  # torch sets it anew where it is needed
                os.environ.pop(variable, None)


def _read_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if _is_read(name)}


def _is_read(name: str) -> bool:
    return name.startswith(_READ) and name != _READ_LATER


@contextlib.contextmanager
def _interrupted_if_it_hangs() -> Iterator[None]:
    """Raise `KeyboardInterrupt` in an import that hangs; hand on one that came in a short import.

    An interrupt between two lines of an import leaves half a module. And an idle kernel ignores
    interrupts: an import that hangs then would leave a kernel that nothing reaches.
    """
    old = signal.getsignal(signal.SIGINT)
    if old is None:  # not Python's own: it could not be put back
        yield
        return
    hangs_at = time.monotonic() + limits.IMPORT_TIMEOUT_S
    again: list[threading.Timer] = []

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        left = hangs_at - time.monotonic()
        if left <= 0:
            raise KeyboardInterrupt
        # A real signal: it also wakes what waits for a disk, a lock or a socket.
        press = functools.partial(signal.pthread_kill, threading.get_ident(), signal.SIGINT)
        again.append(threading.Timer(left, press))
        again[-1].daemon = True
        again[-1].start()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
        for timer in again:
            timer.cancel()
    if again:
        signal.raise_signal(signal.SIGINT)


@functools.cache
def _guard_forks() -> None:
    os.register_at_fork(
        before=_importing.acquire,
        after_in_parent=_importing.release,
        after_in_child=_importing.release,
    )
