"""Saves a checkpoint after the agreed step, by whatever owns the state of the training.

- A Trainer of transformers saves at the end of the step, into another folder than its own
  checkpoints, which it may delete.
- Lightning saves at the end of the batch.
- Objects that an Accelerator has prepared are saved when the loop fetches its next batch or calls
  backward, because by then it has called the scheduler.
- Of any other loop, the models of the notebook and their optimizers are saved. Only the loop
  knows its position.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ....part_api import (
    Observer,
    RankContext,
    RunFolder,
    hooks,
    patch,
    write_atomically,
)
from ....worker import checkpoints
from .. import kept
from ..orders import SAVED, Decided
from .outer_step import AfterStep


class Keeping(Observer):
    """The checkpoints of a rank. Every rank takes part in each."""

    purpose = "steering"

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._after_step = AfterStep()
        self._due: Path | None = None
        """The folder of an agreed checkpoint that a trainer will save."""
        self._trainer: Any = None
        """The Trainer of transformers that trains."""
        self._fit_loop: weakref.ref[Any] | None = None
        self._accelerator: weakref.ref[Any] | None = None
        """The last one that has prepared something."""
        self._thread = 0
        self._optimizers: list[weakref.ref[Any]] = []
        hooks.add(self, hooks.notify.on_first_step, hooks.notify.on_lightning_epoch)
        patch("transformers.trainer:Trainer", "train", self._train)
        patch("accelerate.accelerator:Accelerator", "prepare", self._prepare)

    def on_first_step(self, optimizer: Any) -> None:
        """Remember an optimizer."""
        self._optimizers.append(weakref.ref(optimizer))

    def on_lightning_epoch(self, fit_loop: Any) -> None:
        """Remember the loop of Lightning that trains."""
        self._fit_loop = weakref.ref(fit_loop)

    def _prepare(self, original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        """Remember an Accelerator that prepares something."""
        self._accelerator = weakref.ref(accelerator)
        return original(accelerator, *args, **kwargs)

    def _train(self, original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Train by a Trainer that can be made to save a checkpoint."""
        outer, self._trainer = self._trainer, trainer
        callback = _make_callback(sys.modules["transformers"].TrainerCallback, self)
        trainer.add_callback(callback)
        try:
            return original(trainer, *args, **kwargs)
        finally:
            self._trainer = outer
            trainer.remove_callback(callback)
            callback.restore(trainer.args)
            if self._due is not None:
                _report(self._due, "the training ended before its Trainer could save it")
                self._due = None

    def find_refusal(self) -> str:
        """Return why no checkpoint can be saved, for people; "" if one can."""
        if refusal := self._context.checkpoint_refusal:
            return refusal
        if self._due is not None:
            return "the last checkpoint is still being saved"
        sender = self._context.sender
        if self._trainer is not None or self._find_lightning() or self._find_accelerator():
            return ""
        if sender is not None and sender.returns_models:
            return ""
        return (
            "nbtrain finds nothing to save. Give the function the model as an argument, or train "
            "by Accelerate, transformers or Lightning"
        )

    def _find_lightning(self) -> Any:
        """Return the loop of Lightning that trains; None without one."""
        fit_loop = self._fit_loop() if self._fit_loop is not None else None
        return fit_loop if fit_loop is not None and fit_loop.trainer.training else None

    def _find_accelerator(self) -> Any:
        """Return the Accelerator that has prepared a model and its optimizer; None without one."""
        found = self._accelerator() if self._accelerator is not None else None
        return found if found is not None and found._models and found._optimizers else None

    def apply(self, decided: Decided) -> None:
        """Save a checkpoint of the present step, as soon as its owner can."""
        folder = kept.folder_of(self._context.job.folder, decided.step)
        with _reporting(folder):
            checkpoints.begin(folder)
            self._thread = threading.get_ident()
            if self._trainer is not None:
                self._due = folder
            elif fit_loop := self._find_lightning():
                callback = _make_lightning_callback(fit_loop, folder)
                fit_loop.trainer.callbacks.append(callback)
            elif self._find_accelerator():
                self._due = folder
                hooks.add(self, *_NEXT)
            else:
                self._after_step.call(partial(self._copy, folder))

    @property
    def due(self) -> Path | None:
        """The folder of the checkpoint that the Trainer of transformers should save."""
        return self._due if self._trainer is not None else None

    def complete(self, folder: Path) -> None:
        """Take note that the checkpoint that was due is saved."""
        self._due = None
        with _reporting(folder):
            checkpoints.mark_done(folder)

    def on_fetch_or_backward(self, fetch: bool) -> None:
        """Save what the Accelerator has prepared: the scheduler has been called by now."""
        if threading.get_ident() == self._thread:  # not in a thread that reads ahead
            self._save_prepared()

    def on_training_end(self, wait: bool) -> None:
        """Save it after the last step, too."""
        if wait:  # not after a failure
            self._save_prepared()

    def _save_prepared(self) -> None:
        """Save what the Accelerator has prepared, if that is due."""
        folder, self._due = self._due, None
        accelerator = self._find_accelerator()
        if folder is None or accelerator is None:
            return
        hooks.drop(self, *_NEXT)
        own, loaders = accelerator.project_configuration, accelerator._dataloaders
        # This may name the folder.
        accelerator.project_configuration = replace(own, automatic_checkpoint_naming=False)
        # Of a TPU, Accelerate 1.15 cannot save its loaders, or load what safetensors saves.
        accelerator._dataloaders = [each for each in loaders if hasattr(each, "dataset")]
        try:
            with _reporting(folder):
                is_tpu = accelerator.device.type == "xla"
                there = str(folder / kept.ACCELERATOR)
                accelerator.save_state(there, safe_serialization=not is_tpu)
                checkpoints.mark_done(folder)
        finally:
            accelerator.project_configuration, accelerator._dataloaders = own, loaders

    def _copy(self, folder: Path) -> None:
        """Copy models and optimizers. A thread saves the copies while the ranks train."""
        with _reporting(folder):
            sender = self._context.sender
            assert sender is not None
            copies, left_out = sender.copy_models()
            if self._context.global_rank:
                checkpoints.mark_done(folder)
                return
            states = []
            optimizers = [o for reference in self._optimizers if (o := reference()) is not None]
            is_spread = any(type(each).__name__ == _SPREAD for each in optimizers)
            for optimizer in optimizers:
                can_be_copied = not is_spread and sender.has_whole(_parameters(optimizer))
                states.append(_copy_state(optimizer) if can_be_copied else b"")
                if not states[-1]:
                    name = type(optimizer).__name__
                    left_out[name] = "it is sharded, or trains more than the notebook's models"

            def save() -> None:
                with _reporting(folder):
                    there = RunFolder(folder / kept.MODELS)
                    there.path.mkdir(exist_ok=True)
                    missing = {**left_out, **sender.save_copies(copies, there)}
                    for number, state in enumerate(states):
                        if state:
                            write_atomically(kept.optimizer_file(there.path, number), state)
                    write_atomically(there.path / SAVED, json.dumps(missing).encode())
                    checkpoints.mark_done(folder)

            _start_thread(save)


_NEXT = (
    hooks.notify.on_fetch_or_backward,
    hooks.notify.on_batch,  # these two patch what the first one needs
    hooks.notify.on_backward,
    hooks.notify.on_training_end,
)
"""What comes after a step and the call of its scheduler."""


_SPREAD = "ZeroRedundancyOptimizer"
"""Each rank has a part of its state, in an inner optimizer that makes steps, too."""


def _parameters(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _copy_state(optimizer: Any) -> bytes:
    """Return the state of an optimizer of torch as `torch.save` writes it; b"" for another one."""
    torch, buffer = sys.modules["torch"], io.BytesIO()
    if isinstance(optimizer, torch.optim.Optimizer):
        torch.save(optimizer.state_dict(), buffer)
    return buffer.getvalue()


def _start_thread(function: Callable[[], None]) -> None:
    try:
        threading.Thread(target=function, name="nbtrain-keep").start()
    except RuntimeError:  # this process cannot start a thread
        function()


@contextlib.contextmanager
def _reporting(folder: Path) -> Iterator[None]:
    """Report an exception of the block, and swallow it: the ranks train on."""
    try:
        yield
    except Exception as error:  # a full disk, or what a trainer cannot save
        _report(folder, f"{type(error).__name__}: {error}")


def _report(folder: Path, reason: str) -> None:
    """Leave why there is no checkpoint, for the notebook: the reason of the first rank that fails.

    Deletes what was saved of it, so that there is room on a full disk.
    """
    file = kept.failure_file(folder, checkpoints.attempt())
    for _ in range(2):  # again, once there is room
        try:
            with open(file, "x", encoding="utf-8") as opened:
                opened.write(reason)
        except FileExistsError:  # another rank was first: without the folder, all ranks fail
            pass
        except OSError:
            file.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _make_callback(base: Any, keeping: Keeping) -> Any:
    """Return a callback of transformers that has a Trainer save the checkpoint that is due."""

    class KeepCheckpoint(base):  # type: ignore[misc]
        folder: Path | None = None
        own: tuple[Any, Any] = "", False

        def on_step_end(self, args: Any, _state: Any, control: Any, **_: Any) -> None:
            """Have the Trainer save at the end of this step, if it saves nothing else then."""
            self.restore(args)  # an evaluation may decide that nothing is saved
            # A checkpoint of the Trainer's own goes into its folder; ours is of the next step.
            if keeping.due is None or control.should_save or self.may_not_save(args, control):
                return
            self.folder, self.own = keeping.due, (args.output_dir, args.save_only_model)
            args.output_dir, args.save_only_model = str(self.folder), False
            control.should_save = True

        def may_not_save(self, args: Any, control: Any) -> bool:
            """Return whether an evaluation decides whether this step is saved, and where."""
            strategy = getattr(args.save_strategy, "value", args.save_strategy)
            return bool(control.should_evaluate) and strategy == "best"

        def on_save(self, args: Any, _state: Any, _control: Any, **_: Any) -> None:
            """Take note that the checkpoint is saved."""
            folder = self.folder
            if folder is not None:
                self.restore(args)
                keeping.complete(folder)

        def restore(self, args: Any) -> None:
            """Give the Trainer its own folder back."""
            if self.folder is not None:
                args.output_dir, args.save_only_model = self.own
                self.folder = None

    return KeepCheckpoint()


def _make_lightning_callback(fit_loop: Any, folder: Path) -> Any:
    """Return a callback of Lightning that saves a checkpoint at the end of the batch, once."""
    package = type(fit_loop).__module__.partition(".loops.")[0]  # one of two
    base: Any = sys.modules[package].Callback

    class KeepCheckpoint(base):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            """Save, and remove this callback."""
            trainer.callbacks.remove(self)
            with _reporting(folder):
                trainer.save_checkpoint(folder / kept.LIGHTNING)
                checkpoints.mark_done(folder)

    return KeepCheckpoint()
