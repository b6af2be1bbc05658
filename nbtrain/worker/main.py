"""Runs a rank: sets up the process, calls the task, and reports the outcome. Does not use IPython.

Every engine calls `main` in the rank's process with a `Job`. The rank reports into the run folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ..hangs import stack_dumps
from ..hangs.failures import DISK_FULL
from ..planning import task_values
from ..planning.plan import Task
from ..system.files import ReservedFile, unshare_in_children, write_atomically
from ..system.instrumentation import fix_warning_lines
from ..system.source_files import is_own, use_cell_names
from ..system.text import short_repr
from ..tracking import clock
from ..tracking import events as ev
from ..tracking.event_log import EventWriter
from ..transport import exceptions, result_pickler
from ..transport.job import Job
from ..transport.weights.sender import ResultSender
from . import (
    failure_evidence,
    hooks,
    nested_launches,
    observers,
    rank_context,
    stopping,
)
from .output import shown_errors
from .output.rich_output import RichOutput
from .rank_context import RankContext, sides_of
from .rank_environment import (
    allow_fsdp_on_cpu,
    clear_prepared_marks,
    join_run_world,
    keep_process_groups,
    quiet_tokenizers,
    rank_environment,
    renew_accelerate_state,
    serve_own_store,
    set_fork_start_method,
    use_own_workers,
)
from .task_runner import run_task
from .thread_joining import join_new_threads, join_threads

FAILED_EXIT_CODE = 1
"""The exit code of a rank whose exception is in its failure file."""


def main(job: Job, rank: int, call: Callable[[Task], Any] | None = None) -> int:
    """Make this process rank `rank` of a job, run the plan's task, and return the exit code.

    Sets environment variables and the number of threads. The outcome is in the run's folder. `call`
    runs the task, instead of `run_task`.
    """
    os.environ.update(rank_environment(job, rank, os.environ))
    _set_threads()
    if job.scratch:
        from multiprocessing import process

        # For the sockets of `multiprocessing`: each worker of a DataLoader makes a folder for
        # them, and leaves it behind when it is killed.
        process.current_process()._config["tempdir"] = job.scratch  # type: ignore[attr-defined]
    return run_in_rank(job, rank, call or run_task)


def run_in_rank(job: Job, rank: int, call: Callable[[Task], Any]) -> int:
    """Run the plan's task in a process that is a rank already, and return the exit code.

    Makes the rank's context, and installs the signal handler, patches and observers of the task;
    reports the outcome in the run's folder and prints the traceback of a failure. After a success,
    waits for threads and leaves the process group, unless the rank stays. An exception of the
    task does not come out.
    """
    os.environ["NBTRAIN_RUN"] = str(job.folder.path)
    context = _make_context(job, rank)
    rank_context.set_current(context)
    use_cell_names(job.folder.cells)
    failure_evidence.report_os_exit(rank, context.writer)
    _install_stack_dumps(context)
    task_values.keep_references(job.plan.task)
    observers.install(context)
    nested_launches.refuse()
    shown_errors.install()
    if not job.in_kernel:
        for side in sides_of(job):
            side.begin(context)
        use_own_workers()
        quiet_tokenizers()
        unshare_in_children()
        fix_warning_lines()
        if not job.ranks_stay:
            output = RichOutput(call)
            output.install(in_notebook=job.in_notebook)
            call = output.run
    serve_own_store(job.world.master_port if job.world else job.port)
    keep_process_groups()
    set_fork_start_method()
    if context.world_size > 1:
        clear_prepared_marks()
    join_run_world(job.device, context.world_size)
    if job.device == "cpu" and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        allow_fsdp_on_cpu()
    code, error = run_and_report(context, call)
    if error is not None:
        _print_traceback(error, heading=ev.TRACEBACK_FOLLOWS)
    if job.ranks_stay:  # else with the process: a thread may report until then
        context.writer.close()
    elif code == 0:
        with contextlib.suppress(OSError, KeyboardInterrupt):  # everything has been reported
            join_threads()
            _destroy_group_without_blocking(job)
    return code


def _make_context(job: Job, rank: int) -> RankContext:
    """Return the context of a task, and handle SIGINT for its run from now on.

    In a rank that stays, it shares with the context of the process what outlives a task.
    """
    stopper = stopping.install(job.folder.stopping_file)
    process = rank_context.current() if job.ranks_stay else None
    return RankContext(
        job=job,
        process_job=job if process is None else process.process_job,
        rank=rank,
        writer=EventWriter(job.folder.events(rank)),
        reserve=_reserve_last_file(job, process),
        stopper=stopper,
        checkpoint_refusal=(job if process is None else process).checkpoint_refusal,
    )


def _reserve_last_file(job: Job, process: RankContext | None) -> ReservedFile:
    """Return reserved space for a rank's last file, in the file system of the run's folder.

    A rank that stays has one for all of its tasks, as to reserve space takes longer than a short
    cell. It is replaced once it was used.
    """
    if process is None or job.folder_is_temporary:
        return ReservedFile(job.folder.path)
    if not process.reserve.is_free:
        process.reserve = ReservedFile(job.folder.path)
    return process.reserve


def _install_stack_dumps(context: RankContext) -> None:
    """Have the rank answer requests for its stacks, where the launcher reads them."""
    job, of_process = context.job, context.process_job
    folder = of_process.folder if job.folder_is_temporary else job.folder
    on_this_host = (job.world.ranks if job.world else 0) or job.world_size
    stack_dumps.install(
        folder, context.rank, context.writer, on_this_host, of_process.folder, of_process.lost
    )


def run_and_report(
    context: RankContext, call: Callable[[Task], Any]
) -> tuple[int, BaseException | None]:
    """Run the task, leave its outcome in the run folder, and return exit code and exception.

    There is no exception after a success, or after ``sys.exit`` with another code than 0.
    """
    with contextlib.ExitStack() as after:
        return _run_and_report(context, call, after)


def _run_and_report(
    context: RankContext, call: Callable[[Task], Any], after: contextlib.ExitStack
) -> tuple[int, BaseException | None]:
    """Do the work of `run_and_report`; `after` is closed once the outcome is saved."""
    job, rank, writer = context.job, context.rank, context.writer
    threads = threading.enumerate()
    sender: ResultSender | None = None
    try:
        try:
            writer.write(ev.Started(clock.now(), rank, pid=os.getpid()))
            sender = context.sender = ResultSender(job, rank, writer)
            if sender.needs_first_steps:
                hooks.add(sender, hooks.notify.on_first_step)
            if not (job.in_kernel or job.ranks_stay):
                renew_accelerate_state(job.plan)
            task_values.forget_references(job.plan.task)
            for side in sides_of(job):
                side.before_call(context)
            value = _run_watched(context, call)
            _deliver(context, sender, value, threads)
            return 0, None
        except BaseException:  # of any kind, raised by the user's code; it is raised again
            # First: a DataLoader's handler of SIGCHLD may raise again, for the same worker or
            # another one, and its error would replace the one that is reported.
            after.enter_context(failure_evidence.ignore_child_signals())
            raise
    except SystemExit as leaving:
        if not job.ranks_stay:
            return _leave(context, leaving), None
        error = RuntimeError(
            f"{failure_evidence.describe_sys_exit(leaving)}, which does not end live ranks"
        )
        _report_failure(context, error.with_traceback(leaving.__traceback__))
        return FAILED_EXIT_CODE, None
    except BaseException as error:  # of any kind, raised by the user's code
        for side in sides_of(job):
            side.handle_failure(context, error)
        _report_failure(context, error)
        if sender is not None and all(side.can_rescue for side in sides_of(job)):
            sender.rescue()
        return FAILED_EXIT_CODE, error
    finally:
        # Otherwise the reserve is for later tasks, too.
        if context.job is context.process_job or job.folder_is_temporary:
            context.reserve.close()


def _deliver(
    context: RankContext,
    sender: ResultSender,
    value: Any,
    threads: Collection[threading.Thread],
) -> None:
    """Save what the task returned, then the weights and variables, and report the end.

    Waits for the device's queued work. After the result is saved, waits for threads and leaves the
    process group, except in a rank that stays, and in a CPU rank of one host with nothing to send.
    In the kernel, `threads`, those from before the task, are not waited for. Raises
    `ResultNotPicklable`, and `OSError` if the result does not fit.
    """
    job, rank, writer = context.job, context.rank, context.writer
    _finish_device_work(context)
    data = result_pickler.dump_result(value, job.shared_classes)
    ended = ev.Ended(
        clock.now(),
        rank,
        result=short_repr(value),
        collectives=failure_evidence.last_collective(),
        checksum=f"{zlib.crc32(data):08x}",
    )
    _save_result(
        context.reserve, job.folder.result(rank), data
    )  # before what takes longer, and may fail
    if trouble := result_pickler.reading_trouble(data):
        returned = ev.ArtifactSaved(clock.now(), rank, ev.RETURNED, "value", trouble=trouble)
        writer.write(returned)
    sender.gather()
    is_apart = job.device != "cpu" or job.world is not None or job.in_kernel
    if not job.ranks_stay and (is_apart or sender.sends_anything):  # queued work may change that
        if not job.in_kernel:
            join_threads()
        elif _has_process_group():
            join_new_threads(threads)
        leave_process_group()
    sender.send(value)
    writer.write(ended)


def _save_result(reserve: ReservedFile, path: Path, data: bytes) -> None:
    """Save the pickled result. Raises `OSError` with its size if it does not fit."""
    try:
        reserve.write(path, data)
    except OSError as error:
        size = f"{len(data):,} bytes of what the rank returned do not fit into the run folder"
        raise OSError(error.errno, f"{size} ({error.strerror})", str(path)) from None


def _report_failure(context: RankContext, error: BaseException) -> None:
    """Report a failure, save its exception for the notebook, and report the end with evidence.

    The events are `Failing` and `Ended`. The exception is saved twice, first without its instance,
    as the user's code may be slow. If saving fails, `Ended` also says why. Raises no `Exception`.
    """
    job, rank, writer = context.job, context.rank, context.writer
    now, headline = clock.now(), type(error).__name__
    error_type = headline
    evidence: ev.Evidence = ()
    called = failure_evidence.last_collectives(job.folder.recorder(rank))
    writer.write(ev.Failing(now, rank, headline, error_type))
    try:
        captured = exceptions.capture(error, job.shared_classes, pickles=False)
        headline = captured.headline
        with contextlib.suppress(OSError):  # the room kept free is for the next one
            write_atomically(job.folder.failure(rank), result_pickler.dumps((now, captured)))
        evidence = failure_evidence.evidence(error)
        # Now with the instance, which is dispensable: user code may take too long over it.
        captured = exceptions.capture(error, job.shared_classes)
        context.reserve.write(job.folder.failure(rank), result_pickler.dumps((now, captured)))
    except Exception as second:  # a full disk, no memory: the first failure is still the cause
        reason = f"its report could not be written: {type(second).__name__}: {second}"
        is_full = getattr(second, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        evidence = (*evidence, (DISK_FULL if is_full else "", reason))
    writer.write(ev.Ended(clock.now(), rank, headline, None, evidence, error_type, called))


def _run_watched(context: RankContext, call: Callable[[Task], Any]) -> Any:
    """Call the task and return its value; ``sys.exit(0)`` in it returns None.

    Reports the last figures of the training in any case. A process that the task forked, and that
    comes back here, ends.
    """
    ended, process = False, os.getpid()
    try:
        value = call(context.job.plan.task)
        ended = True
        return value
    except SystemExit as leaving:
        ended = leaving.code in (None, 0)
        if not ended:
            raise
        return None
    finally:
        _end_if_forked(process)
        with contextlib.suppress(Exception):  # a GPU in trouble gives no last figures
            observers.finish(context, wait=ended)  # after a failure, the GPU may never be done


def _end_if_forked(process: int) -> None:
    """End a process that the task forked and that came back from it: it is not the rank."""
    if os.getpid() == process:
        return
    error, code = sys.exc_info()[1], 0
    with contextlib.suppress(Exception):  # a closed stream
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif error is not None:
            code = FAILED_EXIT_CODE
            _print_traceback(error)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


def _leave(context: RankContext, leaving: SystemExit) -> int:
    """Report ``sys.exit()`` of the task, and return the exit code, never 0.

    As in the interpreter, a message is printed to standard error and means 1.
    """
    code = leaving.code
    text = failure_evidence.describe_sys_exit(leaving)
    context.writer.write(ev.Failing(clock.now(), context.rank, text, SystemExit.__name__))
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    return code & 0xFF or 1


def _print_traceback(error: BaseException, heading: str = "") -> None:
    """Print the traceback of an error to standard error, without nbtrain's frames.

    `heading` is a line before it. Raises no `Exception`.
    """
    with contextlib.suppress(Exception):  # a hostile __str__, a full disk: the report is out
        report = traceback.TracebackException.from_exception(error)
        frames = [frame for frame in report.stack if not is_own(frame.filename)]
        report.stack = traceback.StackSummary.from_list(frames)
        lines = [f"{heading}\n"] if heading else []
        sys.stderr.write("".join([*lines, *report.format()]))


def _set_threads() -> None:
    """Apply OMP_NUM_THREADS to a torch that read the variable long ago, in the kernel."""
    torch = sys.modules.get("torch")
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and wanted.isdecimal() and int(wanted) > 0:
        torch.set_num_threads(int(wanted))


def _finish_device_work(context: RankContext) -> None:
    """Finish each side's work, and wait for what was queued on a device; raises the device's error.

    A peer may be waiting for this rank's part of it.
    """
    torch = sys.modules.get("torch")
    for side in sides_of(context.job):
        side.finish_task(context)
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _destroy_group_without_blocking(job: Job) -> None:
    """Leave the default process group, and wait until it is freed or each peer has returned.

    When gloo (torch 2.13) frees a group, it waits idly up to 10 ms for each peer, and for its
    queued work. After each peer has returned from its task, that wait is useless: a daemon thread
    goes on with it.
    """
    if not _has_process_group():
        return
    groups = [sys.modules["torch.distributed"].group.WORLD]
    leave_process_group()
    freeing = threading.Thread(target=groups.clear, name="nbtrain-leave", daemon=True)
    try:
        freeing.start()
    except RuntimeError:  # this process cannot start a thread
        groups.clear()
    peers = [job.folder.result(rank) for rank in range(job.world_size)]
    while peers and freeing.is_alive():
        if peers[-1].exists():
            peers.pop()
        else:
            freeing.join(0.002)


def leave_process_group() -> None:
    """Leave the default process group, if this process is in one."""
    if _has_process_group():
        sys.modules["torch.distributed"].destroy_process_group()


def _has_process_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    return bool(dist is not None and dist.is_available() and dist.is_initialized())
