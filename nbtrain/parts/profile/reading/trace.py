"""Reads the trace of one rank, as `torch.profiler` exports it, into a `RankProfile`. Pure.

A trace has operations (`cpu_op`), kernels of a GPU, and annotations: the steps, what loaders and
optimizers do, and the collectives of gloo. Kernels whose names begin with `nccl` are collectives,
too. What an instant of a step is spent on is the first of these that applies:

- A CPU rank: a collective runs while no operation does and no batch is fetched, inside of a call
  that waits for it; a batch is fetched; the optimizer's step; backward; an operation outside of
  these (forward); only Python runs.
- A GPU rank: a kernel runs, for what the operation is a part of that launched it; a collective's
  kernel runs alone; the GPU is idle because a batch is fetched, or because it waits for Python.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .intervals import Interval, contains, intersect, merge, subtract, total

KINDS = ("data", "forward", "backward", "optimizer", "communication", "python")
"""What a step's time is spent on. On a GPU, `python` means that the GPU is idle."""

BACKWARD = "nbtrain: backward"
"""The annotation of a call of backward. torch itself adds no such annotation."""

WAIT = "nbtrain: wait"
"""The annotation of a call that waits for a collective, which torch itself does not add."""

LANE_BINS = 400
"""Parts of a step in `Step.lane`, enough for a picture as wide as a page."""

_LANE_SIGNS = {kind: kind[0] for kind in KINDS}
LANE_KINDS = {sign: kind for kind, sign in _LANE_SIGNS.items()}
"""The kinds by their letters in `Step.lane`."""


@dataclass(frozen=True)
class Event:
    """An operation, a kernel, or an annotation. Times are nanoseconds since 1970."""

    name: str
    category: str
    thread: tuple[Any, Any]
    begin: int
    end: int
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Collective:
    """A collective of one rank. Times are nanoseconds since 1970."""

    name: str
    begin: int
    end: int
    size_bytes: int | None = None
    """Missing if the trace lacks it."""
    group: str = ""
    """Which ranks took part: a name that is the same on all of them."""
    thread: int | str = 0
    """Of the trace: which thread or stream it ran on."""


@dataclass(frozen=True)
class Step:
    """What a rank did in a step. Times are nanoseconds since 1970."""

    number: int
    begin: int
    end: int
    parts_ns: Mapping[str, int]
    """How long each of `KINDS` took. The sum is the step."""
    hidden: Sequence[Interval]
    """When collectives ran and cost no time: the part of them that is not in `communication`."""
    lane: str
    """The most frequent kind in each of `LANE_BINS` parts of the step, a letter each."""


@dataclass(frozen=True)
class Operation:
    """What calls of one operation took in the recorded steps, without the operations in them."""

    name: str
    calls: int
    self_ns: int
    kind: str
    """The one of `KINDS` that took most of it."""
    line: str = ""
    """The line of the user's code that called it most, as ``file:number``; "" if not known."""
    allocated_bytes: int = 0
    """What the calls allocated; of a kernel, the operation that launched it."""


@dataclass(frozen=True)
class RankProfile:
    """The recorded steps of one rank."""

    rank: int
    host: str
    has_gpu: bool
    steps: Sequence[Step]
    operations: Sequence[Operation]
    """The most expensive first."""
    collectives: Sequence[Collective]
    waits: Sequence[Interval]
    """When the rank did nothing but a collective, in nanoseconds since 1970."""
    lines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """For each kind, lines of the user's code (``file:number``) with the share of its time."""
    loader: str = ""
    """The class of the iterator that gave batches, such as ``_SingleProcessDataLoaderIter``."""
    syncs: int = 0
    """How often Python waited for the GPU."""
    sync_line: str = ""
    """The line of the user's code that did most of that, as ``file:number``."""


@dataclass(frozen=True)
class Sample:
    """Where the training thread was in the user's code at a time, in nanoseconds since 1970."""

    time_ns: int
    line: str


def read_trace(
    trace: Mapping[str, Any],
    rank: int,
    first_step: int = 1,
    samples: Sequence[Sample] = (),
    host: str = "",
) -> RankProfile:
    """Return what a trace has about a rank whose first recorded step has a number.

    Raises `ValueError` for a trace without a step, and for a damaged one.
    """
    try:
        events = _read_events(trace)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"the trace is damaged: {error!r}") from error
    marks = sorted(
        (e for e in events if e.category == "user_annotation" and _is_step(e.name)),
        key=lambda e: e.begin,
    )
    if not marks:
        raise ValueError("the trace has no step")
    kernels = [e for e in events if e.category in ("kernel", "gpu_memcpy", "gpu_memset")]
    regions = _find_regions(events)
    reader = _read_gpu if kernels else _read_cpu
    layers, found = reader(events, regions, kernels)
    collectives = [_collective(e) for e in found]
    steps = [_read_step(first_step + i, mark, layers, collectives) for i, mark in enumerate(marks)]
    window = marks[0].begin, marks[-1].end
    loaders = Counter(e.name for e in events if e.name.startswith(_LOADER))
    syncs = [e for e in events if e.name in _SYNCS and window[0] <= e.begin < window[1]]
    return RankProfile(
        rank,
        host or str(trace.get("host_name", "")),
        bool(kernels),
        steps,
        _list_operations(events, kernels, layers, samples, window),
        [c for c in collectives if window[0] <= c.begin < window[1]],
        intersect(dict(layers)["communication"], merge((m.begin, m.end) for m in marks)),
        _find_lines(samples, layers, window),
        max(loaders, key=loaders.__getitem__, default="").partition("#")[2].partition(".")[0],
        len(syncs),
        _find_line(samples, syncs),
    )


_LOADER = "enumerate(DataLoader)#"
_SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "hipStreamSynchronize")
_WAIT_TENSOR = "_c10d_functional::wait_tensor"
_DDP_FORWARD = "DistributedDataParallel.forward"
_GLOO = ("gloo:", "mpi:", "ucc:")
_MEMORY = "[memory]"
_ALLOCATE = ("aten::empty", "aten::resize_")
"""Operations that only allocate, for the one that calls them."""


def _is_step(name: str) -> bool:
    return name.startswith("ProfilerStep")


def _is_collective(kernel: Event) -> bool:
    return kernel.name.startswith("nccl")


def _read_events(trace: Mapping[str, Any]) -> list[Event]:
    """Return what lasts and what is allocated, by their beginnings, the outer ones first."""
    base = int(trace.get("baseTimeNanoseconds", 0))
    events = []
    for record in trace["traceEvents"]:
        lasts = record.get("ph") == "X" and record.get("cat") not in (None, "Trace")
        if lasts or record.get("name") == _MEMORY:
            begin = base + round(record["ts"] * 1000)
            end = begin + round(record["dur"] * 1000) if lasts else begin
            thread = record.get("pid"), record.get("tid")
            category = record["cat"].lower() if lasts else _MEMORY
            args = record.get("args", {})
            events.append(Event(record["name"], category, thread, begin, end, args))
    return sorted(events, key=lambda e: (e.begin, -e.end))


def _find_regions(events: Sequence[Event]) -> dict[str, list[Interval]]:
    """Return when a batch was fetched, when backward and the optimizer ran, and calls that wait."""
    found = defaultdict[str, list[Interval]](list)
    for event in events:
        if event.category == "user_annotation":
            if event.name.startswith(_LOADER):
                found["data"].append((event.begin, event.end))
            elif event.name == WAIT or event.name.startswith(_DDP_FORWARD):
                found["wait"].append((event.begin, event.end))
            elif event.name == BACKWARD:
                found["backward"].append((event.begin, event.end))
            elif event.name.startswith("Optimizer."):
                found["optimizer"].append((event.begin, event.end))
    return {kind: merge(spans) for kind, spans in found.items()}


Layers = list[tuple[str, list[Interval]]]
"""When each kind applies, if those before it do not."""


def _read_cpu(
    events: Sequence[Event],
    regions: Mapping[str, list[Interval]],
    kernels: Sequence[Event],
) -> tuple[Layers, list[Event]]:
    """Return the layers of a rank on the CPU, and its collectives."""
    found = [e for e in events if e.name.startswith(_GLOO) and e.category == "user_annotation"]
    operations = merge(
        (e.begin, e.end)
        for e in events
        if e.category == "cpu_op" and not e.name.startswith("c10d::")
    )
    # It is inside of other operations.
    calls = merge((e.begin, e.end) for e in events if e.name == _WAIT_TENSOR)
    operations = subtract(operations, calls)
    data = regions.get("data", [])
    busy = merge([*operations, *data])
    # DDP and sharded models wait inside of backward, and some optimizers in their step.
    kinds = ("wait", "backward", "optimizer")
    calls = merge([*calls, *(i for kind in kinds for i in regions.get(kind, []))])
    waiting = intersect(subtract(merge((e.begin, e.end) for e in found), busy), calls)
    layers = [
        ("communication", waiting),
        *((kind, regions.get(kind, [])) for kind in ("data", "optimizer", "backward")),
        ("forward", operations),
    ]
    return layers, found


def _read_gpu(
    events: Sequence[Event],
    regions: Mapping[str, list[Interval]],
    kernels: Sequence[Event],
) -> tuple[Layers, list[Event]]:
    """Return the layers of a rank on a GPU, and its collectives."""
    launches = {
        e.args["correlation"]: e.begin
        for e in events
        if e.category in ("cuda_runtime", "cuda_driver", "hip_runtime") and "correlation" in e.args
    }
    found, by_kind = list[Event](), defaultdict[str, list[Interval]](list)
    for kernel in kernels:
        if _is_collective(kernel):
            found.append(kernel)
            continue
        launched = launches.get(kernel.args.get("correlation"), kernel.begin)
        # Kernels that copy a batch to the GPU are launched after it was fetched, so are forward.
        kinds = (k for k in ("backward", "optimizer") if contains(regions.get(k, ()), launched))
        by_kind[next(kinds, "forward")].append((kernel.begin, kernel.end))
    computing = [(kind, merge(by_kind[kind])) for kind in ("backward", "optimizer", "forward")]
    busy = merge(i for _, spans in computing for i in spans)
    waiting = subtract(merge((e.begin, e.end) for e in found), busy)
    layers = [
        *computing,
        ("communication", waiting),
        ("data", regions.get("data", [])),
    ]
    return layers, found


def _collective(event: Event) -> Collective:
    """Return a collective of an annotation or a kernel."""
    span = event.begin, event.end
    args, name = event.args, event.name
    size = _read_size(args)
    name = str(args.get("Collective name") or name.partition(":")[2] or name)
    group = str(args.get("Process Group Name", ""))
    return Collective(name, *span, size, group, event.thread[1])


_DTYPE_BYTES = {
    "float": 4, "double": 8, "c10::half": 2, "half": 2, "c10::bfloat16": 2, "bfloat16": 2,
    "int": 4, "long": 8, "long int": 8, "short": 2, "byte": 1, "char": 1, "bool": 1,
    "unsigned char": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


def _read_size(args: Mapping[str, Any]) -> int | None:
    """Return how many bytes a collective takes from a rank, if its trace has that."""
    if "In msg nelems" in args:
        item = _DTYPE_BYTES.get(str(args.get("dtype", "")).lower())
        return None if item is None else int(args["In msg nelems"]) * item
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not dims or not types:
        return None
    size = 0
    for shape, dtype in zip(dims, types, strict=False):
        item = _DTYPE_BYTES.get(str(dtype).lower())
        if item is None or not all(isinstance(n, int) for n in shape):
            return None
        count = 1
        for n in shape:
            count *= n
        size += count * item
    return size


def _read_step(
    number: int,
    mark: Event,
    layers: Layers,
    collectives: Sequence[Collective],
) -> Step:
    """Return what a step's time was spent on."""
    whole = [(mark.begin, mark.end)]
    free, parts, spans = whole, dict.fromkeys(KINDS, 0), list[tuple[int, int, str]]()
    for kind, layer in layers:
        part = intersect(free, layer)
        free = subtract(free, part)
        parts[kind] += total(part)
        spans += [(begin, end, kind) for begin, end in part]
    parts["python"] = total(free)
    communication = intersect(merge((c.begin, c.end) for c in collectives), whole)
    hidden = subtract(communication, dict(layers)["communication"])
    lane = _draw_lane(mark, [*spans, *((begin, end, "python") for begin, end in free)])
    return Step(number, mark.begin, mark.end, parts, hidden, lane)


def _draw_lane(mark: Event, spans: Iterable[tuple[int, int, str]]) -> str:
    """Return `Step.lane`."""
    width = max(1, mark.end - mark.begin) / LANE_BINS
    bins = [dict.fromkeys(KINDS, 0.0) for _ in range(LANE_BINS)]
    for begin, end, kind in spans:
        low, high = (begin - mark.begin) / width, (end - mark.begin) / width
        for at in range(int(low), min(LANE_BINS, int(high) + 1)):
            bins[at][kind] += min(high, at + 1) - max(low, at)
    return "".join(_LANE_SIGNS[max(each, key=each.__getitem__)] for each in bins)


def _kind_at(layers: Layers, time: int) -> str:
    return next((kind for kind, spans in layers if contains(spans, time)), "python")


def _list_operations(
    events: Sequence[Event],
    kernels: Sequence[Event],
    layers: Layers,
    samples: Sequence[Sample],
    window: Interval,
) -> list[Operation]:
    """Return the operations of the recorded steps; on a GPU its kernels."""
    calls = _list_calls(events)
    if kernels:
        callers = {call.caller.args.get("External id"): call for call in calls}
        calls = [_kernel_call(kernel, callers) for kernel in kernels]
    by_name = defaultdict[str, list[_Call]](list)
    for call in calls:
        if window[0] <= call.event.begin < window[1]:
            by_name[call.event.name].append(call)
    costs = {name: sum(call.self_ns for call in calls) for name, calls in by_name.items()}
    dearest = sorted(costs, key=costs.__getitem__, reverse=True)[:MAX_OPERATIONS]
    operations = []
    for name in dearest:
        kinds = Counter[str]()
        for call in by_name[name]:
            # A collective may begin beside a kernel that computes.
            is_collective = _is_collective(call.event)
            kind = "communication" if is_collective else _kind_at(layers, call.event.begin)
            kinds[kind] += call.self_ns
        line = _find_line(samples, [call.caller for call in by_name[name]])
        kind = max(kinds, key=kinds.__getitem__)
        count, size = len(by_name[name]), sum(call.allocated_bytes for call in by_name[name])
        operations.append(Operation(name, count, costs[name], kind, line, size))
    return operations


MAX_OPERATIONS = 30
"""Operations of a rank that are kept; a page shows ten."""


@dataclass
class _Call:
    """A call of an operation, or a kernel."""

    event: Event
    self_ns: int
    caller: Event
    """The operation on the CPU: of a kernel, the one that launched it."""
    allocated_bytes: int = 0


def _kernel_call(kernel: Event, callers: Mapping[Any, _Call]) -> _Call:
    """Return the call of a kernel; `callers` are the operations by their numbers in the trace."""
    length_ns = kernel.end - kernel.begin
    launched = callers.get(kernel.args.get("External id", -1))
    if launched is None:
        return _Call(kernel, length_ns, kernel)
    # What an operation has allocated counts once, though it may launch several kernels.
    size, launched.allocated_bytes = launched.allocated_bytes, 0
    return _Call(kernel, length_ns, launched.event, size)


def _list_calls(events: Sequence[Event]) -> list[_Call]:
    """Return the operations on the CPU, each without the time and memory of those in it."""
    calls = list[_Call]()
    stacks = defaultdict[tuple[Any, Any], list[_Call]](list)
    for event in events:
        if event.category not in ("cpu_op", _MEMORY):
            continue
        stack = stacks[event.thread]
        while stack and stack[-1].event.end <= event.begin:
            stack.pop()
        if event.category == _MEMORY:
            callers = (c for c in reversed(stack) if not c.event.name.startswith(_ALLOCATE))
            if (call := next(callers, None)) is not None:
                call.allocated_bytes += max(0, int(event.args.get("Bytes", 0)))
            continue
        length_ns = event.end - event.begin
        if stack:
            stack[-1].self_ns = max(0, stack[-1].self_ns - length_ns)
        calls.append(_Call(event, length_ns, event))
        stack.append(calls[-1])
    return calls


def _find_line(samples: Sequence[Sample], events: Sequence[Event]) -> str:
    """Return the line of most samples in the time of some events; "" without one."""
    spans = merge((event.begin, event.end) for event in events)
    lines = Counter(sample.line for sample in samples if contains(spans, sample.time_ns))
    return max(lines, key=lines.__getitem__, default="")


def _find_lines(
    samples: Sequence[Sample], layers: Layers, window: Interval
) -> dict[str, dict[str, float]]:
    """Return `RankProfile.lines`."""
    by_kind = defaultdict[str, Counter[str]](Counter)
    for sample in samples:
        if window[0] <= sample.time_ns < window[1]:
            by_kind[_kind_at(layers, sample.time_ns)][sample.line] += 1
    return {
        kind: {line: n / lines.total() for line, n in lines.most_common(5)}
        for kind, lines in by_kind.items()
    }
