"""Finds ranks that do the same work, or train alone, from what each rank reports.

In doubt it says nothing: tensor parallelism wants the same data on every rank, and ranks may train
alone on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from ..findings import Finding
from ..tracking import events as ev

LOSSES = 4
"""Losses that are compared, at least."""

PLACE = "{place}"
"""Stands in the text of a finding where the place of the step belongs."""

_KNOWN = frozenset({"migrate", "prepare"})
"""The rules that may have found the same in the code, before the run."""

_PREPARE = (
    "write `model, optimizer, loader = accelerator.prepare(model, optimizer, loader)` before the "
    "loop"
)
_JOIN = f"make an `accelerator = Accelerator()` in the code, and {_PREPARE}"
_SPLIT = (
    "Give each rank a different part: `loader = accelerator.prepare(loader)`, or a loader with "
    "`sampler=DistributedSampler(dataset)`. Divide a stream with `split_dataset_by_node` of "
    "Hugging Face datasets, or let your `IterableDataset` skip the samples of the other ranks"
)
_SEED = (
    "Ranks begin with the same random numbers. If the data is drawn by chance, write "
    "`torch.manual_seed(seed + nbtrain.rank())` before the loop (for numpy, "
    "`np.random.seed(seed + nbtrain.rank())`). Otherwise, give each rank a part of the data: "
    "`data[nbtrain.rank() :: nbtrain.world_size()]`"
)
_ALONE = "If each rank is meant to train alone, have it choose its work by `nbtrain.rank()`"


class WorkComparison:
    """Compares the ranks of a run, and reports what is wrong once."""

    def __init__(self, world_size: int, cells: Callable[[], Mapping[str, str]]) -> None:
        self._world_size, self._cells = world_size, cells
        self._samples: dict[int, ev.WorkSample] = {}
        self._is_new = False
        self._reported: Finding | None = None

    def observe(self, events: Iterable[ev.Event]) -> None:
        """Take what ranks reported of their work; an attempt begins anew."""
        for event in events:
            if isinstance(event, ev.WorkSample):
                self._samples[event.rank], self._is_new = event, True
            elif isinstance(event, ev.Attempt):
                self._samples.clear()
                self._reported = None

    def check(self, findings: Iterable[Finding]) -> list[ev.RunNote]:
        """Return a note, if there is one to give that is not among the run's `findings`."""
        before = self._reported
        is_flawed = before is not None and before.flaw
        if not self._is_new or is_flawed or len(self._samples) < self._world_size:
            return []
        self._is_new = False
        finding = compare([self._samples[rank] for rank in sorted(self._samples)])
        if finding is None or finding == before:
            return []
        self._reported = finding
        place = _place(self._samples[0], self._cells())
        shown = replace(finding, text=finding.text.replace(PLACE, place))
        # What ended equally is a flaw, too, and no other note.
        if before is not None or any(known.code in _KNOWN for known in findings):
            shown = replace(shown, text="", remedy="")
        return [ev.RunNote.of(shown)] if shown.text or shown.flaw else []


def compare(samples: list[ev.WorkSample]) -> Finding | None:
    """Return what is wrong with the work of all ranks."""
    if len(samples) < 2 or any(sample.is_excused for sample in samples):
        return None
    trained = [sample.steps > 0 for sample in samples]
    joined = [sample.has_joined for sample in samples]
    if all(trained) and not any(joined):
        return _alone(samples)
    if all(trained) and all(joined):
        return _together(samples)
    if not any(trained) and not any(joined):
        return _read_only(samples)
    return None


def _alone(samples: list[ev.WorkSample]) -> Finding | None:
    """Judge ranks that never formed a process group.

    Only trainings that were the same to their end are wrong for sure: ranks that differ may have
    been meant to, by a seed of their own, say.
    """
    count, first = len(samples), samples[0]
    is_same = _have_same_losses(samples) and _ended_equally(samples)
    asks = any(sample.asks_rank for sample in samples)
    if is_same or (_have_same_losses(samples) and not asks):
        what = (
            f"the {count} ranks never join each other: each trains alone{PLACE}, on the same data"
        )
    elif not asks and all(sample.steps >= LOSSES for sample in samples):
        what = f"the {count} ranks never join each other: each trains a separate model{PLACE}"
    else:
        return None
    if first.library == "lightning":
        remedy = f'Write `Trainer(devices={count}, strategy="ddp")` to train one model on all'
    else:
        remedy = f"To train one model on all of them, {_JOIN}. {_ALONE}"
    flaw = "each rank trained alone" if is_same else ""
    return Finding("not-joined", f"{what}.", remedy, flaw=flaw)


def _together(samples: list[ev.WorkSample]) -> Finding | None:
    """Judge the ranks of a process group."""
    if finding := _apart(samples):
        return finding
    if not _have_same_losses(samples):
        return None
    is_wrapped = all(sample.is_wrapped == "whole" for sample in samples)
    if is_wrapped and not any(sample.batches or sample.gathers for sample in samples):
        # In 16 bits, different batches have one loss, too.
        return None if _have_few_bits(samples[0].losses) else _same_batches(samples, _SEED)
    if not _have_same_batches(samples):
        return None
    if is_wrapped:
        return _same_batches(samples, _SEED if samples[0].splits_data else _SPLIT)
    is_apart = not any(sample.has_exchanged or sample.is_wrapped for sample in samples)
    if is_apart and _ended_equally(samples):
        return Finding(
            "no-exchange",
            f"the {len(samples)} ranks exchange no gradients: each trains alone{PLACE}, on the "
            "same data.",
            f"To train one model on all of them, {_PREPARE}",
            flaw="each rank trained alone",
        )
    return None


def _same_batches(samples: list[ev.WorkSample], remedy: str) -> Finding:
    return Finding(
        "same-batches",
        f"all {len(samples)} ranks train on the same batches{PLACE}, so they learn what one rank "
        "alone would learn.",
        remedy,
        flaw="all ranks trained on the same batches",
    )


def _apart(samples: list[ev.WorkSample]) -> Finding | None:
    """Find ranks of one group whose weights differ in the end, though no code asks for its rank.

    Not before: ranks that average their weights now and then differ in between.
    """
    weights = {sample.weights for sample in samples}
    shapes = {sample.weights.partition(" ")[0] for sample in samples}  # of stages, they differ
    steps = {sample.steps for sample in samples}
    is_meant = any(s.asks_rank or s.is_wrapped or not s.is_last for s in samples)
    if "" in weights or len(weights) == 1 or max(len(shapes), len(steps)) > 1 or is_meant:
        return None
    return Finding(
        "apart",
        f"the {len(samples)} ranks trained different weights{PLACE}, and the notebook gets those "
        "of rank 0.",
        f"To train one model on all of them, {_PREPARE}. {_ALONE}",
        flaw="each rank trained a model of its own",
    )


def _read_only(samples: list[ev.WorkSample]) -> Finding | None:
    """Judge ranks that took no optimizer step."""
    is_over = all(sample.is_last and not sample.asks_rank for sample in samples)
    if not (is_over and _have_same_batches(samples)):
        return None
    return Finding(
        "same-batches",
        f"all {len(samples)} ranks went over the same batches.",
        "To give each rank a different part, write `loader = Accelerator().prepare(loader)`, or "
        "`with PartialState().split_between_processes(items) as part:`",
    )


def _have_same_losses(samples: list[ev.WorkSample]) -> bool:
    """Whether the first losses are equal, though they change from step to step.

    If they hardly change, any data may give them: a last layer of zeros in a warm-up does.
    """
    first = samples[0].losses
    if len(first) < LOSSES or math.isclose(min(first), max(first), rel_tol=1e-3):
        return False
    return all(
        len(sample.losses) == len(first)
        and all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(first, sample.losses, strict=True))
        for sample in samples
    )


def _have_few_bits(losses: tuple[float, ...]) -> bool:
    """Whether all are numbers of bfloat16 or float16, whose significands have up to 11 bits."""
    return all((math.frexp(loss)[0] * 2**11).is_integer() for loss in losses)


def _have_same_batches(samples: list[ev.WorkSample]) -> bool:
    """Whether the first batches are equal, and not all one, as where a test overfits one batch."""
    first = samples[0].batches
    if "" in first or len(set(first)) < 2:
        return False
    return all(sample.batches == first for sample in samples)


def _ended_equally(samples: list[ev.WorkSample]) -> bool:
    ends = {(s.steps, s.losses, s.last_loss, s.batches) for s in samples}
    return all(sample.is_last for sample in samples) and len(ends) == 1


def _place(sample: ev.WorkSample, cells: Mapping[str, str]) -> str:
    """Return the place of a step, as a part of a sentence: `` (In[3], line 7)``."""
    if not sample.file:
        return ""
    return f" ({cells.get(sample.file) or Path(sample.file).name}, line {sample.line})"
