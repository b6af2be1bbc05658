"""The command ``nbtrain``. Thin."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import doctor, export, kept
from .errors import NbtrainError
from .run import Run
from .summary import summary
from .view import text


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    That is 0, 1 for what cannot be done, 2 for nonsense, 130 for what Ctrl-C ended.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        return _do(options, parser)
    except (NbtrainError, FileNotFoundError, IndexError) as error:
        print(f"nbtrain: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, ``head`` say, has seen enough
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nbtrain", description="Train on many devices from a notebook cell."
    )
    parser.add_argument("--version", action="store_true", help="print nbtrain's version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser(
        "doctor", help="what this host offers, and what would be refused or warned of, on a page"
    )
    commands.add_parser("runs", help="the runs that are kept")
    command = commands.add_parser(
        "export", help="a notebook's %%%%distributed cell as a script; nothing is run for it"
    )
    command.add_argument("notebook", type=Path, metavar="NOTEBOOK.ipynb")
    told = "the script to write; without it, NOTEBOOK.py beside the notebook"
    command.add_argument("-o", "--output", type=Path, metavar="FILE.py", help=told)
    told = "the N-th of its %%%%distributed cells, if there are several"
    command.add_argument("--cell", type=int, metavar="N", help=told)
    for name, what in (
        ("show", "a run as it stands now"),
        ("logs", "what the ranks of a run printed"),
        ("stop", "end a run, wherever it was started on this host, and wait until it has ended"),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument(
            "run",
            nargs="?",
            default="",
            metavar="RUN",
            help="its name, or how that begins; without one: the last",
        )
        if name == "logs":
            command.add_argument("--rank", type=int, help="of this rank alone")
            command.add_argument("--tail", type=int, metavar="N", help="the last N lines of each")
    return parser


def _do(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    match options.command:
        case "doctor":
            print(doctor.page())
            print("\nOf a notebook's own kernel, `%nbtrain doctor` in a cell tells the same.")
        case "runs":
            print(kept.page(kept.digests(), time.time()))
        case "export":
            output = options.output or options.notebook.with_suffix(".py")
            export.export(options.notebook, output, options.cell)
            print(f"wrote {output}")
        case "show":
            state, now = kept.find(options.run).state, time.time()
            print(text.summary(state, now), summary(state, now), sep="\n\n")
        case "logs":
            print(kept.find(options.run).logs(options.rank, options.tail))
        case "stop":
            return _stop(kept.find(options.run))
        case _ if options.version:
            print(f"nbtrain {vars(sys.modules['nbtrain'])['__version__']}")
        case _:
            parser.print_help()
    return 0


def _stop(run: Run) -> int:
    if run.state.is_over:
        print(f"{run.folder.name} is over: {run.state.status}")
        return 0
    try:
        run.stop(how="by `nbtrain stop`")
    except KeyboardInterrupt:  # Ctrl-C ends the waiting; what was asked for stays so
        print(f"{run.folder.name} was asked to stop, and has not ended yet", file=sys.stderr)
        return 130
    print(f"{run.folder.name}: {run.state.status} {run.state.message}")
    return 0
