"""The body of a rank: environment, threads, the call, the outcome. Knows nothing of IPython.

Whatever engine brought the process to life calls `main` in it, with everything a rank needs in a
`Job`; what the rank has to say goes into the run folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sys
import time
import traceback
from ast import Expr, Expression, Module, PyCF_ALLOW_TOP_LEVEL_AWAIT, parse
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import Any

from . import (
    config,
    exceptions,
    inspection,
    report,
    serialize,
    stopping,
    telemetry,
    tpus,
    witness,
    xla,
)
from . import events as ev
from .folder import RunFolder, Spare
from .homecoming import Sender
from .imports import when_imported
from .nodes import World, is_loopback
from .plan import Call, Cell, Plan, Task
from .preview import preview
from .writer import EventWriter

FAILED = 1
"""The exit code of a rank whose failure is told in its failure file."""


@dataclass(frozen=True)
class Job:
    """One run, ready to start: the plan with every 'auto' resolved, and where it reports.

    `scratch` is a folder for sockets of the ranks' own workers; the launcher deletes it. Of a run
    on several nodes these are one's ranks, numbered from 0: `world` says where they are in it.
    """

    plan: Plan
    folder: RunFolder
    world_size: int
    device: str
    threads: int
    port: int = 0
    attempt: int = 1
    scratch: str = ""
    world: World | None = None
    shared_classes: frozenset[type] = field(default_factory=frozenset)


def with_port(job: Job, port: int) -> Job:
    """Return the job with the port that its store listens on."""
    return replace(job, port=port)


def environment(job: Job, rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables a rank adds to those it inherited.

    They are what ``torchrun`` sets (an ``env://`` process group needs no argument), and what
    makes a plain ``Accelerator()`` distributed on CPU ranks and honour the precision.
    """
    world = job.world or World(0, 1, 0, job.world_size, "127.0.0.1", job.port)
    local, size = rank - world.begin, str(world.size)
    number = str(world.first + local)
    variables = {
        "RANK": number,
        "LOCAL_RANK": str(local),
        "GROUP_RANK": str(world.node),
        "ROLE_RANK": number,
        "ROLE_NAME": "default",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(world.ranks or job.world_size),
        "GROUP_WORLD_SIZE": str(world.nodes),
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": str(world.master_port),
        # The launcher keeps the store: no rank has to win a port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(job.attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(job.plan.max_restarts),
        "TORCHELASTIC_RUN_ID": world.run_id if job.world else job.folder.path.name,
        "FORK_LAUNCHED": "1",
        "ACCELERATE_MIXED_PRECISION": job.plan.mixed_precision or "no",
        "NBTRAIN_RUN": str(job.folder.path),
    }
    if job.device == "cpu":
        variables["ACCELERATE_USE_CPU"] = "true"
    if job.device == "xla":
        # transformers takes it, beside torch_xla, for torchrun on another maker's chips.
        del variables["TORCHELASTIC_RUN_ID"]
        variables["PJRT_DEVICE"] = inherited.get("PJRT_DEVICE", "TPU")
        variables |= _xla_precision(job.plan, inherited)
    elif "USE_TORCH_XLA" not in inherited and tpus.has_torch_xla():
        variables["USE_TORCH_XLA"] = "0"
    here = "lo0" if sys.platform == "darwin" else "lo"
    its_own = "" if is_loopback(world.master_addr) else world.interface
    if "GLOO_SOCKET_IFNAME" in {**inherited, **job.plan.env}:  # theirs; ours may be a wrong one
        its_own = ""
    for name, value in (
        ("GLOO_SOCKET_IFNAME", here if is_loopback(world.master_addr) else world.interface),
        ("NCCL_SOCKET_IFNAME", its_own and f"={its_own}"),  # without it, all that begin so
        ("OMP_NUM_THREADS", str(job.threads)),
        # A rank that ends right after gloo connected it would cut off those still connecting.
        # torchrun's do not know of it: one of ours would wait for them.
        ("TORCH_DIST_INIT_BARRIER", "" if world.has_strangers else "1"),
    ):
        if name not in inherited and value:
            variables[name] = value
    return {**variables, **job.plan.env}


def _xla_precision(plan: Plan, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return what makes torch_xla compute in bf16.

    Accelerate sets the same when an Accelerator is made; but torch_xla reads it once, at the
    first float tensor, and Accelerate takes ``ACCELERATE_DOWNCAST_BF16=false`` for a yes.
    """
    asked = inherited.get("ACCELERATE_DOWNCAST_BF16", "").lower() in ("1", "true", "yes", "on")
    downcast = plan.downcast_bf16 or asked
    variables = {"ACCELERATE_DOWNCAST_BF16": "true" if downcast else ""}
    if plan.mixed_precision == "bf16":
        variables |= {
            "XLA_USE_BF16": str(int(not downcast)),
            "XLA_DOWNCAST_BF16": str(int(downcast)),
        }
    return variables


def main(job: Job, rank: int, call: Callable[[Task], Any] | None = None) -> int:
    """Run the plan's task as `rank`, report how it ended, and return the exit code.

    `call` runs it, instead of `run_task`.
    """
    os.environ.update(environment(job, rank, os.environ))
    stopping.activate(stopping.StopOnRequest(job.folder.stop_request))
    if os.environ.get("USE_TORCH_XLA") == "0":
        xla.leave_alone()
    _set_threads()
    _use_scratch(job.scratch)
    writer = EventWriter(job.folder.events(rank))
    inspection.install(job.folder, rank, writer)
    report.activate(_reporter(job, rank, writer))
    telemetry.install(job.plan.telemetry, job.plan)
    if job.device == "cpu" and config.wants_fsdp(os.environ):
        when_imported("accelerate.state", config.fsdp_on_cpu)
    code, error = run_and_report(job, rank, writer, call or run_task)
    if error is not None:
        _print_traceback(error)
    return code


def _reporter(job: Job, rank: int, writer: EventWriter) -> report.Reporter:
    world = job.world
    first, size = (world.first - world.begin, world.size) if world else (0, job.world_size)
    return report.Reporter(writer, rank, size, first)


def run_and_report(
    job: Job, rank: int, writer: EventWriter, call: Callable[[Task], Any]
) -> tuple[int, BaseException | None]:
    """Run the task and leave its outcome in the run folder; return exit code and exception."""
    folder, spare = job.folder, Spare(job.folder.path)
    sender: Sender | None = None
    try:
        writer.write(ev.Started(time.time(), rank, pid=os.getpid()))
        sender = Sender(job.plan, folder, rank, writer, job.shared_classes)
        value = _run_watched(job.plan.task, call)
        _finish_device_work()
        data = serialize.dump_result(value, job.shared_classes)
        ended = ev.Ended(time.time(), rank, result=preview(value))
        _save_result(spare, folder.result(rank), data)  # before what takes longer, and may fail
        sender.gather()
        leave_process_group()
        sender.send()
        writer.write(ended)
        return 0, None
    except SystemExit as leaving:
        return _leave(job, rank, writer, spare, leaving, sender), None
    except BaseException as error:  # whatever the user's code raised is this rank's outcome
        _report_failure(job, rank, writer, spare, error)
        if sender is not None and job.device != "xla":  # it would compile what never ran
            sender.rescue()
        return FAILED, error
    finally:
        spare.close()


def _save_result(spare: Spare, path: Path, data: bytes) -> None:
    try:
        spare.write(path, data)
    except OSError as error:
        size = f"{len(data):,} bytes of what the rank returned do not fit into the run folder"
        raise OSError(error.errno, f"{size} ({error.strerror})", str(path)) from None


def _report_failure(
    job: Job, rank: int, writer: EventWriter, spare: Spare, error: BaseException
) -> None:
    """Leave an exception in the run folder; where that fails too, its headline and both reasons."""
    now, told = time.time(), type(error).__name__
    seen: tuple[str, ...] = ()
    writer.write(ev.Failing(now, rank, error=told))
    with witness.undisturbed():
        try:
            captured = exceptions.capture(error, job.shared_classes)
            told, seen = captured.headline, witness.seen(error)
            spare.write(job.folder.failure(rank), serialize.dumps((now, captured)))
        except Exception as second:  # a full disk, no memory: the first failure is still the cause
            seen = (*seen, f"its report could not be written: {type(second).__name__}: {second}")
        writer.write(ev.Ended(time.time(), rank, error=told, evidence=seen))


def _run_watched(task: Task, call: Callable[[Task], Any]) -> Any:
    """Run the task, and have told at its end what was seen of it by then."""
    ended = False
    try:
        value = call(task)
        ended = True
        return value
    finally:
        with contextlib.suppress(Exception):  # a GPU in trouble gives no last figures
            telemetry.finish(wait=ended)  # after a failure, the GPU may never be done


def _leave(
    job: Job,
    rank: int,
    writer: EventWriter,
    spare: Spare,
    leaving: SystemExit,
    sender: Sender | None,
) -> int:
    """Treat ``sys.exit()`` as the interpreter would: a message goes to stderr and means 1."""
    code = leaving.code
    if code is None or code == 0:
        spare.write(job.folder.result(rank), serialize.dumps(None))
        if sender is not None:
            sender.gather()
            sender.send()
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
    own = str(Path(__file__).parent / "engines"), __file__
    with contextlib.suppress(Exception):  # a hostile __str__, a full disk: the report is out
        told = traceback.TracebackException.from_exception(error)
        frames = [frame for frame in told.stack if not frame.filename.startswith(own)]
        told.stack = traceback.StackSummary.from_list(frames)
        sys.stderr.write("".join(told.format()))


def _set_threads() -> None:
    """Apply OMP_NUM_THREADS to a torch that read the variable long ago, in the kernel."""
    torch = sys.modules.get("torch")
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and wanted.isdecimal() and int(wanted) > 0:
        torch.set_num_threads(int(wanted))


def _use_scratch(folder: str) -> None:
    """Have `multiprocessing` leave its sockets in `folder`.

    Each worker of a DataLoader makes a folder for them, and leaves it behind when it is killed.
    """
    if folder:
        from multiprocessing import process

        process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]


def run_task(task: Task) -> Any:
    """Do what the plan says and return its value, awaited if it is a coroutine."""
    if isinstance(task, Call):
        value = task.function(*task.args, **task.kwargs)
        return _in_a_loop(_awaited(value)) if inspect.iscoroutine(value) else value
    codes = _compiled(task)
    if any(code.co_flags & inspect.CO_COROUTINE for code in codes):
        return _in_a_loop(_run_cell_awaiting(task, codes))
    value = None
    for code in codes:
        value = eval(code, task.namespace)
    value = _call(task, value)
    return _in_a_loop(_awaited(value)) if inspect.iscoroutine(value) else value


async def _run_cell_awaiting(cell: Cell, codes: list[CodeType]) -> Any:
    """Run a cell with a top-level await: all of it in one event loop."""
    value = None
    for code in codes:
        value = eval(code, cell.namespace)
        if code.co_flags & inspect.CO_COROUTINE:
            value = await value
    value = _call(cell, value)
    return await value if inspect.iscoroutine(value) else value


def _call(cell: Cell, value: Any) -> Any:
    """Call the cell's training function; without one, the cell's value is the result."""
    if cell.function is None:
        return value
    args, kwargs = arguments(cell)
    return cell.namespace[cell.function](*args, **kwargs)


async def _awaited(value: Any) -> Any:
    return await value


def _in_a_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, also where a loop runs already (inline, in a kernel)."""
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return asyncio.run(coroutine)
    finally:
        asyncio._set_running_loop(running)
        if running is not None:
            asyncio.set_event_loop(running)


def _compiled(cell: Cell) -> list[CodeType]:
    """Compile the cell's statements, and a trailing expression apart from them."""
    tree = parse(cell.source, cell.filename)
    last = tree.body[-1]
    if not isinstance(last, Expr):
        return [_compile(tree, cell, "exec")]
    body = Module(tree.body[:-1], type_ignores=[])
    return [_compile(body, cell, "exec"), _compile(Expression(last.value), cell, "eval")]


def _compile(tree: Module | Expression, cell: Cell, mode: str) -> CodeType:
    flags = PyCF_ALLOW_TOP_LEVEL_AWAIT | cell.flags
    code: CodeType = compile(tree, cell.filename, mode, flags=flags, dont_inherit=True)
    return code


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


def _finish_device_work() -> None:
    """Let what was queued on a GPU end: a peer may be waiting for this rank's part of it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def leave_process_group() -> None:
    """Leave the default process group, if this process is in one."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
