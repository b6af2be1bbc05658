"""Running the same function at each size, one ordinary run after the other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..devices import usable_cpus
from ..errors import NbtrainError, PlanError
from ..folder import RunFolder
from ..launcher import run_plan
from ..plan import Call, Plan, check_kinds
from ..run import Run, last_run
from ..telemetry.timing import ASKED
from ..view.wording import counted, number
from .report import KINDS, ScalingReport, Size, compare
from .steps import Taken, read, together

_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Asked:
    """What is to be measured. Raises `PlanError` for what makes no sense."""

    ranks: tuple[int, ...] = (1, 2, 4)
    repeat: int = 1
    warm_up: int | None = None
    kind: str | None = None

    def __post_init__(self) -> None:
        if not self.ranks or not all(type(n) is int and n > 0 for n in self.ranks):
            raise PlanError(f"scaling: ranks are whole numbers ≥ 1 (1, 2, 4), not {self.ranks!r}")
        if len(set(self.ranks)) < len(self.ranks):
            raise PlanError(f"scaling: a number of ranks comes twice in {self.ranks!r}")
        if type(self.repeat) is not int or not 0 < self.repeat <= 100:
            raise PlanError(f"scaling: repeats are a number from 1 to 100, not {self.repeat!r}")
        if self.warm_up is not None and (type(self.warm_up) is not int or self.warm_up < 0):
            raise PlanError(f"scaling: the warm-up is a number of steps, not {self.warm_up!r}")
        if self.kind not in (None, *KINDS):
            raise PlanError(f"scaling: kind is 'weak', 'strong' or None, not {self.kind!r}")


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

    Each is an ordinary run with a folder of its own, from the same start: no weights come home. A
    size that fails is a row with its error, or with what its earlier repeats took; an interrupt
    keeps what was measured until then. What is measured are optimizer steps, after a warm-up.

    Args:
        ranks: the sizes; all are compared with the smallest that was measured.
        repeat: how often each is run, in rounds that go up and down; the median counts.
        warmup: steps left out at the beginning; None: a fifth, at least 3.
        kind: 'weak' or 'strong', where that is not to be told from the batches that were seen.
        engine, mixed_precision, config, env, timeout: as for `launch`, of each run.
        view: 'none' says nothing meanwhile; else a line a run.

    Raises:
        PlanError: an argument that makes no sense; nothing was started.
        KeyboardInterrupt: it came before any size was measured.
        Exception: no size could be measured: what the first one raised.
    """
    if not callable(function):
        raise PlanError(f"scaling needs a function to call, not a {type(function).__name__}")
    check_kinds(config=config, env=env)
    plan = Plan(
        task=Call(function, args, kwargs),
        name=getattr(function, "__name__", type(function).__name__),
        engine=engine,
        mixed_precision=mixed_precision,
        config=config,
        env=dict(env or {}),
        timeout=timeout,
        view=view,
    )
    return measure(plan, Asked(tuple(ranks), repeat, warmup, kind))


def measure(plan: Plan, asked: Asked) -> ScalingReport:
    """Carry the plan out at each size that is asked for; see `scaling`."""
    if plan.engine == "inline":
        raise PlanError("the inline engine runs one rank: there is nothing to compare")
    cores = _cores()
    # At all sizes the same, or one rank would have the cores of all.
    threads = _threads(plan.env) or max(1, usable_cpus() // max(asked.ranks))
    env = {**plan.env, _THREADS: str(threads), ASKED: "1"}
    done = _Done()
    quiet = replace(plan, env=env, view="none", sync=False)
    for size, word in _order(asked):
        if size in done.errors:
            continue
        try:
            done.add(size, replace(quiet, num_processes=size), asked.warm_up)
        except KeyboardInterrupt:
            if not done.taken:
                raise
            done.notes["it was stopped: what is here was measured before"] = None
            break
        if plan.view != "none":
            print(f"scaling {word}: {done.said(size)}", flush=True)
    if not done.taken:
        raise next(iter(done.errors.values()))
    room = cores // threads if done.device == "cpu" else None
    kind, rows, notes = compare(done.taken, kind=asked.kind, room=room)
    if rows[0].ranks > min(asked.ranks):
        base, least = (counted(n, "rank") for n in (rows[0].ranks, min(asked.ranks)))
        notes.append(f"all is against {base}: there are no figures of {least}")
    errors = {n: Size(n, error=_line(done.errors.get(n))) for n in asked.ranks}
    sizes = errors | {row.ranks: replace(row, runs=tuple(done.runs[row.ranks])) for row in rows}
    return ScalingReport(
        name=plan.name,
        kind=kind,
        sizes=tuple(sizes[n] for n in sorted(sizes)),
        device=done.device,
        cores=cores,
        threads=threads,
        repeats=asked.repeat,
        notes=(*notes, *done.notes),
    )


def _threads(env: Mapping[str, str]) -> int:
    """Return how many threads the user asked for; 0 if that is no number."""
    told = env.get(_THREADS, os.environ.get(_THREADS, ""))
    return int(told) if told.isdecimal() else 0


def _order(asked: Asked) -> Iterator[tuple[int, str]]:
    """Yield the sizes, up and down in turn: a host that gets slower is then nobody's handicap."""
    count = len(asked.ranks) * asked.repeat
    for i in range(count):
        turn, place = divmod(i, len(asked.ranks))
        ordered = sorted(asked.ranks, reverse=turn % 2 == 1)
        yield ordered[place], f"{i + 1}/{count}"


class _Done:
    """What was measured so far."""

    def __init__(self) -> None:
        self.taken: dict[int, list[Taken]] = {}
        self.errors: dict[int, BaseException] = {}
        self.runs: dict[int, list[str]] = {}
        self.notes: dict[str, None] = {}
        self.device = "cpu"

    def add(self, size: int, plan: Plan, warm_up: int | None) -> None:
        """Run one size; what is wrong with it is kept, beside its earlier repeats."""
        before = last_run()
        try:
            run = run_plan(plan)
            taken = _read(run, warm_up)
            self.taken.setdefault(size, []).append(taken)
            self.runs.setdefault(size, []).append(run.folder.name)
            self.device = run.state.device
        except Exception as error:  # the user's function may raise anything: the others go on
            if isinstance(error, PlanError) and not self.taken:
                raise
            self.errors[size] = error
            if size in self.taken:
                had = counted(len(self.taken[size]), "repeat")
                said = f"{self.said(size)}, after {had}: what is told of it is of before"
                self.notes[said] = None
        run_now = last_run()
        if run_now is not None and run_now is not before:
            self.notes |= dict.fromkeys(run_now.state.notes)

    def said(self, size: int) -> str:
        """Word how the last run of a size went."""
        ranks = counted(size, "rank")
        if size in self.errors:
            return f"{ranks}: {_line(self.errors[size])}"
        last = self.taken[size][-1]
        rate = f", {number(size * last.samples / last.step)} samples/s" if last.samples else ""
        return f"{ranks}: {1000 * last.step:.3g} ms a step{rate}"


def _read(run: Run, warm_up: int | None) -> Taken:
    """Read what the ranks of a run saw. Raises `NbtrainError` where they took no steps."""
    folder = RunFolder(run.folder)
    try:
        said = [json.loads(folder.steps(r).read_bytes()) for r in range(run.state.world_size)]
    except FileNotFoundError as error:
        name = os.path.basename(error.filename)
        raise NbtrainError(
            f"what a rank saw of its steps is not in the run's folder: {name} is missing"
        ) from None
    if not all(one["rows"] for one in said):
        raise NbtrainError(
            "a rank took no optimizer step that could be seen: scaling needs a torch optimizer"
        )
    return together([read(one, warm_up) for one in said])


def _cores() -> int:
    """Return how many cores are there to be used, two threads of one counted once."""
    import psutil

    return min(usable_cpus(), psutil.cpu_count(logical=False) or usable_cpus())


def _line(error: BaseException | None) -> str:
    if error is None:
        return "not measured"
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return text if len(text) <= 160 else text[:159] + "…"
