"""Figures of profiles as texts. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping


def format_time(seconds: float) -> str:
    """Write a time of part of a step: ``340 µs``, ``12.3 ms``, ``1.23 s``."""
    if seconds < 0.9995e-3:
        return f"{1e6 * seconds:.0f} µs"
    if seconds < 0.9995:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s"


def format_share(share: float) -> str:
    """Write a share of a step: ``12 %``, and ``<1 %`` for what rounds to none."""
    percent = 100 * share
    return "<1 %" if 0 < percent <= 0.5 else f"{percent:.0f} %"


def name_operation(name: str) -> str:
    """Return the name of an operation without what torch puts before those of backward."""
    return name.removeprefix("autograd::engine::evaluate_function: ")


def name_line(line: str, cells: Mapping[str, str]) -> str:
    """Return ``In[5], line 41`` for ``file:number``; `cells` are the names of cells by files."""
    file, _, number = line.rpartition(":")
    return f"{cells.get(file) or os.path.basename(file)}, line {number}"
