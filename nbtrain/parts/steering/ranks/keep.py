"""Saves a checkpoint after the agreed step, by whatever owns the state of the training.

- A Trainer of transformers saves at the end of the step, into another folder than its own
  checkpoints, which it may delete.
- Lightning saves at the end of the batch.
- Objects that an Accelerator has prepared are saved when the loop fetches its next batch, calls the
  model or calls backward, because by then it has called the scheduler.
- Of any other loop, the models of the notebook and their optimizers are saved. Only the loop knows
  its position.
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
    NbtrainError,
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
        self.due: Path | None = None
        """The folder of an agreed checkpoint that is saved a little later."""
        self._trainer: Any = None
        """The Trainer of transformers that trains."""
        self._lightning = _Lightning()
        self._accelerators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._accelerator: Any = None
        """The one that saves what is due."""
        self._undo: list[Callable[[], None]] = []
        self._thread = 0
        self._optimizers: list[weakref.ref[Any]] = []
        hooks.add(self, hooks.notify.on_first_step)
        hooks.add(self._lightning)
        patch("transformers.trainer:Trainer", "train", self._train)
        for name in ("prepare", "prepare_model", "prepare_optimizer"):
            patch("accelerate.accelerator:Accelerator", name, self._prepare)

    def on_first_step(self, optimizer: Any) -> None:
        """Remember an optimizer."""
        self._optimizers.append(weakref.ref(optimizer))

    def _prepare(self, original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        """Remember an Accelerator that prepares something."""
        self._accelerators.add(accelerator)
        return original(accelerator, *args, **kwargs)

    def _train(self, original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Train by a Trainer that can be made to save a checkpoint."""
        outer, self._trainer = self._trainer, trainer
        callback = _make_callback(self)
        trainer.add_callback(callback)
        own = trainer._save_checkpoint
        trainer._save_checkpoint = partial(callback.save, trainer, own)
        try:
            return original(trainer, *args, **kwargs)
        finally:
            self._trainer = outer
            del trainer._save_checkpoint
            trainer.remove_callback(callback)
            if self.due is not None:
                _report(self.due, "the training ended before its Trainer could save it")
                self.due = None

    def find_refusal(self, optimizer: Any) -> str:
        """Return why no checkpoint can be saved, for people; "" if one can.

        `optimizer` has made the present step.
        """
        if refusal := self._context.checkpoint_refusal:
            return refusal
        if self.due is not None:
            return "the last checkpoint is still being saved"
        sender = self._context.sender
        has_owner = self._trainer is not None or self._lightning.trains
        if has_owner or self._find_accelerator(optimizer) is not None:
            return ""
        if sender is not None and sender.returns_models:
            return ""
        return (
            "nbtrain finds nothing to save. Give the function the model as an argument, or train "
            "by Accelerate, transformers or Lightning"
        )

    def _find_accelerator(self, optimizer: Any) -> Any:
        """Return the Accelerator that has prepared an optimizer and a model; None without one."""
        for accelerator in self._accelerators:
            for each in accelerator._optimizers if accelerator._models else ():
                while each is not None:  # Accelerate's wrapper, and DeepSpeed's
                    if each is optimizer:
                        return accelerator
                    each = getattr(each, "optimizer", None)
        return None

    def apply(self, decided: Decided, optimizer: Any) -> None:
        """Save a checkpoint of the present step, as soon as its owner can."""
        folder = kept.folder_of(self._context.job.folder, decided.step)
        with _reporting(folder):
            checkpoints.begin(folder)
            self._accelerator = self._find_accelerator(optimizer)
            if self._trainer is not None:
                self.due = folder
            elif self._lightning.trains:
                self._lightning.save_later(folder)
            elif self._accelerator is not None:
                self.due, self._thread = folder, threading.get_ident()
                hooks.add(self, *_NEXT)
                for model in self._accelerator._models:
                    hook = model.register_forward_pre_hook(self._before_forward, prepend=True)
                    self._undo.append(hook.remove)
            else:
                self._after_step.call(partial(self._copy, folder))

    def complete(self, folder: Path) -> None:
        """Take note that the checkpoint that was due is saved."""
        self.due = None
        with _reporting(folder):
            checkpoints.mark_done(folder)

    def on_fetch_or_backward(self, fetch: bool) -> None:
        """Save what the Accelerator has prepared: the scheduler has been called by now."""
        if threading.get_ident() == self._thread:  # not in a thread that reads ahead
            self._save_prepared()

    def _before_forward(self, *_: Any) -> None:
        """Save it before a BatchNorm counts another batch."""
        self._save_prepared()

    def on_training_end(self, wait: bool) -> None:
        """Save it after the last step, too."""
        if wait:  # not after a failure
            self._save_prepared()

    def _save_prepared(self) -> None:
        """Save what the Accelerator has prepared, if that is due."""
        folder, self.due = self.due, None
        accelerator, self._accelerator = self._accelerator, None
        if folder is None or accelerator is None:
            return
        hooks.drop(self, *_NEXT)
        while self._undo:
            self._undo.pop()()
        own, loaders = accelerator.project_configuration, accelerator._dataloaders
        # This may name the folder.
        accelerator.project_configuration = replace(own, automatic_checkpoint_naming=False)
        # Of a TPU, Accelerate 1.15 cannot save its loaders, or load what safetensors saves.
        accelerator._dataloaders = [each for each in loaders if hasattr(each, "dataset")]
        is_tpu = accelerator.device.type == "xla"
        try:
            with _reporting(folder):
                accelerator.save_state(str(folder), safe_serialization=not is_tpu)
                checkpoints.mark_done(folder)
        finally:
            accelerator.project_configuration, accelerator._dataloaders = own, loaders

    def _copy(self, folder: Path) -> None:
        """Copy models and optimizers. A thread saves the copies while the ranks train."""
        with _reporting(folder):
            sender = self._context.sender
            assert sender is not None
            copies, troubles = sender.copy_models()
            if self._context.global_rank:
                checkpoints.mark_done(folder)
                return
            optimizers = [reference() for reference in self._optimizers]
            states = [_copy_state(each, optimizers, sender.has_whole) for each in optimizers]
            names = ["" if each is None else type(each).__name__ for each in optimizers]
            useless = [n for n, state in zip(names, states, strict=True) if n and not state]

            def save() -> None:
                with _reporting(folder):
                    missing = {**troubles, **sender.save_copies(copies, RunFolder(folder))}
                    if not RunFolder(folder).list_weights():
                        raise NbtrainError(next(iter(missing.values()), _UNCHANGED))
                    missing |= dict.fromkeys(useless, _USELESS)
                    for number, state in enumerate(states):
                        if state:
                            write_atomically(kept.optimizer_file(folder, number), state)
                    write_atomically(folder / SAVED, json.dumps([missing, names]).encode())
                    checkpoints.mark_done(folder)

            _start_thread(save)


_UNCHANGED = "no model of the notebook has changed. Does the function train a copy?"

_USELESS = "it is sharded, uses another optimizer, or trains more than the notebook's models"

_NEXT = (
    hooks.notify.on_fetch_or_backward,
    hooks.notify.on_batch,  # these two patch what the first one needs
    hooks.notify.on_backward,
    hooks.notify.on_training_end,
)
"""What comes after a step and the call of its scheduler."""


def _copy_state(optimizer: Any, others: list[Any], has_whole: Callable[[list[Any]], bool]) -> bytes:
    """Return the state of an optimizer of torch as `torch.save` writes it; b"" if that is useless.

    Each rank has a part of it if it is sharded. Of optimizers that share parameters, one uses the
    other for its step, and their order is unknown.
    """
    torch, buffer = sys.modules["torch"], io.BytesIO()
    if not isinstance(optimizer, torch.optim.Optimizer):
        return b""
    parameters = _parameters(optimizer)
    ids = {*map(id, parameters)}
    shares = any(
        other is not None and other is not optimizer and ids & {*map(id, _parameters(other))}
        for other in others
    )
    if not shares and has_whole(parameters):
        torch.save(optimizer.state_dict(), buffer)
    return buffer.getvalue()


def _parameters(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


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
        is_known = isinstance(error, NbtrainError)
        _report(folder, str(error) if is_known else f"{type(error).__name__}: {error}")


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


_SETTINGS: dict[str, Any] = {"save_only_model": False, "push_to_hub": False}


def _make_callback(keeping: Keeping) -> Any:
    """Return a callback of transformers that has a Trainer save the checkpoint that is due."""
    base: Any = sys.modules["transformers"].TrainerCallback

    class KeepCheckpoint(base):  # type: ignore[misc]
        is_forced = False
        """Whether the Trainer would save nothing at this step."""

        def on_step_end(self, args: Any, _state: Any, control: Any, **_: Any) -> None:
            """Have the Trainer save at the end of this step."""
            strategy = getattr(args.save_strategy, "value", args.save_strategy)
            # Then the evaluation decides. If it saves nothing, the next step is kept.
            is_open = control.should_evaluate and strategy == "best"
            self.is_forced = not (keeping.due is None or control.should_save or is_open)
            control.should_save |= self.is_forced

        def save(self, trainer: Any, own: Any, *args: Any, **kwargs: Any) -> None:
            """Save the Trainer's own checkpoint, as `own` does, and the one that is due."""
            is_forced, self.is_forced = self.is_forced, False
            if not is_forced:
                own(*args, **kwargs)
            folder = keeping.due
            if folder is None:
                return
            settings = trainer.args
            # Without a strategy, ranks do not wait for each other, and the best model stays.
            new = {**_SETTINGS, "output_dir": str(folder)}
            new["save_strategy"] = type(settings.save_strategy)("no")
            before = {name: getattr(settings, name) for name in new}
            try:
                vars(settings).update(new)
                with _reporting(folder):
                    own(*args, **kwargs)
            finally:
                vars(settings).update(before)
                keeping.complete(folder)

    return KeepCheckpoint()


class _Lightning(Observer):
    """The Trainer of Lightning that trains, if any."""

    purpose = "steering"

    def __init__(self) -> None:
        self._fit_loop: weakref.ref[Any] | None = None
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._due: list[Path] = []

    def on_lightning_epoch(self, fit_loop: Any) -> None:
        """Remember the loop that trains."""
        self._fit_loop = weakref.ref(fit_loop)

    @property
    def trains(self) -> bool:
        """Whether Lightning trains now."""
        fit_loop = self._fit_loop() if self._fit_loop is not None else None
        return fit_loop is not None and bool(fit_loop.trainer.training)

    def save_later(self, folder: Path) -> None:
        """Save a checkpoint at the end of the batch."""
        assert self._fit_loop is not None
        fit_loop = self._fit_loop()
        assert fit_loop is not None
        trainer = fit_loop.trainer
        self._due.append(folder)
        if trainer not in self._seen:
            self._seen.add(trainer)
            package = type(fit_loop).__module__.partition(".loops.")[0]  # one of two
            base: Any = sys.modules[package].Callback
            save = self._save
            class_ = type("KeepCheckpoint", (base,), {"on_train_batch_end": lambda *a: save(a[1])})
            trainer.callbacks.append(class_())

    def _save(self, trainer: Any) -> None:
        """Save the checkpoints that are due."""
        while self._due:
            folder = self._due.pop()
            with _reporting(folder):
                try:
                    trainer.save_checkpoint(folder / kept.LIGHTNING)
                except Exception:  # of any kind: the other ranks wait in this barrier
                    trainer.strategy.barrier("Trainer.save_checkpoint")
                    raise
                checkpoints.mark_done(folder)
