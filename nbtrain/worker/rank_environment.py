"""Makes plain code distributed in a rank: environment variables, and FSDP on CPU ranks.

torchrun, Accelerate, gloo and NCCL read the variables.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from ..planning import accelerate_objects, task_values
from ..planning.plan import Plan
from ..planning.world import Placement
from ..system.instrumentation import patch
from ..system.network import is_loopback
from ..transport.job import Job
from . import api


def rank_environment(job: Job, rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables a rank adds to those it inherited.

    They are what ``torchrun`` sets (an ``env://`` process group needs no argument), and what
    makes a plain ``Accelerator()`` distributed on CPU ranks and honour the precision.
    """
    world = job.world or Placement(0, 1, 0, job.world_size, "127.0.0.1", job.port)
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
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    is_local = is_loopback(world.master_addr)
    for_gloo = loopback if is_local else world.interface
    # The user's choice for gloo holds for NCCL, too: the interface that nbtrain found may be wrong.
    is_chosen = "GLOO_SOCKET_IFNAME" in {**inherited, **job.plan.env}
    for_nccl = "" if is_local or is_chosen else world.interface
    for name, value in (
        ("GLOO_SOCKET_IFNAME", for_gloo),
        # "=" selects exactly this interface; otherwise NCCL uses all with this prefix.
        ("NCCL_SOCKET_IFNAME", for_nccl and f"={for_nccl}"),
        ("OMP_NUM_THREADS", str(job.threads)),
        # A rank that ends right after gloo connected it would cut off those still connecting.
        ("TORCH_DIST_INIT_BARRIER", "1"),
        *job.environment.items(),
    ):
        if name not in inherited and value:
            variables[name] = value
    return {**variables, **job.plan.env}


def join_run_world(device: str, world_size: int) -> None:
    """Make a plain `PartialState()` use the world of the run, or none in a single rank.

    Accelerate (1.15) treats a process with ``LOCAL_RANK`` as one of several, and wrapped the model
    of a single rank in DistributedDataParallel. The variable stays, because code for torchrun reads
    it. On CPU ranks, Accelerate joins the world only with ``cpu=True``. `Accelerator()` reads that
    in the environment, but `PartialState` does not, so every rank would train alone, with all of
    the data. It also names the device "cpu:0", which `torch.load` (2.13) cannot load to, so that
    the `Trainer` of transformers 5.15 could not resume. With torch_xla, it takes the world from
    that library.
    """
    if world_size == 1 and device != "xla":
        patch("accelerate.state:PartialState", "__init__", _init_single)
    if device == "cpu":
        patch("accelerate.state:PartialState", "__init__", _init_on_cpu)
        patch("accelerate.state:AcceleratorState", "__init__", _hide_cpu_flag)
        patch("accelerate.accelerator:Accelerator", "prepare_model", _prepare_untrained)


def _prepare_untrained(
    original: Any,
    accelerator: Any,
    model: Any,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> Any:
    """Return a model that has nothing to train as it is: a loss, a frozen teacher.

    Accelerate (1.15) does so on GPUs. On CPU ranks it wrapped the model in DistributedDataParallel,
    which refuses one without trainable parameters.
    """
    if str(accelerator.distributed_type) == "DistributedType.MULTI_CPU":
        evaluation_mode |= not any(p.requires_grad for p in model.parameters())
    return original(accelerator, model, device_placement, evaluation_mode=evaluation_mode)


_NEEDS_GROUP = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM")


def _init_single(original: Any, *args: Any, **kwargs: Any) -> None:
    """Make Accelerate's state without ``LOCAL_RANK``: of one process, in no group.

    The variable stays for DeepSpeed, FSDP and Megatron-LM, which train in a group of one, too.
    """
    needs_group = any(os.environ.get(name, "").lower() == "true" for name in _NEEDS_GROUP)
    local_rank = None if needs_group else os.environ.pop("LOCAL_RANK", None)
    try:
        original(*args, **kwargs)
    finally:
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = local_rank


def _init_on_cpu(original: Any, state: Any, cpu: bool = False, *args: Any, **kwargs: Any) -> None:
    original(state, True, *args, **kwargs)
    device = state.device  # None after a first try that failed
    if device is not None and device.type == "cpu":
        state.device = type(device)("cpu")


def _hide_cpu_flag(original: Any, *args: Any, **kwargs: Any) -> None:
    """Hide ACCELERATE_USE_CPU from `AcceleratorState` if DeepSpeed is requested.

    With the variable, Accelerate (1.15) trained by DDP on CPU ranks and ignored DeepSpeed. A patch
    of ``AcceleratorState.__init__``.
    """
    is_asked = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    use_cpu = os.environ.pop("ACCELERATE_USE_CPU", None) if is_asked else None
    try:
        original(*args, **kwargs)
    finally:
        if use_cpu is not None:
            os.environ["ACCELERATE_USE_CPU"] = use_cpu


def clear_prepared_marks() -> None:
    """Let `accelerator.prepare` wrap a model that the notebook has prepared for itself.

    Accelerate (1.15) marks a model that it has prepared, and leaves a marked one as it is. In a
    rank that had the mark from the notebook (as from a `Trainer` that evaluated it there), no
    DistributedDataParallel came around the model, and each rank trained one of its own.
    """
    for name in ("prepare", "prepare_model"):
        patch("accelerate.accelerator:Accelerator", name, _prepare_unmarked)


_MARK = "_is_accelerate_prepared"
_prepared = weakref.WeakSet[Any]()
"""The models that were prepared in this process."""


def _prepare_unmarked(original: Any, accelerator: Any, *values: Any, **named: Any) -> Any:
    """Call ``prepare`` after the mark of the notebook's ``prepare`` was removed from the models."""
    for value in (*values, *named.values()):
        if task_values.is_model(value) and value not in _prepared and not _is_wrapper(value):
            vars(value).pop(_MARK, None)
    made = original(accelerator, *values, **named)
    if not named.get("evaluation_mode"):  # such a model has no wrapper: a Trainer trains it later
        models = filter(task_values.is_model, made if isinstance(made, (tuple, list)) else (made,))
        _prepared.update(model for model in models if _MARK in vars(model))
    return made


def _is_wrapper(model: Any) -> bool:
    return type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel")


def renew_accelerate_state(plan: Plan) -> None:
    """Clear the inherited state of Accelerate, which belongs to the notebook.

    A single rank keeps it if its task uses an Accelerator that the notebook made. If the task uses
    objects of the notebook that show the state (TrainingArguments, a PartialState), makes it anew,
    which joins the run's process group. All instances share one state, so they show the run's.
    """
    if not plan.has_peers and any(accelerate_objects.find_single_process_objects(plan.task)):
        return
    is_inherited = accelerate_objects.has_state()
    if is_inherited:
        accelerate_objects.reset_state()
    elif plan.engine in ("fork", "xla") or "accelerate.state" not in sys.modules:
        return
    for each in accelerate_objects.state_holders(plan.task):
        if accelerate_objects.is_shared_state(each):
            accelerate_objects.make_state()
        elif vars(each).pop("_setup_devices", None) is not None:  # the notebook's device
            each.device  # noqa: B018  # TrainingArguments set it again, and join


def serve_own_store(served: int) -> None:
    """Let ranks connect through another port than the launcher's, as code for `mp.spawn` does.

    That code sets MASTER_ADDR and MASTER_PORT itself. No launcher serves a store there, so rank 0
    must do it. torch does not as long as ``TORCHELASTIC_USE_AGENT_STORE`` is set, which is correct
    only for the port `served`, under any name of the host.
    """

    def create(original: Any, hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
        before = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "")
        if port != served:
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        connected = threading.Event()
        # The signal for stacks then goes to this thread: it would interrupt torch's wait.
        threading.Thread(target=connected.wait, daemon=True).start()
        try:
            return original(hostname, port, *args, **kwargs)
        finally:
            connected.set()
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = before

    patch("torch.distributed.rendezvous", "_create_c10d_store", create)  # torch 2.7 to 2.13


def set_fork_start_method() -> None:
    """Make multiprocessing fork in this process where Python (3.14) would use a fork server.

    There, it does so also if the notebook chose the fork server itself; "spawn" or "fork" stays.
    Forks nothing. A fork server has nothing of the notebook: the workers of a DataLoader could not
    unpickle what a cell defined.
    """
    from multiprocessing import context

    chosen = multiprocessing.get_start_method(allow_none=True)
    default = getattr(context._default_context, "_default_context", None)  # Python 3.10 to 3.14
    if chosen in (None, "forkserver") and getattr(default, "_name", "") == "forkserver":
        multiprocessing.set_start_method("fork", force=True)


_LOADER_CLASSES = {
    "torch.utils.data.dataloader": ("DataLoader", "_MultiProcessingDataLoaderIter"),
    "torchdata.stateful_dataloader.stateful_dataloader": (
        "StatefulDataLoader",
        "_StatefulMultiProcessingDataLoaderIter",
    ),
}
"""Loaders and their iterators, by module (private names of torch 2.7 to 2.13, torchdata 0.11)."""


def use_own_workers() -> None:
    """Make loaders start new workers in this process and ignore inherited ones.

    A DataLoader with ``persistent_workers=True`` keeps its iterator and the notebook's workers. A
    rank that used them got replies to the notebook's requests (`KeyError`). When it deleted its
    copy of the iterator, it ended these workers, and the notebook's loader waited forever.
    """
    for module, (loader, iterator) in _LOADER_CLASSES.items():
        patch(f"{module}:{loader}", "__iter__", _iterate_own)
        patch(f"{module}:{iterator}", "_shutdown_workers", _shut_down_own)
        if api.world_size() > 1:  # a single rank takes no other rank's batches
            patch(f"{module}:{iterator}", "_next_data", _next_own_data)


def _is_inherited(iterator: Any) -> bool:
    workers: Any = getattr(iterator, "_workers", None)
    return bool(workers) and workers[0]._parent_pid != os.getpid()


def _iterate_own(original: Any, loader: Any) -> Any:
    if _is_inherited(getattr(loader, "_iterator", None)):
        loader._iterator = None
    return original(loader)


def _shut_down_own(original: Any, iterator: Any) -> None:
    """End a loader's workers if they are this process's; else only forget them."""
    if not _is_inherited(iterator):
        original(iterator)
    elif iterator._worker_pids_set:  # torch knows its workers by its id, which may come again
        signals: Any = sys.modules["torch.utils.data._utils.signal_handling"]
        signals._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


def _next_own_data(original: Any, iterator: Any) -> Any:
    """Return the next data of a loader. Raises `RuntimeError` if its workers are the notebook's."""
    if _is_inherited(iterator):
        raise RuntimeError(
            "this iterator of a DataLoader belongs to the notebook, as its workers do. Call "
            "`iter(loader)` inside the training function"
        )
    return original(iterator)


@functools.cache
def quiet_tokenizers() -> None:
    """Keep tokenizers (before 0.23) from announcing at each fork that it gives up its threads.

    They do so in every worker of a DataLoader, five lines each. What it announces happens anyway.
    """

    def before() -> None:
        if "tokenizers" in sys.modules and variable not in os.environ:
            os.environ[variable] = "false"
            is_set.append(True)

    def after() -> None:
        if is_set:
            is_set.clear()
            os.environ.pop(variable, None)

    variable, is_set = "TOKENIZERS_PARALLELISM", list[bool]()
    os.register_at_fork(before=before, after_in_parent=after)


def keep_process_groups() -> None:
    """Keep process groups that are destroyed until the rank's process ends, where that matters.

    Below torch 2.8, a group of gloo's waits for its threads in its destructor and holds the GIL,
    which they may need: about every third rank hung after its last step. What destroys it, the
    rank's end, Accelerate or the user's own code, does not matter. Later, Python's own references
    let go of the GIL. But a DDP model's does not, and is the last one where the code destroys the
    group before its model is freed, as PyTorch's tutorials do (seen in 2.13).
    """
    kept: list[Any] = []

    def wrap(original: Any, ddp: Any, *args: Any, **kwargs: Any) -> None:
        original(ddp, *args, **kwargs)
        group = getattr(ddp, "process_group", None)
        if group is not None and not any(group is each for each in kept):
            kept.append(group)

    def update(original: Any, group: Any) -> None:
        module = sys.modules["torch.distributed.distributed_c10d"]
        if tuple(map(int, sys.modules["torch"].__version__.split(".")[:2])) < (2, 8):
            kept.extend(module._world.pg_map)
        original(group)

    patch("torch.distributed.distributed_c10d", "_update_default_pg", update)  # torch 2.7
    patch("torch.nn.parallel.distributed:DistributedDataParallel", "__init__", wrap)


def allow_fsdp_on_cpu() -> None:
    """Let `Accelerator` do FSDP on CPU ranks too, whether it is imported already or later.

    Accelerate (1.15) passes its FSDP plugin to the state of GPU ranks only, though what follows
    works on any device.
    """
    patch("accelerate.state:AcceleratorState", "__init__", _init_with_fsdp)


def _init_with_fsdp(original: Any, state: Any, *args: Any, **kwargs: Any) -> None:
    """Make Accelerate's state, and turn FSDP on where a plugin for it was passed on CPU ranks."""
    original(state, *args, **kwargs)
    module: Any = sys.modules["accelerate.state"]
    plugin = kwargs.get("fsdp_plugin")
    if plugin is None or state.distributed_type != module.DistributedType.MULTI_CPU:
        return
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    state.fsdp_plugin = plugin
    state.distributed_type = module.DistributedType.FSDP
    module.PartialState._shared_state["distributed_type"] = state.distributed_type
