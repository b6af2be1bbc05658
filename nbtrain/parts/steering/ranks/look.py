"""Copies the models of a rank after a step, for a notebook that looks at them as it trains."""

from __future__ import annotations

import json
import shutil
import threading
from functools import partial

from ....part_api import RankContext, RunFolder, write_atomically
from ..orders import REQUESTS, SAVED, Decided
from .outer_step import AfterStep


class Looking:
    """The copies of the models of a rank. All ranks copy what is sharded, the first saves it."""

    def __init__(self, context: RankContext) -> None:
        self._context, self._after_step = context, AfterStep()

    def find_refusal(self) -> str:
        """Return why there is nothing to look at, for people; "" if there is a model."""
        sender = self._context.sender
        if sender is not None and sender.returns_models:
            return ""
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
            try:
                if not (run.path / REQUESTS).exists():  # on another host than the launcher
                    folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                left_out = {**troubles, **sender.save_copies(copies, folder)}
                write_atomically(folder.path / SAVED, json.dumps(left_out).encode())
            except OSError:  # a full disk, or the request was withdrawn: its folder is deleted
                shutil.rmtree(folder.path, ignore_errors=True)

        try:
            threading.Thread(target=save, name="nbtrain-look").start()
        except RuntimeError:  # this process cannot start a thread
            save()
