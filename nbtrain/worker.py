"""The body of a rank: environment, threads, the call, the outcome. Knows nothing of IPython.

Whatever engine brought the process to life calls `main` in it, with everything a rank needs in a
`Job`; what the rank has to say goes into the run folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import sys
import time
import traceback
from ast import Expr, Expression, Module, PyCF_ALLOW_TOP_LEVEL_AWAIT, parse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any

from . import events as ev
from . import exceptions, report, serialize, telemetry
from .folder import RunFolder, write_atomically
from .plan import Call, Cell, Plan

FAILED = 1
"""The exit code of a rank whose failure is told in its failure file."""


@dataclass(frozen=True)
class Job:
    """One run, ready to start: the plan with every 'auto' resolved, and where it reports."""

    plan: Plan
    folder: RunFolder
    world_size: int
    device: str
    threads: int
    port: int = 0
    shared_classes: frozenset[type] = field(default_factory=frozenset)


def with_port(job: Job, port: int) -> Job:
    """Return the job with the port that its store listens on."""
    return replace(job, port=port)


def environment(job: Job, rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables a rank adds to those it inherited.

    They are what ``torchrun`` sets (an ``env://`` process group needs no argument), and what
    makes a plain ``Accelerator()`` distributed on CPU ranks and honour the precision.
    """
    size, local = str(job.world_size), str(rank)
    variables = {
        "RANK": local,
        "LOCAL_RANK": local,
        "GROUP_RANK": "0",
        "ROLE_RANK": local,
        "ROLE_NAME": "default",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.port),
        # The launcher keeps the store: no rank has to win a port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": job.folder.path.name,
        "FORK_LAUNCHED": "1",
        "ACCELERATE_MIXED_PRECISION": job.plan.mixed_precision,
        "NBTRAIN_RUN": str(job.folder.path),
    }
    if job.device == "cpu":
        variables["ACCELERATE_USE_CPU"] = "true"
    for name, value in (
        ("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo"),
        ("OMP_NUM_THREADS", str(job.threads)),
    ):
        if name not in inherited:
            variables[name] = value
    return {**variables, **job.plan.env}


def main(job: Job, rank: int) -> int:
    """Run the plan's task as `rank`, report how it ended, and return the exit code."""
    os.environ.update(environment(job, rank, os.environ))
    signal.signal(signal.SIGINT, _StopOnRequest(job.folder))
    _set_threads()
    writer = ev.EventWriter(job.folder.events(rank))
    report.activate(report.Reporter(writer, rank, job.world_size))
    telemetry.install()
    code, error = run_and_report(job, rank, writer)
    if error is not None:
        _print_traceback(error)
    return code


def run_and_report(job: Job, rank: int, writer: ev.EventWriter) -> tuple[int, BaseException | None]:
    """Run the task and leave its outcome in the run folder; return exit code and exception."""
    folder = job.folder
    try:
        writer.write(ev.Started(time.time(), rank, pid=os.getpid()))
        value = run_task(job.plan.task)
        _leave_process_group()
        data = serialize.dump_result(value, job.shared_classes)
        write_atomically(folder.result(rank), data)
        writer.write(ev.Ended(time.time(), rank, result=preview(value)))
        return 0, None
    except SystemExit as leaving:
        return _leave(job, rank, writer, leaving), None
    except BaseException as error:  # whatever the user's code raised is this rank's outcome
        now = time.time()
        writer.write(ev.Failing(now, rank, error=type(error).__name__))
        captured = exceptions.capture(error, job.shared_classes)
        write_atomically(folder.failure(rank), serialize.dumps((now, captured)))
        writer.write(ev.Ended(time.time(), rank, error=captured.headline))
        return FAILED, error


def _leave(job: Job, rank: int, writer: ev.EventWriter, leaving: SystemExit) -> int:
    """Treat ``sys.exit()`` as the interpreter would: a message goes to stderr and means 1."""
    code = leaving.code
    if code is None or code == 0:
        write_atomically(job.folder.result(rank), serialize.dumps(None))
        writer.write(ev.Ended(time.time(), rank, result="None"))
        return 0
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    text = f"sys.exit({leaving.code!r})"
    writer.write(ev.Failing(time.time(), rank, error=text))
    return code & 0xFF or 1


def _print_traceback(error: BaseException) -> None:
    """Leave the whole traceback in the rank's log, the launcher's frames cut off."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    with contextlib.suppress(Exception):  # a hostile __str__, a full disk: the report is out
        traceback.print_exception(type(error), error, tb)


class _StopOnRequest:
    """The SIGINT handler of a rank: KeyboardInterrupt, once, and only when the launcher asks.

    Jupyter signals the kernel's whole process group and VS Code every descendant; the launcher
    alone decides what an interrupt means for the ranks.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._request = str(folder.stop_request)
        self._done = False

    def __call__(self, _signum: int, _frame: FrameType | None) -> None:
        if not self._done and os.path.exists(self._request):
            self._done = True
            raise KeyboardInterrupt


def _set_threads() -> None:
    """Apply OMP_NUM_THREADS to a torch that read the variable long ago, in the kernel."""
    torch = sys.modules.get("torch")
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and wanted.isdecimal() and int(wanted) > 0:
        torch.set_num_threads(int(wanted))


def run_task(task: Call | Cell) -> Any:
    """Do what the plan says and return its value."""
    if isinstance(task, Call):
        value = task.function(*task.args, **task.kwargs)
    else:
        value = _run_cell(task)
        if task.function is not None:
            function = task.namespace[task.function]
            args, kwargs = arguments(task)
            value = function(*args, **kwargs)
    return asyncio.run(_awaited(value)) if inspect.iscoroutine(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def arguments(cell: Cell) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fill the training function's parameters from the variables of their names.

    A parameter without a variable keeps its default. Raises `TypeError` for one that has neither
    (which the launch refuses earlier wherever it can know).
    """
    found = {p.name: cell.namespace[p.name] for p in cell.parameters if p.name in cell.namespace}
    missing = [p.name for p in cell.parameters if p.name not in found and p.default is None]
    if missing:
        raise TypeError(f"{cell.function}() is missing {', '.join(missing)}")
    positional = [p.name for p in cell.parameters if p.positional_only]
    filled = [name for name in positional if name in found]
    if filled != positional[: len(filled)]:
        raise TypeError(f"{cell.function}(): a positional-only parameter before another is missing")
    return tuple(found[n] for n in filled), {n: v for n, v in found.items() if n not in positional}


def _run_cell(cell: Cell) -> Any:
    """Execute the cell in its namespace; return the value of a trailing expression."""
    tree = parse(cell.source, cell.filename)
    last = tree.body[-1]
    if not isinstance(last, Expr):
        _execute(_compile(tree, cell.filename, "exec"), cell.namespace)
        return None
    _execute(
        _compile(Module(tree.body[:-1], type_ignores=[]), cell.filename, "exec"), cell.namespace
    )
    return _execute(_compile(Expression(last.value), cell.filename, "eval"), cell.namespace)


def _compile(tree: Module | Expression, filename: str, mode: str) -> CodeType:
    code: CodeType = compile(
        tree, filename, mode, flags=PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
    )
    return code


def _execute(code: CodeType, namespace: dict[str, Any]) -> Any:
    value = eval(code, namespace)
    return asyncio.run(value) if code.co_flags & inspect.CO_COROUTINE else value


def _leave_process_group() -> None:
    """Finish what is under way on the device and leave the default process group, if any."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def preview(value: Any, width: int = 200) -> str:
    """Return a short text for a result, without reading a large value or a device."""
    if value is None or isinstance(value, (bool, int, float, complex)):
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) <= width else value[:width] + "…")
    if isinstance(value, dict):
        inner = ", ".join(f"{k!r}: {preview(v, 40)}" for k, v in list(value.items())[:8])
        return _cut(f"{{{inner}{', …' if len(value) > 8 else ''}}}", width)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(preview(v, 40) for v in value[:8])
        inner += ", …" if len(value) > 8 else ""
        return _cut(f"[{inner}]" if isinstance(value, list) else f"({inner})", width)
    shape = getattr(value, "shape", None)
    name = type(value).__name__
    return f"{name}{list(shape)}" if isinstance(shape, tuple) else f"<{name}>"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
