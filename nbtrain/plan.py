"""What to run, on how many ranks, by which engine, within which limits: frozen values."""

from __future__ import annotations

import keyword
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import PlanError
from .nodes import Nodes

ENGINES = ("auto", "fork", "spawn", "tpu", "xla", "torch_tpu", "ray", "inline")
PRECISIONS = ("no", "fp16", "bf16", "fp8")
VIEWS = ("auto", "widget", "html", "text", "none")
SOURCES = ("bars", "steps", "loss", "data", "phases", "trainer", "tracker")
"""What a rank reports unasked: tqdm bars; optimizer steps and learning rate; the loss that goes
backward; batches and the time spent waiting for them; saving and compiling; the logs of
transformers' Trainer; Accelerate's tracker."""

HANG_AFTER = 300.0
"""Seconds without a sign of progress after which a rank is asked where it is; None: never."""


OF_ALL = "@all"
"""After a name of `Plan.out`: what the variable is in every rank, as a list."""


def names_of(texts: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names in a text or several, where they are separated by commas or spaces."""
    whole = [texts] if isinstance(texts, str) else texts
    return tuple(
        dict.fromkeys(name for text in whole for name in re.split(r"[,\s]+", text) if name)
    )


def sources_of(asked: str | Iterable[str]) -> tuple[str, ...]:
    """Return the sources of telemetry that are asked for: ``"all"``, ``"none"``, names, or all but
    those with a minus. Raises `PlanError`.
    """
    if asked == "all":
        return SOURCES
    names = names_of(asked)
    unknown = [n for n in names if n.removeprefix("-") not in (*SOURCES, "none")]
    if unknown or (isinstance(asked, str) and not names):
        what = repr(unknown[0]) if unknown else "of no name"
        raise PlanError(f"no telemetry {what}: choose among all, none, {', '.join(SOURCES)}")
    taken_out = {n[1:] for n in names if n.startswith("-")}
    if taken_out and len(taken_out) == len(names):
        return tuple(s for s in SOURCES if s not in taken_out)
    return tuple(s for s in SOURCES if s in names)


_KINDS: Mapping[str, tuple[type, ...]] = {
    "config": (str, os.PathLike),
    "env": (Mapping,),
    "resources": (Mapping,),
    "out": (str, Iterable),
    "telemetry": (str, Iterable),
}


def check_kinds(**options: Any) -> None:
    """Refuse what cannot be an option's value: it was meant for the function. `PlanError`."""
    for name, value in options.items():
        if value is not None and not isinstance(value, _KINDS[name]):
            kind = type(value).__name__
            raise PlanError(
                f"`{name}` is an option of nbtrain's here, and cannot be a value of type {kind}. "
                "An argument of that name gets to the function by position, or in "
                f"functools.partial(function, {name}=...)."
            )


@dataclass(frozen=True)
class Call:
    """Call ``function(*args, **kwargs)`` on every rank."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the training function, as the cell's source writes it."""

    name: str
    default: str | None = None
    positional_only: bool = False


@dataclass(frozen=True)
class Cell:
    """Run a notebook cell on every rank, then call its training function if it ends in one.

    `flags` are the compiler's: the ``__future__`` imports of earlier cells. `number` is that of
    ``In[number]``.
    """

    source: str
    filename: str
    namespace: dict[str, Any]
    function: str | None = None
    parameters: tuple[Parameter, ...] = ()
    flags: int = 0
    number: int | None = None


Task = Call | Cell


@dataclass(frozen=True)
class Plan:
    """One launch, as it was asked for. Raises `PlanError` if a value is out of range.

    `out` are the variables of rank 0 that come back; with `sync`, models that the function is
    given, or the cell mentions, come back trained. `config` is a file of ``accelerate config``'s,
    "default" the usual one: it decides what is None here. `address` is that of a Ray cluster,
    `spread` how many of its nodes share the ranks, at least and at most, `resources` what each
    rank takes of its node, by Ray's names, `wait_for_nodes` the seconds that it has to make room.
    """

    task: Task
    name: str
    num_processes: int | None = None
    engine: str = "auto"
    mixed_precision: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    timeout: float | None = None
    max_restarts: int = 0
    background: bool = False
    detach: bool = False
    view: str = "auto"
    port: int | None = None
    config: str | None = None
    telemetry: tuple[str, ...] = SOURCES
    hang_after: float | None = HANG_AFTER
    downcast_bf16: bool = False
    out: tuple[str, ...] = ()
    sync: bool = True
    nodes: Nodes | None = None
    address: str | None = None
    spread: tuple[int, int] | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    wait_for_nodes: float = 0.0

    @property
    def goes_on(self) -> bool:
        """Whether the run goes on behind the cell: to the kernel's end, or beyond (`detach`)."""
        return self.background or self.detach

    def __post_init__(self) -> None:
        n = self.num_processes
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
            raise PlanError(
                f"the number of processes must be a whole number ≥ 1 (None: automatic), not {n!r}"
            )
        for what, value, known in (
            ("engine", self.engine, ENGINES),
            ("mixed precision", self.mixed_precision or "no", PRECISIONS),
            ("view", self.view, VIEWS),
        ):
            if value not in known:
                raise PlanError(f"unknown {what} {value!r}: choose one of {', '.join(known)}")
        told = self.mixed_precision is not None or self.config is None
        if self.downcast_bf16 and told and self.mixed_precision != "bf16":
            raise PlanError("downcast_bf16 goes with bf16 mixed precision: -p bf16 --downcast-bf16")
        limit = self.timeout
        if limit is not None and not (isinstance(limit, (int, float)) and 0 < limit < 1e9):
            raise PlanError(f"the timeout must be a number of seconds > 0, not {self.timeout!r}")
        quiet = self.hang_after
        if quiet is not None and not (isinstance(quiet, (int, float)) and 0 < quiet < 1e9):
            raise PlanError(f"hang_after must be a number of seconds > 0 or None, not {quiet!r}")
        if self.port is not None and not 0 < self.port < 65536:
            raise PlanError(f"the port must be between 1 and 65535, not {self.port!r}")
        if type(self.max_restarts) is not int or not 0 <= self.max_restarts <= 1000:
            raise PlanError(f"restarts must be a number ≥ 0, not {self.max_restarts!r}")
        if self.max_restarts and self.engine == "inline":
            raise PlanError("the inline engine runs in the kernel itself: it cannot restart ranks")
        if not self.sync and self.engine == "inline":
            raise PlanError("the inline engine trains the notebook's own models: no --no-sync here")
        if self.goes_on and self.engine == "inline":
            raise PlanError("the inline engine runs in the kernel itself: the cell has to wait")
        self._check_cluster()
        for source in self.telemetry:
            if source not in SOURCES:
                raise PlanError(f"no telemetry {source!r}: choose among {', '.join(SOURCES)}")
        for name in self.out:
            plain = name.removesuffix(OF_ALL) if isinstance(name, str) else ""
            if not plain.isidentifier() or keyword.iskeyword(plain):
                raise PlanError(f"out: {name!r} is not a variable name (NAME, or NAME{OF_ALL})")
        for key, value in self.env.items():
            sound = isinstance(key, str) and isinstance(value, str)
            if not sound or not key or "=" in key or "\0" in key + value:
                raise PlanError(f"not an environment variable: {key!r}={value!r}")

    def _check_cluster(self) -> None:
        if self.engine != "ray":
            if self.address is not None or self.spread is not None or self.resources:
                raise PlanError("address, nodes and resources are for a cluster: --engine ray")
            if self.wait_for_nodes:
                raise PlanError("there are nodes to wait for on a cluster: --engine ray")
            return
        wait = self.wait_for_nodes
        if not isinstance(wait, (int, float)) or not 0 <= wait < 1e9:
            raise PlanError(f"wait_for_nodes must be a number of seconds ≥ 0, not {wait!r}")
        least, most = self.spread or (1, 1)
        if type(least) is not int or type(most) is not int or not 1 <= least <= most:
            raise PlanError(f"nodes must be a number ≥ 1, or MIN:MAX, not {self.spread!r}")
        if (self.num_processes or most) % most:
            raise PlanError(
                f"{self.num_processes} ranks cannot be shared equally by {most} nodes: "
                f"ask for a multiple of {most}"
            )
        for name, amount in self.resources.items():
            if not isinstance(amount, (int, float)) or not 0 <= amount < 1e15:
                raise PlanError(f"resources: {name} must be a number ≥ 0, not {amount!r}")
            if name == "GPU" and amount % 1:
                raise PlanError(f"a rank takes whole GPUs, or none, not {amount:g} of one")
