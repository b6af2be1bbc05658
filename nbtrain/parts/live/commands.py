"""The commands for live ranks, ``%nbtrain start`` and the others, as the user types them."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from ...part_api import (
    LEFT,
    OPTIONS,
    PASS,
    RIGHT,
    PlanError,
    Typed,
    check_parsed,
    format_bytes,
    format_ranks,
    html_table,
    parser,
    plural,
    shorten,
    show,
    split_line,
    text_table,
)
from . import live_ranks
from .live_ranks import LiveRanks

START = (
    *("num_processes", "engine", "mixed_precision", "downcast_bf16", "config", "env"),
    *("address", "spread", "resources", "wait_for_nodes"),
)
"""The options of ``%nbtrain start``."""

_NOT_LIVE = ("detach", "max_restarts")
_NUMBER = r"\d{1,9}"
_HINT = " (%nbtrain? shows the commands)"


def command(typed: Typed) -> object:
    """Run a command for live ranks, and print its result.

    Returns `PASS` for a ``stop`` that is about a run, otherwise None. Raises `PlanError` for wrong
    arguments, and without live ranks.
    """
    if typed.command == "stop":
        are_there = live_ranks.current() is not None or live_ranks.find_lost_ranks() is not None
        if not are_there or typed.text.strip():
            return PASS  # it is about a run
    answered = answer(typed.command, typed.text, typed.namespace)
    if isinstance(answered, dict):
        show(answered)
    elif answered:
        print(answered)
    return None


def answer(name: str, text: str, namespace: dict[str, Any]) -> str | dict[str, str]:
    """Carry out a command, and return what to print; empty for nothing.

    A table is returned as HTML and as text, by MIME type. Raises `PlanError` for wrong arguments,
    and without live ranks.
    """
    if name in ("start", "restart"):
        return _start(name, text, namespace)
    ranks, lost = live_ranks.current(), live_ranks.find_lost_ranks()
    if name == "stop" and lost is not None:
        lost.stop()
        return "The live ranks have already ended"
    if ranks is None:
        why = lost.end_reason if lost is not None else f"%nbtrain {name}: there are no live ranks"
        raise PlanError(f"{why}. %nbtrain start -n 2 starts two")
    if name == "stop":
        ranks.stop()
        return f"{plural(ranks.world_size, 'rank')} stopped"
    if name == "status":
        return status(ranks)
    if name == "debug":
        rest, rank = _split_rank(text)
        if rest.strip():
            raise PlanError("%nbtrain debug takes only a rank: %nbtrain debug --rank 1")
        ranks.debug(rank)
        return ""
    if name == "vars":
        return variables(ranks.describe())
    if name == "push":
        ranks.push(*_names(name, text))
        return ""
    rest, rank = _split_rank(text)
    ranks.pull(*_names(name, rest), rank=rank or 0)
    return ""


def _start(name: str, text: str, namespace: dict[str, Any]) -> str:
    """Start live ranks, bind them to the variable `ranks`, and return what to print.

    A ``restart`` first ends those that live, and without options takes the last ones. A value of
    the user's own in `ranks` stays.
    """
    old, last = live_ranks.current(), live_ranks.last()
    given: Sequence[str] = split_line(text)
    if not given and name == "restart" and last is not None:
        given = last.options
    more = (live_ranks.IDLE_TIMEOUT,)
    options = check_parsed(parser(START, f"%nbtrain {name}", _HINT, more).parse_args(given), more)
    if name == "restart" and old is not None:  # not before the options are known to be right
        old.stop()
    given_options = {o.argument: getattr(options, o.field) for o in _start_options()}
    ranks = live_ranks.start(**given_options, idle_timeout=options.idle_timeout)
    ranks.options = given
    known = namespace.get("ranks")
    is_free = known is None or type(known) is live_ranks.LiveRanks
    if is_free:
        namespace["ranks"] = ranks
    held = "holds them" if is_free else "keeps the value that you gave it"
    return (
        f"{plural(ranks.world_size, 'rank')} live ({ranks.engine}, {ranks.device}): "
        f"%%distributed cells run on them, and what a cell defines stays there. `ranks` {held}. "
        "%nbtrain stop ends them"
    )


def _start_options() -> list[Any]:
    return [option for option in OPTIONS if option.field in START]


def _names(name: str, text: str) -> list[str]:
    """Return the names that ``push`` or ``pull`` was given.

    Raises `PlanError` if there are none, or one cannot be a variable's name.
    """
    words = split_line(text.replace(",", " "))
    if not words or not all(word.isidentifier() for word in words):
        raise PlanError(f"%nbtrain {name} needs names of variables: %nbtrain {name} model, lr")
    return words


def _split_rank(text: str) -> tuple[str, int | None]:
    """Return the text of a command without its ``--rank``, and that rank; None without one."""
    match = re.search(rf"(?:--rank|-r)[ =]+({_NUMBER})(?!\S)", text)
    if match is None:
        return text, None
    return text[: match.start()] + text[match.end() :], int(match[1])


def rank_options(line: str) -> str:
    """Return the options for the line of ``%%rank``. Raises `PlanError` if it names no ranks."""
    ranks, _, rest = line.strip().partition(" ")
    if not ranks:
        raise PlanError("%%rank needs the ranks that run the cell: %%rank 0, or %%rank 0,2-3")
    return f"--ranks {ranks} {rest}"


def check_options(options: Namespace) -> None:
    """Refuse options of ``%%distributed`` that mean nothing on live ranks. Raises `PlanError`."""
    for option in OPTIONS:
        if getattr(options, option.field) == option.default:
            continue
        flag = option.flags.split()[-1] if option.flags else ""
        if option.field in START:
            raise PlanError(
                f"{flag} takes effect only when ranks start. Leave it out to run on the live "
                "ranks, add --new to run on new ranks, or give it to %nbtrain restart"
            )
        if option.field in _NOT_LIVE:
            raise PlanError(f"{flag} does not work on live ranks: add --new to run on new ranks")


def read_ranks(text: str, world_size: int) -> list[int]:
    """Return the ranks that a text such as ``0,2-3`` names, in order and each once.

    Raises `PlanError` for any other text, and for a rank that does not exist.
    """
    ranks: list[int] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(rf"({_NUMBER})(?:-({_NUMBER}))?", part)
        if match is None:
            shown = shorten(text, 40)
            raise PlanError(f"{shown!r} does not name ranks: write 0, or 0,2-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise PlanError(f"{part!r} names no ranks: write {last}-{first}")
        if last >= world_size:  # before the range is a list, which may fill the memory
            beyond = max(first, world_size)
            raise PlanError(f"there is no rank {beyond}: the live ranks are 0 to {world_size - 1}")
        ranks += range(first, last + 1)
    return sorted(set(ranks))


def status(ranks: LiveRanks) -> dict[str, str]:
    """Return a table of the ranks' processes, by MIME type."""
    head = ("rank", "process", "device", "memory", "GPU memory", "variables", "does")
    rows = []
    for rank in ranks._run.state.ranks:
        usage = rank.usage
        memory = "" if usage.memory is None else format_bytes(usage.memory)
        on_gpu = "" if usage.gpu_memory is None else format_bytes(usage.gpu_memory)
        process = "ended" if rank.rank in ranks.dead() else str(rank.pid)
        count = str(len(ranks.names[rank.rank]))
        does = ranks.doing(rank.rank)
        rows.append((str(rank.rank), process, ranks.device, memory, on_gpu, count, does))
    shown = [i for i in range(len(head)) if head[i] != "GPU memory" or any(r[i] for r in rows)]
    kept = [tuple(row[i] for i in shown) for row in (head, *rows)]
    return _draw(kept, "".join(">><>>><"[i] for i in shown))


def _draw(rows: Sequence[Sequence[str]], align: str) -> dict[str, str]:
    """Return a table, by MIME type. The first row has the heads. `align`: see `text_table`."""
    table = html_table(rows, [RIGHT if each == ">" else LEFT for each in align], head=True)
    text = "\n".join(text_table(rows, align))
    return {"text/html": f'<div style="overflow-x:auto">{table}</div>', "text/plain": text}


def variables(by_rank: Mapping[int, Sequence[Mapping[str, Any]]]) -> str | dict[str, str]:
    """Return a table of the ranks' variables by MIME type, or a sentence if there are none.

    What differs between ranks is marked.
    """
    names = dict.fromkeys(about["name"] for rows in by_rank.values() for about in rows)
    tables = {rank: {about["name"]: about for about in rows} for rank, rows in by_rank.items()}
    rows = [_row(name, {rank: rows.get(name) for rank, rows in tables.items()}) for name in names]
    if not rows:
        return "the ranks have no variables"
    head = ("name", "ranks", "type", "shape", "dtype", "device", "size")
    return _draw([head, *rows], "<<<<<<>")


def _row(name: str, by_rank: Mapping[int, Mapping[str, Any] | None]) -> tuple[str, ...]:
    """Return a variable as a row of ``%nbtrain vars``."""
    about = next(each for each in by_rank.values() if each is not None)
    shape = about.get("shape", "")
    size = format_bytes(about["bytes"]) if "bytes" in about else ""
    shown = shape if isinstance(shape, str) else "×".join(map(str, shape)) or "scalar"
    kind = shorten(about["type"], 24)
    place = (shown, about.get("dtype", ""), about.get("device", ""), size)
    return (shorten(name, 24), _difference(by_rank), kind, *place)


def _difference(by_rank: Mapping[int, Mapping[str, Any] | None]) -> str:
    """Describe how a variable differs between the ranks; "same" if it does not."""
    here = {rank: about for rank, about in by_rank.items() if about is not None}
    if len(here) < len(by_rank):
        return f"only {format_ranks(here)}"
    first = next(iter(here.values()))
    for other in here.values():
        if other["type"] != first["type"] or other.get("shape") != first.get("shape"):
            return "≠ kind"
        parts = first.get("parts", {})
        drifted = [part for part in parts if other.get("parts", {}).get(part) != parts[part]]
        if drifted:
            return f"≠ {drifted[0]}".rstrip()
    return "same"
