"""The commands ``finish``, ``turn``, ``peek`` and ``keep``. A terminal lacks ``peek``."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ...part_api import PlanError, Run, Typed, find_run, parser, split_line
from ...part_api import events as ev
from . import requests
from .orders import AFTER
from .settings import TurnError, read_setting

_RUN = "a run: its number, its --name, or the start of its folder's name (default: the last)"


def finish_magic(typed: Typed) -> None:
    """Finish a run from a cell, and print what became of the request.

    Raises `PlanError` for wrong arguments, and `NbtrainError` if the run cannot be finished.
    """
    print(_finish(_parse("finish", typed, add_finish_arguments), "by %nbtrain finish"))


def finish_from_shell(options: argparse.Namespace) -> int:
    """Finish a run from a terminal, and print what became of the request; return 0."""
    print(_finish(options, "by `nbtrain finish`"))
    return 0


def add_finish_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``finish`` to a parser."""
    parser.add_argument("run", nargs="*", metavar="RUN", help=_RUN)
    text = "end the training after this step (the default), or after this epoch"
    parser.add_argument("--after", choices=AFTER, default="step", help=text)


def _finish(options: argparse.Namespace, by: str) -> str:
    run = find_run(" ".join(options.run))
    return _describe(run, requests.finish(run, options.after, by))


def peek_magic(typed: Typed) -> None:
    """Load the weights of a run into the notebook's models, and print their step.

    Raises `PlanError` if there is no such run, and `NbtrainError` as `Run.peek`.
    """
    run = find_run(typed.text)
    answer = requests.peek(run, by="by %nbtrain peek")
    print(f"{run.folder.name}: the notebook's models have the weights of step {answer.step:,}")


def keep_magic(typed: Typed) -> None:
    """Save a checkpoint from a cell, and print where it is.

    Raises `PlanError` for wrong arguments, and `NbtrainError` as `Run.keep`.
    """
    print(_keep(_parse("keep", typed, add_keep_arguments), "by %nbtrain keep"))


def keep_from_shell(options: argparse.Namespace) -> int:
    """Save a checkpoint from a terminal, and print where it is; return 0."""
    print(_keep(options, "by `nbtrain keep`"))
    return 0


def add_keep_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``keep`` to a parser."""
    parser.add_argument("run", nargs="*", metavar="RUN", help=_RUN)
    text = "a name of the checkpoint, for the charts"
    parser.add_argument("--name", metavar="TEXT", default="", help=text)


def _keep(options: argparse.Namespace, by: str) -> str:
    run = find_run(" ".join(options.run))
    return f"saved {requests.keep(run, options.name, by)}"


def turn_magic(typed: Typed) -> None:
    """Turn settings from a cell, and print what became of the request, as `finish_magic`."""
    print(_turn(_parse("turn", typed, add_turn_arguments), "by %nbtrain turn"))


def turn_from_shell(options: argparse.Namespace) -> int:
    """Turn settings from a terminal, and print what became of the request; return 0."""
    print(_turn(options, "by `nbtrain turn`"))
    return 0


def add_turn_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``turn`` to a parser."""
    text = f"{_RUN}; then settings: lr=3e-4, lr=/3, betas=0.9,0.95, or lr=back to take it back"
    parser.add_argument("words", nargs="+", metavar="[RUN] NAME=VALUE", help=text)
    text = "an optimizer: its number, in the order of first steps, or its class (default: all)"
    parser.add_argument("--optimizer", metavar="WHICH", help=text)
    parser.add_argument("--group", type=int, metavar="N", help="a parameter group (default: all)")


def _turn(options: argparse.Namespace, by: str) -> str:
    """Request new settings; return the answer for people. Raises `PlanError` for a wrong word."""
    names = [word for word in options.words if "=" not in word]
    pairs = (word.partition("=") for word in options.words if "=" in word)
    try:
        settings = {name: read_setting(name, text) for name, _, text in pairs}
    except TurnError as error:
        raise PlanError(str(error)) from None
    which = options.optimizer
    optimizer = int(which) if which is not None and which.isdecimal() else which
    run = find_run(" ".join(names))
    return _describe(run, requests.turn(run, settings, optimizer, options.group, by))


def _parse(
    command: str, typed: Typed, add_arguments: Callable[[argparse.ArgumentParser], None]
) -> argparse.Namespace:
    """Return the options of a command as it was typed in a cell. Raises `PlanError`."""
    of_magic = parser((), f"%nbtrain {command}", " (%nbtrain? shows the commands)")
    add_arguments(of_magic)
    return of_magic.parse_args(split_line(typed.text))


def _describe(run: Run, answer: ev.Steered | None) -> str:
    """Return what became of a request that was not called off, for people."""
    text = answer.text if answer is not None else "the run has not reacted yet"
    return f"{run.folder.name}: {text}"
