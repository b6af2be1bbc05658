"""A model's way to the devices of a host with little memory: in parts, one rank after the other."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import xla

LARGE = 64 << 20
"""Bytes of a model from which on ranks move it to their devices one after the other."""


def move_in_turn(lock: Path) -> None:
    """Have large models move to the devices of this host's ranks one rank at a time.

    While it moves, a model is in memory twice and more; all ranks at once are what a small host
    has no room for. What a move needed is given back before the next rank's. The lock is the
    system's: it goes with a rank that is killed.
    """
    module: Any = sys.modules["torch"].nn.Module
    plain = module.to

    @functools.wraps(plain)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_large_move(self, args, kwargs):
            return plain(self, *args, **kwargs)
        xla.finish()  # peers may be waited for in what is pending: not with the lock in hand
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            under_way = 0
            for part in _parts(self):
                under_way += _bytes_on_host(part)
                plain(part, *args, **kwargs)
                if under_way >= LARGE:
                    _give_back()
                    under_way = 0
            moved = plain(self, *args, **kwargs)
            _give_back()
        return moved

    module.to = to


def _parts(model: Any) -> Iterator[Any]:
    """Yield modules that are most of a model: none is larger than `LARGE`, or has no children."""
    size = _bytes_on_host(model)
    children = list(model.children())
    if size <= LARGE or not children:
        if size:
            yield model
        return
    for child in children:
        yield from _parts(child)


def _bytes_on_host(model: Any) -> int:
    return sum(p.nbytes for p in model.parameters() if p.device.type == "cpu")


def _is_large_move(model: Any, args: Any, kwargs: Any) -> bool:
    try:
        device = sys.modules["torch"]._C._nn._parse_to(*args, **kwargs)[0]
    except (TypeError, RuntimeError):  # `to` itself will say what is wrong
        return False
    if device is None or device.type != "xla":
        return False
    return _bytes_on_host(model) > LARGE


def _give_back() -> None:
    """Let the device have what was moved, and give the memory that this took back."""
    xla.finish()
    gc.collect()
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
