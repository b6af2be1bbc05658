"""Wraps the function of a scaling run, so that it returns when its optimizer steps ended."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any


def time_steps(function: Callable[..., Any]) -> Callable[..., tuple[list[float], int]]:
    """Return a function that calls `function` in a rank, and returns the times of its steps.

    These are the seconds at which steps ended, by a clock of any start, and the world size; what
    `function` returns is dropped. The steps are those of the optimizer that steps first: a GAN has
    another. On a GPU they are timed by CUDA events.
    """

    # What it wraps is what nbtrain looks at: for refusals, models, the source.
    @functools.wraps(function, assigned=(), updated=())
    def run(*args: Any, **kwargs: Any) -> tuple[list[float], int]:
        import torch
        import torch.distributed as dist
        from torch.optim.optimizer import register_optimizer_step_post_hook

        ends: list[Any] = []
        first: Any = None
        is_on_gpu = False
        world_size = 1

        def record_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            nonlocal first, is_on_gpu, world_size
            cuda: Any = torch.cuda
            if first is None:
                first, is_on_gpu = optimizer, cuda.is_initialized()
            if dist.is_available() and dist.is_initialized():
                world_size = dist.get_world_size()
            if first is optimizer and is_on_gpu:
                ends.append(cuda.Event(enable_timing=True))
                ends[-1].record()
            elif first is optimizer:
                ends.append(time.monotonic())

        hook = register_optimizer_step_post_hook(record_step)
        try:
            function(*args, **kwargs)
        finally:
            hook.remove()
        if ends and is_on_gpu:
            torch.cuda.synchronize()
            ends = [ends[0].elapsed_time(end) / 1e3 for end in ends]
        return ends, world_size

    return run
