"""What comes home from a run: trained weights for the notebook's own objects, and variables.

Rank 0 leaves them in the run folder once the function has returned; the notebook takes them when
the run has succeeded (`nbtrain.home`). Which they are, both find in the plan: names are all that
they need to have in common.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from . import events as ev
from . import serialize, weights
from .errors import NbtrainError
from .fingerprints import fingerprints
from .folder import RunFolder, write_atomically
from .imports import when_imported
from .names import names_read
from .plan import OF_ALL, Call, Cell, Plan
from .stages import Stages, put_together
from .writer import EventWriter

QUICK = 512 << 20
"""Bytes of weights that are saved after a failure or an interrupt: there is little time."""

_INSIDE = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "AcceleratedOptimizer": "optimizer",
}
"""Wrappers of models and optimizers, and where they keep what they wrap."""


_FLAT = "FullyShardedDataParallel"


def namespace_of(task: Call | Cell) -> dict[str, Any]:
    """Return where the variables of a task are: the notebook, or the function's module."""
    if isinstance(task, Cell):
        return task.namespace
    function = task.function
    while isinstance(function, functools.partial):
        function = function.func
    try:
        found: dict[str, Any] = getattr(inspect.unwrap(function), "__globals__", {})
    except ValueError:  # it wraps itself
        return {}
    return found


def arguments_of(task: Call | Cell) -> dict[str, Any]:
    """Return what the function is given, by its parameters' names, before anything ran."""
    if isinstance(task, Cell):
        names = [p.name for p in task.parameters]
        return {name: task.namespace[name] for name in names if name in task.namespace}
    try:
        parameters = list(inspect.signature(task.function).parameters.values())
    except (TypeError, ValueError):  # of a builtin nobody knows them
        parameters = []
    plain = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
    given = {
        plain[i] if i < len(plain) else f"argument{i}": value for i, value in enumerate(task.args)
    }
    return {**given, **{name: v for name, v in task.kwargs.items() if name.isidentifier()}}


def _read_by(task: Call | Cell) -> list[str]:
    """Return the notebook's variables that a cell itself mentions: ``train(model)``."""
    if not isinstance(task, Cell):
        return []
    return sorted(names_read(task.source, task.filename) & task.namespace.keys())


def handed_over(plan: Plan) -> dict[str, Any]:
    """Return the models and optimizers of the notebook that are to come back, by name."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    given, there = arguments_of(plan.task), namespace_of(plan.task)
    trained = (*given, *_read_by(plan.task)) if plan.sync else ()
    found: dict[str, Any] = {}
    for name in (*plan.out, *trained):
        value = given.get(name, there.get(name))
        # Not isinstance: that asks the object, and a proxy may answer with an exception.
        is_ours = issubclass(type(value), torch.nn.Module) or (
            name in plan.out and issubclass(type(value), torch.optim.Optimizer)
        )
        if is_ours and not any(v is value for v in found.values()):
            found[name] = value
    return found


def unwrapped(value: Any) -> Any:
    """Return a model or an optimizer without what training libraries put around it."""
    while type(value).__name__ in _INSIDE:
        value = getattr(value, _INSIDE[type(value).__name__])
    return value


class Sender:
    """Remembers in a rank what it was given, before the task runs, and sends it home after.

    What the notebook has is known by identity: whatever is put around a model (DDP, FSDP,
    Accelerate, torch.compile), its own tensors are those that are trained.
    """

    def __init__(
        self, plan: Plan, folder: RunFolder, rank: int, writer: EventWriter, shared: frozenset[type]
    ) -> None:
        self._plan, self._folder, self._rank, self._writer = plan, folder, rank, writer
        self._shared = shared
        self._ours = handed_over(plan)
        # Inline, the notebook's objects are the rank's own.
        self._objects = {} if plan.engine == "inline" else self._ours
        self._before = {name: self._mark(value) for name, value in self._objects.items()}
        self._flattened: list[tuple[Any, Any]] = []
        self._ready: dict[str, weights.Parcel | None] = {}
        self._names = {n: id(v) for n, v in namespace_of(plan.task).items()} if plan.out else {}
        self._stages = Stages() if self._objects else None
        if self._objects:
            fsdp = "torch.distributed.fsdp.fully_sharded_data_parallel"
            when_imported(fsdp, self._watch_flattening)

    def _mark(self, value: Any) -> Any:
        if self._rank or not _is_model(value):
            return {}
        with contextlib.suppress(Exception):  # a model of a kind that cannot be asked: it is sent
            return fingerprints(weights.named_tensors(value))
        return {}

    def _watch_flattening(self, module: ModuleType) -> None:
        """Keep each FSDP (version 1) of a model of ours: without it nobody can put it together."""
        cls = module.FullyShardedDataParallel
        begin = cls.__init__

        @functools.wraps(begin)
        def remembered(wrapper: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            ours = [v for v in self._objects.values() if v is module]
            begin(wrapper, module, *args, **kwargs)
            self._flattened += [(value, wrapper) for value in ours]

        cls.__init__ = remembered

    def gather(self) -> None:
        """Put together what is in parts. Every rank has to call it, before it leaves the group.

        What cannot come home is told, here and by `send`, and raises nothing: the training is
        done, and its result counts.
        """
        for name, value in self._objects.items():
            with self._telling(name):
                _reshard(value)
                if _is_model(value) and not self._is_in_parts(value):
                    continue
                self._ready[name] = None  # whatever comes of it, `send` has nothing to add
                if not _is_model(value):
                    self._check_is_in_no_stage(value)
                    found = weights.of_optimizer(value, keep=self._rank == 0)
                    self._ready[name] = None if self._rank else found
                elif gathered := self._gathered(name, value):
                    self._ready[name] = weights.changes(value, gathered, self._before[name])

    def send(self) -> None:
        """Leave in the run folder what is to come home. Ranks need not wait for one another."""
        for name, value in self._objects.items() if self._rank == 0 else ():
            with self._telling(name):
                if name in self._ready:
                    ready = self._ready.pop(name)
                else:  # it is whole in this rank
                    found = weights.named_tensors(value)
                    ready = weights.changes(value, found, self._before[name])
                if ready is not None:
                    self._write(name, ready)
                else:  # an attempt that failed may have left some
                    self._folder.weights_of(name).unlink(missing_ok=True)
        self._send_values()

    def rescue(self) -> None:
        """Leave the weights as they are now, after a failure, where that is a matter of a moment.

        No rank can be counted on any more: what is in parts stays where it is.
        """
        for name, value in self._objects.items() if self._rank == 0 else ():
            with contextlib.suppress(Exception):  # the failure is told already, and is the cause
                _reshard(value)
                if not _is_model(value) or self._is_in_parts(value):
                    continue
                found = weights.named_tensors(value)
                if sum(t.nbytes for t in found.values()) <= QUICK:
                    # All of them: it may be another model that they are loaded into.
                    ready = weights.changes(value, found, self._before[name], entire=True)
                    if ready is not None:
                        self._write(name, ready)

    @contextlib.contextmanager
    def _telling(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a full disk, a left process group, a tensor of no known type
            told = str(error)
            if not isinstance(error, NbtrainError):
                told = f"{type(error).__name__}: {told}"
            self._tell(name, trouble=told)

    def _tell(self, name: str, **about: Any) -> None:
        self._writer.write(ev.Saved(time.time(), self._rank, name, **about))

    def _write(self, name: str, ready: weights.Parcel) -> None:
        path = self._folder.weights_of(name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        partial = path.with_suffix(".partial")
        try:
            weights.save(ready, partial)
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)
        what, count = ready.about["kind"], ready.about.get("parameters", 0)
        self._tell(name, what=what, parameters=count, size=path.stat().st_size)

    def _is_sharded(self, module: Any) -> bool:
        flat = self._flat_root(module) is not None
        return flat or any(map(weights.is_sharded, weights.named_tensors(module).values()))

    def _is_in_parts(self, module: Any) -> bool:
        return self._is_sharded(module) or bool(self._stages and self._stages.of(module))

    def _flat_root(self, module: Any) -> Any:
        """Return what FSDP version 1 can put together: a wrapper of ours, or ours."""
        found = [wrapper for ours, wrapper in self._flattened if ours is module]
        inside = any(type(part).__name__ == _FLAT for part in module.modules())
        return found[-1] if found else module if inside else None

    def _gathered(self, name: str, module: Any) -> dict[str, Any] | None:
        """Return the whole tensors of a model in parts, on the CPU; None in ranks but 0."""
        dist: Any = sys.modules["torch.distributed"]
        if not dist.is_initialized():
            raise NbtrainError(
                "it is in parts, and the function has left the process group: leave it to nbtrain"
            )
        root = self._flat_root(module)
        if root is not None:
            gathered = _gathered_flat(root, module)
            if self._rank == 0 and gathered is None:
                raise NbtrainError("it is whole on the first node only: save it in the function")
            return gathered if self._rank == 0 else None
        stages = self._stages.of(module) if self._stages else []
        found, copies = weights.named_tensors(module), dict[int, Any]()
        for tensor in found.values():
            if id(tensor) not in copies:
                entire = weights.whole(tensor).detach()  # one at a time
                copies[id(tensor)] = entire.cpu() if self._rank == 0 or stages else None
        told = {of_tensor: copies[id(tensor)] for of_tensor, tensor in found.items()}
        if stages:
            path = self._folder.weights_of(name)
            return put_together(stages, module, told, path, is_home=self._rank == 0)
        return None if self._rank else told

    # Variables

    def _send_values(self) -> None:
        task = self._plan.task
        wanted = [n for n in self._plan.out if n.endswith(OF_ALL) or self._rank == 0]
        found: dict[str, bytes] = {}
        there = {**namespace_of(task), **(arguments_of(task) if isinstance(task, Call) else {})}
        known = self._known() if wanted else {}
        for asked in wanted:
            name = asked.removesuffix(OF_ALL)
            with self._telling(name):
                if name not in there:
                    raise NbtrainError(self._absent(name))
                value = unwrapped(there[name])
                if any(value is ours for ours in self._ours.values()) and name == asked:
                    continue
                self._check_is_whole(value)
                if name == asked:
                    self._check_is_in_no_stage(value)
                found[asked] = serialize.dumps(value, self._shared, known)
        if found:
            with self._telling(", ".join(found)):
                write_atomically(self._folder.out(self._rank), pickle.dumps(found))
                for asked, data in found.items():
                    self._tell(asked.removesuffix(OF_ALL), size=len(data))

    def _check_is_whole(self, value: Any) -> None:
        models = filter(_is_model, self._ours.values())
        if hasattr(value, "param_groups") and any(map(self._is_sharded, models)):
            raise NbtrainError("its state is in shards, as the model was")

    def _check_is_in_no_stage(self, value: Any) -> None:
        models = filter(_is_model, self._ours.values())
        if hasattr(value, "param_groups") and self._stages and any(map(self._stages.of, models)):
            raise NbtrainError("its state is in stages, as the model was")

    def _known(self) -> dict[int, tuple[str, str]]:
        """Return what the notebook has, by id: a new optimizer of a model of its is one there, too.

        Not in ranks that do not send the model: theirs may be another.
        """
        known: dict[int, tuple[str, str]] = {}
        for name, value in self._ours.items() if self._rank == 0 else ():
            if _is_model(value):
                for of_tensor, tensor in weights.named_tensors(value).items():
                    known.setdefault(id(tensor), (name, of_tensor))
            known[id(value)] = (name, "")
        return known

    def _absent(self, name: str) -> str:
        """Say that a variable is not there, and which are."""
        there = namespace_of(self._plan.task)
        new = [n for n, v in there.items() if self._names.get(n) != id(v) and n[0] != "_"]
        which = f"those that were assigned: {', '.join(new[-8:])}" if new else "none was assigned"
        return f"there is no variable `{name}` (a function's own are gone with it); {which}"


def _is_model(value: Any) -> bool:
    return hasattr(value, "named_parameters")


def _reshard(value: Any) -> None:
    """Give FSDP (version 2) its shards back, which an evaluation leaves put together, and cast."""
    cls: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for part in value.modules() if cls and _is_model(value) else ():
        if isinstance(part, cls):
            part.reshard()


def _gathered_flat(root: Any, module: Any) -> dict[str, Any] | None:
    """Return the whole tensors of a model in FSDP version 1; None in ranks that did not get them.

    On the CPU not by its state_dict: with ``offload_to_cpu`` that reads freed memory (torch 2.13).
    """
    flat = next(part for part in root.modules() if type(part).__name__ == _FLAT)
    if getattr(flat, "compute_device", None) == sys.modules["torch"].device("cpu"):
        with type(flat).summon_full_params(root, writeback=False):
            found = weights.named_tensors(module)
            copies = {id(t): t.detach().clone() for t in found.values()}
            return {name: copies[id(tensor)] for name, tensor in found.items()}
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    told = get_model_state_dict(root, options=options)
    if sys.modules["torch.distributed"].get_rank():  # of the world: there is one on one node only
        return None
    buffers = {weights.plain_name(n): b.detach().cpu() for n, b in module.named_buffers()}
    return {**buffers, **{weights.plain_name(name): tensor for name, tensor in told.items()}}
