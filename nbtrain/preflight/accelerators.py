"""Questions about GPUs: enough of them, free, open to several processes, and used at all?"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from .. import tpus
from ..devices import Gpu, Holder
from ..host import in_words
from ..xla import INSTALL
from .facts import Facts
from .finding import Ask, Finding

CROWDED = 0.1
"""The share of a GPU that others must hold to be worth a word; a desktop holds less."""

_EXCLUSIVE, _PROHIBITED = 3, 2


def enough(facts: Facts) -> Iterator[Finding]:
    """Rank i drives GPU i, and NCCL refuses two ranks on one GPU; gloo does not."""
    ranks, gpus = facts.ranks, facts.visible
    if facts.on_cpu or facts.inline or not 0 < gpus < ranks:
        return
    seen = f"{ranks} ranks were asked for, and {_counted(gpus)} to be seen"
    hidden = next((n for n in _VISIBILITY if n in facts.env), None)
    seen += f" ({hidden}={facts.env[hidden]})" if hidden else ""
    if "gloo" in facts.source.lower():
        remedy = f"Each rank must choose a GPU itself (its rank modulo {gpus}) for that to work."
        yield Finding(f"{seen}: with gloo they share.", remedy, "warn")
        return
    yield Finding(
        f"{seen}: NCCL refuses two ranks on one GPU.",
        f"Use -n {gpus} (num_processes={gpus}), or the gloo backend in the training function.",
    )


_VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def _counted(gpus: int) -> str:
    return "1 GPU is" if gpus == 1 else f"{gpus} GPUs are"


def crowded(facts: Facts) -> Iterator[Finding]:
    """What others hold on a GPU, this kernel included, is missing to the ranks."""
    for gpu in () if facts.on_cpu else facts.gpus[: facts.ranks]:
        held = [h for h in gpu.holders if h.pid != facts.kernel]
        own = sum(h.mib or 0 for h in gpu.holders if h.pid == facts.kernel)
        if gpu.total and gpu.used >= CROWDED * gpu.total:
            yield Finding(
                f"GPU {gpu.index} ({gpu.name}) is in use: {_gib(gpu.used)} of {_gib(gpu.total)} "
                f"are taken ({_who(held, own, facts)}).",
                _remedy(gpu, held, own),
                "warn",
            )


def _who(held: list[Holder], own: int, facts: Facts) -> str:
    by_size = sorted(held, key=lambda h: -(h.mib or 0))
    words = [
        facts.holder_names.get(h.pid, f"pid {h.pid}") + (f": {h.mib} MiB" if h.mib else "")
        for h in by_size[:3]
    ]
    words += [f"{len(held) - 3} more"] if len(held) > 3 else []
    words += [f"this kernel holds {own} MiB"] if own else []
    return "; ".join(words) or "by processes that cannot be seen from here"


def _remedy(gpu: Gpu, held: list[Holder], own: int) -> str:
    if own and not held:
        return "Restart the kernel to free it, or move what it holds to the CPU."
    return f"End them, or leave this GPU out (CUDA_VISIBLE_DEVICES without {gpu.index})."


def _gib(mib: int) -> str:
    return in_words(mib << 20)


def mode(facts: Facts) -> Iterator[Finding]:
    """In an exclusive compute mode a GPU takes one process at a time, or none."""
    for gpu in () if facts.on_cpu else facts.gpus[: facts.ranks]:
        remedy = f"Ask for `nvidia-smi -i {gpu.index} -c DEFAULT`, or leave this GPU out."
        if gpu.mode == _PROHIBITED:
            yield Finding(f"GPU {gpu.index} takes no process (compute mode PROHIBITED).", remedy)
        elif gpu.mode == _EXCLUSIVE and (gpu.holders or facts.ranks > facts.visible):
            there = ", ".join(facts.holder_names.get(h.pid, f"pid {h.pid}") for h in gpu.holders)
            yield Finding(
                f"GPU {gpu.index} takes one process at a time (compute mode EXCLUSIVE_PROCESS)"
                + (f", and there is {there}." if there else ", and ranks would share it."),
                remedy,
                "warn",
            )


def unused(facts: Facts) -> Iterator[Finding]:
    """An accelerator is there, and the ranks will train on the CPU beside it."""
    build = facts.build
    if facts.device != "cpu" or "ACCELERATE_USE_CPU" in facts.env or facts.inline:
        return
    if facts.visible and build is not None and not (build.cuda or build.hip or build.xpu):
        yield Finding(
            f"This host has {facts.visible} NVIDIA GPU{'s' if facts.visible > 1 else ''}, but "
            f"torch {build.version} was built for the CPU only: the ranks will not use "
            f"{'them' if facts.visible > 1 else 'it'}.",
            "Install a CUDA build of torch (the selector on pytorch.org gives the line), then "
            "restart the kernel.",
            "warn",
        )
    if facts.unused_accelerator:
        yield Finding(
            f"This host has {facts.unused_accelerator}, which nbtrain does not drive yet: the "
            "ranks will train on the CPU.",
            "Train on it in the notebook itself, outside of %%distributed.",
            "warn",
        )


def unused_tpu(facts: Facts) -> Iterator[Finding]:
    """A TPU is there, and the ranks will train on the CPU beside it."""
    if facts.tpu is None or not facts.on_cpu or facts.inline or "ACCELERATE_USE_CPU" in facts.env:
        return
    if not facts.has_torch_xla and not tpus.has_torch_tpu():
        why, remedy = "torch_xla is not installed", f"{INSTALL}, then restart the kernel."
    elif not tpus.is_wanted(facts.env):
        why = f"PJRT_DEVICE={facts.env['PJRT_DEVICE']} says so, and torch_xla sets it by itself "
        why += "where it finds no libtpu"
        remedy = f"{INSTALL}, restart the kernel, and set PJRT_DEVICE=TPU if it still is not."
    else:
        why, remedy = f"the {facts.plan.engine} engine does not drive it", "Leave out --engine."
    yield Finding(
        f"This host has {facts.tpu.words}, and the ranks will train on the CPU: {why}.",
        remedy,
        "warn",
    )


def held_tpu(facts: Facts) -> Iterator[Finding]:
    """A process that was left behind, by an interrupt of another launcher say, keeps chips."""
    if not facts.tpu_holders:
        return
    wanted = tpus.chips_of(facts.ranks, facts.plan.env) if facts.device == "xla" else None
    held: frozenset[int] = frozenset().union(*facts.tpu_holders.values())
    every = frozenset(range(facts.tpu.chips)) if facts.tpu is not None else held
    who = "; ".join(f"{name} ({_chips(chips)})" for name, chips in facts.tpu_holders.items())
    if wanted is not None and not wanted & held:
        yield Finding(
            f"The TPU is held in part by another process: {who}. This run takes {_chips(wanted)}.",
            "Should libtpu refuse to start beside it, end that process first.",
            "warn",
        )
        return
    free = sorted(every - held) if facts.device == "xla" else []
    other = (
        f" Or train on a chip that is free: -n 1 --env TPU_VISIBLE_CHIPS={free[0]}." if free else ""
    )
    yield Finding(
        f"The TPU is held by another process: {who}. Until that ends, no rank can use it.",
        "Shut down the notebook it belongs to, or end it if it was left behind: `!kill PID`, "
        f"then `!kill -9 PID`.{other}",
    )


def _chips(numbers: Collection[int]) -> str:
    return f"chip{'s' if len(numbers) > 1 else ''} {', '.join(map(str, sorted(numbers)))}"


QUESTIONS: tuple[Ask, ...] = (enough, crowded, mode, unused, unused_tpu, held_tpu)
