"""Estimates what a training takes on each rank: `memory_needed` and ``%nbtrain memory``."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...part_api import PlanError, Typed, format_bytes, host
from ...planning.option_parser import OptionParser
from ...system import gpus
from . import batches
from .forked_call import call_in_fork
from .report import MemoryAnatomy, Room
from .step import Step, own_model

PRECISIONS = ("no", "fp16", "bf16")
STRATEGIES = ("ddp", "fsdp")

USAGE = (
    "%nbtrain memory MODEL --batch 8x512 [--optimizer adamw] [--precision no|fp16|bf16] "
    "[--ranks N] [--strategy ddp|fsdp] [--card 16GB] [--batch-from NAME]"
)

_RECURRENT = (
    "These numbers leave out what recurrent layers (LSTM, GRU) keep for the backward pass.",
)
"""A fused kernel does not show what it keeps."""

_UNITS = {"GB": 10**9, "GIB": 1 << 30, "MB": 10**6, "MIB": 1 << 20, "G": 1 << 30, "M": 1 << 20}


def memory_needed(
    model: Any,
    batch: Any,
    *,
    optimizer: Any = "adamw",
    precision: str = "no",
    ranks: int | None = None,
    strategy: str = "ddp",
    card: str | int | None = None,
    rows: int | None = None,
    loss: Callable[[Any], Any] | None = None,
) -> MemoryAnatomy:
    """Estimate the memory that a training step of a model needs on each rank, in bytes by part.

    The step runs on tensors without memory: it allocates nothing, uses no device and leaves the
    model as it is. Print the result, or leave it as a cell's last line.

    Args:
        model: a model, or a function that builds one. The function is called on the meta device,
            so the model may be too large for this host.
        batch: a shape, ``"8x512"`` (rows × tokens for a text model, rows alone for images,
            otherwise the shape of the one input tensor), or a real batch: only its shapes are read.
        optimizer: a name (adamw, sgd, …; none: inference), or an optimizer.
        precision: the precision of autocast, as under Accelerate: 'no', 'fp16' or 'bf16'.
        ranks: how many ranks train together; None: one per GPU of this host, 2 without GPUs, 1
            with `card`.
        strategy: 'ddp', or 'fsdp', which shares weights, gradients and states among the ranks.
        card: the memory of a GPU, ``"16GB"``; None: the memory of this host's GPUs, or of the host.
        rows: the number of rows to use, instead of a real batch's number.
        loss: returns the loss from the model's output; None: the output's ``loss``, or a sum.

    Raises:
        PlanError: the model cannot be run in this way.
    """
    for option, value, known in (
        ("precision", precision, PRECISIONS),
        ("strategy", strategy, STRATEGIES),
    ):
        if value not in known:
            raise PlanError(f"{option} must be one of {', '.join(known)}, not {value!r}")
    if ranks is not None and ranks < 1:
        raise PlanError(f"ranks must be a number ≥ 1, not {ranks}")
    room, ranks = _room(card, ranks)

    def anatomy() -> MemoryAnatomy:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            return _anatomy(model, batch, rows, optimizer, room, precision, ranks, strategy, loss)

    return call_in_fork(anatomy)


def _anatomy(
    model: Any,
    batch: Any,
    rows: int | None,
    optimizer: Any,
    room: Room,
    precision: str,
    ranks: int,
    strategy: str,
    loss: Callable[[Any], Any] | None,
) -> MemoryAnatomy:
    """Run one step on fake tensors, and return what it needs, by part."""
    model = own_model(model)
    shards = ranks if strategy == "fsdp" and optimizer != "none" else 1
    step = Step(model, optimizer, precision, shards, on_gpu=room.device == "cuda")
    if isinstance(batch, (str, int)):
        shape = _shape(str(batch))
        examples = batches.make_examples(model, shape)
    else:
        batch = dict(batch) if isinstance(batch, Mapping) else batch
        shape = (rows or batches.rows_of(batch),)
        examples = [batches.like(model, batch, shape[0])]
    most, peak, phase = step.run(examples, loss)
    if ranks > 1 and strategy == "ddp":
        # As large as the gradients: the default of DDP and Accelerate. `gradient_as_bucket_view`
        # would save them.
        buckets = most.gradients
        most, peak = most._replace(buckets=buckets), peak._replace(buckets=buckets)
    dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    return MemoryAnatomy(
        model=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        batch=shape,
        optimizer=optimizer if isinstance(optimizer, str) else type(optimizer).__name__.lower(),
        precision=", ".join(sorted(dtypes)) if precision == "no" else precision,
        ranks=ranks,
        strategy=strategy,
        parts=most,
        peak=peak,
        phase=phase,
        room=room,
        notes=_RECURRENT if any(isinstance(m, nn.RNNBase) for m in model.modules()) else (),
    )


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*([x×*][1-9]\d*)*", text):
        raise PlanError(f"a batch must be written as 8x512 or 32, not {text!r}")
    return tuple(int(n) for n in re.split("[x×*]", text))


def _room(card: str | int | None, ranks: int | None) -> tuple[Room, int]:
    """Return where the ranks have to fit, and how many there are."""
    if card is not None:
        size = card if isinstance(card, int) else _size(card)
        label = format_bytes(size) if isinstance(card, int) else card
        return Room(size, ranks or 1, label), ranks or 1
    cards = _cards()
    if cards:
        least = min(cards, key=lambda g: g.total - g.used)
        used = f", {format_bytes(least.used << 20)} of it in use" if least.used else ""
        label = f"{least.name} ({format_bytes(least.total << 20)}{used})"
        return Room((least.total - least.used) << 20, len(cards), label), ranks or len(cards)
    ranks = ranks or gpus.DEFAULT_CPU_RANKS
    memory = host.memory()
    label = f"{format_bytes(memory.available)} of this host's memory"
    return Room(memory.available // ranks, ranks, label, "cpu"), ranks


def _cards() -> list[gpus.Gpu]:
    """Return the GPUs that ranks would see, if their memory is known."""
    if not gpus.gpu_count():
        return []
    cards = gpus.list_gpus()
    shown = gpus.visible([g.uuid for g in cards], os.environ.get("CUDA_VISIBLE_DEVICES"))
    return [cards[i] for i in shown if cards[i].total]


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GM](?:i?B)?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise PlanError(f"--card: write the memory as 16GB or 15.5GiB, not {text!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def command(typed: Typed) -> MemoryAnatomy:
    """Carry out ``%nbtrain memory``. Raises `PlanError`."""
    model, options = read(typed.text, typed.namespace, typed.fill)
    return memory_needed(model, **options)


def read(
    line: str, namespace: Mapping[str, Any], fill: Callable[[str], str] = str
) -> tuple[Any, dict[str, Any]]:
    """Return the arguments for `memory_needed`: the model, and the others by name.

    The model is that of a variable, or a function that evaluates the expression. The optimizer is a
    known name, or that of a variable. The options pass through `fill`. Raises `PlanError` for a
    line that cannot be read, and for a variable that does not exist.
    """
    parser = OptionParser("%nbtrain memory", f"\n{USAGE}")
    parser.add_argument("--batch")
    parser.add_argument("--batch-from")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--precision", choices=PRECISIONS, default="no")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--strategy", choices=STRATEGIES, default="ddp")
    parser.add_argument("--card")
    expression, *rest = re.split(r"\s+(?=--[a-z])", line.strip(), maxsplit=1)
    if not expression or expression.startswith("--"):
        parser.error("a model is missing")
    options = vars(parser.parse_args(shlex.split(fill(*rest)) if rest else []))
    source, batch = options.pop("batch_from"), options["batch"]
    if source is not None:
        if batch is not None and not batch.isdecimal():
            raise PlanError("with --batch-from, --batch must be a number of rows")
        options |= {"rows": int(batch) if batch else None, "batch": _variable(source, namespace)}
    elif batch is None:
        parser.error("a batch is missing: --batch 8x512, or --batch-from NAME")
    named = namespace.get(options["optimizer"])
    if hasattr(named, "param_groups"):
        options["optimizer"] = named
    return _model(expression, namespace), options


def _variable(name: str, namespace: Mapping[str, Any]) -> Any:
    if name not in namespace:
        raise PlanError(f"%nbtrain memory: the notebook has no variable {name!r}")
    return namespace[name]


def _model(expression: str, namespace: Mapping[str, Any]) -> Any:
    """Return the variable of this name, or a function that evaluates the expression.

    Raises `PlanError` without such a variable, and for what is no expression.
    """
    if expression.isidentifier():
        return _variable(expression, namespace)
    try:
        code = compile(expression, "<%nbtrain memory>", "eval")
    except SyntaxError as error:
        raise PlanError(
            f"%nbtrain memory: {expression!r} is not an expression: {error.msg}"
        ) from None
    scope = dict(namespace)
    return lambda: eval(code, scope)  # the user's own expression, as in a cell
