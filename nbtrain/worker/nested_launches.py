"""Refuses launchers in a rank: each rank would start more ranks, under the same names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import LaunchError
from ..system.instrumentation import patch
from ..system.source_files import is_library
from . import api


def refuse() -> None:
    """Let no library start ranks in this rank, from now on. A single rank may spawn helpers."""
    # Private names, seen in torch 2.7 to 2.13 and torch_xla 2.9; all launchers come to one of them.
    if api.world_size() > 1:
        patch("torch.multiprocessing.spawn", "start_processes", _refuse_spawn)
        patch("torch.multiprocessing", "start_processes", _refuse_spawn)
    patch("torch.distributed.launcher.api", "launch_agent", _refuse_agent)
    patch("torch_xla._internal.pjrt", "run_multiprocess", _refuse_xla)


def _refuse_spawn(original: Any, fn: Any, args: Any = (), *_: Any, **__: Any) -> None:
    if str(getattr(fn, "__module__", "")).startswith(("lightning", "pytorch_lightning")):
        raise LaunchError(
            f"Lightning would start ranks within rank {api.rank()} of this run. Write "
            f'`strategy="ddp", devices={api.world_size()}`: the ranks already exist.'
        )
    raise refusal("mp.spawn", fn, args, with_rank=True)


def _refuse_agent(original: Any, config: Any, entrypoint: Any, *args: Any, **__: Any) -> None:
    raise refusal("notebook_launcher (or another launcher)", entrypoint, args)


def _refuse_xla(original: Any, fn: Any, *_: Any, **__: Any) -> None:
    raise refusal("xmp.spawn", getattr(fn, "fn", fn), with_rank=True)


def refusal(
    launcher: str, function: Any, args: Any = (), *, with_rank: bool = False
) -> LaunchError:
    """Return what is raised where a rank would launch a function, or a library's that calls it.

    A library hands the user's function to its own among the `args`.
    """
    started = f"{launcher} would start ranks within rank {api.rank()} of this run. "
    names = [function] if isinstance(function, str) else []
    library = ""
    for each in () if names else (function, *_flatten(args)):
        callee = getattr(each, "func", each)  # of a functools.partial
        code = getattr(callee, "__code__", None)
        if code is None:
            continue
        if not is_library(code.co_filename):
            names.append(callee.__name__)
            break
        library = library or str(callee.__module__).partition(".")[0]
    if not names and library:
        return LaunchError(
            f"{started}Leave out the option by which {library} starts processes: every rank runs "
            "this line."
        )
    name = names[0] if names else getattr(function, "__name__", "the function")
    arguments = "nbtrain.rank(), …" if with_rank and not library else "…"
    return LaunchError(
        f"{started}Call `{name}({arguments})` itself instead: every rank runs this line."
    )


def _flatten(args: Any) -> Iterator[Any]:
    for each in args:
        yield from _flatten(each) if isinstance(each, (tuple, list)) else (each,)
