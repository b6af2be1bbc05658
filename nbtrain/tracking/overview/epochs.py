"""Makes the table of a run's epochs: losses, metrics, time, and the best one. Pure."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest

from .. import events as ev
from .. import limits
from ..state import EpochRow, RunState

TRAIN_LOSS = "mean loss"
"""The column of the observed loss, if the user logs no loss of the training."""


_BOOKKEEPING = re.compile(r"^(epoch|(global_)?steps?)$|runtime|_per_second|flos$|_time$", re.I)
"""Names of numbers that are not results of a model."""


def is_bookkeeping(name: str) -> bool:
    """Whether a number is not a result of a model: ``train_runtime``, ``epoch``."""
    return bool(_BOOKKEEPING.search(name))


OWN = ("training", "epoch", "step", "steps", "time", "seconds", "best")
"""Names of columns that each table has; a metric of such a name is ``time (logged)``."""


@dataclass(frozen=True)
class Epoch:
    """A row of the table: means over ranks."""

    epoch: int
    """The number that the loop gives it."""
    steps: int
    """Optimizer steps since the start."""
    seconds: float
    values: Mapping[str, float]
    """By column."""
    training: int = 1
    """As in `EpochRow`."""
    is_best: bool = False
    """Whether it is the best epoch of its training."""


@dataclass(frozen=True)
class EpochTable:
    """The epochs that have ended."""

    columns: tuple[str, ...] = ()
    rows: tuple[Epoch, ...] = ()
    best_by: str = ""
    """The column that decides which epoch is best; "" if there is none."""

    @property
    def has_trainings(self) -> bool:
        """Whether there is more than one training, as in a cross-validation."""
        return len({row.training for row in self.rows}) > 1


def epoch_table(state: RunState) -> EpochTable:
    """Return the table of a run's epochs, without rows if no loader was used."""
    together = zip_longest(*(rank.epochs for rank in state.ranks))
    rows = [_row([row for row in some if row is not None], state.restarts) for some in together]
    names = dict.fromkeys(name for row in rows for name in row.values)
    if any(ev.is_training_loss(name) for name in names if name != TRAIN_LOSS):
        names.pop(TRAIN_LOSS, None)
    columns = sorted(names, key=metric_order)[: limits.MAX_EPOCH_COLUMNS]
    best_by = next((name for name in columns if better(name)), "")
    if not best_by:  # without a validation, the mean loss of the training
        losses = (name for name in columns if name == TRAIN_LOSS or ev.is_training_loss(name))
        best_by = next(losses, "")
    marked: list[Epoch] = []
    for _, training in groupby(rows, lambda row: row.training):
        some = list(training)
        best = _best(some, best_by)
        for at, row in enumerate(some):
            values = {name: row.values[name] for name in columns if name in row.values}
            marked.append(replace(row, values=values, is_best=at == best))
    return EpochTable(tuple(columns), tuple(marked), best_by)


def _row(some: list[EpochRow], restarts: Sequence[tuple[float, float]]) -> Epoch:
    """Return an epoch's row of the table, from the rows of the ranks that have ended it."""
    values: dict[str, list[float]] = {}
    for row in some:
        if row.loss is not None:
            values.setdefault(TRAIN_LOSS, []).append(row.loss)
        for name, value in row.metrics.items():
            if isinstance(value, (int, float)) and not is_bookkeeping(name):
                column = f"{name} (logged)" if name in OWN else name
                values.setdefault(column, []).append(float(value))
    means = {name: sum(each) / len(each) for name, each in values.items()}
    first, seconds = some[0], max(row.seconds for row in some)
    return Epoch(first.epoch, _steps(first, restarts), seconds, means, first.training)


def _steps(row: EpochRow, restarts: Sequence[tuple[float, float]]) -> int:
    """Return the steps since the start, including those of earlier attempts."""
    return row.steps + max(
        (round(reached) for at, reached in restarts if at < row.ended), default=0
    )


def present_training(state: RunState) -> tuple[int, float]:
    """Return the number of the last training, and the step before it (-inf for the first)."""
    rank = next((rank for rank in state.ranks if rank.epochs), None)
    if rank is None:
        return 1, -math.inf
    number = max(rank.epochs[-1].training, rank.progress.training if rank.progress else 1)
    before = [row for row in rank.epochs if row.training < number]
    return number, _steps(before[-1], state.restarts) if before else -math.inf


@functools.lru_cache(1024)
def metric_order(name: str) -> int:
    """Return the sort key of a metric: the training's loss, the validation's, then the rest."""
    if is_bookkeeping(name):
        return 5
    if name == TRAIN_LOSS or ev.is_training_loss(name):
        return 0
    if validation_of(name):
        return 1 if "loss" in name.lower() else 2
    return 3 if better(name) else 4


def _best(rows: Iterable[Epoch], name: str) -> int | None:
    """Return the index of the row with the best value of a column; None with fewer than two."""
    known = [(row.values[name], at) for at, row in enumerate(rows) if name in row.values]
    known = [(value, at) for value, at in known if math.isfinite(value)]
    if len(known) < 2:
        return None
    return max(known, key=lambda k: (k[0], -k[1]))[1] if better(name) == "high" else min(known)[1]


_RISES = re.compile(
    r"acc|auc|f1|precision|recall|bleu|rouge|map|iou|dice|r2|score|reward|psnr", re.I
)
_FALLS = re.compile(r"loss|error|err|perplexity|ppl|mae|mse|wer|cer|fid", re.I)
_SPREAD = re.compile(r"(^|[^a-z])(std|stdev|stderr|var|variance)([^a-z]|$)", re.I)
_VALIDATION = re.compile(
    r"^(val|valid|validation|eval|test|dev)(?=[^a-z]|$)|[_/.](val|valid|eval|test|dev)$", re.I
)


def validation_of(name: str) -> str:
    """Return the name of a validation's metric without the word for it, or ""."""
    return _VALIDATION.sub("", name).strip("_/. -") if _VALIDATION.search(name) else ""


def better(name: str) -> str:
    """Return whether a metric is better 'high' or 'low'; "" if its name does not show it.

    'low' only for a loss or error of a validation, as the lowest of a training is noise. A spread
    has no best value.
    """
    if _SPREAD.search(name):
        return ""
    if _FALLS.search(name):
        return "low" if validation_of(name) else ""
    return "high" if _RISES.search(name) else ""


def main_metric(names: Iterable[str]) -> str | None:
    """Return the most important metric: the loss under any of its names, or the first one.

    None without a metric.
    """
    known = list(names)
    for wanted in ("loss", "train_loss", "train/loss"):
        if wanted in known:
            return wanted
    lossy = [name for name in known if "loss" in name.lower()]
    return next(iter(lossy or known), None)


def training_names(metric: str) -> list[str]:
    """Return the names that `metric` of a validation may have in the training."""
    return [metric, f"train_{metric}", f"train/{metric}", f"training_{metric}"]
