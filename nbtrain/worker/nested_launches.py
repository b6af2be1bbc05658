"""Refuses launchers in a rank: each rank would start more ranks, under the same names."""

from __future__ import annotations

from typing import Any

from ..errors import LaunchError
from ..system.instrumentation import patch
from . import api


def refuse() -> None:
    """Make launchers of torch raise `LaunchError` in this rank from now on.

    They would start ranks within a rank. A single rank may still call ``mp.spawn``, for helpers.
    """
    # Private names, seen in torch 2.7 to 2.13; all launchers come to one of them.
    if api.world_size() > 1:
        patch("torch.multiprocessing.spawn", "start_processes", _refuse_spawn)
        patch("torch.multiprocessing", "start_processes", _refuse_spawn)
    patch("torch.distributed.launcher.api", "launch_agent", _refuse_agent)


def _refuse_spawn(original: Any, fn: Any, *_: Any, **__: Any) -> None:
    """Raise `LaunchError` in place of ``torch.multiprocessing.spawn``."""
    if str(getattr(fn, "__module__", "")).startswith(("lightning", "pytorch_lightning")):
        raise LaunchError(
            f"Lightning would start ranks within rank {api.rank()} of this run. Write "
            f'`strategy="ddp", devices={api.world_size()}`: the ranks already exist.'
        )
    raise refusal("mp.spawn")


def _refuse_agent(original: Any, *_: Any, **__: Any) -> None:
    raise refusal("notebook_launcher (or another launcher)")


def refusal(launcher: str) -> LaunchError:
    """Return what is raised where a rank would launch ranks."""
    return LaunchError(
        f"{launcher} would start ranks within rank {api.rank()} of this run. Every rank runs this "
        "line: call the function itself instead, or leave out the option by which a library starts "
        "processes. `nbtrain.rank()` is what `spawn` passes first."
    )
