"""Runs a function with each number of ranks: `scaling` and ``%nbtrain scaling``."""

from __future__ import annotations

import argparse
import ast
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from ...part_api import (
    Call,
    NbtrainError,
    Plan,
    PlanError,
    Run,
    Typed,
    check_parsed,
    host,
    mask_source,
    name_with_lookalikes,
    parser,
    plan_fields,
    plural,
    run_plan,
    shorten,
    split_line,
    with_article,
)
from ...planning.option_parser import split_options
from .report import ScalingReport, Size
from .timed_function import time_steps

USAGE = (
    "%nbtrain scaling [--ranks 1,2,4] [--repeat N] [-e, -p, --downcast-bf16, --config, --env, "
    "--timeout, --hang-after, --as: as %%distributed] FUNCTION(ARGUMENTS)"
)
_SHARED = ("engine", "mixed_precision", "downcast_bf16", "config", "env", "timeout", "hang_after")
"""The options of ``%%distributed`` that apply here; `bind` (``--as``) names the report."""

_THREADS = "OMP_NUM_THREADS"
_DOUBTFUL_RATIO = 1.25
"""How many times faster one repeat may be than another before the report doubts its numbers."""


def scaling(
    function: Callable[..., Any],
    /,
    *args: Any,
    ranks: Iterable[int] = (1, 2, 4),
    repeat: int = 3,
    engine: str = "auto",
    mixed_precision: str | None = None,
    config: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    view: str = "auto",
    **kwargs: Any,
) -> ScalingReport:
    """Run ``function(*args, **kwargs)`` with each number of ranks and report the speed-up.

    Each is an ordinary run with its own folder, and all start from the same state: no weights are
    copied back. A size that fails is a row with its error. An interrupt keeps what was measured
    until then. nbtrain times the optimizer steps, without the first fifth.

    Args:
        function: what every rank calls.
        args: its positional arguments.
        kwargs: its keyword arguments.
        ranks: the numbers of ranks; all are compared with the smallest that was measured.
        repeat: how often to run each size, in rounds that go up and down; the median counts.
        engine, mixed_precision, config, env, timeout: as for `launch`, for each run.
        view: 'none' prints nothing; any other value prints one line per run.

    Returns:
        A report that a notebook draws; `table` is a DataFrame, `svg` the curve.

    Raises:
        PlanError: an argument cannot be used as written; nothing was started.
        KeyboardInterrupt: the run was interrupted before any size was measured.
        Exception: no size could be measured; this is what the first one raised.
    """
    options = plan_fields(locals())
    call = Call(function, args, kwargs)
    return _measure(Plan(call, call.name, **options), tuple(ranks), repeat)


def command(typed: Typed) -> ScalingReport:
    """Carry out ``%nbtrain scaling``; the report is bound to the name that ``--as`` gives.

    Raises `PlanError`, and what `scaling` raises.
    """
    reader = parser((*_SHARED, "bind"), "%nbtrain scaling", f"\n{USAGE}")
    reader.add_argument("--ranks", type=_numbers, default=(1, 2, 4))
    reader.add_argument("--repeat", type=int, default=3)
    text, expression = split_options(typed.text, [])
    options = check_parsed(reader.parse_args(split_line(typed.fill(text))))
    shared = {name: getattr(options, name) for name in _SHARED}
    plan = Plan(_call(expression, typed.namespace), shorten(mask_source(expression), 60), **shared)
    report = _measure(plan, options.ranks, options.repeat)
    if options.bind is not None:
        typed.namespace[options.bind] = report
    return report


def _numbers(text: str) -> tuple[int, ...]:
    """Read numbers of ranks such as ``1,2,4``. Raises `ArgumentTypeError`."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers of ranks, such as 1,2,4"
        ) from None


def _call(expression: str, namespace: Mapping[str, Any]) -> Call:
    """Evaluate the function and the arguments of a call, and return them without calling.

    Raises `PlanError` if the text is no call, or evaluating it raises anything.
    """
    capture = ast.Name("call as it stands", ast.Load())  # a name that no notebook has
    try:
        tree = ast.parse(expression.strip(), "<%nbtrain scaling>", "eval")
        if not isinstance(tree.body, ast.Call):
            raise PlanError("it is not a call")
        tree.body = ast.Call(capture, [tree.body.func, *tree.body.args], tree.body.keywords)
        code = compile(ast.fix_missing_locations(tree), "<%nbtrain scaling>", "eval")
        return eval(code, dict(namespace), {capture.id: _capture})  # type: ignore[no-any-return]
    except NameError as error:
        name = name_with_lookalikes(str(error.name), namespace)
        raise PlanError(
            f"%nbtrain scaling: the notebook has no {name}. What a %%distributed cell "
            "defines stays in its ranks: define it in an ordinary cell"
        ) from None
    except Exception as error:  # the user's own expressions
        problem = f"{expression!r} is not a call such as train(model): {_line(error)}"
        raise PlanError(f"%nbtrain scaling: {problem}\n{USAGE}") from error


def _capture(function: Any, /, *args: Any, **kwargs: Any) -> Call:
    return Call(function, args, kwargs)


def _measure(plan: Plan, ranks: tuple[int, ...], repeat: int) -> ScalingReport:
    """Check the arguments, then run the plan with each number of ranks, `repeat` times.

    A size that fails is a row with its error. An interrupt keeps what was measured. Raises
    `PlanError`, or, if nothing was measured, the interrupt or the first error.
    """
    if not callable(plan.task.function):
        kind = type(plan.task.function).__name__
        raise PlanError(f"scaling needs a function to call, not {with_article(kind)}")
    if not ranks or any(type(number) is not int or number < 1 for number in (*ranks, repeat)):
        problem = f"ranks and repeat must be whole numbers ≥ 1, not {ranks!r} and {repeat!r}"
        raise PlanError(f"scaling: {problem}")
    # The same at all sizes: else a single rank would have the cores of all.
    threads = plan.env.get(_THREADS, os.environ.get(_THREADS, ""))
    if not threads.isdecimal() or int(threads) < 1:
        threads = str(max(1, host.usable_cpus() // max(ranks)))
    task = replace(plan.task, function=time_steps(plan.task.function))
    env = {**plan.env, _THREADS: threads}
    quiet = replace(plan, task=task, env=env, view="none", sync=False, scaling=True)
    sizes = {number: Size(number) for number in sorted(ranks)}
    # Up and down in turn, so that a host that gets slower slows all of them.
    order = [number for i in range(repeat) for number in sorted(sizes, reverse=i % 2 == 1)]
    notes: dict[str, None] = {}
    errors = []
    for i, number in enumerate(order, 1):
        size, name = sizes[number], plural(number, "rank")
        if size.error:
            continue
        try:
            _add(size, run_plan(replace(quiet, num_processes=number)), notes)
            outcome = f"{1000 * size.steps[-1]:.3g} ms per step"
        except KeyboardInterrupt:
            if not any(size.steps for size in sizes.values()):
                raise
            notes["The measurement was interrupted."] = None
            break
        except Exception as error:  # the user's function may raise anything: the others go on
            if isinstance(error, PlanError) and not any(s.steps for s in sizes.values()):
                raise  # nothing was started
            errors.append(error)
            outcome = size.error = _line(error)
            notes[f"A run of {name} failed: {outcome}"] = None
        if plan.view != "none":
            print(f"scaling {i}/{len(order)}: {name}: {outcome}", flush=True)
    if not any(size.steps for size in sizes.values()):
        raise errors[0]
    title = f"{plan.name} · {plural(int(threads), 'thread')} per rank"
    return ScalingReport(title, tuple(sizes.values()), (*notes, *_doubts(list(sizes.values()))))


def _add(size: Size, run: Run, notes: dict[str, None]) -> None:
    """Add a run's mean step to `size`, and to `notes` what a reader has to know about the run.

    Raises `NbtrainError` if a rank made fewer than 8 steps of a torch optimizer.
    """
    ends = [seconds for seconds, _ in run.results]
    count = min(map(len, ends))
    warm_up = max(3, count // 5)
    if count < warm_up + 5:
        raise NbtrainError(f"scaling needs at least 8 steps of a torch optimizer, and saw {count}")
    size.steps.append(fmean((e[-1] - e[warm_up - 1]) / (len(e) - warm_up) for e in ends))
    trainings = [rank.progress for rank in run.state.ranks if rank.progress is not None]
    # Where rank 0 alone reads, for all of them, only its batches are seen.
    fed = sum((training.samples or 0) / (training.steps or 1) for training in trainings)
    size.batch = fed / size.ranks or None
    at = f"At {plural(size.ranks, 'rank')},"
    if any(world_size != size.ranks for _, world_size in run.results):
        notes[f"{at} the ranks did not join one process group: each trained alone."] = None
    if run.state.device == "cpu" and size.ranks > host.usable_cpus():
        notes[f"{at} the ranks share CPU cores, so this does not predict other hardware."] = None


def _doubts(sizes: list[Size]) -> list[str]:
    """Return what a reader has to know to judge the numbers."""
    measured = [size for size in sizes if size.steps]
    notes = []
    if any(max(size.steps) > _DOUBTFUL_RATIO * min(size.steps) for size in measured):
        notes.append(
            "The runs of a size differ widely: the host was also busy with something else."
        )
    if len(measured) > 1 and None in [size.batch for size in measured]:
        notes.append(
            "nbtrain saw no batches, because none came from a DataLoader. The speed-up assumes "
            "that each rank has a batch of the same size."
        )
    elif len(measured) > 1 and len({round(size.batch or 0) for size in measured}) == 1:
        notes.append(
            "Each rank has a batch of the same size (weak scaling): n ranks train on n times the "
            "batch in a step, which can change the result."
        )
    return notes


def _line(error: Exception) -> str:
    return shorten(f"{type(error).__name__}: {error}".strip().splitlines()[0], 160)
