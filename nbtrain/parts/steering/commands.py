"""The commands ``%nbtrain finish`` and ``nbtrain finish``."""

from __future__ import annotations

import argparse

from ...part_api import PlanError, Typed, find_run
from ...part_api import events as ev
from .orders import AFTER
from .requests import finish

_USAGE = "%nbtrain finish [RUN] [--after step|epoch]"


class _Parser(argparse.ArgumentParser):
    """A parser that raises."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise PlanError(f"{message}. Use {_USAGE}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``finish`` to a parser."""
    text = "a run: its number, its --name, or the start of its folder's name (default: the last)"
    parser.add_argument("run", nargs="*", metavar="RUN", help=text)
    text = "end the training after this step (the default), or after this epoch"
    parser.add_argument("--after", choices=AFTER, default="step", help=text)


def magic(typed: Typed) -> None:
    """Finish a run from a cell, and print what became of the request.

    Raises `PlanError` for wrong arguments, and `NbtrainError` if the run cannot be finished.
    """
    parser = _Parser(add_help=False)
    add_arguments(parser)
    options = parser.parse_args(typed.text.split())
    print(_finish(options, "by %nbtrain finish"))


def run_shell_command(options: argparse.Namespace) -> int:
    """Finish a run from a terminal, and print what became of the request; return 0."""
    print(_finish(options, "by `nbtrain finish`"))
    return 0


def _finish(options: argparse.Namespace, by: str) -> str:
    """Request the end of a training; return the answer for people."""
    run = find_run(" ".join(options.run))
    return f"{run.folder.name}: {describe(finish(run, options.after, by))}"


def describe(answer: ev.Steered | None) -> str:
    """Return what became of a request that was not called off."""
    return answer.text if answer is not None else "asked to finish; the run has not reacted yet"
