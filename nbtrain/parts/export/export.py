"""Writes a notebook's training cell, and the cells before it, as a script for `torchrun`.

Statements stay as they were typed. One that a script cannot run becomes a comment with the reason.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import json
import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from ...part_api import (
    Cell,
    PlanError,
    load_provided,
    mask_source,
    name_with_lookalikes,
    plural,
    split_line,
    write_atomically,
)
from ...planning.cell import read_cell
from ...planning.option_parser import parse_options
from ...planning.secrets import has_secret, is_secret, move_secrets_to_environment
from ...planning.source_names import always_bound_names, bound_names, names_read

_HEADER = "# Made by nbtrain"
_MAGIC = re.compile(r"\s*%%distributed\b(.*)\n?")
_LEFT_OUT = "  # left out: "
_START = "--start-from"
_IPYTHON = "only IPython can run it"
_FUTURE = re.compile(r"(?m)^from __future__ import .*\n")


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments of ``nbtrain export``."""
    command.add_argument("notebook", type=Path, metavar="NOTEBOOK.ipynb")
    text = "the script to write (by default NOTEBOOK.py, next to the notebook)"
    command.add_argument("-o", "--output", type=Path, metavar="FILE.py", help=text)
    text = "use the N-th %%%%distributed cell, if there are several"
    command.add_argument("--cell", type=int, metavar="N", help=text)
    text = "make the changes of this run again: what `nbtrain turn` changed, after the same steps"
    command.add_argument("--run", metavar="RUN", help=text)
    text = "also write FILE.trainjob.yaml, by which Kubeflow Trainer runs the script on Kubernetes"
    command.add_argument("--kubernetes", action="store_true", help=text)
    text = "with --kubernetes: the container image (by default IMAGE, for you to replace)"
    command.add_argument("--image", default="IMAGE", help=text)


def shell_command(options: Namespace) -> int:
    """Write the script that ``nbtrain export`` asks for, and print where; return 0.

    Raises `PlanError` for what cannot be exported, as `export` does.
    """
    output = options.output or options.notebook.with_suffix(".py")
    image = options.image if options.kubernetes else ""
    print(export(options.notebook, output, options.cell, options.run, image))
    return 0


def save(
    cell: Cell, raw: str, history: Sequence[str], failures: Mapping[int, int], options: Namespace
) -> str:
    """Write the script of a cell that is about to run; return a message for the user.

    `history` has the inputs of earlier cells. `failures` has the line at which a cell failed, by
    the cell's number. An earlier script of nbtrain's is replaced. Raises `PlanError` for what
    cannot be exported, and rather than replace any other file.
    """
    path = Path(options.save or "train.py").expanduser()
    inputs = {f"In[{number}]": text for number, text in enumerate(history)}
    inputs[f"In[{cell.number}]"] = raw
    failed = {f"In[{number}]": line for number, line in failures.items()}
    return _write(path, inputs, failed, options, cell)


def export(
    notebook: Path, path: Path, number: int | None = None, run: str | None = None, image: str = ""
) -> str:
    """Write the script of a notebook's ``%%distributed`` cell, the `number`-th if given.

    Runs nothing, and returns a message for the user. The script makes the changes of a `run` again:
    what the user changed with `Run.turn`. With an `image`, a TrainJob for Kubernetes is written
    next to the script. Earlier files of nbtrain's are replaced. Raises `PlanError` if the notebook
    cannot be read, the cell does not exist or has to be chosen, it cannot become a script or a
    TrainJob, or another file is in the way.
    """
    try:
        content = json.loads(notebook.read_text(encoding="utf-8"))
        # A source is a string, or a list of lines.
        cells = ["".join(c["source"]) for c in content["cells"] if c["cell_type"] == "code"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{notebook} cannot be read as a notebook: {error!r}") from error
    cells = cells[: _find_cell_index(cells, number, notebook) + 1]
    magic = _MAGIC.match(cells[-1])
    options = parse_options([])
    with contextlib.suppress(PlanError):  # `-n {ranks}`: the notebook would fill that in
        options = _read_options(magic[1] if magic else "")
    name = _printable(notebook.name)
    inputs = {f"cell {n} of {name}": text for n, text in enumerate(cells, 1)}
    changes = ""
    if run is not None:
        changes = load_provided("steering", "export_changes", "--run")(run)
    return _write(path, inputs, {}, options, changes=changes, image=image)


def _read_options(line: str) -> Namespace:
    """Return the options of a cell. Raises `PlanError`.

    The checkpoint to start from is only marked: it need not exist where the script is written.
    """
    texts = split_line(line)
    starts = [n for n, text in enumerate(texts) if text.partition("=")[0] == _START]
    for n in reversed(starts):
        del texts[n : n + (1 if "=" in texts[n] else 2)]
    options = parse_options(texts)
    if starts:
        options.start_from = "a checkpoint"
    return options


def _find_cell_index(cells: Sequence[str], number: int | None, notebook: Path) -> int:
    """Return the index of the cell to export: the `number`-th of the ``%%distributed`` cells.

    Raises `PlanError` if it does not exist, and without a `number` if there are several.
    """
    matches = [i for i, raw in enumerate(cells) if _MAGIC.match(raw)]
    if not matches:
        raise PlanError(f"{notebook} has no %%distributed cell")
    if number is None and len(matches) == 1:
        return matches[0]
    if number is not None and 1 <= number <= len(matches):
        return matches[number - 1]
    problem = "several %%distributed cells" if number is None else f"no %%distributed cell {number}"
    heads = [re.findall(r"(?m)^(?:async )?def .*(?=:)|^.+", cells[i])[-1] for i in matches]
    shown = "".join(f"\n  --cell {n}: {head}" for n, head in enumerate(heads, 1))
    raise PlanError(f"{notebook} has {problem}; choose one:{shown}")


def _write(
    path: Path,
    inputs: Mapping[str, str],
    failures: Mapping[str, int],
    options: Namespace,
    running: Cell | None = None,
    changes: str = "",
    image: str = "",
) -> str:
    """Write the script of the last cell, in place of an earlier script; return a message.

    `inputs` has the cells by their names for messages; `running` is the last one in a kernel,
    and `changes` is code that changes settings as the script trains. With an `image`, also write
    the TrainJob of the script.
    Raises `PlanError` where the training needs what a script cannot have, and rather than replace
    a file that nbtrain did not write.
    """
    *earlier, place = inputs
    cells = []
    for name in earlier:
        with contextlib.suppress(SyntaxError, ValueError):  # then it cannot have run
            cells.append(_NotebookCell(inputs[name], name))
    raw = _MAGIC.sub("\n", inputs[place], count=1)
    try:
        cells.append(_NotebookCell(raw, place))
        cell = running or read_cell("\n".join(cells[-1].lines), place, {})
    except SyntaxError as error:
        number = (error.lineno or 1) + len(raw) - len(raw.lstrip("\n"))  # IPython drops empty ones
        raise PlanError(f"{place}, line {number}: {error.msg}") from error
    known = _comment_out_statements(cells, failures, cell)
    source = "\n\n\n".join("\n".join([f"# {c.place}", *c.lines]) for c in cells if any(c.lines))
    futures = dict.fromkeys(_FUTURE.findall(source))  # Python wants them first
    settings = _settings(source, options)
    source, secrets = move_secrets_to_environment(_FUTURE.sub("", source))
    secrets |= {key for key, value in options.env.items() if is_secret(key, value)}
    sections = [
        _header(place, options, path.name, secrets),
        "".join(futures),
        *settings,
        changes or _changes(options),
        "\n" + source,
        "\n" + _call(cell, known),
    ]
    text = "\n\n".join(filter(str.strip, sections)).rstrip() + "\n"
    try:
        compile(text, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        line = text.splitlines()[(error.lineno or 1) - 1].strip()
        raise PlanError(f"a script cannot contain `{line}`: {error.msg}") from error
    files = {path: text}
    if image:
        make_trainjob = load_provided("kubernetes", "make_trainjob", "--kubernetes")
        job = make_trainjob(text, path.name, options, secrets, image)
        files[path.with_suffix(".trainjob.yaml")] = f"{_first_lines(place)}\n{job}"
    _save_files(files)
    count = source.count(_LEFT_OUT) - source.count(_LEFT_OUT + _IPYTHON)
    counts = {"statement": count, "change": changes.count(_LEFT_OUT)}
    missing = " and ".join(plural(number, what) for what, number in counts.items() if number)
    wrote = f"wrote {' and '.join(map(str, files))}"
    return f"{wrote} without {missing} (marked: left out)" if missing else wrote


def _save_files(files: Mapping[Path, str]) -> None:
    """Write files. Raises `PlanError` rather than replace one that nbtrain did not write."""
    try:
        for path in files:
            if path.exists() and not path.read_bytes().startswith(_HEADER.encode()):
                raise PlanError(f"{path} exists and nbtrain did not write it: choose another name")
        for path, text in files.items():
            write_atomically(path, text.encode())
    except OSError as error:
        raise PlanError(f"the script cannot be written: {error}") from error


def _changes(options: Namespace) -> str:
    """Return code that makes the changes of ``--turn``; "" without any."""
    if not options.turn:
        return ""
    return str(load_provided("steering", "export_settings", "--turn")(options.turn))


def _header(place: str, options: Namespace, name: str, secrets: set[str]) -> str:
    """Return the comment on top: how to run the script."""
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
    notes = [f"# Set {name} in the environment first: it is a secret." for name in sorted(secrets)]
    if options.start_from is not None:
        note = "is not loaded. Load it in the training function."
        notes.append(f"# The checkpoint of {_START} {note}")
    lines = ["# To run it:", *(f"#     {each}" for each in commands), *notes]
    return "\n".join([_first_lines(place), *map(_printable, lines)])


def _first_lines(place: str) -> str:
    """Return the comment on top of each file: where it is from, and who may overwrite it."""
    head = _printable(f"{_HEADER} from {place}, {date.today()}.")
    return f"{head}\n# nbtrain may overwrite this file as long as it begins with the line above."


def _printable(text: str) -> str:
    """Return a line of a comment: what ends a line, as a file's name may, would begin code."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def _settings(source: str, options: Namespace) -> list[str]:
    """Return the sections before the cells: environment, seeds, and imports that are missing.

    Variables with a secret are left out. A section may be empty.
    """
    environment = dict(options.env)
    if options.mixed_precision:
        environment["ACCELERATE_MIXED_PRECISION"] = options.mixed_precision
    lines = [
        f"os.environ.setdefault({name!r}, {value!r})"
        for name, value in environment.items()
        if not is_secret(name, value)
    ]
    return [
        "\n".join(["import os", *lines]),  # before torch reads it
        _SETTINGS,
        "import numpy\nnumpy.random.seed(0)" if "numpy" in source else "",
        _TRACKER if "log_with" in source and re.search(r"[\"']nbtrain[\"']", source) else "",
        *(line for name, line in _SUPPLIED.items() if name in names_read(source)),
    ]


_SUPPLIED = {"display": "from IPython.display import display", "nbtrain": "import nbtrain"}
"""The imports of names that a notebook has without one."""

_SETTINGS = """
import random
import torch

os.environ.setdefault("MPLBACKEND", "Agg")  # a plot opens no window
# torchrun on CPUs: without this, Accelerate treats each process as a single one.
if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    if not getattr(torch, "accelerator", torch.cuda).is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
# All ranks draw the same numbers until a cell sets a seed, as in the notebook.
random.seed(0)
torch.manual_seed(0)
""".strip()

_TRACKER = """
from nbtrain.worker.observers.integrations import offer_tracker

offer_tracker()  # for log_with="nbtrain", which Accelerate does not know on its own
""".strip()


def _call(cell: Cell, known: set[str]) -> str:
    """Return the code that calls the training function, if the cell has one, and ends the ranks.

    Parameters with a name in `known` get the variable of the same name. The code stands under ``if
    __name__ == "__main__":``.
    """
    lines = ['if __name__ == "__main__":']
    if cell.function is not None:
        arguments = [
            p.name if p.positional_only else f"{p.name}={p.name}"
            for p in cell.parameters
            if p.name in known
        ]
        call = f"{cell.function}({', '.join(arguments)})"
        if isinstance(ast.parse(cell.source).body[-1], ast.AsyncFunctionDef):
            call = f"import asyncio\n\n    asyncio.run({call})"
        lines.append(f"    {call}")
    return "\n".join([*lines, _LEAVE])


_LEAVE = """
    # Else a thread of gloo may abort a rank as Python ends, and other nodes wait for it.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
""".strip("\n")
"""Leaves the process group before Python ends.

A thread of gloo drops a tensor some time after its collective is done. Once Python ends, that
aborts the process (https://github.com/pytorch/pytorch/issues/190489), mostly on a busy machine.
The torchrun of that node then ends at once, and those of the other nodes wait 300 s for it.
"""


class _Statement:
    """A statement at a cell's top level, or several that share a line.

    Attributes:
        lines: the indices of its lines in the cell, decorators included.
        binds: the names that it may bind; ``*`` for a star import.
        reads: the names that it reads, at once or later in a function's body.
        makers: the statements that had bound a name when it ran.
    """

    def __init__(self, cell: _NotebookCell, lines: range) -> None:
        self.cell = cell
        self.lines = lines
        text = "\n".join(cell.lines[lines.start : lines.stop])
        self.nodes = ast.parse(text).body
        deleted = [node for node in self.nodes if isinstance(node, ast.Delete)]
        targets = [target for node in deleted for target in node.targets]
        self.deletes = {target.id for target in targets if isinstance(target, ast.Name)}
        self.binds, self.reads = bound_names(text) - self.deletes, names_read(text)
        self.certainly_binds = {name for node in self.nodes for name in always_bound_names(node)}
        self.makers: dict[str, _Statement] = {}
        self.is_ipythons = "get_ipython" in self.reads
        flags = compile(text, "", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT).co_flags
        self.awaits = bool(flags & inspect.CO_COROUTINE)

    def is_only(self, *kinds: type[ast.stmt]) -> bool:
        return all(isinstance(node, kinds) for node in self.nodes)

    @property
    def typed_line(self) -> str:
        """The line that only IPython can run, or else the first one."""
        magics = [i for i in self.lines if "get_ipython" in self.cell.lines[i]]
        first = [*magics, *self.lines][0]
        return str(self.cell.typed[first]).strip()

    def make_comment(self, reason: str) -> None:
        """Turn the statement into a comment with the reason, and leave out lines with a secret."""
        for i in self.lines:
            typed = self.cell.typed[i]
            if "get_ipython" not in self.cell.lines[i]:
                typed = self.cell.masked_lines[i]
            shown = "(a line with a secret)" if has_secret(typed) else typed
            self.cell.lines[i] = f"# {shown}".rstrip()
        self.cell.lines[self.lines.start] += _LEFT_OUT + reason


class _NotebookCell:
    """A cell's lines as Python, and its statements; ``%%time`` and ``%%capture`` are removed."""

    def __init__(self, raw: str, place: str) -> None:
        """Read a cell, which messages call `place`. Raises `SyntaxError`."""
        from IPython.core.inputtransformer2 import TransformerManager

        self.place = place
        raw = re.sub(r"^\s*%%(time|capture)\b.*\n?", "", raw)
        raw = re.sub(r"(?m)^%time[ \t]+(?=\S)", "", raw).strip("\n").rstrip()
        if raw.startswith("%%"):
            raw = f"# This {raw.split()[0]} cell is left out."
        python = str(TransformerManager().transform_cell(raw)).rstrip()  # type: ignore[no-untyped-call,unused-ignore]
        self._python = python
        self.lines = python.split("\n")  # as ast counts them
        self.typed: list[str] = raw.split("\n")
        if len(self.typed) != len(self.lines):  # a magic over several lines has become one
            self.typed = list(self.lines)
        self.statements: list[_Statement] = []
        for node in ast.parse(python).body:
            decorators: list[ast.expr] = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            lines = range(first - 1, node.end_lineno or first)
            if self.statements and lines.start < self.statements[-1].lines.stop:  # a = 1; b = 2
                lines = range(self.statements.pop().lines.start, lines.stop)
            self.statements.append(_Statement(self, lines))

    @functools.cached_property
    def masked_lines(self) -> list[str]:
        """Its lines as they were before some became comments, without secrets."""
        return mask_source(self._python).split("\n")


def _nbtrain_names(node: ast.stmt) -> set[str]:
    """Return the names that an import gives to nbtrain and to what is in it.

    Empty for any other statement, and for the plain ``import nbtrain``.
    """
    if isinstance(node, ast.Import):
        return {a.asname for a in node.names if a.name.split(".")[0] == "nbtrain" and a.asname}
    if isinstance(node, ast.ImportFrom) and node.module == "nbtrain":
        return {a.asname or a.name for a in node.names}
    return set()


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def _comment_out_statements(
    cells: Sequence[_NotebookCell], failures: Mapping[str, int], training: Cell
) -> set[str]:
    """Comment out what a script cannot run; return the parameters that get a variable's value.

    A script cannot run magics and shell commands, calls of nbtrain before the last cell, an
    `await` outside a function, what failed in the kernel, and whatever needs a name that only such
    a statement assigns. `failures` has, by the place of a cell, the line at which it failed. Raises
    `PlanError` if the training, which is the last cell, needs what is left out.
    """
    statements = [statement for cell in cells for statement in cell.statements]
    left: dict[_Statement, str] = {}
    makers: dict[str, _Statement] = {}
    launchers = {"nbtrain", "notebook_launcher", "debug_launcher"}
    launchers |= {name for s in statements for node in s.nodes for name in _nbtrain_names(node)}
    for statement in statements:
        # A function reads a variable as it is when it is called; other code, as it is by then.
        statement.makers = {} if statement.is_only(*_DEFINITIONS) else dict(makers)
        if statement.lines.stop >= failures.get(statement.cell.place, sys.maxsize):
            left[statement] = "the cell failed here"
            # It assigned nothing, so an earlier value still counts.
            makers = dict.fromkeys(statement.binds, statement) | makers
            continue
        makers |= dict.fromkeys(statement.binds, statement)
        makers = {name: maker for name, maker in makers.items() if name not in statement.deletes}
        if statement.is_ipythons:
            left[statement] = _IPYTHON
        elif statement.awaits:
            left[statement] = "it awaits outside a function"
        elif statement.reads & launchers and not statement.is_only(*_DEFINITIONS):
            left |= {} if statement.cell is cells[-1] else {statement: "it calls nbtrain"}
    # In a kernel it is known; else a value counts where nothing can have kept it from being made.
    certain = {name for name, maker in makers.items() if name in maker.certainly_binds}
    has_value = training.namespace or certain
    filled = {p.name for p in training.parameters if p.default is None or p.name in has_value}
    for statement in cells[-1].statements[-1:]:
        statement.reads |= filled
    bound = {name for statement in statements for name in statement.binds}
    unknown = {name for statement in statements for name in statement.reads}
    unknown -= {*dir(builtins), *_SUPPLIED, "get_ipython", *bound}
    if "*" in bound:  # a star import: its names are known only when it has run
        unknown = set()

    def reason_of(statement: _Statement) -> str:
        for name in sorted(statement.reads):
            maker = statement.makers.get(name, makers.get(name))
            if name in unknown:
                return f"no cell assigns {name_with_lookalikes(name, makers)}"
            if maker in left and maker is not None:
                return f"it needs `{name}` ({maker.cell.place}: {left[maker]})"
        return ""

    while more := {s: reason for s in statements if s not in left and (reason := reason_of(s))}:
        left |= more
    for statement, reason in left.items():
        is_magic = statement.is_ipythons and statement.is_only(ast.Expr)
        if statement.cell is cells[-1] and not is_magic:
            place = statement.cell.place
            raise PlanError(f"{place}: `{statement.typed_line}` cannot be in a script: {reason}")
        statement.make_comment(reason)
    return {name for name in filled if makers.get(name) not in left}
