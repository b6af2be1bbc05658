"""Reports what a rank trains on and with whom, to find ranks that repeat work or train alone.

Each rank reports what its first batches and losses were, whether it joined the others, and whether
anything was exchanged between its steps. The launcher compares (`nbtrain.checks.rank_comparison`):
a rank alone cannot know that the others read the same data.
"""

from __future__ import annotations

import re
import sys
import weakref
import zlib
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from ....planning.plan import Task
from ....planning.task_values import source_lines
from ....system.source_files import RANK_BODY, is_library
from ....tracking import clock
from ....tracking import events as ev
from ... import hooks, limits
from ...device_scalars import captures
from ...hooks.guard import guard_step
from ...rank_context import RankContext
from ..reports import Meter

_OTHERS = ("horovod", "mpi4py", "hivemind", "torchft", "flwr", "byteps", "torch_xla")
"""Libraries that ranks can use to train together without torch's process group."""

_SHARDS = ("deepspeed", "megatron", "torch.distributed.pipelining")
"""Libraries that give each rank a part of the model, as plain tensors."""

_LIGHTNING = ("lightning.", "lightning_fabric.", "pytorch_lightning.")

_ASKS = re.compile(r"rank|process_index|process_id|split_between_processes", re.IGNORECASE)
_GATHERS = re.compile(r"all_gather|all_reduce|acc\w*\.(gather|reduce)\(")
_IGNORES = re.compile(r"#\s*nbtrain:\s*ignore(\[[^\]]*migrate[^\]]*\])?\s*$")

_SPLITTERS = ("DistributedSampler", "DistributedSamplerWrapper", "BatchSamplerShard")
"""Samplers of torch, Catalyst's and Lightning's wrapper, and Accelerate: each rank gets a part."""

_harmless = guard_step("comparing the ranks' work")


class WorkSampler(Meter):
    """Collects the evidence; it keeps no model, batch or loss of the user's alive."""

    purpose = "comparing the ranks' work"

    def __init__(self, context: RankContext) -> None:
        self._figures, self._writer = context.figures, context.writer
        self._rank, self._task = context.rank, context.job.plan.task
        self._world_size = context.world_size
        self._batches: list[str] = []
        self._splits_data = False
        self._gathers = self._has_buffers = self._has_stepped = False
        self._losses: list[Any] = []  # numbers, or detached tensors on a GPU
        self._has_joined = False
        self._counts: tuple[int, int] | None = None  # of collectives: first and last
        self._wraps: set[str] = set()
        self._excuse = False
        self._trained: list[weakref.ref[Any]] = []
        self._place: tuple[str, int] | None = None
        """The line of the user's code that steps: a file and a number."""
        self._library = ""
        self._is_sampling = True  # batches and losses still count

    def on_batch(self, iterator: Any, batch: Any, began: float, is_ahead: bool) -> None:
        """Keep a checksum of one of the first batches; after them, stop being notified."""
        if self._is_sampling and len(self._batches) < limits.COMPARED_STEPS:
            self._splits_data = self._splits_data if self._batches else _splits_data(iterator)
            self._batches.append(digest(batch))
            self._look_at_group()
        else:
            hooks.drop(self, hooks.notify.on_batch)

    def on_backward(self, loss: Any) -> None:
        """Keep one of the first losses on CPU or CUDA; after them, stop being notified.

        Also notes whether collectives ran between the step before and this loss.
        """
        if self._has_stepped and self._counts is not None:  # DDP broadcasts buffers in between
            self._gathers |= not self._has_buffers and collectives() != self._counts[1]
        self._has_stepped = False
        is_wanted = self._is_sampling and len(self._losses) < limits.COMPARED_STEPS
        if is_wanted and loss.device.type in ("cpu", "cuda"):
            self._losses.append(loss.item() if loss.device.type == "cpu" else loss.detach())
        if not self._is_sampling:
            hooks.drop(self, hooks.notify.on_backward)

    def on_step(self, optimizer: Any) -> None:
        """Take note of one of the first steps; report after them, and stop being notified."""
        if self._place is None:
            self._place, self._library = _user_place()
            self._excuse |= _trains_otherwise(optimizer)
            every = [p for group in optimizer.param_groups for p in group["params"]]
            stride = -(-len(every) // limits.COMPARED_STEPS) or 1
            self._trained = [weakref.ref(p) for p in every[::stride]]
        self._count_exchanges()
        self._has_stepped = self._is_sampling
        torch: Any = sys.modules["torch"]
        is_capturing = torch.cuda.is_initialized() and captures.under_way(torch)
        if self._figures.steps >= limits.COMPARED_STEPS and not is_capturing:
            self._is_sampling = False
            hooks.drop(self, hooks.notify.on_step)
            self._report(None, is_last=False)

    @_harmless
    def refresh(self) -> None:
        """Count the collectives so far, also when it is no longer notified of steps."""
        self._count_exchanges()

    def _count_exchanges(self) -> None:
        self._look_at_group()
        if self._has_joined and self._figures.steps > 1:
            count = collectives()
            self._counts = (count if self._counts is None else self._counts[0], count)

    def on_training_end(self, wait: bool) -> None:
        """With `wait`, write the evidence with a last loss and a checksum of the weights.

        Not if nothing was trained or read: another framework than torch may have trained.
        """
        self._is_sampling = False
        hooks.drop(self, hooks.notify.on_step)  # a thread of the user's may go on
        has_read = self._figures.loader_place[1] is not None
        if wait and (self._figures.steps or has_read):
            self._look_at_group()
            self._report(self._figures.last_loss, is_last=True)

    def _report(self, loss: float | None, *, is_last: bool) -> None:
        """Write the evidence so far as one event; the last has a checksum of the weights.

        Waits for losses that are on a GPU. Writes nothing before a first step or batch.
        """
        self._losses = [float(value) for value in self._losses]
        if not (self._figures.steps or self._batches):
            return
        asks, gathers, ignores = read_source(self._task)
        file, line = self._place or ("", 0)
        sample = ev.WorkSample(
            clock.now(),
            self._rank,
            steps=self._figures.steps,
            losses=tuple(self._losses),
            batches=tuple(self._batches),
            splits_data=self._splits_data,
            last_loss=loss,
            is_last=is_last,
            has_joined=self._has_joined,
            is_wrapped="part" if "part" in self._wraps else next(iter(self._wraps), ""),
            has_exchanged=self._counts is None or self._counts[0] != self._counts[1],
            asks_rank=asks,
            gathers=gathers or self._gathers,
            is_excused=self._excuse or (ignores and not self._has_joined),
            weights=_checksum([ref() for ref in self._trained]) if is_last else "",
            file=file,
            line=line,
            library=self._library,
        )
        self._writer.write(sample)

    def _look_at_group(self) -> None:
        self._has_joined = self._has_joined or is_in_group()

    def on_model_wrap(self, wrapper: Any) -> None:
        """Take note whether the ranks of a data-parallel model are all of them."""
        self._has_buffers |= any(True for _ in getattr(wrapper, "buffers", tuple)())
        mesh = getattr(getattr(wrapper, "mesh_info", None), "mesh", None)
        if mesh is not None:
            size = mesh.size()
        elif hasattr(wrapper, "dp_world_size"):  # DeepSpeed's engine
            size = wrapper.dp_world_size
        else:
            size = wrapper.process_group.size()
        self._wraps.add("whole" if size == self._world_size else "part")


def _checksum(weights: list[Any]) -> str:
    """Return shapes and a checksum of plain parameters, or "" if there is no comparing them.

    That is so for no parameters, if one is sharded, freed or of a subclass, and whenever DeepSpeed,
    Megatron or pipelining is imported.
    """
    plain: Any = sys.modules["torch"].nn.Parameter
    is_plain = all(type(weight) is plain and weight.numel() for weight in weights)
    if not weights or not is_plain or any(name in sys.modules for name in _SHARDS):
        return ""
    shapes = "/".join("x".join(map(str, weight.shape)) for weight in weights)
    checksum = digest(weights)
    return f"{shapes} {checksum}" if checksum else ""


def _splits_data(iterator: Any) -> bool:
    """Whether the sampler of a loader's iterator gives each rank other samples."""
    sampler = getattr(iterator, "_index_sampler", None)
    while sampler is not None:
        if any(cls.__name__ in _SPLITTERS for cls in type(sampler).__mro__):
            return True
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return False


def digest(batch: Any) -> str:
    """Return a checksum of what a batch holds; "" where nothing of it can be read."""
    total, count = 0, 0
    try:
        for part in _parts(batch):
            total, count = zlib.crc32(part, total), count + 1
    except Exception:  # a tensor or a container of any kind may refuse to be read
        return ""
    return f"{count}:{total:08x}" if count else ""


def _parts(batch: Any, depth: int = 4) -> Iterator[bytes]:
    """Yield the first bytes of a batch's tensors and arrays, and its texts and numbers."""
    torch: Any = sys.modules["torch"]
    if isinstance(batch, torch.Tensor):
        if batch.device.type in ("cpu", "cuda") and batch.layout is torch.strided:
            count = limits.CHECKSUM_BYTES // max(1, batch.element_size())
            flat = batch.detach().reshape(-1)[:count].cpu()
            yield str(tuple(batch.shape)).encode()
            yield flat.contiguous().view(torch.uint8).numpy().tobytes()
    elif isinstance(batch, (str, int, float, bytes)):
        yield repr(batch)[: limits.CHECKSUM_BYTES].encode()
    elif hasattr(batch, "tobytes") and getattr(batch, "dtype", "object") != "object":
        yield batch.tobytes()[: limits.CHECKSUM_BYTES]
    elif depth and isinstance(batch, (list, tuple, Mapping)):
        for part in list(batch.values() if isinstance(batch, Mapping) else batch)[:64]:
            yield from _parts(part, depth - 1)


def is_in_group() -> bool:
    """Whether this process is in a process group with others."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return False
    return bool(dist.is_initialized() and dist.get_world_size() > 1)


def collectives() -> int:
    """Return how many collectives this process has begun, in any group."""
    world: Any = sys.modules["torch.distributed.distributed_c10d"]._world  # seen in 2.7 to 2.13
    return sum(map(begun_in, list(world.pg_map)))


def begun_in(group: Any) -> int:
    """Return how many collectives this process has begun in a group."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a group of several backends, or of one by its device ("cpu:gloo")
        backends = {id(b): b for b in map(group._get_backend, group._device_types)}
        return sum(b._get_sequence_number_for_group() for b in backends.values())


def _user_place() -> tuple[tuple[str, int], str]:
    """Return the line of the user's code that is running, as (file, line), and "lightning".

    The place is ("", 0) without code of the user. The second is "" if Lightning is not between that
    line and this function.
    """
    frame: FrameType | None = sys._getframe(1)
    library = ""
    while frame is not None and frame.f_code.co_filename not in RANK_BODY:
        if str(frame.f_globals.get("__name__", "")).startswith(_LIGHTNING):
            library = "lightning"
        if not is_library(frame.f_code.co_filename):
            return (frame.f_code.co_filename, frame.f_lineno), library
        frame = frame.f_back
    return ("", 0), library


def _trains_otherwise(optimizer: Any) -> bool:
    """Whether ranks may share a training without a process group: shared memory, other libraries.

    A parameter on another kind of device than torch's own belongs to such a library.
    """
    rpc = getattr(sys.modules.get("torch.distributed.rpc"), "_is_current_rpc_agent_set", None)
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    is_shared = first is not None and first.device.type == "cpu" and first.is_shared()
    is_other = first is not None and first.device.type not in ("cpu", "cuda")
    is_rpc = rpc is not None and rpc()
    return bool(is_shared or is_other or is_rpc or any(name in sys.modules for name in _OTHERS))


def read_source(task: Task | None) -> tuple[bool, bool, bool]:
    """Return whether a task's source uses its rank, gathers values, and excludes the notes.

    If the source cannot be read, the first two are assumed.
    """
    lines = source_lines(task) if task is not None else []
    code = [line.partition("#")[0] for line in lines]
    asks = not code or any(map(_ASKS.search, code))
    gathers = not code or any(map(_GATHERS.search, code))
    return asks, gathers, any(map(_IGNORES.search, lines))
