"""A model of which each rank trains some layers: the stages of a pipeline, put together."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import weights
from .errors import NbtrainError
from .imports import when_imported

if TYPE_CHECKING:
    import torch


class Stages:
    """Remembers the stages that this rank makes: only they know which layers it trains."""

    def __init__(self) -> None:
        self._made: list[Any] = []
        when_imported("torch.distributed.pipelining.stage", self._watch)

    def _watch(self, module: ModuleType) -> None:
        # Private (seen in torch 2.4 to 2.13): both what the user makes and what `pipeline` makes
        # begin here. Without it, what comes home is what rank 0 has.
        cls: Any = getattr(module, "_PipelineStageBase", None)
        if cls is None:
            return
        begin = cls.__init__

        @functools.wraps(begin)
        def remembered(stage: Any, *args: Any, **kwargs: Any) -> None:
            begin(stage, *args, **kwargs)
            self._made.append(stage)

        cls.__init__ = remembered

    def of(self, module: torch.nn.Module) -> list[Any]:
        """Return the stages in which parts of a model are."""
        if not self._made:
            return []
        ours = set(map(id, weights.named_tensors(module).values()))
        return [stage for stage in self._made if ours & _ids(stage)]


def _ids(stage: Any) -> set[int]:
    return set(map(id, weights.named_tensors(stage.submod).values()))


def put_together(
    stages: list[Any], module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], path: Path
) -> dict[str, torch.Tensor] | None:
    """Return a model's tensors, those of each stage from a rank that has it; None in ranks but 0.

    Every rank of the pipeline has to call it, with what it has of the model, on the CPU. Through
    files beside `path`: a layer may be large, and a process group's objects go by way of the GPU.
    Of several equal pipelines (data parallel), the one of rank 0 does it.
    """
    dist: Any = sys.modules["torch.distributed"]
    group, rank = stages[0].group, dist.get_rank()
    ranks = dist.get_process_group_ranks(group)
    if 0 not in ranks:
        return None
    own = set[int]().union(*map(_ids, stages))
    found = weights.named_tensors(module)
    mine = {name: tensors[name] for name, tensor in found.items() if id(tensor) in own}
    part, trouble = path.with_suffix(f".stage-{rank}"), ""
    try:
        if rank:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            weights.save(weights.of_module(module, mine), part)
    except Exception as error:  # whatever it is: the others wait, and would for ever
        trouble = f"{type(error).__name__}: {error}"
    told: list[Any] = [None] * len(ranks)
    dist.all_gather_object(told, (part.name, trouble), group=group)
    if rank:
        return None
    return {**tensors, **_merged(mine, {path.parent / name: why for name, why in told}, part)}


def _merged(
    mine: dict[str, torch.Tensor], parts: Mapping[Path, str], own: Path
) -> dict[str, torch.Tensor]:
    """Add what other ranks saved, and remove their files.

    Raises `NbtrainError` if a rank could not save, or two have another value of the same tensor.
    """
    from safetensors.torch import load_file

    merged = dict(mine)
    try:
        for part, trouble in parts.items():
            if trouble:
                raise NbtrainError(f"a stage of it could not be saved: {trouble}")
            if part == own:
                continue
            theirs: dict[str, Any] = load_file(part)
            tied = weights.read_about(part)["tied"]
            for name, tensor in {**theirs, **{n: theirs[of] for n, of in tied.items()}}.items():
                if name in merged and not merged[name].equal(tensor):
                    raise NbtrainError(f"`{name}` is in two stages, and differs")
                merged[name] = tensor
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    return merged
