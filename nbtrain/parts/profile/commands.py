"""The command ``profile``, of a notebook and of a terminal."""

from __future__ import annotations

import argparse
import json

from ...part_api import PlanError, Run, Typed, find_run, parser, read_regular, split_line
from .files import Request
from .limits import DEFAULT_STEPS
from .profile import Profile, profiles_of, record

_RUN = "a run: its number, its --name, or the start of its folder's name (default: the last)"


def profile_magic(typed: Typed) -> Profile:
    """Record steps of a run that trains, or find the last profile of one that has ended.

    Raises `PlanError` for wrong arguments or without a profile, and `NbtrainError` as
    `Run.profile`.
    """
    of_magic = parser((), "%nbtrain profile", " (%nbtrain? shows the commands)")
    _add_steps(of_magic)
    return _profile(of_magic.parse_args(split_line(typed.text)), "by %nbtrain profile")


def profile_from_shell(options: argparse.Namespace) -> int:
    """Print a profile, as `profile_magic` finds it, or save one trace of all ranks; return 0."""
    profile = _profile(options, "by `nbtrain profile`")
    if options.save is not None:
        print(f"saved {profile.save(options.save)}")
    else:
        print(json.dumps(profile.to_dict()) if options.json else profile)
    return 0


def add_profile_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``profile`` to a parser."""
    _add_steps(command)
    command.add_argument("--json", action="store_true", help="print JSON, for programs")
    text = "write one trace of all ranks, for Perfetto: trace.json.gz"
    command.add_argument("--save", metavar="FILE", help=text)


def _add_steps(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", nargs="*", metavar="RUN", help=_RUN)
    text = f"how many steps of a run that trains are recorded (default: {DEFAULT_STEPS})"
    command.add_argument("--steps", type=int, default=DEFAULT_STEPS, metavar="N", help=text)


def _profile(options: argparse.Namespace, by: str) -> Profile:
    """Record steps of a run that trains, or return the last profile of another one."""
    run = find_run(" ".join(options.run))
    if not run.state.is_over:
        return record(run, Request(options.steps), by)
    found = profiles_of(run)
    if not found:
        raise PlanError(f"{run.folder.name} has no profile: {_explain_lack(run)}")
    return found[-1]


def _explain_lack(run: Run) -> str:
    """Return why a run that has ended has no profile, for people."""
    folder = run.folder / "profiles"
    for file in sorted(folder.glob("*/rank-*.failed")):
        return read_regular(file).decode()
    if any(folder.glob("*/rank-*.summary.json")):
        return (
            "another version of nbtrain recorded it, or not all ranks did. The traces of torch "
            f"are in {folder}"
        )
    notes = (each for each in run.state.findings if each.code == "no-profile")
    return next((each.text for each in notes), "launch it with --profile")
