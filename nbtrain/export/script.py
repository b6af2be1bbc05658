"""The text of the script: header, what the training needs, the cell, the call; and its files."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from ..cell import Options
from ..errors import PlanError
from ..lint.facts import is_function
from ..names import bound_names, is_secret
from ..plan import Parameter
from .statements import Statement, as_typed, first_line, read

HEADER = "# Made by nbtrain"
DISPLAY = "from IPython.display import display"


@dataclass(frozen=True)
class Training:
    """The cell that trains, as Python: its statements, and its function if it ends in one."""

    source: str
    where: str
    statements: tuple[Statement, ...]
    function: str | None = None
    parameters: tuple[Parameter, ...] = ()
    options: Options = field(default_factory=Options)

    @property
    def binds(self) -> set[str]:
        return bound_names(self.source)


@dataclass(frozen=True)
class Material:
    """What goes before the cell: statements in their order, and the files they read."""

    parts: Sequence[str]
    futures: Sequence[str] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)


def body(training: Training) -> str:
    """Return the cell without what only IPython can run: that becomes a comment.

    Raises `PlanError` where the cell needs it, by name.
    """
    lines = training.source.split("\n")
    for one in training.statements:
        gone = one.is_future
        if one.of_ipython and isinstance(one.node, ast.Expr):
            gone = True
        if not gone:
            one.refuse_what_no_script_can()
            continue
        for number in range(first_line(one.node) - 1, one.node.end_lineno or 0):
            shown = "# " + as_typed(lines[number])
            lines[number] = "" if one.is_future else f"{shown}  # IPython's: not in a script"
    return "\n".join(lines).strip("\n")


def call(training: Training, known: Iterable[str]) -> str:
    """Return the call of the training function: what has a variable of its name gets that."""
    if training.function is None:
        return ""
    known = {*known, *training.binds}
    words = [
        p.name if p.positional_only else f"{p.name}={p.name}"
        for p in training.parameters
        if p.name in known
    ]
    called = f"{training.function}({', '.join(words)})"
    last = training.statements[-1].node
    if isinstance(last, ast.AsyncFunctionDef):
        return f'if __name__ == "__main__":\n    import asyncio\n\n    asyncio.run({called})'
    return f'if __name__ == "__main__":\n    {called}'


def text(training: Training, material: Material, known: Iterable[str], name: str) -> str:
    """Return the whole script. Raises `PlanError` for what no script can do."""
    cell = body(training)
    first = dict.fromkeys([*material.futures, *futures(training.statements)])
    sections = [
        _header(training, name),
        "\n".join(first),
        _settings(training.options),
        *material.parts,
        *_on_cpu(material.parts, cell),
        *_tracker(material.parts, cell),
        f"# The cell.\n{cell}",
        call(training, known),
    ]
    return _joined([s for s in sections if s])


def futures(statements: Iterable[Statement]) -> list[str]:
    """Return the ``__future__`` imports among statements: a script has them first."""
    return [ast.unparse(s.node) for s in statements if s.is_future]


def _header(training: Training, name: str) -> str:
    options = training.options
    ranks, file = options.num_processes or 2, shlex.quote(name)
    # Without --multi_gpu, Accelerate starts one process where it sees no GPU.
    words = ["--multi_gpu" if ranks > 1 else "", f"--num_processes {ranks}"]
    commands = [f"python {file}", f"torchrun --nproc_per_node {ranks} {file}"]
    if options.config is not None:  # which the others would not read
        commands = []
        words = (
            [f"--config_file {shlex.quote(options.config)}"] if options.config != "default" else []
        )
        words += [f"--num_processes {ranks}" if options.num_processes else ""]
    words += [f"--mixed_precision {options.mixed_precision}" if options.mixed_precision else ""]
    commands += [" ".join(["accelerate launch", *filter(None, words), file])]
    return "\n".join(
        [
            f"{HEADER} from {training.where}, {date.today()}.",
            "# As long as that line stands first, nbtrain may write this file anew. To run it:",
            *(f"#     {command}" for command in commands),
        ]
    )


def _settings(options: Options) -> str:
    """Return what the cell's options put into the environment, where nobody else has."""
    asked = dict(options.env)
    if options.mixed_precision:
        asked["ACCELERATE_MIXED_PRECISION"] = options.mixed_precision
    lines = [
        f"# {k}: not written here, set it in the environment."
        if is_secret(k)
        else f"os.environ.setdefault({k!r}, {v!r})"
        for k, v in asked.items()
    ]
    return "\n".join(["import os", "", *lines]) if lines else ""


def _on_cpu(parts: Sequence[str], cell: str) -> list[str]:
    """Return what makes one world of CPU processes under torchrun, as nbtrain does."""
    if not re.search(r"accelerat|transformers", "\n".join([*parts, cell]), re.IGNORECASE):
        return []
    return [*(i for i in ("import os", "import torch") if i not in parts), _ON_CPU]


_ON_CPU = """
if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    if not getattr(torch, "accelerator", torch.cuda).is_available():
        # Accelerate takes each process on a CPU for a lone one, unless it is told.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
""".strip()


def _tracker(parts: Sequence[str], cell: str) -> list[str]:
    """Return what makes Accelerate know nbtrain's tracker, where the training asks for it."""
    source = "\n".join([*parts, cell])
    return [_TRACKER] if "log_with" in source and re.search(r"[\"']nbtrain[\"']", source) else []


_TRACKER = """
from nbtrain.telemetry import libraries as _libraries

_libraries.offer_tracker()  # for log_with="nbtrain", which Accelerate does not know by itself
""".strip()


def _joined(sections: Sequence[str]) -> str:
    """Join with two empty lines around definitions and none between assignments and imports."""
    out = ""
    before, last = "header", ""
    for section in sections:
        kind = _kind(section)
        close = kind == before and kind in ("import", "assignment") and "__future__" not in last
        gap = "\n" if close else "\n\n"
        if "definition" in (kind, before) and out:
            gap = "\n\n\n"
        out += (gap if out else "") + section
        before, last = kind, section
    out += "\n"
    try:
        ast.parse(out)
    except SyntaxError as error:  # a cell whose lines mean something only together
        raise PlanError(f"the cell cannot be made a script: {error}") from error
    return out


def _kind(section: str) -> str:
    statements = read(section, "")
    nodes = [s.node for s in statements]
    if any(is_function(n) or isinstance(n, (ast.ClassDef, ast.If)) for n in nodes):
        return "definition"
    if nodes and all(s.is_import for s in statements):
        return "import"
    return "assignment" if len(nodes) == 1 and not section.startswith("#") else "other"


def write(path: Path, source: str, files: Mapping[str, bytes]) -> None:
    """Write the script and the files beside it. Raises `PlanError` rather than replace another's.

    The names of those files say whose they are: they are replaced.
    """
    try:
        if path.exists() and not path.read_bytes().startswith(HEADER.encode()):
            raise PlanError(f"{path} exists, and nbtrain did not make it: choose another name")
        for name, data in files.items():
            (path.parent / name).write_bytes(data)
        path.write_text(source, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"the script cannot be written: {error}") from error
