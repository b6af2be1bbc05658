"""The magics ``%%distributed``, ``%distributed`` and ``%nbtrain``, and those of parts."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from IPython.core.compilerop import PyCF_MASK
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand

from .. import part
from ..errors import CellSyntaxError, PlanError
from ..system import accelerator_guard, instrumentation
from . import cell_watch
from .idle_imports import IdleImports

if TYPE_CHECKING:  # imported at first use; otherwise %load_ext would take ten times as long
    from argparse import Namespace

    from ..lifecycle.run import Run
    from ..planning.plan import Plan

_COMMANDS = ("guard", "doctor", "runs", "show", "stop", "stacks", "migrate")
"""The commands of ``%nbtrain`` that belong to no part."""

_HELP = """Run this cell, or an expression, on several ranks (training processes).

    %%distributed [options]
    def train(model, epochs=3):
        ...
        return accuracy

    %distributed [options] EXPRESSION

If the last statement of the cell is a `def`, every rank runs the cell and calls that function. Each
parameter gets the value of the notebook variable with its name, or its default. Otherwise every
rank runs the cell, and the value of its last expression is the result. The ranks see the notebook's
variables, imports and functions. When the run succeeds, the notebook gets the result, the trained
weights of the models that the cell mentions, and the variables that --out names:

    run = nbtrain.last_run();  run.value;  run.results;  run.logs(rank)

"""


def _distributed_help() -> str:
    from ..planning.option_parser import parser

    return _HELP + parser().format_help()


def _nbtrain_help() -> str:
    """Return the text of ``%nbtrain?``: the commands of the core, then those of the parts."""
    own = inspect.getdoc(NbtrainMagics.nbtrain) or ""
    lines = (command.help.strip("\n") for command in part.commands().values())
    return "\n".join([own, *filter(None, lines)])


@magics_class
class NbtrainMagics(Magics):  # type: ignore[misc,unused-ignore]
    """The magics of nbtrain."""

    shell: Any
    cell_watch: cell_watch.CellWatch
    idle_imports: IdleImports
    undo: Callable[[], None]

    @no_var_expand
    @line_cell_magic
    def distributed(self, line: str, cell: str | None = None) -> Run | None:
        """Run this cell, or an expression, on several ranks (see `_distributed_help`).

        Return the run of an expression, and None for a cell. ``--help`` prints the options.
        """
        if line.split() in (["--help"], ["-h"]):
            from ..planning.option_parser import parser

            print(parser().format_help())
            return None
        if cell is None:
            from ..planning.option_parser import split_options

            options_text, expression = split_options(line)
            return self._run(options_text, expression, offset=0)
        self._run(line, cell, offset=1)
        return None

    # IPython calls `getdoc` for ``%distributed?``, so the options are imported only then.
    vars(distributed)["getdoc"] = _distributed_help

    def cell_magic(self, command: part.Command) -> Callable[[str, str], None]:
        """Return a part's cell magic. It is no line magic, which would hide a variable `rank`."""

        @no_var_expand
        def run(line: str, cell: str) -> None:
            self._run(part.load(command.run)(line), cell, offset=1)

        vars(run)["getdoc"] = lambda: command.help
        return run

    @no_var_expand
    @line_cell_magic
    def nbtrain(self, line: str, cell: str | None = None) -> Any:
        """Show and control runs and this kernel, and change a training.

        %nbtrain guard         show whether an accelerator is initialised here, and by which cell
        %nbtrain guard warn    warn at the cell that initialises one (the default)
        %nbtrain guard block   prevent it: raise before torch or Accelerate initialises one
        %nbtrain guard off     only remember the cell
        %nbtrain doctor        describe this host and kernel on a page, also for a bug report
                               (--json: as JSON, for a program)
        %nbtrain runs          list the runs that are kept
        %nbtrain show [RUN]    draw a run here, running or not: RUN is its number, as in 12 or
                               train #12, its --name, or the start of its folder's name
        %nbtrain stop [RUN]    end a run, also one of another kernel
        %nbtrain stacks [RUN]  show the line that each rank of a run is at now
        %%nbtrain migrate      on top of a cell with a plain PyTorch loop: show what to change, as
                               a diff, to train it on all ranks with Accelerate
        %%nbtrain migrate --apply
                               make these changes: the cell is replaced
        """
        if cell is not None:
            self._migrate(line, cell)
            return None
        fill = functools.partial(_expand_variables, self.shell)
        commands, name = part.commands(), next(iter(line.split()), "")
        if name not in commands or not commands[name].fills_options_alone:
            line = fill(line)
            name = next(iter(line.split()), "")
        command = commands.get(name)
        if command is not None:
            text = line.partition(name)[2]
            found = part.load(command.run)(part.Typed(name, text, self.shell.user_ns, fill))
            if found is not part.PASS:
                return found
        match line.split():
            case ["help" | "--help" | "-h"]:
                print(_nbtrain_help())
            case ["guard"]:
                print(cell_watch.accelerator_status_text())
            case ["guard", ("warn" | "block" | "off") as mode]:
                self.cell_watch.set_mode(mode)
                if mode == "block" and accelerator_guard.initialized_accelerators():
                    print(cell_watch.accelerator_status_text())
            case ["doctor"] | ["doctor", "--json"]:
                self._print_doctor(as_json="--json" in line)
            case ["runs"]:
                from ..lifecycle import catalog
                from ..ui.displays.html_display import show

                infos = catalog.run_infos()
                show({"text/plain": catalog.page(infos), "text/html": catalog.draw_page(infos)})
            case ["show" | "stop" | "stacks", *names]:
                self._run_command(name, [" ".join(names)] if names else [])
            case ["migrate", *_]:
                from . import migrate

                raise PlanError(f"%nbtrain migrate works on a whole cell: {migrate.USAGE}")
            case _:
                from ..system.text import did_you_mean

                problem = f"has no command {line!r}" if line.strip() else "needs a command"
                names = [*_COMMANDS, *(n for n in part.commands() if n not in _COMMANDS)]
                guess = did_you_mean(name, names) if name else ""
                *most, last = names
                raise PlanError(
                    f"%nbtrain {problem}{guess}. Use {', '.join(most)} or {last} (%nbtrain? "
                    "explains them)"
                )
        return None

    vars(nbtrain)["getdoc"] = _nbtrain_help

    def _print_doctor(self, as_json: bool) -> None:
        from . import doctor

        print(json.dumps(doctor.to_dict(), indent=2) if as_json else doctor.page())

    def _run_command(self, command: str, names: list[str]) -> None:
        """Run ``show``, ``stop`` or ``stacks`` on the run of that name, or on the last one."""
        from ..lifecycle import catalog

        run = catalog.find_run(*names)
        match command:
            case "show":
                run.show()
            case "stop":
                print(catalog.stop(run, "by %nbtrain stop", "%nbtrain"))
            case _:
                print(run.stacks())

    def _migrate(self, line: str, cell: str) -> None:
        """Print the changes that a plain loop needs as a diff; with ``--apply``, make them.

        Raises `PlanError` for another command, and if the loop cannot be migrated. Raises
        `CellSyntaxError` if the cell is not Python.
        """
        from . import migrate

        command, *arguments = line.split() or [""]
        if command != "migrate":
            raise PlanError(f"%%nbtrain {command}: the only command for a cell is `migrate`")
        with self._convert_syntax_error():
            print(migrate.migrate(self.shell, arguments, cell))

    @contextlib.contextmanager
    def _convert_syntax_error(self) -> Iterator[None]:
        """Convert a `SyntaxError` of the body to `CellSyntaxError`, with IPython's text."""
        try:
            yield
        except SyntaxError as error:
            lines = self.shell.SyntaxTB.structured_traceback(SyntaxError, error, [])
            if (error.text or "").partition("=")[2].lstrip().startswith("!"):
                lines.append(_SHELL_COMMAND_HINT)
            raise CellSyntaxError(str(error), drawn="\n".join(lines)) from error

    def _run(self, options_text: str, source: str, offset: int) -> Run:
        """Run a source with the options of its magic; return the run.

        The source begins `offset` lines below the magic. Waits for the end of the run, unless it is
        a background run. ``--as NAME`` assigns the run to a variable, also if it fails. Raises
        `PlanError`, `CellSyntaxError`, and the error of the run.
        """
        from ..lifecycle.launch_sides import launch_sides
        from ..lifecycle.launcher import run_plan
        from ..lifecycle.run import last_run, last_run_folder
        from ..planning.option_parser import parse_options, split_line
        from ..planning.plan import Cell
        from ..planning.source_names import bound_names

        before, sides = last_run_folder(), launch_sides()
        options = parse_options(split_line(_expand_variables(self.shell, options_text)))
        place = next(filter(None, (side.place(options) for side in sides)), None)
        with self._convert_syntax_error():
            plan = self._plan(options, source, offset, () if place is None else place.variables)
        if isinstance(plan.task, Cell):
            raw = f"%%distributed\n{source}" if offset else source
            history = self.shell.history_manager.input_hist_raw[:-1]
            for side in sides:
                side.before_cell(plan.task, raw, history, self.cell_watch.failures, options)
        try:
            if place is not None:  # later cells there have the names that this one defines
                return cast("Run", place.run(plan))
            run = run_plan(plan)
            if isinstance(plan.task, Cell) and plan.task.number is not None:
                names = dict.fromkeys(bound_names(plan.task.source), plan.task.number)
                self.cell_watch.defined_in_ranks |= names
            return run
        finally:
            if options.bind is not None and last_run_folder() != before:
                self.shell.user_ns[options.bind] = last_run()

    def _plan(self, options: Namespace, source: str, offset: int, variables: Iterable[str]) -> Plan:
        """Register a source with IPython, and return its plan.

        The ranks have the `variables` already. Raises the source's `SyntaxError`, and `PlanError`
        if it is empty or a parameter has no value.
        """
        from ..planning import cell as reading
        from ..planning.plan import OPTIONS, Plan

        if not source.strip():
            raise PlanError("%distributed has nothing to run: give it a cell or an expression")
        place_names = dict.fromkeys(variables)
        # An empty line replaces the magic's line, so that line numbers are those of the cell.
        transformed = "\n" * offset + self._transform(source, place_names)
        filename, number = self._register(transformed, source)
        flags = self.shell.compile.flags & PyCF_MASK  # ``__future__`` imports of the notebook
        cell = reading.read_cell(transformed, filename, self.shell.user_ns, flags)
        cell = replace(cell, number=number)
        reading.check_parameters(replace(cell, namespace={**place_names, **cell.namespace}))
        fields = {option.field: getattr(options, option.field) for option in OPTIONS}
        return Plan(cell, options.title or reading.title(cell), **fields)

    def _transform(self, source: str, place_names: Container[str]) -> str:
        """Return a cell's Python source. A first word of `place_names` is not a magic's name."""
        first = re.match(r"\s*(\w+)", source)
        if first is not None and first[1] in place_names:
            return str(self.shell.input_transformer_manager.transform_cell(source))
        return str(self.shell.transform_cell(source))

    def _register(self, transformed: str, raw: str) -> tuple[str, int]:
        """Register the source with IPython, for tracebacks; return its file and cell number."""
        shell = self.shell
        # Not execution_count, which IPython 9 increases before the cell runs, 7 and 8 after it.
        number = max(1, len(shell.history_manager.input_hist_parsed) - 1)
        return str(shell.compile.cache(transformed, number, raw_code=raw)), number


_SHELL_COMMAND_HINT = (
    "This IPython does not read `name = !command` on this version of Python, in any cell. Write "
    'name = get_ipython().getoutput("command")'
)
"""IPython 7.34 on Python 3.12, as in Colab. It needs a kind of token that Python removed."""


def _debug(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Open ``%debug`` in the rank that raised the exception.

    If that rank has ended, print so, and open nothing. Any other exception goes to IPython's
    `original`, whose value is returned.
    """
    error = getattr(sys, "last_value", None)
    lifecycle = sys.modules.get("nbtrain.lifecycle.run")
    if error is None or lifecycle is None:
        return original(*args, **kwargs)
    from ..lifecycle.launch_sides import launch_sides

    if any(side.debug(error) for side in launch_sides()):
        return None
    run = lifecycle.last_run()
    if run is not None and run.exception is error:
        print(_RANK_HAS_ENDED)
        return None
    return original(*args, **kwargs)


_RANK_HAS_ENDED = (
    "This exception was raised in a rank, which has ended. Run the cell with --debug: the "
    "debugger then opens in the rank before it ends."
)


def _expand_variables(_shell: Any, _text: str) -> str:
    """Replace ``{name}`` and ``$name`` by the notebook's variables, as IPython does in magics.

    IPython also uses the local names of its caller. Those of this function begin with ``_``, so
    that they hide no variable of the user.
    """
    return str(_shell.var_expand(_text))


_modes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""The guard's mode in each shell. A reload of the extension keeps it."""


def load(shell: Any) -> None:
    """Register the magics with a shell, watch its cells, and replace its ``%debug``.

    Also imports modules while the kernel is idle, and defines ``nbtrain`` in the notebook unless it
    is defined, because messages refer to it. A second call replaces the first.
    """
    unload(shell)
    shell.user_ns.setdefault("nbtrain", sys.modules[__name__.partition(".")[0]])
    magics = NbtrainMagics(shell)
    magics.cell_watch = cell_watch.CellWatch(shell)
    magics.cell_watch.set_mode(_modes.get(shell, "warn"))
    magics.idle_imports = IdleImports(shell)
    shell.register_magics(magics)
    for name, command in part.cell_magics().items():
        shell.register_magic_function(magics.cell_magic(command), "cell", name)
    magics.undo = instrumentation.patch(shell, "debugger", _debug)


def unload(shell: Any) -> None:
    """Remove the magics and stop watching the cells."""
    magics = shell.magics_manager.registry.pop("NbtrainMagics", None)
    if magics is not None:
        _modes[shell] = magics.cell_watch.mode
        magics.cell_watch.stop()
        magics.idle_imports.stop()
        magics.undo()
    for kind in ("line", "cell"):
        for name in ("distributed", "nbtrain", *part.cell_magics()):
            shell.magics_manager.magics[kind].pop(name, None)
