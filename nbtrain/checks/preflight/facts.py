"""Gathers what the checks need to know about the plan, this process and this host.

This runs before every launch, so it is fast, imports no large package and initialises no
accelerator.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ...findings import Finding
from ...planning import accelerate_objects, shared_handles, task_values
from ...planning.accelerate_objects import AccelerateObject
from ...planning.plan import Plan
from ...planning.shared_handles import SharedHandle
from ...system import accelerator_guard, gpus, host, network, processes
from ...system.accelerator_guard import AcceleratorInit
from ...system.gpus import Gpu, TorchBuild
from ...system.host import Memory, Quota, Space
from ...tracking.launch_log import attempt


class EngineTraits(Protocol):
    """The attributes of `nbtrain.engines.Engine` that the checks use."""

    forks_kernel: bool
    runs_in_kernel: bool


@dataclass(frozen=True)
class Facts:
    """What the checks need to know. With the defaults, they find nothing."""

    plan: Plan
    device: str = "cpu"
    forks_kernel: bool = True
    """Whether the ranks inherit this process's state. Spawned ranks do not."""
    runs_in_kernel: bool = False
    """Whether the only rank is this process."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The environment of the ranks."""
    kernel_pid: int = -1
    can_fork: bool = True
    accelerator_inits: tuple[AcceleratorInit, ...] = ()
    accelerate_objects: tuple[AccelerateObject, ...] = ()
    shared_handles: tuple[SharedHandle, ...] = ()
    in_process_group: bool = False
    build: TorchBuild | None = None
    gpu_count: int = 0
    """The number of GPUs that the ranks see, AMD's too."""
    gpus: tuple[Gpu, ...] = ()
    """Those of NVIDIA that the ranks see."""
    holder_names: Mapping[int, str] = field(default_factory=dict)
    """Names of the processes that use these GPUs, by pid."""
    unused_accelerator: str = ""
    source_code: str = ""
    weight_bytes: int = 0
    """The size of the trainable parameters that the task refers to."""
    workers_per_rank: int = 0
    """DataLoader workers."""
    threads_per_rank: int = 1
    memory: Memory | None = None
    shared_memory: Space | None = None
    open_files: Quota | None = None
    quotas: tuple[Quota, ...] = ()
    port_trouble: str = ""
    port_listener: str = ""

    @property
    def ranks(self) -> int:
        return self.plan.num_processes or 1

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks train on the CPU, by choice or because there is no accelerator."""
        asked = self.env.get("ACCELERATE_USE_CPU", "").lower()
        return self.device == "cpu" or asked in ("1", "true", "yes", "on", "y", "t")


Check = Callable[[Facts], Iterator[Finding]]
"""Yields findings. It depends on the facts alone."""


def gather(plan: Plan, device: str, engine: EngineTraits) -> Facts:
    """Return the facts about a plan, this process and this host."""
    torch, env = sys.modules.get("torch"), {**os.environ, **plan.env}
    dist = sys.modules.get("torch.distributed")
    build = gpus.build_of(torch) if torch is not None else None
    ranks = plan.num_processes or 1
    gpu_count, nvidia_gpus = _visible_gpus(device, env)
    threads = _threads(env, ranks)
    needs = attempt(
        "the estimate", partial(task_values.host_needs, plan.task), task_values.HostNeeds()
    )
    port = plan.port or (0 if plan.rendezvous else int(plan.env.get("MASTER_PORT", 0)))
    trouble = network.port_trouble(port) if port and not engine.runs_in_kernel else None
    return Facts(
        plan,
        device,
        engine.forks_kernel,
        engine.runs_in_kernel,
        env,
        kernel_pid=os.getpid(),
        can_fork=hasattr(os, "fork"),
        accelerator_inits=tuple(
            accelerator_guard.first_cause(name)
            for name in sorted(accelerator_guard.initialized_accelerators())
        ),
        accelerate_objects=tuple(accelerate_objects.find_single_process_objects(plan.task))
        if accelerate_objects.has_state() and not _can_reuse_accelerator(plan)
        else (),
        shared_handles=tuple(shared_handles.find_shared_handles(plan.task))
        if engine.forks_kernel
        else (),
        in_process_group=bool(dist and dist.is_available() and dist.is_initialized()),
        build=build,
        gpu_count=gpu_count,
        gpus=nvidia_gpus,
        holder_names={
            h.pid: processes.describe_process(h.pid) for gpu in nvidia_gpus for h in gpu.holders
        },
        unused_accelerator=gpus.unused_accelerator(build) if build is not None else "",
        source_code=needs.source,
        weight_bytes=needs.weights,
        workers_per_rank=needs.workers,
        threads_per_rank=threads,
        memory=attempt("the look at memory", host.memory, None),
        shared_memory=attempt("the look at /dev/shm", host.shared_memory, None),
        open_files=host.descriptors(),
        quotas=tuple(q for q in (host.processes(ranks * (1 + threads)), host.tasks()) if q),
        port_trouble=trouble or "",
        port_listener=processes.port_listener(port) if trouble else "",
    )


def _can_reuse_accelerator(plan: Plan) -> bool:
    """Return whether a single rank can use the Accelerator that the notebook made."""
    wanted = plan.mixed_precision or "no"
    return not plan.has_peers and wanted in ("no", accelerate_objects.state_precision())


def _visible_gpus(device: str, env: Mapping[str, str]) -> tuple[int, tuple[Gpu, ...]]:
    """Return how many GPUs the ranks will see, and NVIDIA's of them as NVML describes them.

    NVML lists GPUs by their place on the bus, CUDA by default the fastest first: on a host with
    GPUs of several kinds, an index may mean another GPU there.
    """
    every = gpus.list_gpus()
    order = gpus.visible([gpu.uuid for gpu in every], env.get("CUDA_VISIBLE_DEVICES"))
    if every or device == "cpu":
        return len(order), tuple(every[i] for i in order)
    return gpus.gpu_count(env), ()


def _threads(env: Mapping[str, str], ranks: int) -> int:
    """Return the number of CPU threads of each rank, from OMP_NUM_THREADS or the host."""
    asked = env.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() else host.threads_per_rank(ranks)
