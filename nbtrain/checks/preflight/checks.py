"""The checks before a launch, as functions of `Facts`: could the ranks run here at all?

First those of this process and the options, then of accelerators, then of the host's resources.
"""

from __future__ import annotations

from collections.abc import Iterator

from ... import part
from ...findings import Finding
from ...planning import option_types
from ...planning.option_parser import cell_options
from ...planning.option_types import ENGINES
from ...planning.shared_handles import Kind
from ...system.accelerator_guard import GPUS
from ...system.gpus import ComputeMode, Holder
from ...system.text import format_bytes, format_bytes_of, plural, with_article
from .. import limits
from .facts import Check, Facts


def check_fork_support(facts: Facts) -> Iterator[Finding]:
    """Refuse to fork on Windows, which has no fork."""
    if facts.forks_kernel and not facts.can_fork:
        yield Finding(
            "no-fork",
            "This system cannot fork.",
            "Use --engine inline (one rank, in the kernel), or Linux or macOS.",
            "refuse",
        )


def check_disabled_options(facts: Facts) -> Iterator[Finding]:
    """Warn about a word of NBTRAIN_DISABLE that switches nothing off."""
    words = set(option_types.read_disabled(facts.env)) - {*ENGINES}
    if words:
        words -= {name.replace("-", "_") for name in option_types.engine_plugins()}
        words -= {each.switch for each in part.parts().values()}
        words -= {name for option in cell_options().values() for name in option.names}
    if unknown := sorted(words):
        text = f"{option_types.DISABLED} names {', '.join(unknown)}, which switches nothing off."
        yield Finding("disabled-unknown", text, "Whoever set the variable should correct it.")


_RESTART = "Restart the kernel and initialise it only inside the training function"
_FRESH = (
    "start the ranks as fresh processes: `%%distributed --engine spawn` "
    '(`nbtrain.launch(..., engine="spawn")`)'
)
_SPAWN = f"or {_FRESH}."


def check_initialized_accelerators(facts: Facts) -> Iterator[Finding]:
    """Refuse to fork ranks from a kernel that has initialised their accelerator.

    They do not survive a fork. One that is no GPU belongs to one process at a time, so fresh ranks
    cannot use it either. CPU ranks, and fresh ranks on GPUs, are not refused.
    """
    on_gpus = facts.device == "cuda"
    if facts.device == "cpu" or (on_gpus and not facts.forks_kernel):
        return
    for init in facts.accelerator_inits:
        if init.name in GPUS and not on_gpus:
            continue
        called = f" Called from {init.calls[-1]}." if init.calls else ""
        users = "ranks forked from the kernel" if on_gpus else "ranks"
        yield Finding(
            "accelerator-initialized",
            f"{init.name} is already initialised in this kernel, so {users} cannot use it. "
            f"First seen: {init.place}.{called}",
            f"{_RESTART}, {_SPAWN}" if on_gpus else f"{_RESTART}.",
            "refuse",
        )


def check_accelerate_objects(facts: Facts) -> Iterator[Finding]:
    """Refuse an Accelerator that the notebook made for one process: each rank would train alone."""
    for made in facts.accelerate_objects if facts.forks_kernel else ():
        place = f" ({made.place})" if made.place else ""
        message = (
            f"`{made.name}` ({with_article(made.kind)}) was made in the notebook, for one process"
        )
        if made.is_trainer:
            remedy = (
                f"Create the {made.kind} and its TrainingArguments inside the training function."
            )
        elif made.kind == "Accelerator":
            remedy = "Create it inside the training function, once in every rank."
        else:
            remedy = "Call `prepare` inside the training function, in every rank."
        yield Finding(
            "accelerator-of-notebook",
            f"{message}{place}.",
            f"{remedy} The kernel needs no restart.",
            "refuse",
        )


_SHARED: dict[Kind, tuple[str, str]] = {
    "pipe": (
        "is a pipe of the notebook. Each part of its data reaches one of the ranks only",
        "Read it in a cell above, and give the data to the training function.",
    ),
    "database": (
        "is a connection to an SQLite database. SQLite forbids using it in forked processes: "
        "ranks may read wrong data, and damage the database",
        "Connect inside the training function, or when the data set first reads.",
    ),
    "environment": (
        "is an LMDB environment. LMDB forbids using it in forked processes: its table of readers "
        "fills up, here too",
        "Open it inside the training function, or when the data set first reads.",
    ),
    "process": (
        "has processes of the notebook. Ranks read one another's answers, or wait for ever",
        "Create it inside the training function.",
    ),
    "thread": (
        "works through a thread of the notebook. Forked ranks have no such thread, so what they "
        "give it is lost",
        "Create it inside the training function. For TensorBoard, use `--track tensorboard`.",
    ),
    "connection": (
        "is a network connection of the notebook. It is closed in the ranks",
        "Connect inside the training function.",
    ),
}


def check_shared_handles(facts: Facts) -> Iterator[Finding]:
    """Warn about open pipes, connections and processes that forked ranks would share."""
    for handle in facts.shared_handles:
        text, remedy = _SHARED[handle.kind]
        yield Finding("shared-handle", f"`{handle.name}` {text}.", remedy)


def check_process_group(facts: Facts) -> Iterator[Finding]:
    """Refuse ranks in the kernel, or forked from it, while the notebook has a process group."""
    if facts.in_process_group and (facts.forks_kernel or facts.runs_in_kernel):
        yield Finding(
            "process-group",
            "The notebook itself belongs to a process group (torch.distributed is initialized).",
            f"To keep it, {_FRESH}. Or call torch.distributed.destroy_process_group() in a cell, "
            "then launch again.",
            "refuse",
        )


def check_precision(facts: Facts) -> Iterator[Finding]:
    """Refuse fp16 on CPUs, which cannot train in it."""
    if facts.plan.mixed_precision == "fp16" and facts.device == "cpu":
        text = "fp16 needs a GPU; this host has none."
        yield Finding("fp16", text, "Use -p bf16 or -p no.", "refuse")


def check_inline_timeout(facts: Facts) -> Iterator[Finding]:
    """Refuse a timeout for a rank in the kernel: no other process could enforce it."""
    if facts.runs_in_kernel and facts.plan.timeout is not None:
        yield Finding(
            "inline-timeout",
            "The inline engine cannot enforce a timeout.",
            "Leave out the timeout, or use the fork engine.",
            "refuse",
        )


def check_gpu_count(facts: Facts) -> Iterator[Finding]:
    """Refuse more ranks than GPUs: NCCL takes one rank on each GPU.

    If the source of the function mentions gloo, it only warns, because gloo's ranks can share a
    GPU.
    """
    ranks, gpus = facts.ranks, facts.gpu_count
    if facts.on_cpu or facts.runs_in_kernel or not 0 < gpus < ranks:
        return
    seen = f"{ranks} ranks were asked for, but the ranks see only {plural(gpus, 'GPU')}"
    hidden = next((n for n in _VISIBILITY if n in facts.env), None)
    seen += f" ({hidden}={facts.env[hidden]})" if hidden else ""
    if "gloo" in facts.source_code.lower():
        remedy = f"In the function, let each rank choose a GPU (its rank modulo {gpus})."
        yield Finding("shared-gpus", f"{seen}. With gloo, ranks can share a GPU.", remedy)
        return
    yield Finding(
        "shared-gpus",
        f"{seen}. NCCL refuses two ranks on one GPU.",
        f"Use -n {gpus} (num_processes={gpus}), or the gloo backend in the training function.",
        "refuse",
    )


_VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def check_gpu_memory(facts: Facts) -> Iterator[Finding]:
    """Warn about GPU memory that other processes, or this kernel, have allocated.

    Only for the first GPUs, one per rank, and only where the share in use is at least
    `MIN_REPORTED_GPU_SHARE`.
    """
    for gpu in () if facts.on_cpu else facts.gpus[: facts.ranks]:
        held = [h for h in gpu.holders if h.pid != facts.kernel_pid]
        own = sum(h.mib or 0 for h in gpu.holders if h.pid == facts.kernel_pid)
        if gpu.total and gpu.used >= limits.MIN_REPORTED_GPU_SHARE * gpu.total:
            yield Finding(
                "gpu-in-use",
                f"GPU {gpu.index} ({gpu.name}) is in use: "
                f"{format_bytes_of(gpu.used << 20, gpu.total << 20)} are allocated "
                f"({_holders(held, own, facts)}).",
                "Restart the kernel to free the memory, or move its tensors to the CPU."
                if own and not held
                else "End these processes, or leave this GPU out (CUDA_VISIBLE_DEVICES without "
                f"{gpu.index}).",
            )


def _holders(held: list[Holder], own: int, facts: Facts) -> str:
    """Return text that names the processes that hold a GPU's memory, and this kernel's part.

    The largest three are named, further ones are counted. `own` is the kernel's part, in MiB.
    Without any, the text is "by processes that are not visible from here", as in a container.
    """
    by_size = sorted(held, key=lambda h: -(h.mib or 0))
    texts = [
        facts.holder_names.get(h.pid, f"pid {h.pid}")
        + (f": {format_bytes(h.mib << 20)}" if h.mib else "")
        for h in by_size[:3]
    ]
    texts += [f"{len(held) - 3} more"] if len(held) > 3 else []
    texts += [f"this kernel holds {format_bytes(own << 20)}"] if own else []
    return "; ".join(texts) or "by processes that are not visible from here"


def check_compute_mode(facts: Facts) -> Iterator[Finding]:
    """Refuse a GPU whose compute mode allows no process.

    Where it allows one process at a time, warn if a process already uses the GPU, or if ranks would
    share it.
    """
    for gpu in () if facts.on_cpu else facts.gpus[: facts.ranks]:
        remedy = f"Run `nvidia-smi -i {gpu.index} -c DEFAULT` as root, or leave this GPU out."
        if gpu.mode == ComputeMode.PROHIBITED:
            yield Finding(
                "gpu-mode",
                f"GPU {gpu.index} accepts no process (compute mode PROHIBITED).",
                remedy,
                "refuse",
            )
        elif gpu.mode == ComputeMode.EXCLUSIVE_PROCESS and (
            gpu.holders or facts.ranks > facts.gpu_count
        ):
            there = ", ".join(facts.holder_names.get(h.pid, f"pid {h.pid}") for h in gpu.holders)
            yield Finding(
                "gpu-mode",
                f"GPU {gpu.index} accepts one process at a time (compute mode EXCLUSIVE_PROCESS)"
                + (f", and {there} uses it." if there else ", and ranks would share it."),
                remedy,
            )


def check_unused_accelerators(facts: Facts) -> Iterator[Finding]:
    """Warn about an accelerator that the ranks will not use: they will train on the CPU.

    Either torch was built for the CPU only, or nbtrain does not support the accelerator. No warning
    if the user chose the CPU (ACCELERATE_USE_CPU) or the inline engine.
    """
    build = facts.build
    if facts.device != "cpu" or "ACCELERATE_USE_CPU" in facts.env or facts.runs_in_kernel:
        return
    if facts.gpu_count and build is not None and not (build.cuda or build.hip or build.xpu):
        yield Finding(
            "cpu-build",
            f"This host has {plural(facts.gpu_count, 'NVIDIA GPU')}, but "
            f"torch {build.version} was built for the CPU only: the ranks will not use "
            f"{'them' if facts.gpu_count > 1 else 'it'}.",
            "Install a CUDA build of torch (pytorch.org shows the command), then restart the "
            "kernel.",
        )
    if facts.unused_accelerator:
        yield Finding(
            "unused-accelerator",
            f"This host has {facts.unused_accelerator}, which nbtrain does not support yet: the "
            "ranks will train on the CPU.",
            "To use it, train in an ordinary cell, without %%distributed.",
        )


def check_port(facts: Facts) -> Iterator[Finding]:
    """Refuse a port that is in use."""
    if facts.port_trouble:
        holder = f", by {facts.port_listener}" if facts.port_listener else ""
        number, source = facts.plan.port, "use_port"
        if number is None:
            number, source = int(facts.plan.env["MASTER_PORT"]), "--env MASTER_PORT"
        yield Finding(
            "port",
            f"The port {number} cannot be used here ({facts.port_trouble}{holder}).",
            f"Leave out {source}: nbtrain then uses a free port.",
            "refuse",
        )


def check_host_memory(facts: Facts) -> Iterator[Finding]:
    """Warn if training on CPU ranks needs more memory than is available.

    For each rank, it counts twice the trainable weights that the task refers to (weights and
    gradients).
    """
    if facts.memory is None or facts.runs_in_kernel or not facts.on_cpu:
        return
    available, weights = facts.memory.available, facts.weight_bytes
    # Twice the weights: training needs at least gradients of the same size.
    if facts.ranks * 2 * weights <= available:
        return
    yield Finding(
        "memory",
        f"{plural(facts.ranks, 'rank')} may need {format_bytes(facts.ranks * 4 * weights)} of "
        f"memory; {format_bytes(available)} is available ({facts.memory.limit_text}). Each rank "
        f"trains {format_bytes(weights)} of weights ({format_bytes(4 * weights)} with gradients "
        "and Adam's two moments).",
        "Use fewer ranks, or train a smaller model. Without enough memory, the system kills a rank "
        "(SIGKILL).",
    )


def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    """Warn if /dev/shm is too small for the batches of DataLoader workers.

    It counts `SHM_BYTES_PER_LOADER_WORKER` for each worker of each rank. A container has 64 MiB by
    default.
    """
    space, per_worker = facts.shared_memory, limits.SHM_BYTES_PER_LOADER_WORKER
    needed = facts.ranks * facts.workers_per_rank * per_worker
    if space is None or space.free >= needed:
        return
    yield Finding(
        "shared-memory",
        f"/dev/shm has {format_bytes(space.free)} free of {format_bytes(space.size)}, and "
        f"{plural(facts.ranks, 'rank')} with "
        f"{plural(facts.workers_per_rank, 'DataLoader worker')} each may need "
        f"{format_bytes(needed)} ({format_bytes(per_worker)} per worker). With less, "
        "a worker dies of a bus error.",
        "Use num_workers=0, or start the container with a larger --shm-size.",
    )


def check_open_files(facts: Facts) -> Iterator[Finding]:
    """Refuse a launch that would exceed the limit on open files, except by the inline engine."""
    quota = facts.open_files
    needed = limits.LAUNCH_FILES_COUNT + limits.RANK_FILES_COUNT * facts.ranks
    if quota is None or facts.runs_in_kernel or quota.holds(needed):
        return
    enough = max(4096, 1 << (quota.used + needed).bit_length())
    yield Finding(
        "descriptors",
        f"{plural(facts.ranks, 'rank')} must open {needed} more files; {quota.used} of the "
        f"{quota.limit} allowed are open (ulimit -n).",
        f"Raise the limit before the kernel starts (`ulimit -n {enough}`), or use fewer ranks.",
        "refuse",
    )


def check_process_limits(facts: Facts) -> Iterator[Finding]:
    """Refuse a launch that would exceed a limit on processes, which counts threads, too.

    The limits are the user's (ulimit -u) and the cgroup's (pids.max). Not for the inline engine.
    """
    needed = facts.ranks * (1 + facts.threads_per_rank)
    for quota in () if facts.runs_in_kernel else facts.quotas:
        if not quota.holds(needed):
            yield Finding(
                "processes",
                f"{plural(facts.ranks, 'rank')} with "
                f"{plural(facts.threads_per_rank, 'thread')} each "
                f"will be {needed} more processes and threads; {quota.used} of the {quota.limit} "
                f"allowed are in use ({quota.source}).",
                "Raise that limit, or use fewer ranks.",
                "refuse",
            )


CHECKS: tuple[Check, ...] = (
    check_fork_support,
    check_disabled_options,
    check_initialized_accelerators,
    check_accelerate_objects,
    check_shared_handles,
    check_process_group,
    check_precision,
    check_inline_timeout,
    check_gpu_count,
    check_gpu_memory,
    check_compute_mode,
    check_unused_accelerators,
    check_port,
    check_host_memory,
    check_shared_memory,
    check_open_files,
    check_process_limits,
)
