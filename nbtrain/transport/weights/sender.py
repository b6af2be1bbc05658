"""Saves what a rank returns to the notebook: trained weights of its objects, and variables.

Rank 0 saves them in the run folder once the function has returned; the notebook loads them when the
run has succeeded (`receiver`). Both take the names of what is returned from
`nbtrain.planning.task_values`.
"""

from __future__ import annotations

import contextlib
import errno
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...errors import NbtrainError
from ...findings import Finding
from ...planning.option_types import OF_ALL
from ...planning.task_values import (
    is_model,
    is_optimizer,
    is_scheduler,
    named_values,
    namespace,
    public,
    synced_objects,
)
from ...system.files import write_atomically
from ...system.instrumentation import patch
from ...system.processes import shared_memory_spans
from ...tracking import clock
from ...tracking import events as ev
from ...tracking.event_log import EventWriter
from .. import result_pickler
from ..job import Job
from . import parts, weights
from .fingerprints import fingerprints
from .model_changes import ModelAtStart
from .tensor_kinds import address, size_of
from .weight_file import WeightFile, save, stamp
from .wrappers import FSDP, plain_name, plain_paths, unwrapped

QUICK = 512 << 20
"""Bytes of weights that are saved after a failure or an interrupt: there is little time."""

LARGEST = 1 << 30
"""Bytes of an optimizer's state that are copied back unasked: most optimizers serve one run."""


class ResultSender:
    """Remembers in a rank what it was given, before the task runs, and saves it afterwards.

    What the notebook has is known by identity: whatever is put around a model (DDP, FSDP,
    Accelerate, torch.compile), its own tensors are those that are trained.
    """

    purpose = "looking for models that the notebook's have no place for"

    def __init__(self, job: Job, rank: int, writer: EventWriter) -> None:
        plan = self._plan = job.plan
        self._folder, self._rank, self._writer = job.folder, rank, writer
        self._shared, self._is_live = job.shared_classes, job.is_live
        self._returned = synced_objects(plan)
        if self._is_live:  # what a task before wrapped; FSDP puts its own together
            self._returned = {n: unwrapped(v, but=FSDP) for n, v in self._returned.items()}
        # In the kernel, the notebook has them already.
        self._objects = {} if job.in_kernel else self._returned
        self._before = {name: self._mark(value) for name, value in self._objects.items()}
        is_asked = rank == 0 and not self._is_live
        self._addresses = _addresses(self._objects.values()) if is_asked else {}
        self._at_start: dict[str, ModelAtStart] = {}
        """Optimizers that have made a step: what they train is as it will be."""
        if rank == 0:
            self._look_at_models()
        self._flattened: list[tuple[Any, Any]] = []
        self._ready: dict[str, WeightFile | None] = {}
        self._unasked = {
            name for name, value in self._objects.items() if not is_model(value)
        }.difference(plan.out)
        """Optimizers and schedulers: they are sent if nothing speaks against it."""
        self._settings = {name: _settings(self._objects[name]) for name in self._unasked}
        self._stepped: set[str] = set()
        self._left: set[str] = set()
        """Names of the notebook's optimizers that have a state now, and are not copied back."""
        for name in self._unasked if rank == 0 else ():
            if is_optimizer(self._objects[name]):
                with contextlib.suppress(Exception):  # one that only looks like torch's
                    self._watch(name, self._objects[name])
        self._names = {n: id(v) for n, v in namespace(plan.task).items()} if plan.out else {}
        known = parts.parts(self._returned) if plan.out and rank == 0 else {}
        self._parts = {part: key for key, part in known.items()}
        self._stages: list[Any] = []
        if self._objects:
            fsdp = "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel"
            patch(fsdp, "__init__", self._fsdp_init)
            # Private (seen in torch 2.4 to 2.13): the stages that the user makes and those that
            # `pipeline` makes begin here. Without it, rank 0's layers would pass for the model.
            stage = "torch.distributed.pipelining.stage:_PipelineStageBase"
            patch(stage, "__init__", self._stage_init)
            if rank == 0:
                patch("peft.peft_model:PeftModel", "__init__", self._peft_init)

    def _watch(self, name: str, optimizer: Any) -> None:
        def stepped(optimizer: Any, *_: Any) -> None:
            handle.remove()
            self._stepped.add(name)

        handle = optimizer.register_step_post_hook(stepped)

    def _mark(self, value: Any) -> Any:
        with contextlib.suppress(Exception):  # a model of a kind that cannot be asked: it is sent
            if self._rank == 0 and is_model(value) and not self._is_live:
                return fingerprints(weights.contents(value))
        return {}

    def _look_at_models(self) -> None:
        """Look at what the notebook has, and again when an optimizer begins to train it."""
        variables = public(namespace(self._plan.task))
        for name, value in self._objects.items():
            if is_model(value):
                known = [n for n, v in variables.items() if v is value]
                variable = name if name in known else next(iter(known), name)
                with contextlib.suppress(Exception):  # as in `_mark`
                    self._at_start[name] = ModelAtStart(value, variable, self._is_live)

    @property
    def looks_at_steps(self) -> bool:
        """Whether `first_stepped` is to be called."""
        return bool(self._at_start)

    def first_stepped(self, optimizer: Any) -> None:
        """Look at the models that an optimizer has begun to train; a hook in the rank calls it."""
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, start in self._at_start.items():
            model = self._objects[name]
            if trained.isdisjoint(map(id, model.parameters())) or self._is_in_parts(model):
                continue
            change = start.change(model)
            if change is not None:
                self._writer.write(ev.RunNote.of(change))

    def _fsdp_init(self, original: Any, wrapper: Any, module: Any, *args: Any, **rest: Any) -> None:
        """Keep each FSDP (version 1) of a returned model: nothing else can put it together."""
        models = [value for value in self._objects.values() if value is module]
        original(wrapper, module, *args, **rest)
        self._flattened += [(model, wrapper) for model in models]

    def _stage_init(self, original: Any, stage: Any, *args: Any, **kwargs: Any) -> None:
        original(stage, *args, **kwargs)
        self._stages.append(stage)

    def _peft_init(self, original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> None:
        """Name prompts that are to be trained: of all adapters, they are no part of the model."""
        original(wrapper, *args, **kwargs)
        with contextlib.suppress(Exception):  # names of PEFT's (seen in 0.21)
            config, model = wrapper.active_peft_config, wrapper.base_model
            name = next((n for n, v in self._objects.items() if v is model), "")
            if name and config.is_prompt_learning and not config.inference_mode:
                text = (
                    f"The prompts that PEFT trains for `{name}` are not part of it, so they are "
                    "lost when the ranks end."
                )
                remedy = (
                    "Return `peft.get_peft_model_state_dict(...)` of PEFT's model from the "
                    "function, and load it in the notebook with `peft.set_peft_model_state_dict`."
                )
                self._writer.write(ev.RunNote.of(Finding("not-copied-back", text, remedy)))

    @property
    def has_more(self) -> bool:
        """Whether `send` saves anything of this rank."""
        return bool(self._plan.out) or (self._rank == 0 and bool(self._objects))

    def gather(self) -> None:
        """Put together what is in parts. Every rank has to call it, before it leaves the group.

        This and `send` report what cannot be returned, and raise nothing: the training is done,
        and its result counts.
        """
        for name, value in self._objects.items():
            with self._reporting(name):
                _reshard(value)
                if name in self._unasked or (is_model(value) and not self._is_in_parts(value)):
                    continue
                self._ready[name] = None  # whatever comes of it, `send` has nothing to add
                self._check_is_in_no_stage(value)
                if is_scheduler(value):
                    self._ready[name] = None if self._rank else weights.of_scheduler(value)
                elif not is_model(value):
                    state = weights.of_optimizer(value, keep=self._rank == 0)
                    self._ready[name] = None if self._rank else state
                elif gathered := self._gathered(value):
                    self._ready[name] = self._changes(name, gathered)

    def send(self, result: Any = None) -> None:
        """Save in the run folder what is returned, but for the task's `result`, which is there.

        Ranks need not wait for one another.
        """
        for name, value in self._objects.items() if self._rank == 0 else ():
            with self._reporting(name):
                if name in self._unasked:
                    ready = self._unasked_state(name, value)
                elif name in self._ready:
                    ready = self._ready.pop(name)
                else:  # it is whole in this rank
                    ready = self._changes(name, weights.named_tensors(value))
                if ready is not None:
                    self._write(name, ready)
                else:  # an attempt that failed may have left some
                    self._folder.weights_of(name).unlink(missing_ok=True)
        self._send_values()

    def _changes(
        self, name: str, tensors: Mapping[str, Any], *, entire: bool = False
    ) -> WeightFile | None:
        """Return what is sent of a model; None for nothing.

        Without what is in memory that the notebook shares: other ranks may have trained it since.
        """
        shared = self._shared_names(tensors)
        before = {n: mark for n, mark in self._before[name].items() if n not in shared}
        tensors = {n: tensor for n, tensor in tensors.items() if n not in shared}
        ready = self._changes_of_own(name, tensors, before, entire)
        if ready is None or not shared:
            return ready
        unchanged = {**ready.about["unchanged"], **dict.fromkeys(shared, weights.SHARED)}
        return replace(ready, about={**ready.about, "unchanged": unchanged})

    def _shared_names(self, tensors: Mapping[Any, Any]) -> list[Any]:
        own = {n: (id(t), address(t)) for n, t in tensors.items() if id(t) in self._addresses}
        places = {n: at for n, (key, at) in own.items() if at and self._addresses[key] == at}
        spans = shared_memory_spans() if places else []
        return [n for n, at in places.items() if any(begin <= at < end for begin, end in spans)]

    def _changes_of_own(
        self, name: str, tensors: Mapping[str, Any], before: Mapping[str, Any], entire: bool
    ) -> WeightFile | None:
        model, start = self._objects[name], self._at_start.get(name)
        if start is None:  # of a kind that cannot be asked
            return weights.changes(model, tensors, before, entire=entire)
        before = start.renamed(before, model)
        if lost := weights.lost_states(model, before):
            places = ", ".join(f"`{f'{name}.{path}'.rstrip('.')}`" for path in lost)
            text = (
                f"The extra state of {places} has values of classes that torch.load does not "
                "allow, so it is lost when the ranks end."
            )
            remedy = (
                f"Return `{name}.state_dict()` from the function, and load it in the notebook with "
                f"`{name}.load_state_dict`."
            )
            self._writer.write(ev.RunNote.of(Finding("not-copied-back", text, remedy)))
        ready = weights.changes(model, tensors, before, entire=entire)
        remedy = ""
        with contextlib.suppress(Exception):  # of a kind that nobody knows: nothing is advised
            if not self._is_in_parts(model) and (change := start.change(model)) is not None:
                remedy = change.remedy
        about = {"adapters": start.new_adapters(model), "remedy": remedy}
        return ready and replace(ready, about={**ready.about, **about})

    def _unasked_state(self, name: str, value: Any) -> WeightFile | None:
        """Return what changed of an optimizer or a scheduler; None for nothing, or if it stays."""
        if is_scheduler(value):
            optimizers = {id(self._objects[each]) for each in self._left}
            if (
                _settings(value) == self._settings[name]
                or id(getattr(value, "optimizer", None)) in optimizers
            ):
                return None
            with contextlib.suppress(Exception):  # users' own classes: `--out` says why
                return weights.of_scheduler(value)
            return None
        parts = _state_parts(value)
        has_moved = name in self._stepped and bool(parts)
        if not has_moved and _settings(value) == self._settings[name]:
            return None
        models = [model for model in self._returned.values() if is_model(model)]
        known = {id(tensor) for model in models for tensor in weights.named_tensors(model).values()}
        if not all(id(p) in known for group in value.param_groups for p in group["params"]):
            return None  # what it trains is not copied back either
        tensors = [part for part in parts if hasattr(part, "element_size")]
        if self._shared_names(dict(enumerate(tensors))):
            return None  # the notebook's has them
        is_apart = any(map(weights.is_sharded, tensors)) or any(map(self._is_in_parts, models))
        if not is_apart and sum(map(size_of, tensors)) <= LARGEST:
            with contextlib.suppress(Exception):  # a state of no known kind: `--out` says why
                return weights.of_optimizer(value)
        self._left.add(name)
        return None

    def rescue(self) -> None:
        """Save the weights as they are now, after a failure, if they are small (`QUICK`).

        The other ranks may be dead: a model that is in parts is not saved.
        """
        for name, value in self._objects.items() if self._rank == 0 else ():
            with contextlib.suppress(Exception):  # the cause is the failure, which is reported
                _reshard(value)
                if not is_model(value) or self._is_in_parts(value):
                    continue
                tensors = weights.named_tensors(value)
                if sum(map(size_of, tensors.values())) <= QUICK:
                    # All of them: it may be another model that they are loaded into.
                    ready = self._changes(name, tensors, entire=True)
                    if ready is not None:
                        self._write(name, ready)

    @contextlib.contextmanager
    def _reporting(self, name: str) -> Iterator[None]:
        try:
            yield
        except _NotWritten as error:
            self._report(name, **error.about, lost=name not in self._unasked)
        except _NoVariableError as error:
            self._report(name, trouble=str(error), code=ev.NO_VARIABLE)
        except Exception as error:  # a left process group, a tensor of no known type
            kind = "" if isinstance(error, NbtrainError) else f"{type(error).__name__}: "
            self._report(name, trouble=f"{kind}{error}")

    def _report(self, name: str, **about: Any) -> None:
        self._writer.write(ev.ArtifactSaved(clock.now(), self._rank, name, **about))

    def _write(self, name: str, ready: WeightFile) -> None:
        path = self._folder.weights_of(name)
        partial = path.with_suffix(".partial")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                not_finite = save(ready, partial)
                partial.rename(path)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise _NotWritten(error) from error
        kind, count = ready.about["kind"], ready.about.get("parameters", 0)
        size, value = path.stat().st_size, self._objects[name]
        found = () if self._is_live else ready.about.get("adapters", ())
        new = ", ".join(f"`{each['name']}`" for each in found)
        known = weights.parameter_names(value) if count else set()
        spoiled = next((n for n in not_finite if n in known), "")  # a mask, a buffer, may be -inf
        about = {"what": kind, "parameters": count, "size": size, "stamp": stamp(path)}
        self._report(name, **about, not_finite=spoiled, adapters=new)

    def _is_sharded(self, module: Any) -> bool:
        flat = self._flat_root(module) is not None
        return flat or any(map(weights.is_sharded, weights.named_tensors(module).values()))

    def _is_in_parts(self, module: Any) -> bool:
        return self._is_sharded(module) or self._is_in_stages(module)

    def _is_in_stages(self, module: Any) -> bool:
        tensors = set(map(id, weights.named_tensors(module).values())) if self._stages else set()
        parts = (weights.named_tensors(stage.submod).values() for stage in self._stages)
        return any(id(tensor) in tensors for part in parts for tensor in part)

    def _flat_root(self, module: Any) -> Any:
        """Return what FSDP version 1 can put together: the model's wrapper, or the model."""
        wrappers = [wrapper for model, wrapper in self._flattened if model is module]
        inside = any(type(part).__name__ == FSDP for part in module.modules())
        return wrappers[-1] if wrappers else module if inside else None

    def _gathered(self, module: Any) -> dict[str, Any] | None:
        """Return the whole tensors of a sharded model, on the CPU; None in ranks but 0."""
        dist: Any = sys.modules["torch.distributed"]
        if not dist.is_initialized():
            raise NbtrainError(
                "its parts are on several ranks, but the function has destroyed the process group. "
                "Do not destroy the group in the function; nbtrain does so afterwards"
            )
        root = self._flat_root(module)
        if root is not None:
            flat = _gathered_flat(root, module, keep=self._rank == 0)
            if self._rank == 0 and flat is None:
                raise NbtrainError(
                    "only the first node has the whole model; save it in the function"
                )
            return flat
        # Not by `get_model_state_dict`, which knows tensors by the names that the model's own
        # state_dict gives them, and has no buffers that are not persistent.
        tensors, copies = weights.named_tensors(module), dict[int, Any]()
        for tensor in tensors.values():
            if id(tensor) not in copies:
                entire = weights.whole(tensor).detach()  # one at a time
                copies[id(tensor)] = None if self._rank else entire.cpu()
        if self._rank:
            return None
        return {of_tensor: copies[id(tensor)] for of_tensor, tensor in tensors.items()}

    # Variables

    def _send_values(self) -> None:
        wanted = [n for n in self._plan.out if n.endswith(OF_ALL) or self._rank == 0]
        pickled: dict[str, bytes] = {}
        variables = named_values(self._plan.task)
        # A new optimizer refers to the notebook's model, but not to a layer that took the place of
        # one that the notebook has. The models of other ranks may differ.
        own = parts.parts(self._returned) if wanted and self._rank == 0 else {}
        known = {key: part for key, part in own.items() if self._parts.get(part, key) == key}
        for asked in wanted:
            name = asked.removesuffix(OF_ALL)
            with self._reporting(name):
                if name not in variables:
                    raise _NoVariableError(self._absent(name))
                value = unwrapped(variables[name])
                if any(value is other for other in self._returned.values()) and name == asked:
                    continue
                self._check_is_whole(value)
                if name == asked:
                    self._check_is_in_no_stage(value)
                pickled[asked] = result_pickler.dump_variable(value, self._shared, known)
        if not pickled:
            return
        about: dict[str, Any] = {}
        try:
            write_atomically(self._folder.out(self._rank), pickle.dumps(pickled))
        except OSError as error:
            about = {**_NotWritten(error).about, "lost": True}
        for asked, data in pickled.items():
            self._report(asked.removesuffix(OF_ALL), size=len(data), **about)

    def _check_is_whole(self, value: Any) -> None:
        models = filter(is_model, self._returned.values())
        if hasattr(value, "param_groups") and any(map(self._is_sharded, models)):
            raise NbtrainError("its state is sharded over the ranks, like the model")

    def _check_is_in_no_stage(self, value: Any) -> None:
        models = [value] if is_model(value) else []
        if hasattr(value, "param_groups"):
            models = [model for model in self._returned.values() if is_model(model)]
        if any(map(self._is_in_stages, models)):
            raise NbtrainError(
                "its layers were trained in pipeline stages, so no rank has all of them. Return "
                "each stage's state_dict() from the function"
            )

    def _absent(self, name: str) -> str:
        """Say that a variable does not exist, and which do."""
        variables = public(namespace(self._plan.task))
        new = [n for n, v in variables.items() if self._names.get(n) != id(v)]
        return (
            f"there is no variable `{name}`. Local variables of a function end when it "
            f"returns. The run assigned: {', '.join(new[-8:]) or 'none'}"
        )


def _addresses(values: Iterable[Any]) -> dict[int, int]:
    """Return where tensors of models and optimizers are in the host's memory, by their ids."""
    found = {}
    for value in values:
        with contextlib.suppress(Exception):  # one of a kind that cannot be asked
            own = [*value.parameters(), *value.buffers()] if is_model(value) else None
            parts = _state_parts(value) if own is None else own
            found.update({id(t): address(t) for t in parts if hasattr(t, "element_size")})
    return found


def _state_parts(optimizer: Any) -> list[Any]:
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    return [part for state in states for part in state.values() if part is not None]


def _settings(value: Any) -> str:
    """Return what an optimizer or a scheduler is set to, to be compared with a later look."""
    with contextlib.suppress(Exception):  # users' own classes
        if is_optimizer(value):
            groups = value.param_groups
            return repr([{k: v for k, v in group.items() if k != "params"} for group in groups])
        return repr(value.state_dict())
    return ""


class _NoVariableError(NbtrainError):
    """There is no variable of a name in ``--out``."""


class _NotWritten(OSError):
    """The run's folder does not take what is to be saved there."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.about = {
            "trouble": error.strerror or str(error),
            "code": errno.errorcode.get(error.errno or 0, ""),
        }


def _reshard(value: Any) -> None:
    """Give FSDP (version 2) its shards back, which an evaluation leaves put together, and cast."""
    cls: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for part in value.modules() if cls and is_model(value) else ():
        if isinstance(part, cls):
            part.reshard()


def _gathered_flat(root: Any, module: Any, *, keep: bool) -> dict[str, Any] | None:
    """Return the whole tensors of a model in FSDP version 1; None in ranks that do not `keep` them.

    And in those that did not get them. On the CPU not by its state_dict: with ``offload_to_cpu``
    that reads freed memory, and the rank dies (SIGSEGV; torch 2.13).
    """
    flat = next(part for part in root.modules() if type(part).__name__ == FSDP)
    if getattr(flat, "compute_device", None) == sys.modules["torch"].device("cpu"):
        with type(flat).summon_full_params(root, writeback=False):
            tensors = weights.named_tensors(module) if keep else {}
            copies = {id(t): t.detach().clone() for t in tensors.values()}
            return {name: copies[id(tensor)] for name, tensor in tensors.items()} or None
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(root, options=options)
    world_rank = sys.modules["torch.distributed"].get_rank()
    if world_rank or not keep:  # torch gives the whole to the first rank of all nodes only
        return None
    buffers = {name: buffer.detach().cpu() for name, buffer in module.named_buffers()}
    paths = plain_paths(module)
    return {plain_name(name, paths): tensor for name, tensor in {**buffers, **state}.items()}
