"""`Plan`: one launch, with its task, ranks, engine and limits, as frozen values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, get_args

from ..errors import PlanError
from . import option_types as options
from .option_types import option


@dataclass(frozen=True)
class Call:
    """Call ``function(*args, **kwargs)`` on every rank."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    owner: str = ""
    """The notebook's name for the object of a bound method, which no fresh process can find."""

    references: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)
    """The values that the task refers to, while `task_values.keep_references` keeps them."""

    @property
    def name(self) -> str:
        """Return the name of a run of the function, which may be any callable.

        That of its class if it has no name; a partial has the name of its function.
        """
        function: Any = self.function
        while type(function) is partial:
            function = function.func
        return str(getattr(function, "__name__", type(function).__name__)).strip("<>")


@dataclass(frozen=True)
class Parameter:
    """A parameter of the training function, as written in the cell's source."""

    name: str
    default: str | None = None
    positional_only: bool = False


@dataclass(frozen=True)
class Cell:
    """Run a notebook cell on every rank, then call its training function if it ends in one."""

    source: str
    filename: str
    namespace: dict[str, Any]
    function: str | None = None
    parameters: tuple[Parameter, ...] = ()
    flags: int = 0
    """The compiler's flags: the ``__future__`` imports of earlier cells."""
    number: int | None = None
    """The number in ``In[number]``."""
    references: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)
    """As for a `Call`."""


Task = Call | Cell


@dataclass(frozen=True)
class Plan:
    """One launch, as the user wants it. A field that is an `option` contains its own help.

    Raises `PlanError` for a value out of range, and for options that exclude each other.
    """

    task: Task
    name: str
    """The name of the run, on its board and in the name of its folder."""

    num_processes: int | None = option(
        "-n --num-processes",
        "ranks to start; auto (the default): one per GPU or TPU chip, or 2 on a host without any",
        metavar="N|auto",
        read=int,
        # 0 is `torch.cuda.device_count()` on a host without a GPU; the launcher handles it.
        must_be=("a whole number ≥ 1", partial(options.is_whole, least=0)),
        none="auto",
    )
    engine: str = option(
        "-e --engine",
        "how ranks are started. fork (auto): copies of the kernel; spawn: fresh processes, which "
        "get what the cell refers to; tpu (auto on a TPU host): xla (torch_xla, forked) or "
        "torch_tpu (its successor, fresh processes), whichever is installed; ray: on a Ray "
        "cluster; slurm (auto in a Slurm job of several nodes): on the nodes of that job; inline: "
        "one rank in the kernel itself, for debugging",
        "auto",
        **options.choice(options.ENGINES, options.engine_plugins),
    )
    mixed_precision: str | None = option(
        "-p --mixed-precision",
        "the precision of a plain Accelerator() in the ranks; on a TPU, bf16 applies to every "
        "float",
        **options.choice(options.PRECISIONS),
    )
    downcast_bf16: bool = option(
        "--downcast-bf16",
        "on a TPU with -p bf16: float becomes bf16, and double a 32-bit float",
        False,
        part="tpu",
    )
    env: Mapping[str, str] = option(
        "--env",
        "set an environment variable of the ranks (repeatable)",
        {},
        metavar="KEY=VALUE",
        types=(Mapping,),
        read=options.read_pair,
        convert=lambda env: dict(env or {}),
        must_be=("environment variables (KEY=VALUE)", options.is_environment),
    )
    out: tuple[str, ...] = option(
        "--out",
        "copy these variables of rank 0 back to the notebook: a,b (NAME@all: of every rank, as a "
        "list)",
        (),
        metavar="NAMES",
        nargs="+",
        types=(str, Iterable),
        convert=options.read_variables,
        must_be=(f"variable names (NAME, or NAME{options.OF_ALL})", options.is_output),
    )
    sync: bool = option(
        "--no-sync",
        "leave the notebook's models unchanged; without it, a run that succeeds updates the "
        "models that the cell mentions",
        True,
    )
    view: options.View = option(
        "--view",
        "how progress is shown while the cell runs",
        "auto",
        **options.choice(options.VIEWS),
    )
    config: str | None = option(
        "--config",
        "take options that you leave out from an `accelerate config` file: ranks, precision, FSDP, "
        "DeepSpeed, dynamo; default: Accelerate's default file",
        metavar="FILE|default",
        types=(str, os.PathLike),
    )
    address: str | None = option(
        "--address",
        "with -e ray: the address of the cluster; auto (the default): the cluster that this host "
        "belongs to; local: start one here, to try it out",
        metavar="auto|local|HOST:PORT",
        part="ray",
    )
    spread: tuple[int, int] | None = option(
        "--nodes",
        "with -e ray and -e slurm: spread the ranks evenly over N nodes (default: 1 on Ray, all "
        "nodes of a Slurm job); with MIN:MAX, a restart after a failure may use as few as MIN",
        keyword="nodes",
        metavar="N|MIN:MAX",
        read=options.read_node_counts,
        convert=lambda nodes: (nodes, nodes) if isinstance(nodes, int) else nodes,
        must_be=(
            "a number of nodes ≥ 1, the least and the most of them (MIN:MAX)",
            options.is_range,
        ),
    )
    resources: Mapping[str, float] = option(
        "--resources",
        "with -e ray: what each rank reserves on its node, by Ray's names (by default CPU=1, and "
        "GPU=1 if the cluster has GPUs)",
        {},
        metavar="NAME=AMOUNT,…",
        types=(Mapping,),
        read=lambda text: {k: float(v) for k, v in map(options.read_pair, text.split(","))},
        convert=lambda resources: dict(resources or {}),
        must_be=("amounts ≥ 0 (CPU=2,GPU=1), and whole GPUs", options.is_resource),
        part="ray",
    )
    wait_for_nodes: float = option(
        "--wait-for-nodes",
        "with -e ray: how long to wait until the cluster has room, or its autoscaler has added "
        "nodes (0: a launch that cannot start at once is refused)",
        0.0,
        metavar="SECONDS",
        read=float,
        convert=lambda seconds: seconds or 0.0,
        must_be=("a number of seconds ≥ 0 and < 1e9", lambda s: s == 0 or options.is_seconds(s)),
        part="ray",
    )
    timeout: float | None = option(
        "--timeout", "stop the run after this many seconds", **options.SECONDS, metavar="SECONDS"
    )
    max_restarts: int = option(
        "--max-restarts",
        "if a rank fails, start all ranks again, up to N times (see nbtrain.checkpoint)",
        0,
        metavar="N",
        read=int,
        must_be=(
            "a number of restarts from 0 to 1000",
            lambda n: type(n) is int and n in range(1001),
        ),
    )
    start_from: str | None = option(
        "--start-from",
        "start from a checkpoint: of a run (its number, name or folder), or at a path",
        metavar="RUN|PATH",
        types=(str, os.PathLike),
        convert=options.read_start,
        part="steering",
    )
    turn: Mapping[str, Any] = option(
        "--turn",
        "change settings of the optimizers from the first step on, as %%nbtrain turn does: lr=/3",
        {},
        metavar="NAME=VALUE",
        nargs="+",
        types=(Mapping, Iterable),
        convert=options.read_turn,
        part="steering",
    )
    profile: tuple[int, int] | None = option(
        "--profile",
        "record COUNT steps of all ranks after START, and show where their time goes (2:3)",
        metavar="START:COUNT",
        types=(str, bool, int, tuple, list),
        bare="2:3",
        convert=options.read_profile,
        part="profile",
    )
    memory_snapshot: bool = option(
        "--memory-snapshot",
        "record what the ranks allocate on GPUs; when memory runs out, or at the end, show which "
        "lines hold it",
        False,
        part="memory_snapshot",
    )
    background: bool = option(
        "--background",
        "return the prompt at once; the board stays live, and run.wait() waits for the end",
        False,
    )
    detach: bool = option(
        "--detach",
        "like --background, but the run also survives the kernel: %%nbtrain show displays it in "
        "another kernel",
        False,
    )
    submit: str | None = option(
        "--submit",
        "send the cell as a job to Slurm, with these options of sbatch: '-p gpu -N 2 "
        "--gpus-per-node=4'; it runs detached on the nodes of that job",
        metavar="OPTIONS",
        must_be=("a text with options of sbatch", lambda text: isinstance(text, str)),
        types=(str,),
        part="slurm",
        has_flags=True,
    )
    hang_after: float | None = option(
        "--hang-after",
        "report a hang: after this many seconds without progress (300), show which rank is "
        "stuck, where, and which ranks wait for it",
        300.0,
        **options.SECONDS,
        metavar="SECONDS|off",
        none="off",
        convert=lambda seconds: seconds or None,
    )
    on_hang: options.OnHang = option(
        "--on-hang",
        "deadlock: end a run whose ranks can never continue, with the report as its error; stop: "
        "end every run that hangs; report: only show the hang on the board",
        "deadlock",
        **options.choice(get_args(options.OnHang)),
    )
    telemetry: tuple[options.Source, ...] = option(
        "--telemetry",
        f"what ranks report by themselves: {', '.join(options.SOURCES)}; with a minus: all but "
        "these",
        options.SOURCES,
        metavar="all|none|NAME,…|-NAME,…",
        types=(str, Iterable),
        convert=options.read_sources,
    )
    track: tuple[str, ...] = option(
        "--track",
        f"send config, metrics, notes and the outcome to a tracker, as one run of it: "
        f"{', '.join(options.TRACKERS)} (NAME@all: the metrics of each rank, too)",
        (),
        metavar="NAMES",
        nargs="+",
        types=(str, Iterable),
        convert=lambda names: options.split_names(names or ()),
        must_be=(
            f"trackers ({', '.join(options.TRACKERS)}), or NAME{options.OF_ALL}",
            lambda name: name.removesuffix(options.OF_ALL) in options.TRACKERS,
        ),
        part="forwarding",
    )
    notify: tuple[str, ...] = option(
        "--notify",
        "send a message when the run ends, fails or hangs, to an address of apprise: Slack, mail, "
        "ntfy, a webhook, … (repeatable)",
        (),
        metavar="URL",
        nargs="+",
        types=(str, Iterable),
        convert=options.read_secrets,
        must_be=("an address (URL)", lambda url: isinstance(url, str) and (":" in url or not url)),
        part="forwarding",
    )
    debug: bool = option(
        "--debug",
        "when a rank raises, open the debugger at that line before the run ends; the others wait",
        False,
        part="debugger",
    )
    port: int | None = None
    """The port where the ranks meet; None for any free one."""

    rendezvous: object | None = None
    """How the ranks meet the ranks of other launches, to train with them as one world: an object of
    the part that starts such ranks. Without it, the ranks of this launch are the whole world."""

    scaling: bool = False
    """Whether this is a run of ``%nbtrain scaling``: its ranks time every step."""

    takes_tasks: bool = False
    """Whether the ranks wait for tasks until they are stopped; one that fails ends no other."""

    is_post_mortem: bool = False
    """Whether this debugs the failure of the task before it, on ranks that stayed."""

    @property
    def is_background(self) -> bool:
        """Whether the run continues after the cell has returned, or even after the kernel ended."""
        return self.background or self.detach or self.submit is not None

    @property
    def has_peers(self) -> bool:
        """Whether the world has several ranks, in this launch or in others."""
        return self.num_processes != 1 or self.rendezvous is not None

    def hide_notify_addresses(self) -> Plan:
        """Return the plan without the addresses of messages, for engines and ranks."""
        return replace(self, notify=()) if self.notify else self

    def __post_init__(self) -> None:
        for each in OPTIONS:
            each.check(getattr(self, each.field), f"`{each.argument}`")
        precision_is_known = self.mixed_precision is not None or self.config is None
        if self.downcast_bf16 and precision_is_known and self.mixed_precision != "bf16":
            raise PlanError("downcast_bf16 needs bf16 mixed precision: use -p bf16 --downcast-bf16")
        if self.debug and self.is_background:
            raise PlanError(
                "--debug needs the foreground: leave out --background, --detach and --submit"
            )
        if self.port is not None and not 0 < self.port < 65536:
            raise PlanError(f"the port must be between 1 and 65535, not {self.port!r}")
        options.check_environment(self.env)
        most = (self.spread or (1, 1))[1]
        if (self.num_processes or most) % most:
            raise PlanError(
                f"{self.num_processes} ranks cannot be shared equally by {most} nodes: "
                f"use a multiple of {most}"
            )


OPTIONS: tuple[options.Option, ...] = tuple(
    replace(f.metadata["option"], field=f.name) for f in fields(Plan) if "option" in f.metadata
)
"""Every option that `nbtrain.launch` has, in the order of the help."""
