"""Imports modules in the kernel once that every rank would otherwise import at its first step.

The first step of torch 2.13 imports 800 modules, which takes one or two seconds of CPU in each rank
of each run. Forked ranks have the kernel's modules. `NAMES` is a fixed list of modules of torch and
of two packages that torch needs. They use no device, start no thread and change no setting. The
environment variables and warning filters that they set are undone. No module of the user is
imported ahead of time, and not `transformers.trainer`, which imports every tracker, TensorFlow and
torch_xla that is installed.

The main thread imports one module at a time, while the kernel is idle (`commands.idle_imports`) and
before ranks are forked. If two threads import torch's circular modules at once, Python returns
incomplete modules. Other threads cannot fork during an import: the child would wait for a module's
lock, which is never released in it.
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

from .. import part
from ..system.source_files import is_library
from ..tracking.launch_log import LOGGER
from . import limits

SWITCH = "NBTRAIN_PRELOAD"
"""The environment variable that turns imports ahead of time off: ``0`` or ``off``."""

IMPORTING = "Importing, once for all ranks of this kernel, what they need."
"""The text of the board while a launch waits for imports."""

NAMES = (
    "mpmath",
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
)
"""Modules that are imported if torch is. `torch._dynamo` imports all of them; separate imports are
shorter.

After them, the first step of DistributedDataParallel, Accelerate and the Trainer imported only one
further module of torch (2.13, CPU). Seconds on two cores: 0.07, 0.2, 0.03, 0.2, 0.04, 0.4.
"""

OWN = (
    *("nbtrain.planning.option_parser", "nbtrain.tracking.replay", "nbtrain.ui.displays.select"),
    *("nbtrain.worker.main", "nbtrain.engines.fork", "nbtrain.lifecycle.launcher"),
)
"""The modules of nbtrain that the first launch of a kernel imports."""

_READ_AT_IMPORT = ("TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE", "TORCH_DYNAMO_")
"""Prefixes of environment variables that these modules read only when they are imported."""

_READ_AT_USE = "TORCHINDUCTOR_CACHE_DIR"
"""An exception: torch reads it at each use, and sets it."""

_import_lock = threading.RLock()
"""Held during an import, and during every fork."""

_variables_at_import: dict[str, str] | None = None
"""These variables when the first module was imported; None before."""

_SET_AT_IMPORT = ("TORCH", "TRITON_")
"""Prefixes of environment variables that these modules set."""

_failed: set[str] = set()


def is_on() -> bool:
    """Whether modules may be imported ahead of time."""
    wanted = os.environ.get(SWITCH, "").strip().lower()
    return wanted not in ("0", "off", "no", "false") and hasattr(os, "register_at_fork")


def import_one_by_one(own: bool = False) -> Iterator[str]:
    """Yield the name of each module of `NAMES`, and import it at the next step of the iteration.

    Modules that are imported already, or failed, are left out. Yields nothing in other threads than
    the main one, without torch, and if `is_on` is False. With `own`, the modules of nbtrain that a
    launch needs come first, and the search for its parts last. Raises `KeyboardInterrupt` if the
    user interrupts a long import.
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
            _import_module(name)
    if own and "torch" in sys.modules and not part.parts.cache_info().currsize:
        yield "nbtrain.parts"
        part.parts()  # reads the entry points of all packages, which takes 25 ms


def affects_imports(variables: Mapping[str, str]) -> bool:
    """Whether the modules read one of these variables when they are imported."""
    return any(map(_is_read, variables))


def changed_variables(variables: Mapping[str, str]) -> list[str]:
    """Return the variables of ranks that the imported modules have read with another value."""
    before, now = _variables_at_import, _read_variables({**os.environ, **variables})
    if before is None:
        return []
    return sorted(n for n in {*before, *now} if before.get(n) != now.get(n))


def fresh_process_modules() -> list[str]:
    """Return the modules to import for ranks that are not forked, in the order of imports."""
    loaded = [n for n in ("transformers", "transformers.trainer") if is_library(_module_file(n))]
    return ["accelerate", "IPython", "torch.utils.serialization", *NAMES, *loaded]


def _module_file(name: str) -> str:
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None) or ""


def _import_module(name: str) -> None:
    """Import a module, and undo what this does to the environment; an error is only logged.

    A module that failed is not imported ahead again. After an interrupt, which is raised, none is.
    """
    global _variables_at_import  # modules are imported once in a process
    _guard_forks()
    before = {*os.environ}
    if _variables_at_import is None and name.startswith("torch."):
        _variables_at_import = _read_variables(os.environ)
    is_collecting = gc.isenabled()
    gc.disable()  # imports make no garbage; collecting takes a quarter of the time
    try:
        with _import_lock, _interrupt_if_hanging(), warnings.catch_warnings():
            importlib.import_module(name)
    except Exception as error:  # broken, or not in this version; its user gets the error
        _failed.add(name)
        LOGGER.info("%s was not imported ahead of time: %r", name, error)
    except KeyboardInterrupt:
        _failed.update((*OWN, *NAMES))
        raise
    finally:
        if is_collecting:
            gc.enable()
        for variable in {*os.environ} - before:
            # Another variable may come from a thread of the user. Torch sets these again if needed.
            if variable.startswith(_SET_AT_IMPORT):
                os.environ.pop(variable, None)


def _read_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if _is_read(name)}


def _is_read(name: str) -> bool:
    return name.startswith(_READ_AT_IMPORT) and name != _READ_AT_USE


@contextlib.contextmanager
def _interrupt_if_hanging() -> Iterator[None]:
    """Delay interrupts to the end of a short import; raise `KeyboardInterrupt` in one that hangs.

    An interrupt in the middle of an import leaves an incomplete module. But an idle kernel ignores
    interrupts, so without this an import that hangs would make it unreachable.
    """
    old = signal.getsignal(signal.SIGINT)
    if old is None:  # set by C code, so it could not be restored
        yield
        return
    deadline = time.monotonic() + limits.IMPORT_TIMEOUT_S
    timers: list[threading.Timer] = []

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise KeyboardInterrupt
        # A real signal also interrupts a wait for a disk, a lock or a socket.
        press = functools.partial(signal.pthread_kill, threading.get_ident(), signal.SIGINT)
        timers.append(threading.Timer(remaining, press))
        timers[-1].daemon = True
        timers[-1].start()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
        for timer in timers:
            timer.cancel()
    if timers:
        signal.raise_signal(signal.SIGINT)


@functools.cache
def _guard_forks() -> None:
    """Have forks wait for the import that another thread has begun: a child would lack its end."""
    os.register_at_fork(
        before=_import_lock.acquire,
        after_in_parent=_import_lock.release,
        after_in_child=_import_lock.release,
    )
