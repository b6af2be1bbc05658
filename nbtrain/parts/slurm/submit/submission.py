"""Sends a run to Slurm as a job, by ``sbatch``."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
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
)
from .. import slurm_commands
from ..limits import SUBMIT_TIMEOUT_S
from . import batch
from .queue import Submitted, cancel_job, scheduler, write_submitted

_REFUSED = {
    "array": "a run is one job",
    "clusters": "nbtrain follows jobs of this cluster only",
    "help": "it submits nothing",
    "job-name": "nbtrain finds its job by its name. --name names the run",
    "quiet": "nbtrain reads what sbatch prints",
    "requeue": "use --max-restarts",
    "test-only": "it submits nothing",
    "usage": "it submits nothing",
    "version": "it submits nothing",
    "wait": "run.wait() waits for the run",
    "wrap": "the cell is what runs",
}
"""Options of ``sbatch`` that a submitted cell cannot have, and why."""

_LETTERS = {
    "a": "array",
    "h": "help",
    "J": "job-name",
    "M": "clusters",
    "Q": "quiet",
    "u": "usage",
    "V": "version",
    "W": "wait",
}
"""Their short forms."""

_SWITCHES = "hHkOQsuvVW"
"""Short options without a value: others may follow in the same word."""

_REFUSED_VARIABLES = ("SBATCH_ARRAY_INX", "SBATCH_CLUSTERS", "SBATCH_REQUEUE", "SBATCH_WAIT")
"""Variables that are such options, too."""


def check_options(text: str) -> list[str]:
    """Return the options of ``sbatch`` in a text. Raises `PlanError` for one that cannot be used.

    Whether Slurm accepts the others shows when the job is submitted.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise PlanError(f"--submit {text!r}: {str(error).lower()}") from None
    for word in words:
        if name := _find_refused(word):
            raise PlanError(f"--submit cannot have {word}: {_REFUSED[name]}")
        if word == ":":
            raise PlanError("--submit cannot have a job of several parts (:)")
    if shutil.which("sbatch") is None:
        raise PlanError(
            "--submit needs Slurm's command sbatch, which is not on the PATH: run the kernel on a "
            "host of the cluster, such as its login node"
        )
    return words


def _find_refused(word: str) -> str:
    """Return the option in `_REFUSED` that a word of the command line is, if it is one. Pure.

    Like sbatch, it takes the beginning of a name for the name.
    """
    if word.startswith("--"):
        name = word[2:].partition("=")[0]
        return next((each for each in _REFUSED if name and each.startswith(name)), "")
    for letter in word[1:] if word.startswith("-") else "":
        if letter in _LETTERS:
            return _LETTERS[letter]
        if letter not in _SWITCHES:  # the rest is its value
            break
    return ""


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
        command = (
            "sbatch",
            f"--output={str(folder.launcher_log).replace('%', '%%')}",
            "--open-mode=append",
            "--parsable",
            "--no-requeue",
            f"--job-name={folder.path.name}",
            # Not as a script: with --wrap, sbatch refuses words of the options that are none.
            f"--wrap=exec {shlex.join(interpreter_command(batch.__name__, order))}",
            *self._options,
        )
        try:
            shutil.copyfile(self._packed.path, folder.payload)
            folder.payload.chmod(0o600)
            submitted = Submitted(slurm_commands.find_cluster())
            write_submitted(folder, submitted)
            set_scheduler(folder, "slurm")
            number = _submit(command)
            # The job writes it, too, if it begins before.
            write_submitted(folder, replace(submitted, job=number))
            scheduler().refresh()
        except BaseException as error:
            if not isinstance(error, PlanError):  # an interrupt: the job may be in the queue
                with contextlib.suppress(LaunchError):
                    cancel_job(folder)
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
        LOGGER.info("submitted as the Slurm job %s", number)
        return True

    def discard(self) -> None:
        """Delete the packed values; the job has a copy in the run's folder."""
        if self._packed is not None:
            self._packed.close()

    def start(self, job: Job) -> Ranks:
        """Raise `LaunchError`: the job starts the ranks."""
        raise LaunchError("the ranks of a submitted run are started by its job")


def _submit(command: Sequence[str]) -> str:
    """Submit a job by a command of ``sbatch``; return its number.

    Raises `PlanError` with Slurm's words if it refuses the job, and `LaunchError` if it does not
    answer, or with something else than a number.
    """
    env = slurm_commands.environment()
    env = {name: value for name, value in env.items() if name not in _REFUSED_VARIABLES}
    try:
        printed = slurm_commands.call(*command, env=env, timeout_s=SUBMIT_TIMEOUT_S)
    except slurm_commands.CommandError as error:
        reason = error.reason.replace("sbatch: error: ", "")
        if "with --wrap" in reason:
            reason = "--submit has a word that is no option. The cell is what runs, not a script"
        raise PlanError(f"Slurm refused the job: {reason}") from error
    # A site's own sbatch may print more; behind the number may be the name of the cluster.
    if not (numbers := re.findall(r"^(\d+)(?:;.*)?$", printed, re.MULTILINE)):
        raise LaunchError(f"sbatch printed no number of a job: {printed[-300:]}")
    return str(numbers[-1])
