"""Finds out in a process of its own what importing modules does to a process.

`try_imports` starts that process. It imports what is already loaded where it is asked for, then
each of the modules in question, and looks at itself after each. The first one that changes the
process ends the trial, because nothing can be said of the modules after it.

It finds the order, too, in which each import is a small one: what others need comes first. Not what
would enter a circle of imports from another side than a rank did; a forked copy tries that.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from ...engines.process.kernel_detach import die_with
from ...system import accelerator_guard
from ...system.instrumentation import environment_reads, replace

LARGEST = 1 << 30
"""Bytes that importing all modules may add to the process."""


PATIENCE = 120.0
"""Seconds after which a trial is given up."""

_BOOT = (
    "import sys; sys.path[:] = eval(sys.argv.pop())\n"
    "from nbtrain.lifecycle.preload import trial; trial.main()"
)


@dataclass(frozen=True)
class Trial:
    """What importing modules did to a process."""

    harmless: tuple[str, ...] = ()
    """Modules that left it as it was, in the order of their import."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """The module that ended the trial, if one did, and what it did."""
    reads: tuple[str, ...] = ()
    """Environment variables that were read meanwhile."""
    seconds: float = 0.0
    bytes: int = 0
    """How much more memory the process used in the end."""


def try_imports(names: Sequence[str], loaded: Sequence[str], own: Collection[str]) -> Trial:
    """Try to import `names` in a new process that has imported `loaded`.

    A module that reads one of the environment variables in `own`, which differ between a kernel and
    its ranks, is refused. Raises `OSError`, `subprocess.SubprocessError` or `ValueError` where the
    process could not be started, or did not answer.
    """
    order = {"names": [*names], "loaded": [*loaded], "own": [*own], "parent": os.getpid()}
    done = subprocess.run(
        [sys.executable, "-c", _BOOT, repr(sys.path)],
        input=json.dumps(order),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=PATIENCE,
        check=True,
        text=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    lists: dict[str, Any] = {name: tuple(answer.pop(name)) for name in ("harmless", "reads")}
    return Trial(**lists, **answer)


def main() -> None:
    """Read an order from standard input; answer on standard output, where nothing else goes."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(19)
    order = json.load(sys.stdin)
    die_with(order["parent"])
    with os.fdopen(os.dup(1), "w") as answer, tempfile.TemporaryFile() as printed:
        for descriptor in (1, 2):
            os.dup2(printed.fileno(), descriptor)
        for name in order["loaded"]:
            with contextlib.suppress(Exception):  # it may be broken; what needs it will say so
                importlib.import_module(name)
        # In a thread, as the importer does: some modules can be imported in the main one only.
        found: dict[str, Any] = {}
        thread = threading.Thread(target=lambda: found.update(_try(order)))
        thread.start()
        thread.join()
        json.dump(found, answer)
        sys.stdout.flush()
    os._exit(0)  # what the modules would do at the end is not the question


def _try(order: Mapping[str, Any]) -> dict[str, Any]:
    harmless: list[str] = []
    refused: dict[str, str] = {}
    began, memory = time.monotonic(), psutil.Process().memory_info().rss
    with _watching() as watched:
        _brought("sys")  # the first fork ends OpenBLAS's threads
        before = _state(watched)
        for name in _in_small_pieces(order["names"]):
            count = len(sys.modules)
            trouble = _import(name)
            if not trouble and len(sys.modules) != count:
                trouble = _difference(before, _state(watched))
                if used := watched.reads & {*order["own"]}:
                    trouble = f"it reads {', '.join(sorted(used))}"
                if psutil.Process().memory_info().rss - memory > LARGEST:
                    trouble = "it takes too much memory"
            if trouble:
                refused[name] = trouble
                break
            harmless.append(name)
    return {
        "harmless": harmless,
        "refused": refused,
        "reads": sorted(watched.reads),
        "seconds": time.monotonic() - began,
        "bytes": psutil.Process().memory_info().rss - memory,
    }


def _in_small_pieces(names: Sequence[str]) -> Iterator[str]:
    """Yield modules, to be imported one by one, in the order in which each is complete by itself.

    `names` are in the order in which their imports had ended where all were imported at once.
    """
    place = {name: number for number, name in enumerate(names)}
    complete = {name: max(place.get(part, -1) for part in _lineage(name)) for name in names}
    circular, put_off = set[str](), []
    for name in sorted(names, key=lambda name: complete[name]):
        missing = [part for part in _lineage(name) if part not in sys.modules]
        if missing and missing[0] not in circular:
            brought = _brought(name)
            if not brought or max(complete.get(other, -1) for other in brought) > complete[name]:
                circular.add(missing[0])
        if missing and missing[0] in circular:
            put_off.append(name)
        else:
            yield name
    yield from put_off


def _lineage(name: str) -> list[str]:
    """Return the packages that a module is in, the outermost first, and the module."""
    parts = name.split(".")
    return [".".join(parts[: number + 1]) for number in range(len(parts))]


def _brought(name: str) -> list[str]:
    """Return what importing a module imports, as a copy of this process does; [] if it raises."""
    count, parent = len(sys.modules), os.getpid()
    with tempfile.TemporaryFile("w+") as answer:
        child = os.fork()
        if child == 0:
            try:
                die_with(parent)
                for descriptor in (1, 2):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
                importlib.import_module(name)
                answer.write("\n".join([*sys.modules][count:]))
                answer.flush()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        answer.seek(0)
        return answer.read().split()


def _import(name: str) -> str:
    """Import a module; return what it raised, as a reason."""
    try:
        importlib.import_module(name)
    except BaseException as error:  # SystemExit included
        return f"it raises {type(error).__name__}"
    return ""


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    changed = [what for what in before if before[what] != after[what]]
    return f"it changes {', '.join(changed)}" if changed else ""


def _state(watched: _Watched) -> dict[str, Any]:
    """Return what importing a module must leave as it is.

    Not here: what `importer` puts back (new environment variables, filters of warnings), and what
    runs when the process exits.
    """
    process = psutil.Process()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return {
        "the accelerators": accelerator_guard.initialized(),
        "the number of threads": process.num_threads(),
        "the number of open files": process.num_fds() if os.name == "posix" else 0,
        "the child processes": [child.pid for child in process.children()],
        "what is printed": sum(os.fstat(descriptor).st_size for descriptor in (1, 2)),
        "environment variables": {n: v for n, v in os.environ.items() if n in watched.environment},
        "what runs in the kernel at a fork": watched.at_fork,
        "signal handlers": [signal.getsignal(s) for s in _handled()],
        "the working directory": os.getcwd(),
        "where Python looks for modules": (sys.path.copy(), sys.meta_path[: watched.finders]),
        "Python's hooks": (sys.excepthook, sys.displayhook, sys.stdout, sys.stderr),
        "logging": (logging.root.level, logging.root.handlers.copy(), logging.root.manager.disable),
        "Python's limits": (sys.getrecursionlimit(), socket.getdefaulttimeout(), gc.isenabled()),
        "the mode of new files": _umask(),
        "random numbers": _digests(),
        "torch's settings": _torch_settings(),
    }


def _handled() -> list[signal.Signals]:
    unchangeable = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}
    return [s for s in signal.Signals if s not in unchangeable]


def _digests() -> list[str]:
    states: list[object] = [random.getstate()]
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and hasattr(numpy, "random"):
        states.append([str(part) for part in numpy.random.get_state()])
    if torch is not None and hasattr(torch, "get_rng_state"):
        states.append(bytes(torch.get_rng_state().numpy()))
    return [hashlib.sha256(repr(state).encode()).hexdigest() for state in states]


def _torch_settings() -> tuple[object, ...]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):
        return ()
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
    )


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


class _Watched:
    """What was seen of a process since `_watching` began."""

    def __init__(self) -> None:
        self.environment = tuple(os.environ)
        self.reads: set[str] = set()
        self.at_fork = 0
        self.finders = len(sys.meta_path)
        """Finders of modules; one more behind them takes no module from them."""


@contextlib.contextmanager
def _watching() -> Iterator[_Watched]:
    """Note which environment variables are read, and whether functions are to run at a fork."""
    watched = _Watched()
    register: Callable[..., None] = getattr(os, "register_at_fork", lambda **_functions: None)

    def registering(**functions: Any) -> None:
        # Python's own modules look after their own locks, in every process that has them; and what
        # runs in the child puts right there what a rank would inherit.
        module = str(sys._getframe(1).f_globals.get("__name__", ""))
        in_kernel = {*functions} - {"after_in_child"}
        is_pythons = module.partition(".")[0] in sys.stdlib_module_names
        watched.at_fork += bool(in_kernel) and not is_pythons
        register(**functions)

    restore = replace(os, "register_at_fork", registering)
    try:
        with environment_reads() as watched.reads:
            yield watched
    finally:
        restore()
