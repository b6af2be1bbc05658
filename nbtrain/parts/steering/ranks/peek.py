"""Copies the models of a rank after a step, for a notebook that peeks at them as it trains."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Mapping, Sequence
from functools import partial

from ....part_api import RankContext, RunFolder, write_atomically
from ..orders import REQUESTS, SAVED, Decided
from .outer_step import AfterStep


class Peeking:
    """The copies of the models of a rank. All ranks copy what is sharded, the first saves it."""

    def __init__(self, context: RankContext) -> None:
        self._context, self._after_step = context, AfterStep()

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
        # An outer step changes the weights after the step that was agreed on.
        self._after_step.call(partial(self._copy, decided.token))

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
