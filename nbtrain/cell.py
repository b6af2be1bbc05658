"""A magic's line and a cell's source, read into what is to be run. Pure: text in, values out."""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .errors import PlanError
from .names import bound_names
from .plan import (
    ENGINES,
    HANG_AFTER,
    PRECISIONS,
    SOURCES,
    VIEWS,
    Cell,
    Parameter,
    names_of,
    sources_of,
)


@dataclass(frozen=True)
class Options:
    """The options of ``%%distributed``, as values."""

    num_processes: int | None = None
    engine: str = "auto"
    mixed_precision: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    bind: str | None = None
    view: str = "auto"
    timeout: float | None = None
    max_restarts: int = 0
    background: bool = False
    detach: bool = False
    telemetry: tuple[str, ...] = SOURCES
    hang_after: float | None = HANG_AFTER
    downcast_bf16: bool = False
    out: tuple[str, ...] = ()
    sync: bool = True
    config: str | None = None
    save: str | None = None
    address: str | None = None
    nodes: tuple[int, int] | None = None
    resources: dict[str, float] = field(default_factory=dict)
    wait_for_nodes: float = 0.0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PlanError(f"%distributed: {message} (%%distributed? shows the options)")


def _count(text: str) -> int | None:
    if text == "auto":
        return None
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither 'auto' nor a whole number ≥ 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds > 0")
    return value


def _restarts(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of restarts")
    return int(text)


def _seconds_or_off(text: str) -> float | None:
    return None if text in ("0", "off") else _seconds(text)


def _variable(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return key, value


def _name(text: str) -> str:
    if not text.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not a variable name")
    return text


def _add_precision(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "-p",
        "--mixed-precision",
        choices=PRECISIONS,
        help="what a plain Accelerator() in the ranks uses; on a TPU, bf16 is the kind of every "
        "float",
    )
    p.add_argument(
        "--downcast-bf16",
        action="store_true",
        help="on a TPU with -p bf16: float is bf16, and double stays a 32-bit float",
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the magic's options; its help is the magic's documentation."""
    p = _Parser(prog="%%distributed", add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    p.add_argument(
        "-n",
        "--num-processes",
        type=_count,
        metavar="N|auto",
        help="ranks to start; auto (the default): one a GPU or TPU chip, 2 on a host without",
    )
    p.add_argument(
        "-e",
        "--engine",
        choices=ENGINES,
        default="auto",
        help="how ranks come to life: fork (auto); spawn: fresh processes that get what the cell "
        "refers to; tpu (auto on one): xla (torch_xla, forked) or torch_tpu (its successor, fresh "
        "processes), by what is installed; ray: on a Ray cluster; inline: one rank in the kernel "
        "itself, for debugging",
    )
    _add_precision(p)
    p.add_argument(
        "--env",
        type=_variable,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an environment variable of the ranks (repeatable)",
    )
    p.add_argument(
        "--as",
        dest="bind",
        type=_name,
        metavar="NAME",
        help="bind the Run to this notebook variable; nbtrain.last_run() always has it",
    )
    told = "variables of rank 0 that come back: a,b (NAME@all: of every rank, as a list)"
    p.add_argument("--out", nargs="+", action="extend", default=[], metavar="NAMES", help=told)
    told = "leave the notebook's models as they are; else those in the cell come back trained"
    p.add_argument("--no-sync", dest="sync", action="store_false", help=told)
    p.add_argument(
        "--view", choices=VIEWS, default="auto", help="how progress is shown while the cell runs"
    )
    _add_files(p)
    _add_cluster(p)
    _add_limits(p)
    p.add_argument(
        "--telemetry",
        type=_sources,
        default=SOURCES,
        metavar="all|none|NAME,…|-NAME,…",
        help="what ranks report unasked: " + ", ".join(SOURCES) + "; with a minus: all but these",
    )
    return p


def _add_files(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--config",
        metavar="FILE|default",
        help="take what is not said here from a file that `accelerate config` wrote: ranks, "
        "precision, FSDP, DeepSpeed, dynamo; default: its usual one",
    )
    p.add_argument(
        "--save",
        metavar="FILE.py",
        help="write the cell and what it needs as a script too, then run; it runs by python, "
        "torchrun and accelerate launch",
    )


def _add_cluster(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--address",
        metavar="auto|local|HOST:PORT",
        help="with -e ray: the cluster, by default the one that this host is a node of; local: "
        "start one here, for trying",
    )
    p.add_argument(
        "--nodes",
        type=_nodes,
        metavar="N|MIN:MAX",
        help="with -e ray: share the ranks equally among N nodes (1); after a failure, a restart "
        "goes on with as few as MIN",
    )
    p.add_argument(
        "--resources",
        type=_resources,
        default={},
        metavar="NAME=AMOUNT,…",
        help="with -e ray: what each rank takes of its node, by Ray's names (CPU=1, and GPU=1 "
        "where there are any)",
    )
    p.add_argument(
        "--wait-for-nodes",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="with -e ray: how long others on the cluster, or its autoscaler, have to make room "
        "(0: what cannot start at once is refused)",
    )


def _nodes(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    if not least.isdecimal() or (colon and not most.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of nodes nor MIN:MAX")
    return int(least), int(most or least)


def _resources(text: str) -> dict[str, float]:
    try:
        return {k: float(v) for k, _, v in (part.partition("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form CPU=2,GPU=1") from None


def _add_limits(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="stop the run if it takes longer"
    )
    p.add_argument(
        "--max-restarts",
        type=_restarts,
        default=0,
        metavar="N",
        help="start all ranks again after one failed, up to N times (see nbtrain.checkpoint)",
    )
    p.add_argument(
        "--background",
        action="store_true",
        help="give the prompt back at once; the board stays live, run.wait() waits",
    )
    p.add_argument(
        "--detach",
        action="store_true",
        help="the same, and the run survives the kernel: %%nbtrain show finds it again",
    )
    p.add_argument(
        "--hang-after",
        type=_seconds_or_off,
        default=HANG_AFTER,
        metavar="SECONDS|off",
        help="say who waits where once a rank shows no progress for so long (300)",
    )


def _sources(text: str) -> tuple[str, ...]:
    try:
        return sources_of(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_options(words: Sequence[str]) -> Options:
    """Read the options. Raises `PlanError` with one line saying what is wrong."""
    found = vars(parser().parse_args(list(words)))
    return Options(**{**found, "env": dict(found["env"]), "out": names_of(found["out"])})


def split_options(line: str, more_flags: Collection[str] = ()) -> tuple[str, str]:
    """Split a line magic's text into its options and the expression after them.

    The expression begins at the first word that is neither an option nor an option's value, or
    after ``--``.
    """
    flags = {name for a in parser()._actions if a.nargs == 0 for name in a.option_strings}
    flags |= {*more_flags}
    position, expects_value = 0, False
    for word in re.finditer(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""", line):
        text = word.group()
        if line[position : word.start()].strip():  # a quote that nobody closed
            return line[:position], line[position:].strip()
        if expects_value:
            expects_value = False
        elif text == "--":
            return line[:position], line[word.end() :].strip()
        elif text.startswith("-"):
            told = "=" in text or text in flags or re.fullmatch(r"-\w.+", text)
            expects_value = not told
        else:
            return line[:position], line[word.start() :].strip()
        position = word.end()
    return line, ""


def split_words(line: str) -> list[str]:
    """Split a magic's line as a shell would. Raises `PlanError` for an open quote."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise PlanError(f"%distributed: {str(error).lower()} in {line.strip()!r}") from None


def read_cell(source: str, filename: str, namespace: dict[str, Any], flags: int = 0) -> Cell:
    """Read a cell: its training function if it ends in one. Raises the cell's own SyntaxError."""
    tree = ast.parse(source, filename)
    # Compiled here too: some errors ('return' outside a function) are not the parser's to find.
    compile(tree, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | flags, dont_inherit=True)
    last = tree.body[-1] if tree.body else None
    if last is None:
        raise PlanError("the cell is empty: nothing to run")
    if not isinstance(last, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return Cell(source, filename, namespace, flags=flags)
    return Cell(source, filename, namespace, last.name, _parameters(last.args), flags)


def _parameters(args: ast.arguments) -> tuple[Parameter, ...]:
    positional = [*args.posonlyargs, *args.args]
    required = len(positional) - len(args.defaults)
    defaults = [*[None] * required, *args.defaults, *args.kw_defaults]
    return tuple(
        Parameter(a.arg, ast.unparse(default) if default else None, a in args.posonlyargs)
        for a, default in zip([*positional, *args.kwonlyargs], defaults, strict=True)
    )


def check_parameters(cell: Cell) -> None:
    """Refuse a training function whose parameters have neither a value nor a default.

    Raises `PlanError` naming all of them, and the notebook variables that look alike.
    """
    bound = bound_names(cell.source, cell.filename)
    if "*" in bound:  # a star import: what it brings is known only once it ran
        return
    known = bound | cell.namespace.keys()
    missing = [p.name for p in cell.parameters if p.default is None and p.name not in known]
    if not missing:
        return
    described = [with_lookalikes(name, known) for name in missing]
    one = len(missing) == 1
    raise PlanError(
        f"{cell.function}() needs {', '.join(described)}: no notebook variable of "
        f"{'that name' if one else 'those names'} exists and the "
        f"{'parameter has' if one else 'parameters have'} no default. Define "
        f"{'it' if one else 'them'} in a cell, or give {'it a default' if one else 'defaults'}."
    )


def with_lookalikes(name: str, known: Iterable[str]) -> str:
    """Return a name for a message, with those that are known and look like it."""
    public = {k.lower(): k for k in known if not k.startswith("_")}
    alike = [public[k] for k in difflib.get_close_matches(name.lower(), public, n=3, cutoff=0.6)]
    return f"`{name}`" + (f" (there is {' and '.join(f'`{a}`' for a in alike)})" if alike else "")


def title(cell: Cell) -> str:
    """Return what to call the run: the function's head with its numbers, or a telling line."""
    if cell.function is None:
        lines = [line for line in cell.source.splitlines() if line.strip()]
        dull = ("#", "import ", "from ", "%", "!")
        telling = (line for line in lines if not line.lstrip().startswith(dull))
        return _shortened(next(telling, lines[0]).strip(), 60)
    shown = (_filled(p, cell.namespace) for p in cell.parameters)
    return f"{cell.function}({', '.join(shown)})"


def _filled(parameter: Parameter, namespace: dict[str, Any]) -> str:
    name, text = parameter.name, parameter.default or ""
    if name in namespace:
        value = namespace[name]
        # Numbers only: a text may be a password, and titles are kept in notebooks.
        text = f"{value:.6g}" if isinstance(value, float) else ""
        if isinstance(value, int) and abs(value) < 10**15:
            text = repr(value)
    return f"{name}={text}" if 0 < len(text) <= 24 else name


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
