"""Finds what costs a training most, and what to do about it, from what was recorded. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from ....part_api import format_bytes
from .. import limits
from .comparison import WAITS, Comparison
from .texts import format_share, format_time, name_line
from .trace import RankProfile


@dataclass(frozen=True)
class Advice:
    """What costs most, and what to do about it."""

    code: str
    saving: float
    """The share of a step that could be saved at most."""
    evidence: str
    """What was recorded, for people."""
    remedy: str
    """What to do about it."""
    rank: int | None = None
    """The rank that it is about; by default all."""


def give_advice(
    compared: Comparison, samples: Mapping[int, float] | None = None, names: Mapping[str, str] = {}
) -> Advice | None:
    """Return the advice that could save most, if one cause stands out.

    `samples` is how many samples each rank trains on in a step, by rank, if known. `names` are the
    names of cells by their files.
    """
    place = _Places(names)
    found = [
        _late_rank(compared, samples or {}, place),
        _loader(compared, place),
        _communication(compared),
        _python(compared, place),
        _optimizer(compared),
    ]
    worth = [each for each in found if each is not None and each.saving >= limits.LEAST_SAVING]
    return max(worth, key=lambda each: each.saving, default=None)


class _Places:
    """Names lines of the user's code, given as ``file:number``."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def name(self, line: str) -> str:
        """Return ``In[5], line 41``."""
        return name_line(line, self._names)

    def most(self, rank: RankProfile, kind: str) -> str:
        """Return the up to three lines that take most of a kind's time; "" if there are more."""
        lines, found, share = rank.lines.get(kind, {}), list[str](), 0.0
        for line in sorted(lines, key=lines.__getitem__, reverse=True)[:3]:
            found.append(self.name(line))
            share += lines[line]
            if share >= 0.5:
                return " and ".join(found)
        return ""


def _mean_share(compared: Comparison, ranks: Sequence[RankProfile], kind: str) -> float:
    """Return what a part takes of a step; the mean of ranks."""
    return fmean(compared.shares(rank)[kind] for rank in ranks)


def _usual_share(compared: Comparison, ranks: Sequence[RankProfile], kind: str) -> float:
    """Return the same without rare delays, as when something else runs on a host: at most the mean.

    Waits for data come in rounds, if a loader has workers, and are no rare delays.
    """
    usual = fmean(compared.median_share(rank, kind) for rank in ranks)
    return min(usual, _mean_share(compared, ranks, kind))


def _late_rank(compared: Comparison, samples: Mapping[int, float], place: _Places) -> Advice | None:
    """Advise about one rank that the others wait for."""
    late = compared.late_rank
    if late is None or len(compared.ranks) < 2:
        return None
    slow, others = compared.ranks[late], [r for i, r in enumerate(compared.ranks) if i != late]
    saving = _usual_share(compared, others, WAITS)
    share = format_share(_mean_share(compared, others, WAITS))

    def usual_s(kinds: tuple[str, ...]) -> float:
        return median(compared.mean_s(rank, *kinds) for rank in others)

    excess = {
        kinds: compared.mean_s(slow, *kinds) - usual_s(kinds)
        for kinds in (("data",), ("forward", "backward"), ("optimizer",), ("python",))
    }
    kinds = max(excess, key=excess.__getitem__)
    waits_s = fmean(compared.mean_s(rank, WAITS) for rank in others)
    if excess[kinds] < waits_s / 2:  # it comes later for a reason that was not recorded
        return None
    own = format_time(compared.mean_s(slow, *kinds))
    usual = format_time(usual_s(kinds))
    names = _RANK_TEXTS[kinds[0]]
    is_one, name = len(others) == 1, f"rank {slow.rank}"
    the_others = f"rank {others[0].rank}" if is_one else "the other ranks"
    wait, take = ("waits", "takes") if is_one else ("wait", "take")
    text = (
        f"{the_others.capitalize()} {wait} for {name} during {share} of each step. "
        f"{name.capitalize()} takes {own} for {names}, {the_others} {take} {usual}."
    )
    its, theirs = samples.get(slow.rank), [samples[r.rank] for r in others if r.rank in samples]
    if kinds[0] == "data":
        return _late_loader(slow, saving, text, place)
    if its is not None and theirs and its > 1.1 * median(theirs):
        return Advice(
            "unequal-batches",
            saving,
            f"{text} {name.capitalize()} trains on {round(its, 1):,g} samples in a step, "
            f"{the_others} on {round(median(theirs), 1):,g}.",
            "Give all ranks batches of the same size: one `batch_size` with `DistributedSampler` "
            "or `accelerator.prepare(loader)`, or batches with the same number of tokens.",
            slow.rank,
        )
    where = place.most(slow, max(kinds, key=lambda kind: compared.mean_s(slow, kind)))
    at = f" Most of that is in {where}." if where else ""
    gpu = ", a slower or hotter GPU" if slow.has_gpu else ""
    do = (
        f"Look at what {name} does alone in its Python code: logging, saving, metrics."
        if kinds[0] == "python"
        else f"If all ranks have batches of the same size, something slows {name} down: another "
        f"process on its device or cores, fewer threads{gpu}."
    )
    return Advice("slow-rank", saving, f"{text}{at}", do, slow.rank)


def _late_loader(slow: RankProfile, saving: float, text: str, place: _Places) -> Advice:
    """Advise about a rank that others wait for because it waits for its batches."""
    if slow.loader.startswith("_MultiProcessing"):
        # The traces do not tell whether the others' workers are faster, or only ahead.
        do = (
            f"The workers of rank {slow.rank}'s DataLoader are too slow. Those of other ranks may "
            f"be as slow, and have some batches in stock. {_MORE_WORKERS}"
        )
        return Advice("slow-loader", saving, text, do, slow.rank)
    where = place.most(slow, "data")
    at = f" Most of that is in {where}." if where else ""
    return Advice(
        "slow-loader-of-rank",
        saving,
        f"{text}{at}",
        f"Look at what the loader of rank {slow.rank} does alone: larger or more samples, another "
        "disk.",
        slow.rank,
    )


_MORE_WORKERS = (
    "Give the DataLoader more workers (`num_workers`), let them do less for each sample, or "
    "prepare the data once, before the training."
)

_RANK_TEXTS = {
    "data": "its batches",
    "forward": "forward and backward",
    "optimizer": "its optimizer",
    "python": "Python between operations",
}


def _loader(compared: Comparison, place: _Places) -> Advice | None:
    """Advise about a loader that all ranks wait for."""
    saving = _mean_share(compared, compared.ranks, "data")
    slowest = max(compared.ranks, key=lambda rank: compared.shares(rank)["data"])
    text = f"The ranks wait for batches during {format_share(saving)} of each step."
    if slowest.loader.startswith("_MultiProcessing"):
        do = f"The workers of the DataLoader are too slow. {_MORE_WORKERS}"
        return Advice("slow-loader", saving, text, do)
    where = place.most(slowest, "data")
    at = f" Most of it is in {where}." if where else ""
    do = (
        "Let `DataLoader(…, num_workers=2)` prepare batches in the background, or prepare the data "
        "once, before the training."
    )
    return Advice("slow-loader", saving, f"{text}{at}", do)


def _communication(compared: Comparison) -> Advice | None:
    """Advise about collectives that the ranks wait for, beyond waiting for a late rank."""
    if len(compared.ranks) < 2:
        return None
    saving = _usual_share(compared, compared.ranks, "communication")
    share = format_share(_mean_share(compared, compared.ranks, "communication"))
    text = f"The ranks exchange data during {share} of each step, and do nothing else then"
    if not compared.traffic:
        return Advice("exposed-communication", saving, f"{text}.", _LESS)
    top = compared.traffic[0]
    times = f"mostly {top.per_step:.3g} × {top.name}"
    if top.size_bytes and top.bytes_per_s:
        times += f" of {format_bytes(top.size_bytes)}, {format_bytes(top.bytes_per_s)} in a second"
    if top.size_bytes and top.size_bytes < limits.SMALL_MESSAGE_BYTES and top.per_step > 20:
        do = "They are many and small: join them, as DDP does with a larger `bucket_cap_mb`."
    else:
        do = _LESS
    return Advice("exposed-communication", saving, f"{text} ({times}).", do)


_LESS = (
    "Exchange gradients less often, by a larger batch or accumulation with `no_sync()`, as "
    "`accelerator.accumulate` does. Or send less: DDP's `bf16_compress_hook` sends gradients of "
    "float32 in half the bytes."
)


def _python(compared: Comparison, place: _Places) -> Advice | None:
    """Advise about time when only Python runs, and the GPU is idle."""
    saving = _usual_share(compared, compared.ranks, "python")
    worst = max(compared.ranks, key=lambda rank: compared.shares(rank)["python"])
    where = place.most(worst, "python")
    at = f", most of it in {where}" if where else ""
    share = format_share(_mean_share(compared, compared.ranks, "python"))
    if not worst.has_gpu:
        text = (
            f"Only Python code runs during {share} of each step{at}. Torch computes nothing then."
        )
        do = (
            "Move what is not needed in each step out of the loop, or do it with tensors."
            if where
            else "Larger batches make each operation larger; torch.compile joins small ones."
        )
        return Advice("waits-for-python", saving, text, do)
    text = f"The GPUs are idle during {share} of each step, because they wait for Python{at}."
    if worst.syncs:
        times = f"{worst.syncs / len(worst.steps):.3g} times a step"
        at = f", mostly in {place.name(worst.sync_line)}" if worst.sync_line else ""
        do = (
            f"Python waits for the GPU {times}{at} (`.item()`, `.cpu()`, print of a tensor), so it "
            "cannot work ahead: do that every 100 steps, or on the GPU."
        )
    else:
        do = "torch.compile joins small operations; larger batches make each one larger."
    return Advice("waits-for-python", saving, text, do)


def _optimizer(compared: Comparison) -> Advice | None:
    """Advise about an optimizer that takes much of a step; a fused one takes half, or less."""
    saving = _usual_share(compared, compared.ranks, "optimizer")
    names = [op.name for rank in compared.ranks for op in rank.operations]
    if any("_fused_" in name or "multi_tensor" in name for name in names):
        return None
    share = format_share(_mean_share(compared, compared.ranks, "optimizer"))
    text = f"The optimizer takes {share} of each step."
    foreach = any("_foreach_" in name for name in names)
    do = (
        "`fused=True` (for Adam, AdamW, SGD and Adagrad) updates all parameters in one operation"
        + (", which is faster than the present `foreach`." if foreach else ".")
        + " A larger batch, or gradient accumulation, makes fewer steps."
    )
    return Advice("slow-optimizer", saving / 2, text, do)
