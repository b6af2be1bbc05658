"""The command ``profile``."""

from __future__ import annotations

import argparse

from ...part_api import PlanError, Typed, find_run, split_line
from .files import Request
from .limits import DEFAULT_STEPS
from .profile import Profile, profiles_of, record


class _Parser(argparse.ArgumentParser):
    """A parser that raises."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise PlanError(f"{message}. %nbtrain? shows how the command is used")


def profile_magic(typed: Typed) -> Profile:
    """Record steps of a run that trains, or find the last profile of one that has ended.

    Raises `PlanError` for wrong arguments or without a profile, and `NbtrainError` as
    `Run.profile`.
    """
    parser = _Parser(add_help=False)
    parser.add_argument("run", nargs="*")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    options = parser.parse_args(split_line(typed.text))
    run = find_run(" ".join(options.run))
    if not run.state.is_over:
        return record(run, Request(options.steps), "by %nbtrain profile")
    found = profiles_of(run)
    if not found:
        raise PlanError(
            f"{run.folder.name} has ended, and nothing of it was recorded: launch it with --profile"
        )
    return found[-1]
