"""The xla engine: the fork engine on a TPU, one process a chip.

What ``torch_xla``'s own ``xmp.spawn`` does in its workers is done in ranks that are like all
others: nothing is pickled, the notebook's model is shared until a rank writes to it, and a rank
that fails is known at once.
"""

from __future__ import annotations

import copy
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from .. import moving, worker, xla
from ..errors import LaunchError
from ..plan import Call, Cell, Plan, Task
from ..worker import Job
from .fork import ForkEngine


class XlaEngine(ForkEngine):
    """Forks one process a chip; each joins the others on the TPU before it runs the task."""

    def prepare(self, plan: Plan) -> None:
        """Import torch_xla, once for all ranks. Raises `MissingExtra` or `LaunchError`."""
        xla.load()
        if xla.device_type() == "CPU" and "PJRT_DEVICE" not in plan.env:
            raise LaunchError(
                "torch_xla found no TPU to use (PJRT_DEVICE=CPU). Its libtpu may be missing "
                f"({xla.INSTALL}), or PJRT_DEVICE was set: %env PJRT_DEVICE=TPU, before torch_xla "
                "is imported."
            )

    def caller(self, job: Job, rank: int) -> Callable[[Task], Any]:
        """Return what runs the task in a rank."""
        return partial(_as_one_of_many, job, rank)


def _as_one_of_many(job: Job, rank: int, task: Task) -> Any:
    xla.forget_place(os.environ, keep=job.plan.env)
    devices = xla.join(rank, job.world_size)
    if job.scratch:
        moving.move_in_turn(Path(job.scratch, "move"))
    if len(devices) > 1:
        value: Any = _on_each(devices, task)
    else:
        _agree_on_rank(rank)
        value = worker.run_task(task)
    xla.settle()
    return value


def _agree_on_rank(rank: int) -> None:
    """Make RANK what torch_xla and Accelerate call this rank; a TPU may number them otherwise."""
    number = xla.ordinal()
    if number != rank:
        os.environ["RANK"] = str(number)
        print(f"nbtrain: this is rank {rank} on the board, and process {number} for torch_xla")


def _on_each(devices: list[Any], task: Task) -> list[Any]:
    """Run the task in a thread for each device, as torch_xla does; return a value for each.

    The first to fail ends it: the others may wait for that one, for ever. They are threads that
    nobody waits for.
    """
    done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

    def run(index: int, own: Task) -> None:
        try:
            xla.drive(devices[index])
            done.put((index, worker.run_task(own), None))
        except BaseException as error:  # raised again in the main thread
            done.put((index, None, error))

    xla.start_autograd()
    others = [with_own_models(task) for _ in devices[1:]]
    tasks = [task, *others]  # the first trains the models that go home
    for index, own in enumerate(tasks):
        threading.Thread(target=run, args=(index, own), name=f"xla:{index}", daemon=True).start()
    values: dict[int, Any] = {}
    for _ in devices:
        index, values[index], error = done.get()
        if error is not None:
            raise error
    return [values[index] for index in range(len(devices))]


def with_own_models(task: Task) -> Task:
    """Return the task with copies of the models that are handed over, equal to them.

    What two models share, their copies share. A model that a function of another cell finds by
    its name is still the common one.
    """
    memo: dict[int, Any] = {}
    if isinstance(task, Cell):
        return replace(task, namespace=_copied(task.namespace, memo))
    arguments = _copied(dict(enumerate(task.args)), memo)
    return Call(task.function, tuple(arguments.values()), _copied(task.kwargs, memo))


def _copied(values: Mapping[Any, Any], memo: dict[int, Any]) -> dict[Any, Any]:
    module = getattr(sys.modules.get("torch.nn"), "Module", ())
    return {
        name: copy.deepcopy(value, memo) if isinstance(value, module) else value
        for name, value in values.items()
    }
