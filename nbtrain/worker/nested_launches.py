"""Refuses launchers in a rank: each rank would start more ranks, under the same names."""

from __future__ import annotations

from typing import Any

from ..errors import LaunchError
from ..system.instrumentation import patch
from . import api


def refuse() -> None:
    """Let no library start ranks in this rank, from now on. A single rank may spawn helpers."""
    # Private names, seen in torch 2.4 to 2.13 and torch_xla 2.9; all launchers come to one of them.
    if api.world_size() > 1:
        patch("torch.multiprocessing.spawn", "start_processes", _refuse_spawn)
        patch("torch.multiprocessing", "start_processes", _refuse_spawn)
    patch("torch.distributed.launcher.api", "launch_agent", _refuse_agent)
    patch("torch_xla._internal.pjrt", "run_multiprocess", _refuse_xla)


def _refuse_spawn(original: Any, fn: Any, args: tuple[Any, ...] = (), *_: Any, **__: Any) -> None:
    if str(getattr(fn, "__module__", "")).startswith(("lightning", "pytorch_lightning")):
        raise LaunchError(
            f"Lightning would start ranks within rank {api.rank()} of this run. Write "
            f'`strategy="ddp", devices={api.world_size()}`: the ranks already exist.'
        )
    raise refusal("mp.spawn", fn, with_rank=True)


def _refuse_agent(original: Any, config: Any, entrypoint: Any, *_: Any, **__: Any) -> None:
    raise refusal("notebook_launcher (or another launcher)", entrypoint)


def _refuse_xla(original: Any, fn: Any, *_: Any, **__: Any) -> None:
    raise refusal("xmp.spawn", getattr(fn, "fn", fn), with_rank=True)


def refusal(launcher: str, function: Any, *, with_rank: bool = False) -> LaunchError:
    """Return what is raised where a rank would launch a function."""
    name = function if isinstance(function, str) else getattr(function, "__name__", "the function")
    arguments = "nbtrain.rank(), …" if with_rank else "…"
    return LaunchError(
        f"{launcher} would start ranks within rank {api.rank()} of this run. "
        f"Call `{name}({arguments})` itself instead: every rank runs this line."
    )
