"""``%%distributed`` and ``%distributed``: from what the user typed to a plan. Thin."""

from __future__ import annotations
import __future__

import functools
import operator
import time
import weakref
from dataclasses import replace
from typing import Any

from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class, no_var_expand

from . import blame, doctor, export, guard, kept, memory, speedup
from . import cell as reading
from .errors import CellSyntaxError, PlanError
from .launcher import run_plan
from .plan import Cell, Plan
from .run import Run, last_run

FUTURES = functools.reduce(
    operator.or_, (getattr(__future__, n).compiler_flag for n in __future__.all_feature_names)
)

_QUESTIONS = "runs, show, stop, stacks, memory, scaling, guard and doctor"

_HELP = """Train on several ranks, copies of the kernel: run this cell, or an expression, in each.

    %%distributed [options]
    def train(model, epochs=3):
        ...
        return accuracy

    %distributed [options] EXPRESSION

A cell whose last statement is a `def` is run on every rank and that function called, each
parameter filled from the notebook variable of its name, else its default. Any other cell runs as
it stands, and a trailing expression is the rank's result. Notebook variables, imports and
functions are visible. What comes back: the result, the models that the cell mentions, trained, and
the variables that --out names:

    run = nbtrain.last_run();  run.value;  run.results;  run.logs(rank)

"""


@magics_class
class NbtrainMagics(Magics):  # type: ignore[misc,unused-ignore]
    """The magics of nbtrain."""

    shell: Any
    blame: blame.Blame

    @no_var_expand
    @line_cell_magic
    def distributed(self, line: str, cell: str | None = None) -> Run | None:
        if cell is None:
            options_text, expression = reading.split_options(line)
            return self._run(options_text, expression, offset=0)
        self._run(line, cell, offset=1)
        return None

    distributed.__doc__ = _HELP + reading.parser().format_help()

    @no_var_expand
    @line_magic
    def nbtrain(self, line: str) -> memory.MemoryAnatomy | speedup.ScalingReport | None:
        """Ask nbtrain about this kernel.

        %nbtrain guard         has an accelerator been initialised here, and by which cell
        %nbtrain guard warn    say so at the cell that does it (the default)
        %nbtrain guard block   keep it from happening: raise before torch or Accelerate does it
        %nbtrain guard off     only remember the cell
        %nbtrain doctor        this host and kernel on a page, for you or for a bug report
        %nbtrain runs          the runs that are kept
        %nbtrain show [RUN]    draw one here, running or not: by its name, or how that begins
        %nbtrain stop [RUN]    end one, also one of another kernel
        %nbtrain stacks [RUN]  where each of its ranks is now, line by line
        %nbtrain memory MODEL --batch 8x512 [options]
                               what training it takes on each rank, and whether it fits; options:
            --optimizer NAME            adamw (the default), sgd, …, a variable, none: inference
            --precision no|fp16|bf16    as under Accelerate
            --ranks N, --strategy ddp|fsdp, --card 16GB
            --batch-from NAME           shaped as a batch of yours, in place of --batch
        MODEL is a variable, or an expression that builds one: it is built without memory.
        %nbtrain scaling --ranks 1,2,4 [options] train(model, steps=50)
                               run that at each size: speed-up, and what is lost to what; options:
            --repeat N                  each size N times, up and down; the median counts
            --warmup STEPS              left out at the beginning, in place of a fifth
            --weak, --strong            where that is not to be told from the batches seen
            -e, -p, --downcast-bf16, --config, --env, --timeout, --hang-after, --as
                                        as of %%distributed; --as binds the report
        """
        fill = functools.partial(_expanded, self.shell)
        if line.split()[:1] not in (["memory"], ["scaling"]):  # there, only options are filled
            line = fill(line)
        match line.split():
            case ["guard"]:
                print(blame.report())
            case ["guard", ("warn" | "block" | "off") as mode]:
                self.blame.set_mode(mode)
                if mode == "block" and guard.initialized():
                    print(blame.report())
            case ["doctor"]:
                print(doctor.page())
            case ["runs"]:
                print(kept.page(kept.digests(), time.time()))
            case ["show", *which] if len(which) <= 1:
                kept.find(*which).show()
            case ["stop", *which] if len(which) <= 1:
                kept.find(*which).stop("by %nbtrain stop")
            case ["stacks", *which] if len(which) <= 1:
                print(kept.find(*which).stacks())
            case ["memory", *_]:
                words = line.partition("memory")[2]
                model, options = memory.read(words, self.shell.user_ns, fill)
                return memory.memory_needed(model, **options)
            case ["scaling", *_]:
                return speedup.ask(line.partition("scaling")[2], self.shell.user_ns, fill)
            case _:
                told = f"no such question: {line!r}." if line.strip() else "which question?"
                raise PlanError(
                    f"%nbtrain: {told} There are {_QUESTIONS} (%nbtrain? explains them)"
                )
        return None

    def _run(self, options_text: str, source: str, offset: int) -> Run:
        before = last_run()
        words = reading.split_words(_expanded(self.shell, options_text))
        options = reading.parse_options(words)
        try:
            plan = self._plan(options, source, offset)
        except SyntaxError as error:
            lines = self.shell.SyntaxTB.structured_traceback(SyntaxError, error, [])
            raise CellSyntaxError(str(error), drawn="\n".join(lines)) from error
        if options.save is not None and isinstance(plan.task, Cell):
            raw = f"%%distributed\n{source}" if offset else source
            history = self.shell.history_manager.input_hist_raw[:-1]
            print(export.save(plan.task, raw, history, options))
        try:
            return run_plan(plan)
        finally:
            run = last_run()
            if options.bind is not None and run is not before:
                self.shell.user_ns[options.bind] = run

    def _plan(self, options: reading.Options, source: str, offset: int) -> Plan:
        if not source.strip():
            raise PlanError("%distributed: nothing to run; give a cell or an expression")
        # The magic's own line is kept as an empty one: line numbers are those of the cell.
        transformed = "\n" * offset + self.shell.transform_cell(source)
        filename, number = self._register(transformed, source)
        flags = self.shell.compile.flags & FUTURES
        cell = reading.read_cell(transformed, filename, self.shell.user_ns, flags)
        cell = replace(cell, number=number)
        reading.check_parameters(cell)
        return Plan(
            task=cell,
            name=reading.title(cell),
            num_processes=options.num_processes,
            engine=options.engine,
            mixed_precision=options.mixed_precision,
            downcast_bf16=options.downcast_bf16,
            config=options.config,
            env=options.env,
            timeout=options.timeout,
            max_restarts=options.max_restarts,
            background=options.background,
            detach=options.detach,
            view=options.view,
            telemetry=options.telemetry,
            hang_after=options.hang_after,
            out=options.out,
            sync=options.sync,
            address=options.address,
            spread=options.nodes,
            resources=options.resources,
            wait_for_nodes=options.wait_for_nodes,
        )

    def _register(self, transformed: str, raw: str) -> tuple[str, int]:
        """Tell IPython the source, so that tracebacks show it as ``Cell In[n]``; return both."""
        shell = self.shell
        # Not execution_count: IPython 9 counts up before the cell runs, 7 and 8 after it.
        number = max(1, len(shell.history_manager.input_hist_parsed) - 1)
        return str(shell.compile.cache(transformed, number, raw_code=raw)), number


def _expanded(_shell: Any, _text: str) -> str:
    """Fill ``{name}`` and ``$name`` from the notebook's variables, as IPython does in magics.

    IPython looks at its caller's local names as well: here none has a name of a user's.
    """
    return str(_shell.var_expand(_text))


_modes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""The guard's mode in each shell, which outlives a reload."""


def load(shell: Any) -> None:
    """Register the magics with a shell and watch its cells; again, harmlessly."""
    unload(shell)
    magics = NbtrainMagics(shell)
    magics.blame = blame.Blame(shell)
    magics.blame.start()
    magics.blame.set_mode(_modes.get(shell, "warn"))
    shell.register_magics(magics)


def unload(shell: Any) -> None:
    """Take the magics and the watch away."""
    magics = shell.magics_manager.registry.pop("NbtrainMagics", None)
    if magics is not None:
        _modes[shell] = magics.blame.mode
        magics.blame.stop()
    for kind, name in (("line", "distributed"), ("cell", "distributed"), ("line", "nbtrain")):
        shell.magics_manager.magics[kind].pop(name, None)
