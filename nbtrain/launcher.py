"""From a plan to a finished run, stage by stage: resolve, preflight, start, watch, raise."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from . import config as config_file
from . import devices, engines, estimate, host, keeper, preflight, serialize, stacks, tpus, xla
from . import nodes as several
from .attempts import carry_out
from .engines import Engine
from .errors import LaunchError, PlanError, PreflightError
from .follow import Follower
from .home import Home
from .lint import lint
from .manifest import cell_name, manifest, torch_version
from .nodes import Nodes
from .plan import HANG_AFTER, SOURCES, Call, Plan, check_kinds, names_of, sources_of
from .reopen import initial_state
from .run import Run, going_on, new_folder, remember
from .state import RunState
from .supervise import Interrupts, Supervisor
from .tail import last_bytes
from .view import fronts
from .view.tracebacks import show_from_the_rank
from .worker import Job

START_PATIENCE = 20.0
"""Seconds that a cell waits to hear whether the ranks of a run in the background were started."""


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
    background: bool = False,
    detach: bool = False,
    view: str = "auto",
    telemetry: str | Iterable[str] = SOURCES,
    hang_after: float | None = HANG_AFTER,
    out: str | Iterable[str] = (),
    sync: bool = True,
    address: str | None = None,
    nodes: int | tuple[int, int] | None = None,
    resources: Mapping[str, float] | None = None,
    wait_for_nodes: float = 0.0,
    **kwargs: Any,
) -> Run:
    """Run ``function(*args, **kwargs)`` on several ranks (processes); return the finished `Run`.

    In the `background` it is returned at once, and raises nothing of what the ranks raise:
    ``run.wait()``, then ``run.exception`` and ``run.results``.

    The function may be a lambda or a closure; by fork, nothing of it is pickled. Each rank is a
    process of its own that runs it; what it returns comes back, and models among its arguments
    do, trained. An argument of its own that is called as one of these options gets there by
    position, or in ``functools.partial``.

    Args:
        num_processes: how many ranks; None: one a GPU or TPU chip, 2 on a host without; on
            Ray one a GPU of each node, or one on each.
        engine: 'auto', 'fork', 'spawn' (fresh processes, which get what the function refers to),
            'tpu' (by what is installed 'xla', forked, or 'torch_tpu', fresh processes) or 'inline'
            (one rank in this process, for debugging), or 'ray' (on the nodes of a Ray cluster).
        mixed_precision: 'no' (None), 'fp16', 'bf16' or 'fp8', for a plain ``Accelerator()``. On a
            TPU, with bf16, every float is one.
        downcast_bf16: with bf16 on a TPU: torch.float is bf16, torch.double a 32-bit float.
        config: a file that ``accelerate config`` wrote, 'default' for its usual one: decides what
            is None here, and FSDP, DeepSpeed, dynamo and the like.
        env: environment variables of the ranks.
        timeout: seconds after which the run is stopped, restarts included.
        max_restarts: how often all ranks start again after one failed, unless it is a mistake
            that would only be repeated; see `nbtrain.last_checkpoint`.
        background: give the run back as soon as its ranks were started; it ends with the kernel.
        detach: the same, but it goes on whatever becomes of the kernel; ``%nbtrain show`` in
            another one finds it again.
        view: 'auto', 'widget', 'html', 'text' or 'none'.
        telemetry: what the ranks report unasked, of `nbtrain.plan.SOURCES`: names, or a text as
            for ``%%distributed`` ('all', 'none', 'bars,steps', '-loss').
        hang_after: seconds without progress of a rank after which the board says who waits where;
            None or 0: never. It ends nothing.
        out: names of variables of rank 0 that come back (``NAME@all``: of every rank, as a list):
            arguments, or global ones of the function's module, where they are then assigned.
        sync: load the trained weights into the models that the function is given, if it succeeds.
        address: of the Ray cluster: 'auto' (None: the one that this host is a node of), 'local'
            (start one here, for trying) or 'HOST:PORT'.
        nodes: how many nodes of the cluster share the ranks equally, one by default; (least,
            most): a restart goes on with as few as `least`.
        resources: what each rank takes of its node, by Ray's names ('CPU', 'GPU', …).
        wait_for_nodes: seconds that others on the cluster, or its autoscaler, have to make room.

    Raises:
        PlanError: an argument that makes no sense; nothing was started.
        PreflightError: the state of this process forbids the launch; nothing was started.
        LaunchError: the ranks could not be started.
        RankDied: a rank was killed or exited.
        RunTimeout: the timeout was exceeded.
        KeyboardInterrupt: the run was interrupted; all ranks have ended.
        Exception: what the causing rank raised, with its own type.
    """
    if not callable(function):
        raise PlanError(f"launch needs a function to call, not a {type(function).__name__}")
    check_kinds(config=config, env=env, resources=resources, out=out, telemetry=telemetry)
    plan = Plan(
        task=Call(function, args, kwargs),
        name=getattr(function, "__name__", type(function).__name__),
        num_processes=num_processes,
        engine=engine,
        mixed_precision=mixed_precision,
        downcast_bf16=downcast_bf16,
        config=config,
        env=dict(env or {}),
        timeout=timeout,
        max_restarts=max_restarts,
        background=background,
        detach=detach,
        view=view,
        telemetry=sources_of(telemetry),
        hang_after=hang_after or None,
        out=names_of(out),
        sync=sync,
        address=address,
        spread=(nodes, nodes) if isinstance(nodes, int) else nodes,
        resources=dict(resources or {}),
        wait_for_nodes=wait_for_nodes,
    )
    return run_plan(plan)


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

    Differences: the precision takes effect; CPU ranks form one world; `num_processes` None means
    one a GPU (2 without); one process is forked like several, so that the kernel stays clean; a
    rank's own exception is raised; results come back in ``run.results``, and models among `args`
    trained. The default port means a free one; any other is used or refused.

    With `num_nodes` > 1 it is called on every node, with another `node_rank` each and the address
    and port of node 0 (or its nodes are started by ``torchrun``): the ranks of all are one world.
    Each node shows its own; what fails or is stopped on one ends it on all, and restarts are of
    all. ``rdzv_conf={"timeout": 60}`` is how long they wait for each other (15 min);
    `log_line_prefix_template` changes nothing: lines have their rank anyway.

    Raises:
        PlanError: an argument that makes no sense; nothing was started.
        LaunchError: the ranks could not be started, or the nodes did not meet.
        NodeFailed: another node failed.
        PreflightError, RankDied, KeyboardInterrupt, Exception: see `launch`.
    """
    if not callable(function):
        raise PlanError(f"notebook_launcher needs a function, not a {type(function).__name__}")
    nodes = None
    if (num_nodes, node_rank) != (1, 0):
        meet_at = rdzv_endpoint or f"{master_addr}:{use_port or 29500}"
        nodes = Nodes(
            num_nodes, node_rank, meet_at, rdzv_backend, rdzv_conf or {}, rdzv_id, monitor_interval
        )
    plan = Plan(
        task=Call(function, tuple(args)),
        name=getattr(function, "__name__", type(function).__name__),
        num_processes=num_processes,
        mixed_precision=str(getattr(mixed_precision, "value", mixed_precision)).lower(),
        port=None if nodes is not None else _asked_port(use_port),
        max_restarts=max_restarts,
        nodes=nodes,
    )
    return run_plan(plan)


def _asked_port(use_port: str | int | None) -> int | None:
    """Return the port the caller chose; Accelerate's default is no choice."""
    text = "" if use_port is None else str(use_port)
    if text in ("", "0", "29500"):
        return None
    if not text.isdecimal():
        raise PlanError(f"use_port must be a port number, not {use_port!r}")
    return int(text)


def run_plan(plan: Plan) -> Run:
    """Carry a plan out to its end and return the run; raise what it ended with, if badly."""
    plan, told = config_file.applied(plan)
    plan, device, engine = _resolve(plan)
    try:
        told += config_file.notes_on(plan, device)
        told += several.notes(plan.nodes, plan.num_processes or 1, plan.name)
        notes = [*told, *_check_alone(plan, device), *_notes(plan, device)]
        engine.prepare(plan)
        notes += engine.notes
        if plan.goes_on:
            return _leave(plan, device, engine, notes)
        with Interrupts(wanted=not engine.runs_here) as interrupts:
            run = _prepare(plan, device, engine, interrupts, notes)
            run.wait()
    except OSError as trouble:  # out of descriptors, most likely
        raise LaunchError(f"the run could not be started: {trouble}") from trouble
    finally:
        engine.discard()
    error = run.exception
    if error is None and interrupts.count and run.state.status == "succeeded":
        error = KeyboardInterrupt("the interrupt came when the run had ended")
    if error is not None:
        raise show_from_the_rank(error)
    return run


def _resolve(plan: Plan) -> tuple[Plan, str, Engine]:
    """Replace every 'auto' by what there is; return the kind of device and the engine too."""
    if plan.engine != "ray":
        plan, device = _resolve_here(plan)
        return plan, device, engines.get(plan.engine, plan.nodes)
    from .engines.cluster import RayEngine

    engine = RayEngine()
    try:
        return *engine.resolve(plan), engine
    except BaseException:  # an interrupt too: the connection is not left behind
        engine.discard()
        raise


def _resolve_here(plan: Plan) -> tuple[Plan, str]:
    """Replace every 'auto' by what this host offers; return the kind of device too."""
    env = {**os.environ, **plan.env}
    tpu = tpus.found(env=env)
    engine = plan.engine
    if engine == "tpu" or (engine == "auto" and tpu is not None and tpus.is_wanted(env)):
        engine = tpus.engine(torch_version()) or engine
    if plan.nodes is not None and engine not in ("auto", "fork"):
        raise PlanError("several nodes (num_nodes) train on GPUs or CPUs; on a TPU use num_nodes=1")
    if plan.downcast_bf16 and engine != "xla":
        raise PlanError("downcast_bf16 is for a TPU with torch_xla; leave it out here")
    if engine in tpus.ENGINES:
        ranks = tpus.ranks(tpu, plan.num_processes, env, engine)
        precision = plan.mixed_precision or "no"
        return (
            replace(plan, engine=engine, num_processes=ranks, mixed_precision=precision),
            tpus.ENGINES[engine],
        )
    if engine == "tpu":
        raise PlanError(f"nothing is installed that drives a TPU: {xla.INSTALL}, or {tpus.INSTALL}")
    engine = "fork" if engine == "auto" else engine
    gpus = devices.gpu_count(env)
    inline = engine == "inline"
    default = 1 if inline else gpus or devices.CPU_DEFAULT
    if inline and plan.num_processes not in (None, 1):
        raise PlanError(f"the inline engine runs one rank (-n 1), not {plan.num_processes}")
    resolved = replace(
        plan,
        engine=engine,
        num_processes=plan.num_processes or default,
        mixed_precision=plan.mixed_precision or "no",
    )
    return resolved, "cuda" if gpus else "cpu"


def _notes(plan: Plan, device: str) -> list[str]:
    """Return what may go wrong, a line each. Raises `PreflightError` for what must."""
    lines = preflight.check(plan, device) if plan.engine != "ray" else ()
    try:
        built, ranks = estimate.bytes_built(plan.task), plan.num_processes or 1
        notes = lint(
            plan.task,
            device=device,
            low_ram_tpu=device in tpus.ENGINES.values() and _fills_memory(ranks * built),
            ranks=ranks,
            name_cell=cell_name,
        )
    except Exception:  # what reads any source may meet anything; advice is never worth a launch
        return list(lines)
    if built and plan.engine != "ray":
        lines = preflight.check(plan, device, built)
    return [*lines, *(note.text for note in notes)]


def _fills_memory(size: int) -> bool:
    memory = host.memory()
    return memory is not None and size > memory.available


_SHARE = ", or give each run GPUs of its own: --env CUDA_VISIBLE_DEVICES=0,1"


def _check_alone(plan: Plan, device: str) -> list[str]:
    """Return a note if another run of this kernel goes on. On the same devices it is refused.

    Raises `PreflightError`.
    """
    others = [run.folder.name for run in going_on()]
    if not others:
        return []
    seen = f"The run {others[-1]} of this notebook still goes on in the background"
    if plan.engine == "ray":
        return []
    if device == "cpu" or (device == "cuda" and "CUDA_VISIBLE_DEVICES" in plan.env):
        return [f"{seen}: both share this host."]
    raise PreflightError(
        f"{seen}, on the same {'GPUs' if device == 'cuda' else 'TPU'}. Wait for it "
        "(nbtrain.last_run().wait()), or end it (nbtrain.last_run().stop())"
        + (_SHARE if device == "cuda" else ".")
    )


def _prepare(
    plan: Plan, device: str, engine: Engine, interrupts: Interrupts, notes: Sequence[str] = ()
) -> Run:
    """Make the run's folder and all that watches it; `Run.wait` then starts the ranks."""
    job, state = _job(plan, device, notes)
    supervisor = Supervisor(job.folder, state, timeout=plan.timeout, hang_after=plan.hang_after)
    front = fronts.Guarded(
        fronts.choose(
            plan.view,
            partial(supervisor.request_stop, "by the Stop button"),
            partial(stacks.ask, job.folder, range(job.world_size)),
            inline=engine.runs_here,
        )
    )
    supervisor.show = front.update

    def drive() -> BaseException | None:
        error = carry_out(engine, job, supervisor, interrupts)
        run.bring_home()  # before the board is drawn for the last time
        front.finish(supervisor.state, time.time())
        return error

    run = Run(job.folder, state, watcher=supervisor, drive=drive, home=Home(plan))
    remember(run)
    return run


def _leave(plan: Plan, device: str, engine: Engine, notes: Sequence[str]) -> Run:
    """Start a run that goes on behind the cell. Raises `LaunchError` if its ranks cannot start."""
    job, state = _job(plan, device, notes)
    follower = Follower(job.folder, keeper.start(engine, job, state, leash=not plan.detach))
    run = Run(job.folder, state, watcher=follower, home=Home(plan))
    remember(run, goes_on=True)
    try:
        begun = follower.wait_for_ranks(START_PATIENCE)
    except KeyboardInterrupt:
        follower.start()
        run.stop("by an interrupt")
        raise
    if not begun:
        follower.start()
        run.wait()
        said = last_bytes(job.folder.launcher_log, 500).decode("utf-8", "replace").strip()
        raise LaunchError(". ".join(filter(None, (follower.state.message, said))))
    stop = partial(follower.request_stop, "by the Stop button")
    run.draw_in(fronts.choose(plan.view, stop, run.stacks, behind=True))
    follower.start()
    return run


def _job(plan: Plan, device: str, notes: Sequence[str]) -> tuple[Job, RunState]:
    """Make the run's folder; return what its ranks need, and the picture before they start."""
    world_size = plan.num_processes or 1
    written = manifest(plan, world_size, device, notes)
    job = Job(
        plan=plan,
        folder=new_folder(written),
        world_size=world_size,
        device=device,
        threads=devices.threads_per_rank(world_size),
        shared_classes=serialize.notebook_classes(),
    )
    return job, initial_state(written)
