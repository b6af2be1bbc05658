"""Compares what the ranks train on, to find ranks that do the same work or train alone.

A finding must be certain: with tensor parallelism, all ranks need the same data, and ranks may
train alone on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from ..findings import Finding
from ..tracking import events as ev
from .limits import MIN_COMPARED_LOSSES

PLACE = "{place}"
"""Replaced, in the text of a finding, by the place of the optimizer's step."""

_LINT_CODES = frozenset({"migrate", "prepare"})
"""The rules of lint that may have found the same in the code, before the run."""

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
    """Compares the ranks of a run, and reports each finding once."""

    def __init__(self, world_size: int, cells: Callable[[], Mapping[str, str]]) -> None:
        self._world_size, self._cells = world_size, cells
        self._samples: dict[int, ev.WorkSample] = {}
        self._is_new = False
        self._reported: Finding | None = None

    def observe(self, events: Iterable[ev.Event]) -> None:
        """Take the ranks' samples from the events of a run. A new attempt forgets earlier ones."""
        for event in events:
            if isinstance(event, ev.WorkSample):
                self._samples[event.rank], self._is_new = event, True
            elif isinstance(event, ev.Attempt):
                self._samples.clear()
                self._reported = None

    def check(self, findings: Iterable[Finding]) -> list[ev.RunNote]:
        """Return a list with the note on a new finding, or an empty list.

        The text is empty after an earlier finding, and if lint's `findings` include one about the
        same: such a note only marks the result as wrong, and is left out where it is right. Empty
        until every rank has sent a sample, without a sample since the last call, and after a
        finding with a flaw.
        """
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
        if before is not None or any(known.code in _LINT_CODES for known in findings):
            shown = replace(shown, text="", remedy="")
        return [ev.RunNote.of(shown)] if shown.text or shown.flaw else []


def compare(samples: list[ev.WorkSample]) -> Finding | None:
    """Return what is wrong with the work of all ranks, if anything is.

    Fewer than two ranks, ranks that are excused, and ranks of which only some have trained or
    joined are not compared: they may do different things on purpose.
    """
    if len(samples) < 2 or any(sample.is_excused for sample in samples):
        return None
    trained = [sample.steps > 0 for sample in samples]
    joined = [sample.has_joined for sample in samples]
    if all(trained) and not any(joined):
        return _judge_separate_ranks(samples)
    if all(trained) and all(joined):
        return _judge_process_group(samples)
    if not any(trained) and not any(joined):
        return _judge_ranks_without_steps(samples)
    return None


def _judge_separate_ranks(samples: list[ev.WorkSample]) -> Finding | None:
    """Return what is wrong with ranks that never formed a process group, if anything is.

    Only ranks that trained equally to the end mark the run as flawed. None for ranks that differ
    and use their rank, or have few steps: they may be meant to.
    """
    count, first = len(samples), samples[0]
    is_same = _have_same_losses(samples) and _have_same_end(samples)
    asks = any(sample.asks_rank for sample in samples)
    if is_same or (_have_same_losses(samples) and not asks):
        what = (
            f"the {count} ranks never join each other: each trains alone{PLACE}, on the same data"
        )
    elif not asks and all(sample.steps >= MIN_COMPARED_LOSSES for sample in samples):
        what = f"the {count} ranks never join each other: each trains a separate model{PLACE}"
    else:
        return None
    if first.library == "lightning":
        remedy = f'Write `Trainer(devices={count}, strategy="ddp")` to train one model on all'
    else:
        remedy = f"To train one model on all of them, {_JOIN}. {_ALONE}"
    flaw = "each rank trained alone" if is_same else ""
    return Finding("not-joined", f"{what}.", remedy, flaw=flaw)


def _judge_process_group(samples: list[ev.WorkSample]) -> Finding | None:
    """Return what is wrong with the ranks of a process group, if anything is.

    In this order: different final weights; the same batches, though the model is wrapped for data
    parallelism; and ranks that exchange nothing and end equally.
    """
    if finding := _find_different_weights(samples):
        return finding
    if not _have_same_losses(samples):
        return None
    is_wrapped = all(sample.is_wrapped == "whole" for sample in samples)
    if is_wrapped and not any(sample.batches or sample.gathers for sample in samples):
        # In 16 bits, different batches may have equal losses.
        return None if _are_16_bit_numbers(samples[0].losses) else _same_batches(samples, _SEED)
    if not _have_same_batches(samples):
        return None
    if is_wrapped:
        return _same_batches(samples, _SEED if samples[0].splits_data else _SPLIT)
    is_apart = not any(sample.has_exchanged or sample.is_wrapped for sample in samples)
    if is_apart and _have_same_end(samples):
        return Finding(
            "no-exchange",
            f"the {len(samples)} ranks exchange no gradients: each trains alone{PLACE}, on the "
            "same data.",
            f"To train one model on all of them, {_PREPARE}",
            flaw="each rank trained alone",
        )
    return None


def _same_batches(samples: list[ev.WorkSample], remedy: str) -> Finding:
    """Return the finding that all ranks train on the same batches."""
    return Finding(
        "same-batches",
        f"all {len(samples)} ranks train on the same batches{PLACE}, so they learn what one rank "
        "alone would learn.",
        remedy,
        flaw="all ranks trained on the same batches",
    )


def _find_different_weights(samples: list[ev.WorkSample]) -> Finding | None:
    """Return a finding if ranks of a process group ended with different weights, else None.

    No finding if a rank has not ended, its weights are unknown, its code uses its rank or wraps the
    model, or if weights differ in shape or ranks in their steps. The caller checks that the ranks
    are in a process group.
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


def _judge_ranks_without_steps(samples: list[ev.WorkSample]) -> Finding | None:
    """Return what is wrong with ranks that took no optimizer step, as in an evaluation.

    They are only compared when all have ended, and if their code does not use its rank.
    """
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
    """Return whether all ranks have the same losses at the same steps, and not one loss throughout.

    Equal is within 1e-5. Losses that differ by less than 0.1 % over all steps count as one loss.
    """
    first = samples[0].losses
    if len(first) < MIN_COMPARED_LOSSES or math.isclose(min(first), max(first), rel_tol=1e-3):
        return False
    return all(
        len(sample.losses) == len(first)
        and all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(first, sample.losses, strict=True))
        for sample in samples
    )


def _are_16_bit_numbers(losses: tuple[float, ...]) -> bool:
    """Return whether all numbers fit bfloat16 or float16, with significands of up to 11 bits."""
    return all((math.frexp(loss)[0] * 2**11).is_integer() for loss in losses)


def _have_same_batches(samples: list[ev.WorkSample]) -> bool:
    """Return whether all ranks have the same first batches, and these are not all one batch.

    A test that overfits one batch may have it on all ranks. False also without two batches, or with
    a batch that could not be read.
    """
    first = samples[0].batches
    if "" in first or len(set(first)) < 2:
        return False
    return all(sample.batches == first for sample in samples)


def _have_same_end(samples: list[ev.WorkSample]) -> bool:
    """Return whether all ranks have ended, with equal steps, losses and batches."""
    ends = {(s.steps, s.losses, s.last_loss, s.batches) for s in samples}
    return all(sample.is_last for sample in samples) and len(ends) == 1


def _place(sample: ev.WorkSample, cells: Mapping[str, str]) -> str:
    """Return the place of a step for a sentence, `` (In[3], line 7)``; "" without a file."""
    if not sample.file:
        return ""
    return f" ({cells.get(sample.file) or Path(sample.file).name}, line {sample.line})"
