"""The xla engine: it forks ranks on a TPU, one process per chip.

The ranks do what ``torch_xla``'s own ``xmp.spawn`` does in its workers, and are otherwise like all
others: nothing is pickled, the notebook's model is shared until a rank writes to it, and a rank
that fails is reported at once.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import fcntl
import gc
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ...part_api import (
    Call,
    Cell,
    ForkEngine,
    Job,
    LaunchError,
    Plan,
    PlanError,
    Task,
    clock,
    patch,
    rank_context,
)
from ...part_api import events as ev
from ...worker import task_runner
from . import chips, xla

MIN_STAGGERED_MODEL_BYTES = 64 << 20
"""Ranks move a larger model to their devices one after the other."""


class XlaEngine(ForkEngine):
    """Forks one process per chip; each joins the others on the TPU before it runs the task."""

    name = "xla"
    device = "xla"

    def resolve(self, plan: Plan) -> tuple[Plan, str]:
        """Return the plan with one rank, or one per chip, and torch's name of the device."""
        self.check_options(plan)
        return self.with_ranks(plan, chips.count_ranks(plan, self.name)), self.device

    def prepare(self, plan: Plan) -> None:
        """Import torch_xla, once for all ranks.

        Raises `MissingExtra` without torch_xla, `LaunchError` if it does not work or finds no TPU,
        and `PlanError` for live ranks where each process drives two devices.
        """
        found = chips.find(env={**os.environ, **plan.env})
        if plan.takes_tasks and found is not None and found.devices > found.chips:
            raise PlanError(
                f"each process of this host ({found.label}) drives two devices in two threads, but "
                "a live rank has one thread. Run the cell without live ranks"
            )
        xla.load()
        if xla.device_type() == "CPU" and "PJRT_DEVICE" not in plan.env:
            raise LaunchError(
                "torch_xla found no TPU to use (PJRT_DEVICE=CPU). Its libtpu may be missing "
                f"({chips.XLA_INSTALL}), or PJRT_DEVICE was set: %env PJRT_DEVICE=TPU, before "
                "torch_xla is imported."
            )

    def caller(self, job: Job, rank: int) -> Callable[[Task], Any]:
        """Return what runs the task in a rank."""
        return partial(_call_as_rank, job, rank)


def _call_as_rank(job: Job, rank: int, task: Task) -> Any:
    """Join torch_xla's runtime as a rank, run the task, wait for the device; return the value.

    With several devices per process, returns a list with a value for each.
    """
    xla.forget_place(os.environ, keep=job.plan.env)
    with _joining(rank):
        devices = xla.join(rank, job.world_size)
    if job.scratch:
        serialize_moves(Path(job.scratch, "move"))
    if len(devices) > 1:
        value: Any = _on_each(devices, task)
    else:
        _agree_on_rank(rank)
        value = task_runner.run_task(task)
    xla.finish_at_exit()
    return value


@contextlib.contextmanager
def _joining(rank: int) -> Iterator[None]:
    """Report that a rank joins the others."""
    writer = rank_context.get().writer
    writer.write(ev.Phase(clock.now(), rank, ev.JOINING))
    try:
        yield
    finally:
        writer.write(ev.Phase(clock.now(), rank))


def _agree_on_rank(rank: int) -> None:
    """Set RANK to torch_xla's and Accelerate's number of this rank: a TPU may number otherwise."""
    number = xla.ordinal()
    if number != rank:
        os.environ["RANK"] = str(number)
        print(f"nbtrain: the board shows this as rank {rank}, torch_xla as process {number}")


def _on_each(devices: list[Any], task: Task) -> list[Any]:
    """Run the task in a thread for each device, as torch_xla does; return a value for each.

    The first device trains the task's models, the others train copies. The first failure ends the
    call. The other threads may wait for the failed one forever, so they are daemons.
    """
    done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

    def run(index: int, own: Task) -> None:
        try:
            xla.drive(devices[index])
            done.put((index, task_runner.run_task(own), None))
        except BaseException as error:  # raised again in the main thread
            done.put((index, None, error))

    xla.start_autograd()
    others = [with_own_models(task) for _ in devices[1:]]
    tasks = [task, *others]  # the first trains the models that are copied back
    for index, own in enumerate(tasks):
        threading.Thread(target=run, args=(index, own), name=f"xla:{index}", daemon=True).start()
    values: dict[int, Any] = {}
    for _ in devices:
        index, values[index], error = done.get()
        if error is not None:
            raise error
    return [values[index] for index in range(len(devices))]


def with_own_models(task: Task) -> Task:
    """Return the task with equal copies of the models that it is given.

    What two models share, their copies share. A model that a function of another cell uses by its
    name is not copied.
    """
    memo: dict[int, Any] = {}
    if isinstance(task, Cell):
        return replace(task, namespace=_copy_models(task.namespace, memo))
    arguments = _copy_models(dict(enumerate(task.args)), memo)
    return Call(task.function, tuple(arguments.values()), _copy_models(task.kwargs, memo))


def _copy_models(values: Mapping[Any, Any], memo: dict[int, Any]) -> dict[Any, Any]:
    """Return values with a copy of each model, for a device of its own."""
    module = getattr(sys.modules.get("torch.nn"), "Module", ())
    return {
        name: copy.deepcopy(value, memo) if isinstance(value, module) else value
        for name, value in values.items()
    }


def serialize_moves(lock: Path) -> None:
    """Patch ``Module.to``, so that this host's ranks move large models one rank at a time.

    While it moves, a model is in memory twice and more, and a small host has no room for that in
    all ranks at once. The memory that a move needed is given back before the next rank's begins.
    The system releases `lock` if a rank is killed.
    """

    def move(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_large_move(model, args, kwargs):
            return original(model, *args, **kwargs)
        xla.finish()  # what is pending may wait for peers, which must not wait for the lock
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            under_way = 0
            for part in _parts(model):
                under_way += _bytes_on_host(part)
                original(part, *args, **kwargs)
                if under_way >= MIN_STAGGERED_MODEL_BYTES:
                    _give_back()
                    under_way = 0
            moved = original(model, *args, **kwargs)
            _give_back()
        return moved

    patch("torch.nn.modules.module:Module", "to", move)


def _parts(model: Any) -> Iterator[Any]:
    """Yield the modules of a model that are small enough to move at once, or have no children."""
    size = _bytes_on_host(model)
    children = list(model.children())
    if size <= MIN_STAGGERED_MODEL_BYTES or not children:
        if size:
            yield model
        return
    for child in children:
        yield from _parts(child)


def _bytes_on_host(model: Any) -> int:
    return sum(p.nbytes for p in model.parameters() if p.device.type == "cpu")


def _is_large_move(model: Any, args: Any, kwargs: Any) -> bool:
    """Whether ``model.to`` moves a large model from the host to a TPU."""
    try:
        device = sys.modules["torch"]._C._nn._parse_to(*args, **kwargs)[0]
    except (TypeError, RuntimeError):  # `to` itself raises it again
        return False
    if device is None or device.type != "xla":
        return False
    return _bytes_on_host(model) > MIN_STAGGERED_MODEL_BYTES


def _give_back() -> None:
    """Finish what is moving to the device, and give back the host's memory that it needed."""
    xla.finish()
    gc.collect()
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
