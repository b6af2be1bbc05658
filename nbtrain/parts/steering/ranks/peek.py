"""Copies the models of a rank after a step, for a notebook that peeks at them as it trains."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from ....part_api import Observer, RankContext, RunFolder, hooks, write_atomically
from ..orders import REQUESTS, SAVED, Decided


class Peeking(Observer):
    """The copies of the models of a rank. All ranks copy what is sharded, the first saves it."""

    purpose = "steering"

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._tokens: list[str] = []  # of requests that wait for the end of the present step

    def find_refusal(self) -> str:
        """Return why there is nothing to peek at, for people; "" if there is a model."""
        sender, plan = self._context.sender, self._context.job.plan
        if sender is not None and sender.returns_models:
            return ""
        if not plan.sync:
            return (
                "this run has sync=False (--no-sync), so it gives no model back to the notebook. "
                "Name the model in --out (`out`), or launch the run without this option"
            )
        return (
            "this run gives no model back to the notebook. Give its function the model as an "
            "argument, or name the model in --out (`out`)"
        )

    def apply(self, decided: Decided) -> None:
        """Copy the models after the present step."""
        if not _is_in_outer_step():
            self._copy(decided.token)
            return
        # The outer step changes the weights after the step that was agreed on.
        self._tokens.append(decided.token)
        hooks.drop(self, hooks.notify.on_step)
        hooks.add(self, hooks.notify.on_step)

    def on_step(self, optimizer: Any) -> None:
        """Copy the models once the outermost step has ended."""
        if not _is_in_outer_step():
            hooks.drop(self, hooks.notify.on_step)
            tokens, self._tokens = self._tokens, []
            for token in tokens:
                self._copy(token)

    def _copy(self, token: str) -> None:
        """Copy the models. A thread saves the copies while the training goes on."""
        sender = self._context.sender
        assert sender is not None
        copies, troubles = sender.copy_models()
        if self._context.global_rank:
            return
        run = self._context.job.folder
        folder = RunFolder(run.peeks / token)

        def save() -> None:
            is_far = not (run.path / REQUESTS).exists()  # on another host than the launcher
            try:
                if is_far:
                    folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                left_out = {**troubles, **sender.save_copies(copies, folder)}
                shared = [name for name, copy in copies.items() if copy.is_shared]
                _finish_folder(folder, left_out, shared)
            except OSError as error:  # a full disk, or the request was withdrawn
                shutil.rmtree(folder.path, ignore_errors=True)
                if is_far:  # a process that waits does not see that this folder is gone
                    with contextlib.suppress(OSError):
                        folder.path.mkdir(mode=0o700, parents=True)
                        _finish_folder(folder, dict.fromkeys(copies, str(error)), [])

        try:
            threading.Thread(target=save, name="nbtrain-peek").start()
        except RuntimeError:  # this process cannot start a thread
            save()


def _finish_folder(folder: RunFolder, left_out: Mapping[str, str], shared: Sequence[str]) -> None:
    """Write the last file, `SAVED`. Raises `OSError`."""
    write_atomically(folder.path / SAVED, json.dumps([left_out, shared]).encode())


def _is_in_outer_step() -> bool:
    """Return whether an optimizer makes its step within that of another one.

    torch wraps the `step` of each optimizer in the function that is counted here.
    """
    wrappers = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        wrappers += code.co_name == "wrapper" and code.co_filename.endswith(_OPTIMIZER_FILE)
        frame = frame.f_back
    return wrappers > 1


_OPTIMIZER_FILE = "/torch/optim/optimizer.py"
