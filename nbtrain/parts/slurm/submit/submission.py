"""Sends a run to Slurm as a job, by ``sbatch``."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from ....part_api import (
    LOGGER,
    Engine,
    Job,
    LaunchError,
    Plan,
    PlanError,
    Ranks,
    interpreter_command,
    payload,
    set_scheduler,
    write_atomically,
)
from .. import slurm_commands
from ..limits import SUBMIT_TIMEOUT_S
from . import batch

_REFUSED = {
    "array": "a run is one job",
    "a": "a run is one job",
    "clusters": "nbtrain follows jobs of this cluster only",
    "M": "nbtrain follows jobs of this cluster only",
    "requeue": "use --max-restarts",
    "wait": "run.wait() waits for the run",
    "W": "run.wait() waits for the run",
    "wrap": "the cell is what runs",
    "test-only": "it submits nothing",
}
"""Options of ``sbatch`` that a submitted cell cannot have, and why."""


def check_options(text: str) -> list[str]:
    """Return the options of ``sbatch`` in a text. Raises `PlanError` for one that cannot be used.

    Whether Slurm accepts the others shows when the job is submitted.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise PlanError(f"--submit {text!r}: {str(error).lower()}") from None
    for word in words:
        name = word.partition("=")[0].lstrip("-") if word.startswith("--") else word[1:2]
        if word.startswith("-") and name in _REFUSED:
            raise PlanError(f"--submit cannot have {word}: {_REFUSED[name]}")
    if shutil.which("sbatch") is None:
        raise PlanError(
            "--submit needs Slurm's command sbatch, which is not on the PATH: run the kernel on a "
            "host of the cluster, such as its login node"
        )
    return words


class Submission(Engine):
    """Submits the run; its job chooses the engine that starts the ranks."""

    name = "slurm"
    checks_host = False
    on_cluster = True

    def __init__(self, options: list[str]) -> None:
        self._options = options
        self._plan: Plan | None = None
        self._packed: payload.PackedPlan | None = None

    def resolve(self, plan: Plan) -> tuple[Plan, str]:
        """Return the plan with the ranks that are known now, and the likely kind of device.

        Without a number, the job finds out how many GPUs or tasks it has.
        """
        self._plan = replace(plan, submit=None, background=False, detach=True, view="none")
        ranks = plan.num_processes or (plan.spread or (1, 1))[1]
        has_gpus = any("gpu" in option or option.startswith("-G") for option in self._options)
        return self.with_ranks(plan, ranks), "cuda" if has_gpus else "cpu"

    def prepare(self, plan: Plan) -> None:
        """Pack what the job needs. Raises `PlanError`, which names what cannot be packed."""
        assert self._plan is not None
        self._packed = payload.pack(self._plan, leaves_host=True)

    def submit(self, job: Job) -> bool:
        """Submit the job that runs the ranks.

        Raises `PlanError` with Slurm's words if it refuses the job, and deletes the run's folder.
        """
        assert self._packed is not None
        folder = job.folder
        order = {
            "path": [place or str(Path.cwd()) for place in sys.path],
            "folder": str(folder.path),
            "in_notebook": job.in_notebook,
        }
        script = f"#!/bin/sh\nexec {shlex.join(interpreter_command(batch.__name__, order))}\n"
        command = (
            "sbatch",
            "--parsable",
            f"--job-name={folder.path.name}",
            f"--output={folder.launcher_log}",
            "--open-mode=append",
            "--no-requeue",
            *self._options,
        )
        try:
            shutil.copyfile(self._packed.path, folder.payload)
            folder.payload.chmod(0o600)
            set_scheduler(folder, "slurm")
            printed = slurm_commands.call(
                *command,
                text=script,
                env=slurm_commands.environment(),
                timeout_s=SUBMIT_TIMEOUT_S,
            )
            job_number = printed.partition(";")[0]  # behind it may be the name of the cluster
            LOGGER.info("submitted as the Slurm job %s", job_number)
            # The job writes it, too, if it begins before.
            write_atomically(folder.scheduled_job, job_number.encode())
        except BaseException as error:
            shutil.rmtree(folder.path, ignore_errors=True)
            if isinstance(error, slurm_commands.CommandError):
                reason = error.reason.replace("sbatch: error: ", "")
                raise PlanError(f"Slurm refused the job: {reason}") from error
            raise
        return True

    def discard(self) -> None:
        """Delete the packed values; the job has a copy in the run's folder."""
        if self._packed is not None:
            self._packed.close()

    def start(self, job: Job) -> Ranks:
        """Raise `LaunchError`: the job starts the ranks."""
        raise LaunchError("the ranks of a submitted run are started by its job")
