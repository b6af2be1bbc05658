"""The script: its header, what the training needs, the cell and the call; and its files."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from ...errors import PlanError
from ...planning.cell import read_cell
from ...planning.option_parser import parse_options, split_line
from ...planning.plan import Cell
from ...planning.secrets import is_secret
from ...planning.source_names import bound_names, names_read
from ...system.files import write_atomically
from .statements import Statement, as_python, as_typed, first_line, read

HEADER = "# Made by nbtrain"
DISPLAY = "from IPython.display import display"
MAGIC = re.compile(r"\s*%%distributed\b(.*)\n?")


@dataclass(frozen=True)
class TrainingCell:
    """The cell that trains, as Python: its statements, and its function if it ends in one."""

    cell: Cell
    """Its `filename` is the cell's name for messages: ``In[5]``, ``cell 3 of train.ipynb``."""
    statements: tuple[Statement, ...]
    options: Namespace

    @property
    def binds(self) -> set[str]:
        return bound_names(self.cell.source)

    def needs(self, known: Collection[str]) -> set[str]:
        """Return the names that the cell needs from the notebook, whose names are `known`."""
        own = self.binds
        return names_read(self.body()) | {
            p.name
            for p in self.cell.parameters
            if p.name not in own and (p.default is None or p.name in known)
        }

    def body(self) -> str:
        """Return the cell, with a comment in place of each line that only IPython can run.

        Raises `PlanError`, naming such a line, if the cell needs its result.
        """
        lines = self.cell.source.split("\n")
        for statement in self.statements:
            is_magic = statement.of_ipython and isinstance(statement.node, ast.Expr)
            if not (statement.is_future or is_magic):
                statement.check()
                continue
            for number in range(first_line(statement.node) - 1, statement.node.end_lineno or 0):
                comment = f"# {as_typed(lines[number])}  # only IPython can run this"
                lines[number] = "" if statement.is_future else comment
        return "\n".join(lines).strip("\n")


def read_training_cell(raw: str, place: str, flags: int = 0) -> TrainingCell:
    """Read a ``%%distributed`` cell. Raises `PlanError` if it is not Python."""
    magic = MAGIC.match(raw)
    source = as_python(MAGIC.sub("", raw, count=1) if magic else raw)
    try:
        # Lines are numbered as in the notebook, where the magic has line 1.
        cell = read_cell("\n" * bool(magic) + source, place, {}, flags)
    except SyntaxError as error:
        raise PlanError(f"{place}, line {error.lineno}: {error.msg}") from error
    try:
        options = parse_options(split_line(magic[1] if magic else ""))
    except PlanError:  # `-n {ranks}`: the notebook would fill that in
        options = parse_options([])
    return TrainingCell(cell, tuple(read(cell.source, place)), options)


def write(
    path: Path,
    training: TrainingCell,
    earlier: Iterable[Statement],
    parts: Sequence[str],
    known: Iterable[str],
    files: Mapping[str, bytes],
) -> None:
    """Write the script and the files beside it, replacing earlier ones.

    `parts` are the sources that precede the cell, `known` the names that they bind. Raises
    `PlanError` for code that only IPython can run, and rather than replace a script that nbtrain
    did not write.
    """
    cell = training.body()
    source = "\n".join([*parts, cell])
    futures = [ast.unparse(s.node) for s in (*earlier, *training.statements) if s.is_future]
    sections = [
        _header(training, path.name),
        "\n".join(dict.fromkeys(futures)),  # a script needs them first
        *_settings(training.options),
        *parts,
    ]
    if re.search(r"accelerat|transformers", source, re.IGNORECASE):
        sections += [*(i for i in ("import os", "import torch") if i not in parts), _ON_CPU]
    if "log_with" in source and re.search(r"[\"']nbtrain[\"']", source):
        sections.append(_TRACKER)
    sections += [f"# The cell.\n{cell}", _call(training, {*known, *training.binds})]
    text = _joined([s for s in sections if s])
    try:
        ast.parse(text)
        if path.exists() and not path.read_bytes().startswith(HEADER.encode()):
            raise PlanError(f"{path} exists and nbtrain did not write it: choose another name")
        for name, data in files.items():
            write_atomically(path.parent / name, data)  # for this user alone
        path.write_text(text, encoding="utf-8")
    except SyntaxError as error:  # a comment stands where a statement needs a line
        raise PlanError(f"the cell cannot become a script: {error}") from error
    except OSError as error:
        raise PlanError(f"the script cannot be written: {error}") from error


def _header(training: TrainingCell, name: str) -> str:
    options = training.options
    ranks, file = options.num_processes or 2, shlex.quote(name)
    # Without --multi_gpu, Accelerate starts one process if it sees no GPU.
    flags = ["--multi_gpu" if ranks > 1 else "", f"--num_processes {ranks}"]
    commands = [f"python {file}", f"torchrun --nproc_per_node {ranks} {file}"]
    if options.config is not None:  # only Accelerate reads it
        commands = []
        config = f"--config_file {shlex.quote(options.config)}"
        flags = [config if options.config != "default" else ""]
        flags += [f"--num_processes {ranks}" if options.num_processes else ""]
    flags += [f"--mixed_precision {options.mixed_precision}" if options.mixed_precision else ""]
    commands += [" ".join(["accelerate launch", *filter(None, flags), file])]
    return "\n".join(
        [
            f"{HEADER} from {training.cell.filename}, {date.today()}.",
            "# nbtrain overwrites this file while the line above is its first. To run it:",
            *(f"#     {command}" for command in commands),
        ]
    )


def _settings(options: Namespace) -> list[str]:
    """Return the lines that set the environment of the cell's options, unless it is set already."""
    asked = dict(options.env)
    if options.mixed_precision:
        asked["ACCELERATE_MIXED_PRECISION"] = options.mixed_precision
    lines = [
        f"# {k} is secret and not written here: set it in the environment."
        if is_secret(k, v)
        else f"os.environ.setdefault({k!r}, {v!r})"
        for k, v in asked.items()
    ]
    return ["import os", "\n".join(lines)] if lines else []


_ON_CPU = """
# torchrun on CPUs: without this, Accelerate treats each process as a single one.
if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    if not getattr(torch, "accelerator", torch.cuda).is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
""".strip()

_TRACKER = """
from nbtrain.worker.telemetry.integrations import offer_tracker

offer_tracker()  # for log_with="nbtrain", which Accelerate does not know on its own
""".strip()


def _call(training: TrainingCell, known: Collection[str]) -> str:
    """Return the call of the training function, with variables for parameters of the same name."""
    if training.cell.function is None:
        return ""
    arguments = [
        p.name if p.positional_only else f"{p.name}={p.name}"
        for p in training.cell.parameters
        if p.name in known
    ]
    call = f"{training.cell.function}({', '.join(arguments)})"
    if isinstance(training.statements[-1].node, ast.AsyncFunctionDef):
        call = f"import asyncio\n\n    asyncio.run({call})"
    return f'if __name__ == "__main__":\n    {call}'


def _joined(sections: Sequence[str]) -> str:
    """Join sections, with two empty lines around definitions, none among imports or assignments."""
    text = sections[0]
    for pair in itertools.pairwise(sections):
        kinds = {section.startswith(("import ", "from ")) for section in pair}
        gap = "\n" if len(kinds) == 1 and "\n" not in "".join(pair) else "\n\n"
        if any(re.search(r"(?m)^(async def|def|class|if)\b", section) for section in pair):
            gap = "\n\n\n"
        text += gap + pair[1]
    return text + "\n"
