"""A model of which each rank trains some layers: the stages of a pipeline, put together."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import NbtrainError
from ..system.instrumentation import patch
from . import weights
from .weight_reader import WeightReader

if TYPE_CHECKING:
    import torch


class Stages:
    """Remembers the stages that this rank makes: only they know which layers it trains."""

    def __init__(self) -> None:
        self._made: list[Any] = []
        # Private (seen in torch 2.4 to 2.13): the stages that the user makes and those that
        # `pipeline` makes begin here. Without it, only what rank 0 has is returned.
        patch("torch.distributed.pipelining.stage:_PipelineStageBase", "__init__", self._init)

    def _init(self, original: Any, stage: Any, *args: Any, **kwargs: Any) -> None:
        original(stage, *args, **kwargs)
        self._made.append(stage)

    def of(self, module: torch.nn.Module) -> list[Any]:
        """Return the stages in which parts of a model are."""
        if not self._made:
            return []
        tensors = set(map(id, weights.named_tensors(module).values()))
        return [stage for stage in self._made if tensors & _ids(stage)]


def _ids(stage: Any) -> set[int]:
    return set(map(id, weights.named_tensors(stage.submod).values()))


def put_together(
    stages: list[Any],
    module: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    collects: bool,
) -> dict[str, torch.Tensor] | None:
    """Return a model's tensors, each stage from a rank that has it; None if not `collects`.

    Every rank of the pipeline has to call it, with what it has of the model, on the CPU. Through
    files beside `path`: a layer may be large, and a process group's objects go by way of the GPU.
    Of several equal pipelines (data parallel), the one of a rank that `collects` does it. Raises
    `NbtrainError` for what cannot be put together; the stages are in files then, which it names.
    """
    dist: Any = sys.modules["torch.distributed"]
    rank = dist.get_rank()
    if not any(_exchanged(stages[0], collects)):
        return None
    own = set[int]().union(*map(_ids, stages))
    names = weights.named_tensors(module).items()
    stage = {name: tensors[name] for name, tensor in names if id(tensor) in own}
    part = path.with_suffix(f".stage-{rank}")
    trouble = "" if collects else _saved(module, stage, part)
    others = dict(_exchanged(stages[0], (part.name, trouble)))
    others.pop(part.name)
    if not collects:
        return None
    parts = {path.parent / name: reason for name, reason in others.items()}
    try:
        merged = _merged(stage, parts, part)
    except Exception as error:  # whatever it is: what was trained is in the parts, and nowhere else
        reason = str(error)
        if not isinstance(error, NbtrainError):
            reason = f"{type(error).__name__}: {error}"
        if unsaved := _saved(module, stage, part):
            reason += f"; the stage of rank {rank} could not be saved: {unsaved}"
        files = ", ".join(file.name for file in sorted({part, *parts}) if file.exists())
        # Not the whole path: of a run on a cluster the notebook's folder, with copies, is another.
        how = "weights/ of run.folder keeps its stages, for safetensors.torch.load_file()"
        raise NbtrainError(f"{reason}; {how}: {files or 'none'}") from None
    for file in parts:
        file.unlink(missing_ok=True)
    return {**tensors, **merged}


def _exchanged(stage: Any, message: Any) -> list[Any]:
    """Return the message of each rank of a stage's pipeline."""
    torch: Any = sys.modules["torch"]
    dist, here = torch.distributed, contextlib.nullcontext()
    if torch.device(stage.device).type == "cuda":  # NCCL sends from the current one: all from 0
        here = torch.cuda.device(stage.device)
    messages: list[Any] = [None] * dist.get_world_size(stage.group)
    with here:
        dist.all_gather_object(messages, message, group=stage.group)
    return messages


def _saved(module: torch.nn.Module, stage: Mapping[str, torch.Tensor], part: Path) -> str:
    """Save a stage; return the reason why it could not be saved, "" for none."""
    try:
        part.parent.mkdir(mode=0o700, exist_ok=True)
        weights.save(weights.of_module(module, stage), part)
    except Exception as error:  # whatever it is: the others wait, and would for ever
        return f"{type(error).__name__}: {error}"
    return ""


def _merged(
    stage: Mapping[str, torch.Tensor], parts: Mapping[Path, str], own: Path
) -> dict[str, torch.Tensor]:
    """Add to a stage, which would be saved as `own`, what other ranks saved.

    Raises `NbtrainError` if a rank could not save, or not here, or if two have another value of
    the same tensor.
    """
    for part, trouble in parts.items():
        if trouble:
            raise NbtrainError(
                f"one of its pipeline stages could not be saved ({part.name}): {trouble}"
            )
    if not all(part.exists() for part in parts):  # a rank elsewhere has a folder of its own
        raise NbtrainError("its stages are on several nodes; save them in the function")
    merged, source = dict(stage), dict.fromkeys(stage, own)
    for part in parts:
        with WeightReader(part) as file:
            loaded, tied = {name: file.tensor(name) for name in file.names()}, file.about["tied"]
        for name, tensor in {**loaded, **{n: loaded[of] for n, of in tied.items()}}.items():
            if name in merged and not merged[name].equal(tensor):
                files = f"{source[name].name} and {part.name}"
                raise NbtrainError(f"`{name}` is in two stages, but differs between them ({files})")
            merged[name], source[name] = tensor, part
    return merged
