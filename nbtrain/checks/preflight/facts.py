"""Gathers the facts that the checks need, once: the plan, this process, this host.

Gathering is cheap (it runs before every launch), imports nothing heavy that is not imported
already, and initialises no accelerator.
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
from ...system import accelerator_guard, gpus, host, network, processes, tpu
from ...system.accelerator_guard import AcceleratorInit
from ...system.gpus import Gpu, TorchBuild
from ...system.host import Memory, Quota, Space
from ...system.tpu import Tpu
from ...tracking.launch_log import attempt


class EngineTraits(Protocol):
    """What is asked of an engine; `nbtrain.engines.Engine` says what each means."""

    forks_kernel: bool
    runs_in_kernel: bool


@dataclass(frozen=True)
class Facts:
    """Values only; the defaults are those of a host on which nothing is wrong.

    `list_gpus` are those the ranks will see, `visible` their number (also AMD's); `env` is what the
    ranks inherit; `kernel` is this process; `weights` are the bytes of the trainable parameters
    that the task refers to, `workers` its DataLoader workers per rank, `threads` the CPU threads
    that a rank gets.
    """

    plan: Plan
    device: str = "cpu"
    forks: bool = True
    """Whether the ranks inherit this process's state; spawned ones start afresh."""
    inline: bool = False
    """Whether the one rank is this process."""
    env: Mapping[str, str] = field(default_factory=dict)
    kernel: int = -1
    can_fork: bool = True
    touches: tuple[AcceleratorInit, ...] = ()
    accelerate_held: tuple[AccelerateObject, ...] = ()
    shared_handles: tuple[SharedHandle, ...] = ()
    in_process_group: bool = False
    build: TorchBuild | None = None
    visible: int = 0
    gpus: tuple[Gpu, ...] = ()
    holder_names: Mapping[int, str] = field(default_factory=dict)
    unused_accelerator: str = ""
    tpu: Tpu | None = None
    tpu_holders: Mapping[str, frozenset[int]] = field(default_factory=dict)
    has_torch_xla: bool = False
    source: str = ""
    weights: int = 0
    workers: int = 0
    builds: int = 0
    threads: int = 1
    memory: Memory | None = None
    shared_memory: Space | None = None
    descriptors: Quota | None = None
    quotas: tuple[Quota, ...] = ()
    port_trouble: str = ""
    port_listener: str = ""

    @property
    def ranks(self) -> int:
        return self.plan.num_processes or 1

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks train on the CPU, for want of an accelerator or by choice."""
        asked = self.env.get("ACCELERATE_USE_CPU", "").lower()
        return self.device == "cpu" or asked in ("1", "true", "yes", "on", "y", "t")


Question = Callable[[Facts], Iterator[Finding]]
"""A check: it yields what it finds in the facts, and looks at nothing else."""


def gather(plan: Plan, device: str, engine: EngineTraits) -> Facts:
    """Look at everything that the questions are about."""
    torch, env = sys.modules.get("torch"), {**os.environ, **plan.env}
    dist = sys.modules.get("torch.distributed")
    build = gpus.build_of(torch) if torch is not None else None
    ranks = plan.num_processes or 1
    visible, nvidia_gpus = _visible(device, env)
    tpu_holders = tpu.holders() if device in tpu.ENGINES.values() else {}
    threads = _threads(env, ranks)
    mentioned = attempt(
        "the estimate", partial(task_values.host_needs, plan.task), task_values.HostNeeds()
    )
    port = plan.port or (0 if plan.nodes else int(plan.env.get("MASTER_PORT", 0)))
    trouble = network.port_trouble(port) if port and not engine.runs_in_kernel else None
    return Facts(
        plan,
        device,
        engine.forks_kernel,
        engine.runs_in_kernel,
        env,
        kernel=os.getpid(),
        can_fork=hasattr(os, "fork"),
        touches=tuple(
            accelerator_guard.first_cause(name) for name in sorted(accelerator_guard.initialized())
        ),
        accelerate_held=tuple(accelerate_objects.made_for_one(plan.task))
        if accelerate_objects.is_set() and not _may_stay(plan)
        else (),
        shared_handles=tuple(shared_handles.find(plan.task)) if engine.forks_kernel else (),
        in_process_group=bool(dist and dist.is_available() and dist.is_initialized()),
        build=build,
        visible=visible,
        gpus=nvidia_gpus,
        holder_names={
            h.pid: processes.process_name(h.pid) for gpu in nvidia_gpus for h in gpu.holders
        },
        tpu_holders={processes.process_name(pid): chips for pid, chips in tpu_holders.items()},
        unused_accelerator=gpus.unused_accelerator(build) if build is not None else "",
        tpu=tpu.find(env=env),
        has_torch_xla=tpu.has_torch_xla(),
        source=mentioned.source,
        weights=mentioned.weights,
        workers=mentioned.workers,
        threads=threads,
        memory=attempt("the look at memory", host.memory, None),
        shared_memory=attempt("the look at /dev/shm", host.shared_memory, None),
        descriptors=host.descriptors(),
        quotas=tuple(q for q in (host.processes(ranks * (1 + threads)), host.tasks()) if q),
        port_trouble=trouble or "",
        port_listener=processes.port_listener(port) if trouble else "",
    )


def _may_stay(plan: Plan) -> bool:
    """Whether one rank, alone, can go on with an Accelerator that the notebook made."""
    wanted = plan.mixed_precision or "no"
    is_alone = plan.num_processes == 1 and plan.nodes is None
    return is_alone and wanted in ("no", accelerate_objects.precision())


def _visible(device: str, env: Mapping[str, str]) -> tuple[int, tuple[Gpu, ...]]:
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
    asked = env.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() else host.threads_per_rank(ranks)
