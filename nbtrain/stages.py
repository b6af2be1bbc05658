"""A model of which each rank trains some layers: the stages of a pipeline, put together."""

from __future__ import annotations

import contextlib
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
    stages: list[Any],
    module: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    is_home: bool,
) -> dict[str, torch.Tensor] | None:
    """Return a model's tensors, those of each stage from a rank that has it; None if not `is_home`.

    Every rank of the pipeline has to call it, with what it has of the model, on the CPU. Through
    files beside `path`: a layer may be large, and a process group's objects go by way of the GPU.
    Of several equal pipelines (data parallel), the one of a rank that `is_home` does it. Raises
    `NbtrainError` for what cannot be put together; the stages are in files then, which it names.
    """
    dist: Any = sys.modules["torch.distributed"]
    rank = dist.get_rank()
    if not any(_exchanged(stages[0], is_home)):
        return None
    own = set[int]().union(*map(_ids, stages))
    found = weights.named_tensors(module)
    mine = {name: tensors[name] for name, tensor in found.items() if id(tensor) in own}
    part = path.with_suffix(f".stage-{rank}")
    trouble = "" if is_home else _saved(module, mine, part)
    others = [told for told in _exchanged(stages[0], (part.name, trouble)) if told[0] != part.name]
    if not is_home:
        return None
    parts = {path.parent / name: why for name, why in others}
    try:
        merged = _merged(mine, parts, part)
    except Exception as error:  # whatever it is: what was trained is in the parts, and nowhere else
        why = str(error) if isinstance(error, NbtrainError) else f"{type(error).__name__}: {error}"
        if unsaved := _saved(module, mine, part):
            why += f"; the stage of rank {rank} could not be saved: {unsaved}"
        kept = ", ".join(file.name for file in sorted({part, *parts}) if file.exists())
        # Not the whole path: of a run on a cluster the notebook's folder, with copies, is another.
        how = "weights/ of run.folder keeps its stages, for safetensors.torch.load_file()"
        raise NbtrainError(f"{why}; {how}: {kept or 'none'}") from None
    for file in parts:
        file.unlink(missing_ok=True)
    return {**tensors, **merged}


def _exchanged(stage: Any, mine: Any) -> list[Any]:
    """Return what each rank of a stage's pipeline has to tell."""
    torch: Any = sys.modules["torch"]
    dist, here = torch.distributed, contextlib.nullcontext()
    if torch.device(stage.device).type == "cuda":  # NCCL sends from the current one: all from 0
        here = torch.cuda.device(stage.device)
    told: list[Any] = [None] * dist.get_world_size(stage.group)
    with here:
        dist.all_gather_object(told, mine, group=stage.group)
    return told


def _saved(module: torch.nn.Module, mine: Mapping[str, torch.Tensor], part: Path) -> str:
    """Save a stage; return what was in the way, "" for nothing."""
    try:
        part.parent.mkdir(mode=0o700, exist_ok=True)
        weights.save(weights.of_module(module, mine), part)
    except Exception as error:  # whatever it is: the others wait, and would for ever
        return f"{type(error).__name__}: {error}"
    return ""


def _merged(
    mine: Mapping[str, torch.Tensor], parts: Mapping[Path, str], own: Path
) -> dict[str, torch.Tensor]:
    """Add to a stage, which would be saved as `own`, what other ranks saved.

    Raises `NbtrainError` if a rank could not save, or not here, or if two have another value of
    the same tensor.
    """
    from safetensors.torch import load_file

    for part, trouble in parts.items():
        if trouble:
            raise NbtrainError(f"a stage of it could not be saved as {part.name}: {trouble}")
    if not all(part.exists() for part in parts):  # a rank elsewhere has a folder of its own
        raise NbtrainError("its stages are on several nodes: save them in the function")
    merged, source = dict(mine), dict.fromkeys(mine, own)
    for part in parts:
        theirs: dict[str, Any] = load_file(part)
        tied = weights.read_about(part)["tied"]
        for name, tensor in {**theirs, **{n: theirs[of] for n, of in tied.items()}}.items():
            if name in merged and not merged[name].equal(tensor):
                where = f"{source[name].name} and {part.name}"
                raise NbtrainError(f"`{name}` is in two stages, and differs ({where})")
            merged[name], source[name] = tensor, part
    return merged
