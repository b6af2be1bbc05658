"""Small traces that are written by hand, as `torch.profiler` writes them, in microseconds."""

from __future__ import annotations

from typing import Any

from nbtrain.parts.profile.reading.trace import WAIT

Record = dict[str, Any]

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
"""The annotation of a batch that is fetched."""

BASE_NS = 1_700_000_000_000_000_000


def trace(*events: Record, base_ns: int = BASE_NS) -> Record:
    return {"schemaVersion": 1, "baseTimeNanoseconds": base_ns, "traceEvents": list(events)}


def lasting(category: str, name: str, begin: float, end: float, tid: int, **args: Any) -> Record:
    times = {"ts": begin, "dur": end - begin, "pid": 4000, "tid": tid}
    return {"ph": "X", "cat": category, "name": name, **times, "args": args}


def step(number: int, begin: float, end: float) -> Record:
    return lasting("user_annotation", f"ProfilerStep#{number}", begin, end, 1)


def note(name: str, begin: float, end: float, tid: int = 1, **args: Any) -> Record:
    return lasting("user_annotation", name, begin, end, tid, **args)


def operation(name: str, begin: float, end: float, tid: int = 1, **args: Any) -> Record:
    return lasting("cpu_op", name, begin, end, tid, **args)


def allocation(at: float, size: int, tid: int = 1) -> Record:
    """Return that a thread has allocated, or with a negative size freed, some bytes."""
    args = {"Bytes": size, "Device Type": 0}
    place = {"pid": 4000, "tid": tid, "ts": at}
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "s": "t",
        "name": "[memory]",
        **place,
        "args": args,
    }


def all_reduce(begin: float, end: float, tid: int = 2, **args: Any) -> Record:
    """Return a collective of gloo."""
    return note("gloo:all_reduce", begin, end, tid, **args)


def waited_for(begin: float, end: float, **args: Any) -> tuple[Record, Record]:
    """Return a collective of gloo, and the call of the training thread that waits for it."""
    return all_reduce(begin, end, **args), note(WAIT, begin, end)


def launch(correlation: int, begin: float, name: str = "cudaLaunchKernel") -> Record:
    """Return the call that puts a kernel into a stream."""
    return lasting("cuda_runtime", name, begin, begin + 5, 1, correlation=correlation)


def kernel(
    name: str, begin: float, end: float, correlation: int, stream: int = 7, **args: Any
) -> Record:
    """Return what ran on the GPU, which is a process of its own in a trace."""
    of_gpu = {"device": 0, "stream": stream, "correlation": correlation, **args}
    return {**lasting("kernel", name, begin, end, stream, **of_gpu), "pid": 0}


def nccl(begin: float, end: float, correlation: int, **args: Any) -> Record:
    """Return a collective of NCCL, which averages 1,000,000 numbers."""
    told = {
        "Collective name": "allreduce",
        "In msg nelems": 1_000_000,
        "Out msg nelems": 1_000_000,
        "Group size": 2,
        "dtype": "Float",
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": "[0, 1]",
        **args,
    }
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    return kernel(name, begin, end, correlation, 20, **told)
