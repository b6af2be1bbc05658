"""Wraps the function of a scaling run, so that it returns when its optimizer steps ended."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any


def time_steps(function: Callable[..., Any]) -> Callable[..., tuple[list[float], int]]:
    """Return a function that calls another one in a rank, and returns when its steps ended.

    It returns the seconds at which steps ended, and the world size. The steps are those of the
    optimizer that steps first: a GAN has another. On a GPU, CUDA events are recorded, as the host
    is ahead of the GPU.
    """

    # What it wraps is what nbtrain looks at: for refusals, models, the source.
    @functools.wraps(function, assigned=(), updated=())
    def run(*args: Any, **kwargs: Any) -> tuple[list[float], int]:
        import torch
        import torch.distributed as dist
        from torch.optim.optimizer import register_optimizer_step_post_hook

        ends: list[Any] = []
        first: Any = None
        world_size = 1

        def record_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            nonlocal first, world_size
            first = optimizer if first is None else first
            if dist.is_available() and dist.is_initialized():
                world_size = dist.get_world_size()
            cuda: Any = torch.cuda
            if first is optimizer and cuda.is_initialized():
                ends.append(cuda.Event(enable_timing=True))
                ends[-1].record()
            elif first is optimizer:
                ends.append(time.monotonic())

        hook = register_optimizer_step_post_hook(record_step)
        try:
            function(*args, **kwargs)
        finally:
            hook.remove()
        if ends and not isinstance(ends[0], float):
            torch.cuda.synchronize()
            ends = [ends[0].elapsed_time(end) / 1e3 for end in ends]
        return ends, world_size

    return run
