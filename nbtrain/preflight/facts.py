"""Everything the questions are asked about, gathered once: the plan, this process, this host.

Gathering is cheap (it runs before every launch), imports nothing heavy that is not imported
already, and initialises no accelerator.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from .. import devices, guard, host, tpus
from ..devices import Build, Gpu
from ..guard import Touch
from ..host import Memory, Quota, Space
from ..plan import Plan
from ..tpus import Tpu
from . import task

SUSPECTS = ("bitsandbytes", "xformers", "transformer_engine", "peft", "unsloth")
"""Libraries reported to initialise CUDA on import. The driver is asked, so that importing one is
no finding; it is a hint where CUDA is initialised and nobody saw by what."""


@dataclass(frozen=True)
class Facts:
    """Values only; the defaults are those of a host on which nothing is wrong.

    `gpus` are those the ranks will see, `visible` their number (also AMD's); `env` is what the
    ranks inherit; `kernel` is this process; `suspects` are those of `SUSPECTS` it imported;
    `weights` are the bytes of the trainable parameters that the task refers to, `workers` its
    DataLoader workers a rank, `threads` the CPU threads a rank gets.
    """

    plan: Plan
    device: str = "cpu"
    env: Mapping[str, str] = field(default_factory=dict)
    kernel: int = -1
    can_fork: bool = True
    touches: tuple[Touch, ...] = ()
    suspects: tuple[str, ...] = ()
    accelerator_alive: bool = False
    in_process_group: bool = False
    build: Build | None = None
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
    def inline(self) -> bool:
        return self.plan.engine == "inline"

    @property
    def forks(self) -> bool:
        """Whether the ranks inherit this process's state; spawned ones start afresh."""
        return self.plan.engine in ("fork", "xla")

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks train on the CPU, for want of an accelerator or by choice."""
        asked = self.env.get("ACCELERATE_USE_CPU", "").lower()
        return self.device == "cpu" or asked in ("1", "true", "yes", "on", "y", "t")


def gather(plan: Plan, device: str, builds: int = 0) -> Facts:
    """Look at everything that the questions are about."""
    torch, env = sys.modules.get("torch"), {**os.environ, **plan.env}
    build = devices.build_of(torch) if torch is not None else None
    ranks = plan.num_processes or 1
    visible, gpus = _visible(device, env)
    tpu_holders = tpus.holders() if device in ("xla", "tpu") else {}
    threads = _threads(env, ranks)
    mentioned = task.read(plan.task)
    trouble = host.port_trouble(plan.port) if plan.port and plan.engine != "inline" else None
    return Facts(
        plan,
        device,
        env,
        kernel=os.getpid(),
        can_fork=hasattr(os, "fork"),
        touches=tuple(guard.culprit(what) for what in sorted(guard.initialized())),
        suspects=tuple(name for name in SUSPECTS if name in sys.modules),
        accelerator_alive=_accelerator_is_alive(),
        in_process_group=_is_in_process_group(),
        build=build,
        visible=visible,
        gpus=gpus,
        holder_names={h.pid: host.process_name(h.pid) for gpu in gpus for h in gpu.holders},
        tpu_holders={host.process_name(pid): chips for pid, chips in tpu_holders.items()},
        unused_accelerator=devices.unused_accelerator(build) if build is not None else "",
        tpu=tpus.found(env=env),
        has_torch_xla=tpus.has_torch_xla(),
        source=mentioned.source,
        weights=mentioned.weights,
        workers=mentioned.workers,
        builds=builds,
        threads=threads,
        memory=host.memory(),
        shared_memory=host.shared_memory(),
        descriptors=host.descriptors(),
        quotas=tuple(q for q in (host.processes(ranks * (1 + threads)), host.tasks()) if q),
        port_trouble=trouble or "",
        port_listener=host.listener(plan.port) if trouble and plan.port else "",
    )


def _visible(device: str, env: Mapping[str, str]) -> tuple[int, tuple[Gpu, ...]]:
    """Return how many GPUs the ranks will see, and NVIDIA's of them as NVML describes them.

    NVML lists GPUs by their place on the bus, CUDA by default the fastest first: on a host with
    GPUs of several kinds, an index may mean another GPU there.
    """
    every = devices.gpus()
    order = devices.visible([gpu.uuid for gpu in every], env.get("CUDA_VISIBLE_DEVICES"))
    if every or device == "cpu":
        return len(order), tuple(every[i] for i in order)
    return devices.gpu_count(env), ()


def _threads(env: Mapping[str, str], ranks: int) -> int:
    asked = env.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() else devices.threads_per_rank(ranks)


def _accelerator_is_alive() -> bool:
    state = sys.modules.get("accelerate.state")
    return state is not None and bool(state.PartialState._shared_state)


def _is_in_process_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and bool(dist.is_available() and dist.is_initialized())
