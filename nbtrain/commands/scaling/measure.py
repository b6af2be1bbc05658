"""`scaling` and ``%nbtrain scaling``: the same function with each number of ranks, run by run."""

from __future__ import annotations

import argparse
import ast
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ...errors import NbtrainError, PlanError
from ...lifecycle.launcher import run_plan
from ...lifecycle.run import Run, last_folder, last_run
from ...planning.cell import with_lookalikes
from ...planning.option_parser import checked, parser, plan_fields, split_line, split_options
from ...planning.plan import Call, Plan
from ...system.host import usable_cpus
from ...system.text import format_number, plural, shorten
from ...tracking.run_folder import RunFolder
from .efficiency import KINDS, Size, StepTime, compare, step_time
from .report import ScalingReport

USAGE = (
    "%nbtrain scaling [--ranks 1,2,4] [--repeat N] [--warmup STEPS] [--weak|--strong] "
    "[-e, -p, --downcast-bf16, --config, --env, --timeout, --hang-after, --as: as %%distributed] "
    "FUNCTION(ARGUMENTS)"
)
_SHARED = ("engine", "mixed_precision", "downcast_bf16", "config", "env", "timeout", "hang_after")
"""The options of ``%%distributed`` that apply here; `bind` (``--as``) names the report."""

_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class ScalingRequest:
    """What is to be measured. Raises `PlanError` for values that make no sense."""

    ranks: tuple[int, ...] = (1, 2, 4)
    repeat: int = 1
    warm_up: int | None = None
    kind: str | None = None

    def __post_init__(self) -> None:
        if not self.ranks or not all(type(n) is int and n > 0 for n in self.ranks):
            raise PlanError(
                f"scaling: ranks must be whole numbers ≥ 1, as in (1, 2, 4), not {self.ranks!r}"
            )
        if type(self.repeat) is not int or not 0 < self.repeat <= 100:
            raise PlanError(
                f"scaling: repeat must be a whole number from 1 to 100, not {self.repeat!r}"
            )
        if self.warm_up is not None and (type(self.warm_up) is not int or self.warm_up < 0):
            raise PlanError(f"scaling: the warm-up must be a number of steps, not {self.warm_up!r}")
        if self.kind not in (None, *KINDS):
            raise PlanError(f"scaling: kind must be 'weak', 'strong' or None, not {self.kind!r}")


def scaling(
    function: Callable[..., Any],
    /,
    *args: Any,
    ranks: Iterable[int] = (1, 2, 4),
    repeat: int = 1,
    warmup: int | None = None,
    kind: str | None = None,
    engine: str = "auto",
    mixed_precision: str | None = None,
    config: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    view: str = "auto",
    **kwargs: Any,
) -> ScalingReport:
    """Run ``function(*args, **kwargs)`` at each number of ranks and report how it scales.

    Each is an ordinary run with its own folder, and all start from the same state: no weights are
    copied back. A size that fails is a row with its error, or with the times of its earlier
    repeats; an interrupt keeps what was measured until then. Optimizer steps are measured, after
    a warm-up.

    Args:
        ranks: the sizes; all are compared with the smallest that was measured.
        repeat: how often to run each size, in rounds that go up and down; the median counts.
        warmup: steps to leave out at the beginning; None: a fifth, at least 3.
        kind: 'weak' or 'strong', where the batches do not show it.
        engine, mixed_precision, config, env, timeout: as for `launch`, for each run.
        view: 'none' prints nothing meanwhile; else one line per run.

    Raises:
        PlanError: an argument makes no sense; nothing was started.
        KeyboardInterrupt: the run was interrupted before any size was measured.
        Exception: no size could be measured; this is what the first one raised.
    """
    options = plan_fields(locals())
    call = Call(function, args, kwargs)
    request = ScalingRequest(tuple(dict.fromkeys(ranks)), repeat, warmup, kind)
    return measure(Plan(call, call.name, **options), request)


def ask(line: str, namespace: dict[str, Any], fill: Callable[[str], str] = str) -> ScalingReport:
    """Run ``%nbtrain scaling`` and return the report, bound to the name that ``--as`` gives."""
    plan, request, name = read(line, namespace, fill)
    report = measure(plan, request)
    if name is not None:
        namespace[name] = report
    return report


def read(
    line: str, namespace: Mapping[str, Any], fill: Callable[[str], str] = str
) -> tuple[Plan, ScalingRequest, str | None]:
    """Return what to run, how to measure it, and the name that the report is bound to.

    The function and its arguments are evaluated, the function is not called. The options pass
    through `fill`. Raises `PlanError`.
    """
    reader = parser((*_SHARED, "bind"), "%nbtrain scaling", f"\n{USAGE}")
    reader.add_argument("--ranks", type=_numbers, default=(1, 2, 4))
    reader.add_argument("--repeat", type=int, default=1)
    reader.add_argument("--warmup", type=int)
    kinds = reader.add_mutually_exclusive_group()
    for kind in KINDS:
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind)
    text, expression = split_options(line, [f"--{kind}" for kind in KINDS])
    options = checked(reader.parse_args(split_line(fill(text))))
    shared = {name: getattr(options, name) for name in _SHARED}
    plan = Plan(_call(expression, namespace), shorten(expression, 60), **shared)
    request = ScalingRequest(options.ranks, options.repeat, options.warmup, options.kind)
    return plan, request, options.bind


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(map(int, text.split(","))))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers of ranks, such as 1,2,4"
        ) from None


def _call(expression: str, namespace: Mapping[str, Any]) -> Call:
    """Evaluate the function and the arguments of a call, in the notebook; do not call."""
    try:
        tree = ast.parse(expression.strip(), "<%nbtrain scaling>", "eval")
    except SyntaxError as error:
        raise PlanError(f"%nbtrain scaling: {error.msg} in {expression!r}\n{USAGE}") from None
    call = tree.body
    if not isinstance(call, ast.Call):
        raise PlanError(
            f"%nbtrain scaling: {expression!r} is not a call such as train(model)\n{USAGE}"
        )
    capture = ast.Name("call as it stands", ast.Load())  # a name that no notebook has
    tree.body = ast.Call(capture, [call.func, *call.args], call.keywords)
    code = compile(ast.fix_missing_locations(tree), "<%nbtrain scaling>", "eval")
    try:
        return eval(code, dict(namespace), {capture.id: _capture})  # type: ignore[no-any-return]
    except NameError as error:
        name = with_lookalikes(str(error.name), namespace)
        raise PlanError(
            f"%nbtrain scaling: the notebook has no {name}. What a %%distributed cell "
            "defines stays in its ranks: define it in an ordinary cell"
        ) from None
    except Exception as error:  # the user's own expressions
        message = f"{type(error).__name__}: {error}"
        raise PlanError(f"%nbtrain scaling: {expression} raised {message}") from error


def _capture(function: Any, /, *args: Any, **kwargs: Any) -> Call:
    return Call(function, args, kwargs)


def measure(plan: Plan, request: ScalingRequest) -> ScalingReport:
    """Run the plan with each number of ranks that is asked for; see `scaling`."""
    if not callable(plan.task.function):
        raise PlanError(
            f"scaling needs a function to call, not a {type(plan.task.function).__name__}"
        )
    cores = _cores()
    # The same at all sizes: else a single rank would have the cores of all.
    threads = _threads(plan.env) or max(1, usable_cpus() // max(request.ranks))
    env = {**plan.env, _THREADS: str(threads)}
    done = _Done(request.warm_up)
    quiet = replace(plan, env=env, view="none", sync=False, scaling=True)
    order = _order(request)
    for number, size in enumerate(order, 1):
        if size in done.errors:
            continue
        try:
            done.add(size, replace(quiet, num_processes=size))
        except KeyboardInterrupt:
            if not done.measured:
                raise
            done.notes.append("It was stopped: these numbers were measured before that.")
            break
        if plan.view != "none":
            print(f"scaling {number}/{len(order)}: {done.outcome(size)}", flush=True)
    if not done.measured:
        raise next(iter(done.errors.values()))
    room = cores // threads if done.device == "cpu" else None
    kind, rows, notes = compare(done.measured, kind=request.kind, room=room)
    if rows[0].ranks > min(request.ranks):
        base, least = (plural(n, "rank") for n in (rows[0].ranks, min(request.ranks)))
        notes.append(f"All sizes are compared with {base}: {least} could not be measured.")
    errors = {n: Size(n, error=_line(done.errors.get(n))) for n in request.ranks}
    sizes = errors | {row.ranks: replace(row, runs=tuple(done.runs[row.ranks])) for row in rows}
    return ScalingReport(
        name=plan.name,
        kind=kind,
        sizes=tuple(sizes[n] for n in sorted(sizes)),
        device=done.device,
        cores=cores,
        threads=threads,
        repeats=request.repeat,
        notes=(*notes, *dict.fromkeys(done.notes)),
    )


def _threads(env: Mapping[str, str]) -> int:
    """Return how many threads the user asked for; 0 if that is not a number."""
    value = env.get(_THREADS, os.environ.get(_THREADS, ""))
    return int(value) if value.isdecimal() else 0


def _order(request: ScalingRequest) -> list[int]:
    """Return the sizes, up and down in turn, so that a host that gets slower slows all of them."""
    turns = (sorted(request.ranks, reverse=i % 2 == 1) for i in range(request.repeat))
    return list(chain.from_iterable(turns))


@dataclass
class _Done:
    """What was measured so far, by the number of ranks."""

    warm_up: int | None
    measured: dict[int, list[StepTime]] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    runs: dict[int, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    device: str = "cpu"

    def add(self, size: int, plan: Plan) -> None:
        """Run one size; if that fails, keep the error beside its earlier repeats."""
        before = last_folder()
        try:
            run = run_plan(plan)
            step = _read(run, self.warm_up)
            self.measured.setdefault(size, []).append(step)
            self.runs.setdefault(size, []).append(run.folder.name)
            self.device = run.state.device
        except Exception as error:  # the user's function may raise anything: the others go on
            if isinstance(error, PlanError) and not self.measured:
                raise
            self.errors[size] = error
            if size in self.measured:
                repeats = plural(len(self.measured[size]), "repeat")
                self.notes.append(
                    f"{self.outcome(size)}; its numbers are those of {repeats} before"
                )
        run_now = last_run()
        if run_now is not None and run_now.folder != before:
            self.notes += run_now.state.notes

    def outcome(self, size: int) -> str:
        """Describe how the last run of a size went."""
        ranks = plural(size, "rank")
        if size in self.errors:
            return f"{ranks}: {_line(self.errors[size])}"
        last = self.measured[size][-1]
        rate = size * (last.samples or 0) / last.step
        speed = f", {format_number(rate)} samples/s" if rate else ""
        return f"{ranks}: {1000 * last.step:.3g} ms per step{speed}"


def _read(run: Run, warm_up: int | None) -> StepTime:
    """Read the steps that ranks recorded. Raises `NbtrainError` if they took none."""
    folder = RunFolder(run.folder)
    try:
        records = [json.loads(folder.steps(r).read_bytes()) for r in range(run.state.world_size)]
    except FileNotFoundError as error:
        name = os.path.basename(error.filename)
        raise NbtrainError(
            f"a rank's record of its steps is missing from the run's folder: {name}"
        ) from None
    if not all(record["rows"] for record in records):
        raise NbtrainError(
            "no optimizer step of a rank could be seen: scaling needs a torch optimizer"
        )
    return step_time(records, warm_up)


def _cores() -> int:
    """Return how many cores this process may use; two threads of a core count once."""
    import psutil

    return min(usable_cpus(), psutil.cpu_count(logical=False) or usable_cpus())


def _line(error: BaseException | None) -> str:
    if error is None:
        return "not measured"
    return shorten(f"{type(error).__name__}: {error}".strip().splitlines()[0], 160)
