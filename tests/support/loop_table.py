"""A table of training loops, each with what its rank must report of it last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.runs import last, launch


class LoopTable:
    """Rows for `pytest.mark.parametrize(("loop", "expected"), table.rows)`."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def row(self, *arguments: Any, **expected: Any) -> Callable[[Any], Any]:
        """Add a loop, called with `arguments`; `expected` are fields of its last report."""

        def add(loop: Any) -> Any:
            name = " ".join([loop.__name__, *map(str, arguments)])
            self.rows.append(pytest.param(lambda: loop(*arguments), expected, id=name))
            return loop

        return add


def check(loop: Callable[[], Any], expected: dict[str, Any]) -> None:
    """Launch a loop on one rank, and compare what it reported last."""
    report = last(launch(loop))
    assert {name: getattr(report, name) for name in expected} == pytest.approx(expected)


def one_weight(lr: float = 0.0) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """Return three ones, and an optimizer that trains them."""
    w = nn.Parameter(torch.ones(3))
    return w, torch.optim.SGD([w], lr=lr)
