"""Turns a plan into a finished run: resolves it, checks it, prepares its engine, and executes it.

`run_plan` has these steps; `execute` starts the ranks and watches them until they end.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from .. import engines, part
from ..checks import preflight
from ..checks.lint import lint
from ..engines import Engine
from ..errors import LaunchError, PlanError, PreflightError
from ..findings import Finding
from ..hangs import stacks
from ..planning import accelerate_config as config_file
from ..planning import task_values
from ..planning.option_parser import (
    check_rank_argument,
    explain_shared_name,
    plan_fields,
    read_arguments,
    split_launch_kwargs,
)
from ..planning.option_types import SOURCES
from ..planning.plan import Call, Plan
from ..system import gpus, host
from ..system.source_files import cell_name
from ..system.text import plural, with_article
from ..tracking import clock, launch_log, run_folder
from ..tracking.launch_log import LOGGER, attempt
from ..tracking.replay import initial_state
from ..tracking.run_folder import RunFolder
from ..tracking.state import RunState
from ..transport import result_pickler
from ..transport.job import Job
from ..transport.limits import CONNECT_TIMEOUT_S
from ..transport.weights.receiver import ResultReceiver
from ..ui.displays import prompt as prompts
from ..ui.displays import select
from ..ui.displays.html_display import Display, ipython_shell
from ..ui.displays.tracebacks import show_rank_traceback
from ..worker import nested_launches, rank_context
from . import background, limits
from .follower import Follower
from .launch_sides import add_below, buttons, launch_sides
from .restarts import run_attempts
from .run import (
    Run,
    background_runs,
    draw_live,
    mark_finished,
    previous_curve,
    prune_old_runs,
    set_last_run,
)
from .run_info import complete_manifest, manifest
from .supervisor import Interrupts, Supervisor

_NO_DEBUGGER = Finding(
    "no-debugger",
    "--debug has no effect here: the debugger needs ranks on this host, and a notebook or a "
    "terminal in which you can type.",
)

_NO_ADDRESS = Finding(
    "no-address",
    "--notify has an empty address, so no message is sent there.",
    "Check the variable or the expression that gives it.",
)

_LOGGED = ("name", "engine", "mixed_precision", "timeout", "max_restarts", "env", "scaling")
"""Keys of the manifest that are logged. The manifest has only the names of `env`."""

_refusals: list[str] = []
"""Why launches of the running cell were refused. Code that catches the error would hide it."""


@contextlib.contextmanager
def record_refusals() -> Iterator[None]:
    """Note why a launch in this block was refused, for `take_refusals`, and raise the error again.

    Only `PlanError` and `PreflightError` count, and only in the main thread.
    """
    try:
        yield
    except (PlanError, PreflightError) as error:
        text = f"{type(error).__name__}: {error}"
        is_of_cell = threading.current_thread() is threading.main_thread()
        if is_of_cell and text not in _refusals:  # `launch` and `run_plan` both raise it
            _refusals.append(text)
        raise


def take_refusals() -> list[str]:
    """Return why launches were refused since the last call."""
    refusals = _refusals.copy()
    _refusals.clear()
    return refusals


@record_refusals()
def launch(
    function: Callable[..., Any],
    /,
    *args: Any,
    num_processes: int | None = None,
    engine: str = "auto",
    mixed_precision: str | None = None,
    downcast_bf16: bool = False,
    config: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    max_restarts: int = 0,
    start_from: Run | str | os.PathLike[str] | None = None,
    turn: Mapping[str, Any] | None = None,
    profile: str | int | tuple[int, int] | bool | None = None,
    memory_snapshot: bool = False,
    background: bool = False,
    detach: bool = False,
    submit: str | None = None,
    view: str = "auto",
    telemetry: str | Iterable[str] = SOURCES,
    hang_after: float | None = 300.0,
    on_hang: str = "deadlock",
    track: str | Iterable[str] = (),
    notify: str | Iterable[str] = (),
    debug: bool = False,
    out: str | Iterable[str] = (),
    sync: bool = True,
    address: str | None = None,
    nodes: int | tuple[int, int] | None = None,
    resources: Mapping[str, float] | None = None,
    wait_for_nodes: float = 0.0,
    **kwargs: Any,
) -> Run:
    """Run ``function(*args, **kwargs)`` on several ranks (training processes); return the `Run`.

    Example::

        def train(model, epochs=3):
            ...
            return accuracy

        run = nbtrain.launch(train, model, epochs=5, num_processes=2)
        run.value  # what rank 0 returned

    The call returns when the run has ended. With `background`, it returns when the ranks have
    started, and it does not raise the ranks' errors: call ``run.wait()``, then read
    ``run.exception`` and ``run.results``.

    The function may be a lambda or a closure: the fork engine does not pickle it. nbtrain copies
    back what each rank returns, and the trained weights of the models among the arguments. If the
    function has an argument with the same name as an option below, nbtrain takes the value, and the
    function gets it only if it does not fit the option. To pass it to the function in any case,
    give it by position, or with ``functools.partial``.

    Args:
        function: what every rank calls.
        args: its positional arguments.
        kwargs: its keyword arguments: all that are not options of nbtrain.
        num_processes: the number of ranks. None: one per GPU or TPU chip, or 2 on a host without
            any; on Ray one per GPU of each node, or one per node.
        engine: 'auto', 'fork', 'spawn' (fresh processes, which get what the function refers to),
            'tpu' ('xla', forked, or 'torch_tpu', fresh processes, whichever is installed), 'ray'
            (on the nodes of a Ray cluster) or 'inline' (one rank in this process, for debugging).
        mixed_precision: 'no' (None), 'fp16', 'bf16' or 'fp8', for a plain ``Accelerator()``. On a
            TPU, bf16 applies to every float.
        downcast_bf16: on a TPU with bf16, torch.float becomes bf16, torch.double a 32-bit float.
        config: an ``accelerate config`` file, or 'default' for Accelerate's default file. It sets
            what is None here, and FSDP, DeepSpeed, dynamo and the like.
        env: environment variables of the ranks.
        timeout: nbtrain stops the run after this many seconds, restarts included.
        max_restarts: how often nbtrain starts all ranks again after one failed, unless the failure
            is a mistake that would only repeat itself; see `nbtrain.last_checkpoint`.
        start_from: a run that has kept a checkpoint (`Run.keep`, `nbtrain.checkpoint`), or the path
            of any checkpoint. A Trainer of transformers or Lightning continues there. Another loop
            begins at its start with the weights and the optimizers' states of the checkpoint,
            unless the function loads what `nbtrain.last_checkpoint` returns.
        turn: new settings of the optimizers from the first step on, as for `Run.turn`:
            ``{"lr": "/3"}``. A checkpoint that is loaded does not replace them.
        profile: record some steps of all ranks, and show where their time goes: True for the 3
            steps after the second, a number of steps, or ``"100:3"`` for the 3 after step 100.
        memory_snapshot: record what the ranks allocate on GPUs. When memory runs out, or at the
            end, a note shows which lines hold it. A restart after that failure records by itself.
        background: return the run when its ranks have started; it ends with the kernel.
        detach: the same, but the run survives the kernel: ``%nbtrain show`` displays it in another.
        submit: the same, on the nodes of a Slurm job of its own: options of ``sbatch`` for that
            job. It waits in Slurm's queue, and `engine` and `num_processes` apply in the job.
        view: how progress is shown: 'auto', 'widget', 'html', 'text' or 'none'.
        telemetry: what the ranks report by themselves, of
            `nbtrain.planning.option_types.SOURCES`: names, or a text as for ``%%distributed``
            ('all', 'none', 'bars,steps', '-loss').
        hang_after: report a hang after this many seconds without progress of a rank; None or 0:
            never. A deadlock that is certain is reported after seconds.
        on_hang: end the run, and raise `RunTimeout` with the report, at a certain 'deadlock', at
            any hang ('stop'), or never ('report').
        track: trackers that get config, metrics, notes and the outcome, as one run: 'tensorboard',
            'mlflow', 'wandb', 'trackio' or another that Accelerate has (``NAME@all``: the metrics
            of each rank, too).
        notify: addresses of apprise that get a message when the run ends, fails or hangs.
        debug: when a rank raises, open the debugger at that line before the run ends.
        out: names of variables of rank 0 to copy back (``NAME@all``: of every rank, as a list):
            arguments, or global variables of the function's module. They are assigned there.
        sync: if the run succeeds, load the trained weights into the models among the arguments.
        address: the Ray cluster: 'auto' (None: the one that this host is a node of), 'local'
            (start one here, to try it out) or 'HOST:PORT'.
        nodes: how many nodes of the cluster share the ranks equally, one by default. (least,
            most): a restart continues with as few as `least`.
        resources: what each rank reserves on its node, by Ray's names ('CPU', 'GPU', …).
        wait_for_nodes: seconds to wait until the cluster has room.

    Returns:
        The run: `Run.value` is what rank 0 returned, `Run.results` what each rank returned.

    Raises:
        PlanError: an argument cannot be used as written; nothing was started.
        MissingExtra: a package that an option needs is not installed; nothing was started.
        PreflightError: the state of this process forbids the launch; nothing was started.
        LaunchError: the ranks could not be started.
        RankDied: a rank was killed or exited.
        RunTimeout: the timeout was exceeded, or the run hung (see `on_hang`).
        ResultsLost: all ranks ended well, but what they trained could not be saved.
        KeyboardInterrupt: the run was interrupted; all ranks have ended.
        Exception: what the rank that failed first raised, with its own type.
    """
    given = locals()
    if not callable(function):
        raise PlanError(
            f"launch needs a function to call, not {with_article(type(function).__name__)}"
        )
    kwargs, given, notes = split_launch_kwargs(function, args, kwargs, given)
    check_rank_argument(function, args, kwargs)
    call = Call(function, args, kwargs)
    return run_plan(Plan(call, call.name, **plan_fields(given)), notes)


@record_refusals()
def notebook_launcher(
    function: Callable[..., Any],
    args: Any = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int | None = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> Run:
    """Do what ``accelerate.notebook_launcher`` does, with its exact signature; return the `Run`.

    It differs in this: the precision takes effect, CPU ranks form one world, and `num_processes`
    None means one rank per GPU (2 without any). One process is forked like several, so that the
    kernel stays clean. It raises a rank's own exception. ``run.results`` has the return values, and
    models among `args` are updated in place. The default port means a free one; any other is used
    or refused.

    With `num_nodes` > 1, call it on every node, with a different `node_rank` on each and with the
    address and port of node 0: the ranks of all nodes form one world. Each notebook shows the ranks
    of its node. If one of them fails or is stopped, the ranks of the other nodes fail in their next
    collective. ``rdzv_conf={"timeout": 60}`` sets how many seconds the nodes wait for each other
    (900 by default). `monitor_interval` and `log_line_prefix_template` have no effect.

    Raises:
        PlanError: an argument cannot be used as written; nothing was started.
        LaunchError: the ranks could not be started, or the nodes did not meet.
        PreflightError, MissingExtra, RankDied, RunTimeout, ResultsLost, KeyboardInterrupt,
            Exception: see `launch`.
    """
    given = with_article(type(function).__name__)
    if not callable(function):
        raise PlanError(
            f"notebook_launcher needs a function, not {given}. If this is what a training "
            "returned, it ran in this kernel, without ranks: pass the function itself, as in "
            "notebook_launcher(trainer.train, num_processes=2)"
        )
    args = read_arguments(args)
    rendezvous = None
    if (num_nodes, node_rank) != (1, 0):
        meet = part.load_provided("nodes", "rendezvous", "`num_nodes`")
        address = rdzv_endpoint or f"{master_addr}:{use_port or 29500}"
        rendezvous = meet(num_nodes, node_rank, address, rdzv_backend, rdzv_conf or {}, rdzv_id)
    check_rank_argument(function, args, {})
    call = Call(function, args)
    plan = Plan(
        call,
        call.name,
        num_processes=num_processes,
        mixed_precision=str(getattr(mixed_precision, "value", mixed_precision)).lower(),
        port=_requested_port(use_port) if rendezvous is None else None,
        max_restarts=max_restarts,
        rendezvous=rendezvous,
    )
    return run_plan(plan)


def _requested_port(use_port: str | int | None) -> int | None:
    """Return the port that the caller chose; None for Accelerate's default, 0, None and "".

    Raises `PlanError` if it is no number.
    """
    text = "" if use_port is None else str(use_port)
    if text in ("", "0", "29500"):
        return None
    if not text.isdecimal():
        raise PlanError(f"use_port must be a port number, not {use_port!r}")
    return int(text)


@record_refusals()
@launch_log.record_launch()
def run_plan(plan: Plan, noticed: Sequence[Finding] = (), *, engine: Engine | None = None) -> Run:
    """Resolve a plan, check it, prepare its engine and execute it; return the run.

    A background run is returned when its ranks have started. Deletes runs that are no longer kept.
    `noticed` are findings of the caller, and `engine` is an engine that the plan cannot name: live
    ranks. Raises `PlanError`, `PreflightError`, `LaunchError`, or the run's error.
    """
    if rank_context.current() is not None:
        raise nested_launches.refusal("nbtrain")
    for side in launch_sides():
        side.check(plan)
    plan, findings = _apply_config(plan)
    plan, notes = _replace_zero_ranks(plan)
    findings += [*notes, *noticed]
    engine = engine or engines.choose(plan)
    task_values.keep_references(plan.task)
    try:
        for side in launch_sides():
            engine = side.replace_engine(plan, engine)
        plan, device, found = _get_ready(plan, engine)
        findings += found
        has_prompt = not (plan.is_background or engine.on_cluster) and prompts.find() is not None
        if plan.debug and not has_prompt:
            findings.append(_NO_DEBUGGER)
        for finding in findings:
            LOGGER.info("note: %s", finding.full_text)
        if plan.is_background:
            return _start_in_background(plan, device, engine, findings)
        with Interrupts(wanted=not engine.runs_in_kernel) as interrupts:
            job, state = make_job(plan, device, engine, findings)
            if has_prompt:
                job = replace(job, unanswered="")
            supervisor = Supervisor(job.folder, state, plan, ranks_stay=engine.ranks_stay)
            stop = partial(supervisor.request_stop, "by the Stop button")
            read_stacks = partial(stacks.read_stacks, job.folder, range(job.world_size))
            of_parts = partial(buttons, job.folder)
            board = partial(select.choose, plan.view, stop, read_stacks, of_parts)
            display = add_below(_display(plan, engine, board), job.folder)
            run = execute(job, engine, supervisor, display, interrupts)
            every = limits.PRUNE_EVERY_TASKS if engine.ranks_stay else 1
            prune_old_runs(job.folder, lambda: interrupts.count > 0, every=every)
    except OSError as failure:  # most likely out of descriptors
        raise LaunchError(f"the run could not be started: {failure}") from failure
    finally:
        engine.discard()
        task_values.forget_references(plan.task)
    error = run.exception
    if error is None and interrupts.count and run.state.status == "succeeded":
        error = KeyboardInterrupt("the interrupt came after the run had ended")
    if error is not None:
        raise show_rank_traceback(error)
    return run


def _get_ready(plan: Plan, engine: Engine) -> tuple[Plan, str, list[Finding]]:
    """Resolve and check a plan, and prepare its engine; return plan, device and findings."""
    plan, device = engine.resolve(plan)
    LOGGER.info("%s on %s", plural(plan.num_processes or 1, "rank"), device)
    findings = _check(plan, device, engine)
    engine.prepare(plan.hide_notify_addresses())
    return plan, device, [*findings, *engine.notes]


@launch_log.record_launch()
def run_submitted(load: Callable[[], Plan], folder: RunFolder, *, in_notebook: bool) -> None:
    """Run a submitted plan in the job that its scheduler has begun, in the folder of its run.

    `load` loads the plan as the notebook sent it, with its values in ``__main__``. Raises nothing:
    the end is recorded in the folder.
    """
    launch_log.keep_in(folder.launcher_log)
    given = folder.read_manifest()
    plan = Plan(Call(len), str(given["name"]))
    engine = None
    try:
        plan = load()
        engine = engines.choose(plan)
        task_values.keep_references(plan.task)
        plan, device, findings = _get_ready(plan, engine)
        job, state = make_job(plan, device, engine, findings, folder)
    except (Exception, SystemExit) as error:  # of the user's modules, too; it is the run's
        run_folder.recreate(folder, given)
        supervisor = Supervisor(folder, initial_state(given), plan)
        code = error.code if isinstance(error, LaunchError) else ""
        supervisor.abort(f"{type(error).__name__}: {error}", code)
    else:
        background.watch(engine, replace(job, in_notebook=in_notebook), state)
    finally:
        if engine is not None:
            engine.discard()


def _display(plan: Plan, engine: Engine, choose: Callable[..., Display]) -> Display:
    """Return what shows a run: the display of a part, or the board and its outputs."""
    looks = (partial(side.display, plan, engine, choose) for side in launch_sides())
    shown = (attempt("the display of a part", look, None) for look in looks)
    of_part = next((each for each in shown if each is not None), None)
    return of_part or select.with_outputs(choose(inline=engine.runs_in_kernel))


def _replace_zero_ranks(plan: Plan) -> tuple[Plan, list[Finding]]:
    """Replace 0 processes, the number of GPUs on a host without any, by the default.

    Raises `PlanError` on a host with GPUs.
    """
    if plan.num_processes != 0:
        return plan, []
    if gpus.gpu_count({**os.environ, **plan.env}):
        raise PlanError("num_processes must be a whole number ≥ 1, not 0")
    text = "num_processes is 0, which is torch.cuda.device_count() on a host without a GPU"
    remedy = "nbtrain uses the default instead."
    return replace(plan, num_processes=None), [Finding("no-gpus", f"{text}.", remedy)]


def _apply_config(plan: Plan) -> tuple[Plan, list[Finding]]:
    """Return the plan with its config file applied, and findings about overridden settings.

    A plan without a config file is returned as it is. Raises `PlanError` for an unusable file.
    """
    try:
        return config_file.apply_config(plan)
    except PlanError as error:
        if hint := explain_shared_name(plan.task, "config"):
            raise PlanError(f"{error}. {hint}") from error.__cause__
        raise


def execute(
    job: Job, engine: Engine, supervisor: Supervisor, display: Display, interrupts: Interrupts
) -> Run:
    """Start the ranks, watch them until they end, and load their results; return the run.

    The run becomes the last run before the ranks start. Raises nothing: ``run.exception`` has the
    error.
    """
    run = Run(job.folder, supervisor.state, watcher=supervisor, receiver=ResultReceiver(job.plan))
    set_last_run(run)
    drawing = select.GuardedDisplay(display)
    supervisor.show = drawing.update
    error = run_attempts(engine, job, supervisor, interrupts)
    run.bring_home()  # first, so that the board can show it
    drawing.finish(supervisor.state, clock.now())
    mark_finished(run, error)
    return run


def _check(plan: Plan, device: str, engine: Engine) -> list[Finding]:
    """Return all findings about a launch.

    Raises `PreflightError` or `PlanError` if one of them refuses the launch.
    """
    findings = config_file.check_device(plan, device)
    if engine.checks_host:
        findings += _check_other_runs(plan, device)

    on_host = preflight.check(plan, device, engine) if engine.checks_host else ()
    find = partial(
        lint,
        plan.task,
        device=device,
        sharded=config_file.is_sharded({**os.environ, **plan.env}),
        ranks=plan.num_processes or 1,
        name_cell=cell_name,
    )
    in_code = list(launch_log.attempt("the lint", find, ()))
    if engine.ranks_stay:  # a later cell may call the function
        in_code = [finding for finding in in_code if finding.code != "not-called"]
    from_parts = [each for side in launch_sides() for each in side.findings(plan, device, engine)]
    findings += preflight.raise_if_refused([*on_host, *from_parts, *in_code])
    return [*findings, _NO_ADDRESS] if "" in plan.notify else findings


def _check_other_runs(plan: Plan, device: str) -> list[Finding]:
    """Return a finding if another run of this kernel has not ended: they share the host.

    Raises `PreflightError` instead if both use accelerators of one kind, except for GPUs that
    `--env CUDA_VISIBLE_DEVICES` selects. Does not check which GPUs the other run uses.
    """
    others = [run for run in background_runs() if not run.state.is_submitted]
    if not others:
        return []
    on_device = [run for run in others if run.state.device == device]
    last = (on_device or others)[-1]
    other = f"Run {last.folder.name} of this notebook is still running in the background"
    ends = "Wait for it (nbtrain.last_run().wait()), or end it (nbtrain.last_run().stop())"
    if last.state.takes_tasks:
        other = f"The {last.state.name} of this notebook are running"
        ends = "%nbtrain stop ends them"
    has_own_gpus = device == "cuda" and "CUDA_VISIBLE_DEVICES" in plan.env
    if device == "cpu" or has_own_gpus or not on_device:
        return [Finding("run-in-background", f"{other}. The new run shares this host with it.")]
    devices, share = "GPUs", ", or give each run different ones: --env CUDA_VISIBLE_DEVICES=0,1"
    if device in part.devices():
        devices, share = part.devices()[device].label, "."
    raise PreflightError(f"{other}, on the same {devices}. {ends}{share}")


def _start_in_background(
    plan: Plan, device: str, engine: Engine, findings: Sequence[Finding]
) -> Run:
    """Start a background run, and draw it; return it when its ranks have started.

    It becomes the last run, and runs that are no longer kept are deleted. Raises `LaunchError` if
    the ranks cannot start, or if no thread can follow the run, which is stopped then. An interrupt
    stops the run and is raised.
    """
    job, state = make_job(plan, device, engine, findings)
    prune_old_runs(job.folder, lambda: False)
    supervisor = None
    if engine.ranks_stay:
        background.start_in_thread(engine, job, state)
    elif not engine.submit(job):
        supervisor = background.start(engine, job, state, ends_with_kernel=not plan.detach)
    follower = Follower(job.folder, supervisor)
    receiver = ResultReceiver(plan)
    run = Run(job.folder, state, watcher=follower, receiver=receiver)
    set_last_run(run, in_background=True)
    try:
        receiver.remember()  # while the ranks start
        started = follower.wait_for_ranks(2 * CONNECT_TIMEOUT_S)
    except KeyboardInterrupt:
        follower.start()
        run.stop("by an interrupt")
        raise
    if not started:
        follower.start()
        run.wait()
        printed = launch_log.printed_in(job.folder.launcher_log)
        raise LaunchError(". ".join(filter(None, (follower.state.explanation, printed))))
    draw_live(run, plan.view)
    try:
        follower.start()
    except LaunchError:  # no thread can follow the run, so end it
        follower.request_stop("because its kernel could not follow it")
        raise
    return run


def make_job(
    plan: Plan,
    device: str,
    engine: Engine,
    findings: Sequence[Finding],
    submitted: RunFolder | None = None,
) -> tuple[Job, RunState]:
    """Create the run's folder; return the ranks' job, and the run's state before they start.

    A `submitted` run has its folder; what only the notebook knew stays in its manifest. Writes this
    launch's log into the folder from now on. Sets nbtrain's clock by the system's, unless a run is
    in the background. Raises `LaunchError` if the folder cannot be written, and what a part raises;
    then a folder that was created is deleted.
    """
    world_size = plan.num_processes or 1
    if not background_runs():  # which would change the clock of a background run
        clock.synchronize()
    contents = manifest(plan, world_size, device, findings, engine.runs_in_kernel)
    contents["earlier"] = None if plan.scaling else previous_curve(contents["name"])
    if submitted is not None:
        contents = complete_manifest(contents, submitted.read_manifest())
        run_folder.recreate(submitted, contents)
    job = Job(
        plan=plan,
        folder=submitted or run_folder.create(contents["name"], contents),
        world_size=world_size,
        device=device,
        threads=host.threads_per_rank(world_size),
        in_kernel=engine.runs_in_kernel,
        rank_sides=() if engine.runs_in_kernel else part.rank_sides(),
        in_notebook=getattr(ipython_shell(), "kernel", None) is not None,
        shared_classes=result_pickler.notebook_classes(),
    )
    try:
        for side in launch_sides():
            job = side.complete_job(job, engine)
    except BaseException:  # an interrupt, too: nothing was started
        if submitted is None:
            shutil.rmtree(job.folder.path, ignore_errors=True)
        raise
    launch_log.keep_in(job.folder.launcher_log)
    LOGGER.info(
        "nbtrain %s, Python %s, torch %s, %s, process %d",
        vars(sys.modules["nbtrain"])["__version__"],
        contents["python"],
        contents["torch"],
        f"{platform.system()} {platform.release()}",  # platform.platform() starts a process
        os.getpid(),
    )
    LOGGER.info("plan: %s", ", ".join(f"{name} {contents[name]!r}" for name in _LOGGED))
    return job, initial_state(contents | {"number": run_folder.number_of(job.folder)})
