"""Starts the training of a rank from a checkpoint: that of an earlier run, or any other.

The function may load it by itself: `nbtrain.last_checkpoint` returns it. Else a Trainer of
transformers or Lightning continues there, if it is a checkpoint of one. Of what an Accelerator or a
bare loop has saved, the weights and the states of the optimizers are loaded: the loop begins at its
start, and so do its learning rate and its schedule.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....part_api import (
    Finding,
    NbtrainError,
    RankContext,
    RunFolder,
    patch,
    undo_later,
    when_imported,
)
from ....part_api import events as ev
from ....planning.task_values import is_model, synced_objects
from ....transport.weights.receiver import load_all
from ....worker import checkpoints
from .. import kept
from ..orders import SAVED
from ..settings import SETTINGS

_BEGINS_AT_START = Finding(
    "loop-begins-at-start",
    "The model and the optimizers are those of the checkpoint. The loop, its learning rate and its "
    "schedule begin at their start, because only your code knows where the loop was.",
    "To continue there, load `nbtrain.last_checkpoint()` in the function.",
)


class Starting:
    """Loads the checkpoint that a run starts from, once."""

    def __init__(self, context: RankContext, path: str) -> None:
        self._context, self._path = context, Path(path)
        self._is_loaded = False
        self._begins_at_start = False
        """Whether the function's loop does, unless the function itself loads the checkpoint."""
        self._seen: dict[int, Any] = {}
        """The optimizers, by their ids, in the order of their first steps."""
        self._kinds: list[str] = []
        """The classes of the optimizers in the checkpoint of a bare loop."""
        self._depth = 0
        """How many calls of an Accelerator that prepares something are within each other."""
        patch("transformers.trainer:Trainer", "train", self._train)
        for package in ("lightning.pytorch", "pytorch_lightning"):
            patch(f"{package}.trainer.trainer:Trainer", "fit", self._fit)
        for name in ("prepare", "prepare_model", "prepare_optimizer"):
            patch("accelerate.accelerator:Accelerator", name, self._prepare)
        when_imported("torch.optim.optimizer", self._watch_steps)

    def _watch_steps(self, module: Any) -> None:
        undo_later(module.register_optimizer_step_pre_hook(self._before_step).remove)

    def load_models(self) -> None:
        """Load the models of a bare loop, if the function gets models with these names.

        Raises `NbtrainError` if the weights do not fit, or this host has no such checkpoint.
        """
        if not self._path.exists():
            raise NbtrainError(
                f"start_from: {self._path} is not there. On several hosts, the checkpoint must be "
                "in a folder that all of them see"
            )
        if self._kind != "models":
            return
        objects = synced_objects(self._context.job.plan)
        models = {name: value for name, value in objects.items() if is_model(value)}
        folder = RunFolder(self._path)
        saved = folder.list_weights()
        if len(saved) == len(models) == 1:  # also under another name
            models = {saved[0]: next(iter(models.values()))}
        if not saved or not {*saved} <= {*models}:
            return  # the function may load it
        self._kinds = json.loads((self._path / SAVED).read_text())[1]
        with _explain_errors(self._path):
            load_all(folder, {name: models[name] for name in saved})
        self._is_loaded = self._begins_at_start = True

    @property
    def _kind(self) -> str:
        """The library that has saved the checkpoint; "" if it is unknown."""
        path = self._path
        if (path / "trainer_state.json").exists():
            return "transformers"
        if path.suffix == ".ckpt":
            return "lightning"
        if (path / "weights").is_dir():
            return "models"
        is_accelerate = any(path.glob("random_states_*.pkl")) if path.is_dir() else False
        return "accelerate" if is_accelerate else ""

    def _take(self, kind: str) -> bool:
        """Return whether a library should load the checkpoint now: it is the first to train."""
        wanted = kind == self._kind and not self._is_loaded and not self._context.start_is_read
        self._is_loaded |= wanted
        return wanted

    def _train(self, original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Train by a Trainer of transformers from the checkpoint, if the code names no other.

        In a later attempt, True is its own last checkpoint, if it has saved one.
        """
        given = args[0] if args else kwargs.get("resume_from_checkpoint")
        if given is True and checkpoints.attempt() > 1:
            module = sys.modules["transformers.trainer_utils"]
            if os.path.isdir(trainer.args.output_dir):
                given = module.get_last_checkpoint(trainer.args.output_dir) or True
        if given in (None, False, True):
            given = str(self._path) if self._take("transformers") else given
        else:
            self._is_loaded = True  # the code says where it begins
        kwargs.pop("resume_from_checkpoint", None)
        return original(trainer, given, *args[1:], **kwargs)

    def _fit(self, original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Train by Lightning from the checkpoint, if the code names no other."""
        given = args[4] if len(args) > 4 else kwargs.get("ckpt_path")
        if given is not None:
            self._is_loaded = True  # the code says where it begins
        elif self._take("lightning"):
            args, kwargs = args[:4], {**kwargs, "ckpt_path": str(self._path)}
        return original(trainer, *args, **kwargs)

    def _prepare(self, original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare objects, and load what the checkpoint has of models and optimizers."""
        self._depth += 1
        try:
            prepared = original(accelerator, *args, **kwargs)
        finally:
            self._depth -= 1
        has_all = bool(accelerator._models) and not self._depth
        for pattern, there in _PREPARED:
            has_all &= _count(self._path, pattern) <= len(getattr(accelerator, there))
        if has_all and self._take("accelerate"):
            with _explain_errors(self._path), _hide_position(accelerator, self._path):
                accelerator.load_state(str(self._path))
            self._begins_at_start = True
        return prepared

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """Load the state of an optimizer of a bare loop before its first step.

        Raises `NbtrainError` at the first step if nothing has loaded the checkpoint.
        """
        if id(optimizer) in self._seen:
            return
        number = len(self._seen)
        self._seen[id(optimizer)] = optimizer
        if not (self._is_loaded or self._context.start_is_read):
            raise NbtrainError(self._not_loaded)
        if self._context.start_is_read or not self._begins_at_start:
            return
        if number == 0:
            self._note(_BEGINS_AT_START)
        file = kept.optimizer_file(self._path, number)
        name = type(optimizer).__name__
        if self._kind == "models" and file.exists():
            if self._kinds[number] != name:
                self._note(_make_other_optimizer(self._kinds[number], name))
                return
            state = sys.modules["torch"].load(file, map_location="cpu", weights_only=True)
            with _explain_errors(self._path), _own_settings([optimizer]):
                optimizer.load_state_dict(state)

    def _note(self, finding: Finding) -> None:
        """Write a note, once in all ranks."""
        if self._context.global_rank == 0:
            self._context.writer.write(ev.RunNote.of(finding))

    def check_is_loaded(self) -> None:
        """Raise `NbtrainError` if the task has ended, and nothing has loaded the checkpoint."""
        if not (self._is_loaded or self._context.start_is_read):
            raise NbtrainError(self._not_loaded)

    @property
    def _not_loaded(self) -> str:
        return (
            f"start_from: nothing has loaded {self._path}. Load `nbtrain.last_checkpoint()` in the "
            "function, before the first step"
        )


_PREPARED = (
    (re.compile(r"(?:pytorch_)?model(?:_fsdp)?(?:_(\d+))?(?:-\d+-of-\d+)?(?:\..*)?"), "_models"),
    (re.compile(r"optimizer(?:_(\d+))?(?:\..*)?"), "_optimizers"),
)
"""What Accelerate calls files and folders of models and of optimizers, the second one with 1."""


def _count(folder: Path, name: re.Pattern[str]) -> int:
    """Return how many objects of a kind a checkpoint of Accelerate has."""
    found = [match for path in folder.iterdir() if (match := name.fullmatch(path.name))]
    return max((int(match[1] or 0) + 1 for match in found), default=0)


def _make_other_optimizer(saved: str, name: str) -> Finding:
    """Return a note that the state of an optimizer cannot be used."""
    return Finding(
        "other-optimizer",
        f"The checkpoint has the state of {saved}, so {name} begins without one.",
        "",
    )


@contextmanager
def _explain_errors(path: Path) -> Iterator[None]:
    """Raise an exception of the block as an `NbtrainError` that names the checkpoint."""
    try:
        yield
    except Exception as error:
        raise NbtrainError(f"start_from: {path} could not be loaded: {error}") from error


@contextmanager
def _own_settings(optimizers: list[Any]) -> Iterator[None]:
    """Keep the settings that the code gave the groups of optimizers, such as the learning rate.

    Other values in the groups are of the optimizer itself, as those of Prodigy.
    """
    groups = [dict(group) for optimizer in optimizers for group in optimizer.param_groups]
    yield
    now = (group for optimizer in optimizers for group in optimizer.param_groups)
    for group, before in zip(now, groups, strict=True):
        group.update({key: value for key, value in before.items() if key in _OWN})


_OWN = {
    *SETTINGS,
    "initial_lr",
    *("max_lr", "min_lr", "max_momentum", "base_momentum"),  # of torch's cyclic schedules
}


class _Ignored:
    """Stands for an object that is not loaded."""

    def load_state_dict(self, state: Any) -> None:
        """Do nothing."""


@contextmanager
def _hide_position(accelerator: Any, path: Path) -> Iterator[None]:
    """Have ``load_state`` load only models, optimizers and the gradient scaler."""
    ignored = [_Ignored() for _ in path.glob("custom_checkpoint_*.pkl")]
    hidden: dict[str, Any] = {"_schedulers": [], "_dataloaders": [], "_custom_objects": ignored}
    own = {name: getattr(accelerator, name) for name in hidden}
    step = accelerator.step
    for name, value in hidden.items():
        setattr(accelerator, name, value)
    try:
        with _own_settings(accelerator._optimizers):
            yield
    finally:
        for name, value in own.items():
            setattr(accelerator, name, value)
        accelerator.step = step
