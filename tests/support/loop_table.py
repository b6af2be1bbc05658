"""Training loops: a table of them with what a rank must report last, and those of libraries."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def transformers_trainer(
    rows: Sequence[Mapping[str, Any]], eval_rows: Any = None, **options: Any
) -> Any:
    """Return a Trainer of three ones: the loss of a row is the sum of what it multiplies by "x"."""
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: Any, labels: Any = None) -> Any:
            return {"loss": (self.w * x).sum(1).mean()}

    quiet = {"save_strategy": "no", "report_to": "none", "dataloader_pin_memory": False}
    arguments = TrainingArguments(output_dir="unused", **{**quiet, **options})
    return Trainer(Model(), arguments, train_dataset=rows, eval_dataset=eval_rows)  # type: ignore[arg-type]


def lightning_fit(
    step: Callable[[Any, Any], Any],
    *loaders: Iterable[Any],
    validate: Callable[[Any, Any], Any] | None = None,
    lr: float = 0.0,
    **options: Any,
) -> Any:
    """Train four ones, `w` of a module, by Lightning; return its trainer."""
    import lightning

    warnings.simplefilter("ignore")  # its own, of torch's deprecations

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def training_step(self, batch: Any, _index: int) -> Any:
            return step(self, batch)

        def validation_step(self, batch: Any, _index: int) -> None:
            if validate is not None:
                validate(self, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=lr)

    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(**{"max_epochs": 1, **quiet, **options})
    trainer.fit(Module(), *loaders)
    return trainer
