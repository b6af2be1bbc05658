"""The command ``nbtrain``: parses its arguments and runs the command that they name."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Sequence

from .. import part
from ..errors import NbtrainError
from ..lifecycle import catalog
from ..lifecycle.run import Run
from ..system.text import strip_controls
from ..tracking import clock
from ..ui import text_summary
from ..ui.summary import SCHEMA_VERSION, summary, to_json_value
from . import doctor


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``nbtrain``; return 0, 1 after an error, or 130 after Ctrl-C.

    Also 1 where ``doctor`` finds no engine, or a run that ``show --follow`` waited for did not
    succeed. Raises `SystemExit` with 2 for wrong arguments, with 0 after ``--help``. Makes stdout
    and stderr escape characters that they cannot encode.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # closed, or not a text file
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    parser = _parser()
    try:
        try:
            return _run_command(parser.parse_args(argv), parser)
        finally:
            print(end="", flush=True)  # a later error could not be reported
    except BrokenPipeError:  # the reader has closed the pipe, as ``head`` does
        _flush_or_discard_output()
        return 0
    except (NbtrainError, OSError, IndexError) as error:
        _flush_or_discard_output()
        print(f"nbtrain: {strip_controls(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _flush_or_discard_output() -> None:
    """Write pending output, or discard it if that fails: stdout then leads to the null device.

    The interpreter would otherwise try to write it again at its exit.
    """
    try:
        print(end="", flush=True)
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


_JSON = "print it as JSON, for a program"


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command ``nbtrain``, with the commands of the parts."""
    parser = argparse.ArgumentParser(
        prog="nbtrain", description="Train on many devices from a notebook cell."
    )
    parser.add_argument("--version", action="store_true", help="print nbtrain's version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    command = commands.add_parser("demo", help="train a small model here, and show what happens")
    text = "how many processes train (by default one per GPU, or 2 without a GPU)"
    command.add_argument("-n", "--num-processes", type=int, metavar="N", help=text)
    text = (
        "describe this host and list what would stop a launch; exit with 1 if every engine refuses"
    )
    command = commands.add_parser("doctor", help=text)
    command.add_argument("--json", action="store_true", help=_JSON)
    command = commands.add_parser("runs", help="list the runs that are kept")
    command.add_argument("--json", action="store_true", help=_JSON)
    for name, of_part in part.shell_commands().items():
        part.load(of_part.arguments)(commands.add_parser(name, help=of_part.help))
    for name, purpose in (
        ("show", "show the present state of a run"),
        ("logs", "print the output of a run's ranks"),
        ("stop", "stop a run on this host (a notebook's run, too) and wait until it has ended"),
    ):
        command = commands.add_parser(name, help=purpose)
        text = (
            "a run: its number, its --name, or the start of its folder's name (default: the last)"
        )
        command.add_argument("run", nargs="?", default="", metavar="RUN", help=text)
        if name in ("show", "logs"):
            command.add_argument("--json", action="store_true", help=_JSON)
        if name == "show":
            text = "wait until the run has ended; exit with 1 if it did not succeed"
            command.add_argument("--follow", action="store_true", help=text)
        if name == "logs":
            command.add_argument("--rank", type=int, help="print only the output of this rank")
            text = "print only the last N lines of each rank"
            command.add_argument("--tail", type=int, metavar="N", help=text)
    return parser


def _run_command(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the command that was parsed; return the exit code.

    Without a command, print the help, or the version with ``--version``, and return 0. Raises
    `NbtrainError` if the command fails, and `IndexError` for a rank that the run does not have.
    """
    if of_part := part.shell_commands().get(options.command):
        return int(part.load(of_part.run)(options))
    match options.command:
        case "demo":
            from .demo import demo  # it imports torch and Accelerate

            demo(options.num_processes)
        case "doctor":
            return _print_doctor(options)
        case "runs" if options.json:
            listed = [to_json_value(info) for info in catalog.run_infos()]
            _print_json({"schema": SCHEMA_VERSION, "runs": listed})
        case "runs":
            width = shutil.get_terminal_size((160, 24)).columns
            _print_text(catalog.page(catalog.run_infos(), "nbtrain", width))
        case "show":
            return _show_run(catalog.find_run(options.run), options)
        case "logs" if options.json:
            run = catalog.find_run(options.run)
            ranks = range(run.state.world_size) if options.rank is None else [options.rank]
            lines = {str(rank): run.logs(rank, options.tail).splitlines() for rank in ranks}
            _print_json({"schema": SCHEMA_VERSION, "run": run.folder.name, "logs": lines})
        case "logs":
            _print_text(catalog.find_run(options.run).logs(options.rank, options.tail))
        case "stop":
            return _stop_run(catalog.find_run(options.run))
        case _ if options.version:
            print(f"nbtrain {vars(sys.modules['nbtrain'])['__version__']}")
        case _:
            parser.print_help()
    return 0


def _print_doctor(options: argparse.Namespace) -> int:
    """Print the doctor's page; return 1 if no engine can start a launch."""
    seen = doctor.examine()
    if options.json:
        _print_json(doctor.to_dict(seen))
    else:
        print(doctor.page(seen))
        print("\nRun `%nbtrain doctor` in a cell to see the same for a notebook's kernel.")
    return int(not seen.usable_engines)


def _show_run(run: Run, options: argparse.Namespace) -> int:
    """Print a run now, or with ``--follow`` at its end; then return 1 if it did not succeed."""
    if options.follow:
        run.wait()  # Ctrl-C ends only the wait
    state = run.state
    now = clock.now(state.clock_offset)
    if options.json:
        _print_json(run.to_dict())
    else:
        _print_text(f"{text_summary.summary(state, now)}\n\n{summary(state, now)}")
    return int(options.follow and state.status != "succeeded")


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def _stop_run(run: Run) -> int:
    """Stop a run and wait for its end; return the exit code, 130 after Ctrl-C."""
    try:
        _print_text(catalog.stop(run, "by `nbtrain stop`", "nbtrain"))
    except KeyboardInterrupt:  # Ctrl-C ends only the wait; the run still stops
        print(f"{run.folder.name} was asked to stop and has not ended yet", file=sys.stderr)
        return 130
    return 0


def _print_text(text: str) -> None:
    """Print text from a run's files, without control characters that act on a terminal."""
    print(strip_controls(text))
