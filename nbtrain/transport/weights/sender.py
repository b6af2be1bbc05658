"""Saves what a rank returns to the notebook: trained weights of its objects, and variables.

Rank 0 saves them in the run folder once the function has returned. The notebook loads them when the
run has succeeded (`receiver`). Both get the names from `nbtrain.planning.task_values`.
"""

from __future__ import annotations

import contextlib
import errno
import pickle
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...errors import NbtrainError
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
from ...tracking import clock
from ...tracking import events as ev
from ...tracking.event_log import EventWriter
from ...tracking.run_folder import RunFolder
from .. import result_pickler
from ..job import Job
from ..limits import RESCUE_MAX_BYTES
from . import state_io
from .models import (
    FSDP,
    ModelAtStart,
    find_parts,
    is_sharded,
    named_parameters,
    named_tensors,
    plain_name,
    plain_paths,
    unwrap,
)
from .state_io import WeightFile, save, stamp
from .tensors import (
    can_be_saved,
    fingerprints,
    has_no_bytes,
    shared_address,
    size_of,
    storage_address,
    to_cpu,
)


@dataclass(frozen=True)
class ModelCopy:
    """The tensors of a model as they were after a step, to be saved while the rank trains."""

    tensors: Mapping[str, Any]
    states: Mapping[str, Any]
    """What a file has beside the tensors, see `state_io.extra_states`."""
    before: Mapping[str, Any]
    """The fingerprints from the start, by the names that the tensors have now."""
    about: Mapping[str, Any]
    """The new adapters, and the remedy for what the notebook's model has no place for."""
    unchanged: Mapping[str, str]
    """The fingerprints of tensors that are left out: they did not change, or are in memory that the
    notebook shares."""

    @property
    def is_shared(self) -> bool:
        """Whether the notebook's model has all that the rank trains, in memory that both share."""
        return not self.tensors and state_io.SHARED in self.unchanged.values()


class ResultSender:
    """Remembers in a rank what it was given, before the task runs, and saves it afterwards.

    Objects of the notebook are known by identity: also in a wrapper (DDP, FSDP, Accelerate,
    torch.compile), the model's own tensors are trained.
    """

    purpose = "looking for models that the notebook's have no place for"

    def __init__(self, job: Job, rank: int, writer: EventWriter) -> None:
        plan = self._plan = job.plan
        self._folder, self._rank, self._writer = job.folder, rank, writer
        self._shared, self._ranks_stay = job.shared_classes, job.ranks_stay
        self._returned = synced_objects(plan)
        if self._ranks_stay:  # an earlier task may have wrapped them; FSDP is needed to gather
            self._returned = {n: unwrap(v, keep=FSDP) for n, v in self._returned.items()}
        # A rank in the kernel trains the notebook's own objects.
        self._objects = {} if job.in_kernel else self._returned
        self._sent = self._objects if rank == 0 else {}
        self._before = {name: self._fingerprints(value) for name, value in self._objects.items()}
        has_shared = rank == 0 and not self._ranks_stay
        self._addresses = _find_shared_addresses(self._objects.values()) if has_shared else {}
        self._at_start: dict[str, ModelAtStart] = {}
        self._remember_models()
        self._flattened: list[tuple[Any, Any]] = []
        """Models and their FSDP (version 1) wrappers."""
        self._gathered: dict[str, WeightFile | None] = {}
        self._unasked = {
            name for name, value in self._objects.items() if not is_model(value)
        }.difference(plan.out)
        """Optimizers and schedulers that no `--out` names. They are sent if they can be."""
        self._settings = {name: _describe_settings(self._objects[name]) for name in self._unasked}
        self._stepped: set[int] = set()
        """Ids of the optimizers that have made a step."""
        self._unsent: set[str] = set()
        self._left_out: set[int] = set()  # ids of optimizers whose schedulers stay as well
        """Names of the notebook's optimizers that have a state now, and are not copied back."""
        self._names = {n: id(v) for n, v in namespace(plan.task).items()} if plan.out else {}
        known = find_parts(self._returned) if plan.out and rank == 0 else {}
        self._parts = {part: key for key, part in known.items()}
        self._staged: dict[int, Any] = {}
        """The tensors of pipeline stages by their ids, and alive: CPython reuses those."""
        if self._objects:
            self._patch_libraries()

    def _patch_libraries(self) -> None:
        """Patch FSDP and pipeline stages to note their parts, which are gathered in other ways."""
        fsdp = "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel"
        patch(fsdp, "__init__", self._fsdp_init)
        # Private (seen in torch 2.4 to 2.13): both the stages that the user makes and those that
        # `pipeline` makes begin here. Without it, rank 0's layers would pass for the model.
        stage = "torch.distributed.pipelining.stage:_PipelineStageBase"
        patch(stage, "__init__", self._stage_init)

    def _fingerprints(self, value: Any) -> Any:
        """Return the fingerprints of a model in rank 0, by name; else {}.

        Also {} in a rank that stays, whose models are always sent, and for a model that cannot be
        read.
        """
        with contextlib.suppress(Exception):  # a model that cannot be read is always sent
            if self._rank == 0 and is_model(value) and not self._ranks_stay:
                return fingerprints(state_io.contents(value))
        return {}

    def _remember_models(self) -> None:
        """Keep what the notebook's models were before the task, to describe changes.

        A model that cannot be read is left out. Only rank 0 keeps any.
        """
        variables = public(namespace(self._plan.task))
        for name, value in self._sent.items():
            if is_model(value):
                known = [n for n, v in variables.items() if v is value]
                variable = name if name in known else next(iter(known), name)
                with contextlib.suppress(Exception):  # as in `_fingerprints`
                    self._at_start[name] = ModelAtStart(value, variable, self._ranks_stay)

    @property
    def needs_first_steps(self) -> bool:
        """Return whether `on_first_step` has anything to do."""
        return bool(self._sent)

    def on_first_step(self, optimizer: Any) -> None:
        """Record a note for each model whose weights the notebook's cannot take over.

        A hook calls this at an optimizer's first step; only models that it trains and that are
        whole in this rank are checked. Names, shapes and dtypes of their tensors are compared with
        those at the start, values are not. Also notes that the optimizer has made a step.
        """
        self._stepped.add(id(optimizer))
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, start in self._at_start.items():
            model = self._objects[name]
            if trained.isdisjoint(map(id, model.parameters())) or self._is_in_parts(model):
                continue
            change = start.find_change(model)
            if change is not None:
                self._writer.write(ev.RunNote.of(change))

    def _fsdp_init(self, original: Any, wrapper: Any, module: Any, *args: Any, **rest: Any) -> None:
        """Keep each FSDP (version 1) of a returned model: only it can gather the tensors.

        Replaces ``FullyShardedDataParallel.__init__``, which it calls.
        """
        models = [value for value in self._objects.values() if value is module]
        original(wrapper, module, *args, **rest)
        self._flattened += [(model, wrapper) for model in models]

    def _stage_init(self, original: Any, stage: Any, *args: Any, **kwargs: Any) -> None:
        original(stage, *args, **kwargs)
        self._staged |= {id(tensor): tensor for tensor in named_tensors(stage.submod).values()}

    @property
    def sends_anything(self) -> bool:
        """Return whether `send` saves anything of this rank.

        True also if it may turn out that nothing changed.
        """
        return bool(self._plan.out or self._sent)

    def gather(self) -> None:
        """Gather what is sharded, for `send`. Every rank must call this before it leaves the group.

        Only rank 0 keeps it. Both methods report what cannot be returned, and raise nothing: the
        training has succeeded, and its result counts.
        """
        for name, value in self._objects.items():
            with self._reporting(name):
                _reshard(value)
                if name in self._unasked or (is_model(value) and not self._is_in_parts(value)):
                    continue
                self._gathered[name] = None  # if gathering fails, `send` must not try again
                self._check_is_in_no_stage(value)
                keep = self._rank == 0
                if is_model(value):
                    tensors = self._gather_model(value)
                    self._gathered[name] = self._model_changes(name, tensors) if tensors else None
                elif keep or is_optimizer(value):
                    state = state_io.state_file(value, keep=keep)
                    self._gathered[name] = state if keep else None

    def send(self, result: Any = None) -> None:
        """Save changed weights (rank 0) and the variables of ``--out`` in the run folder.

        The file that an earlier attempt left for weights that did not change is deleted. The task's
        `result` is in the folder already, and is not used here. Ranks need not wait for one
        another. Raises nothing, see `gather`.
        """
        for name, value in sorted(self._sent.items(), key=lambda item: is_scheduler(item[1])):
            with self._reporting(name):
                if name in self._unasked:
                    content = self._read_unasked_state(name, value)
                elif name in self._gathered:
                    content = self._gathered.pop(name)
                else:  # it is whole in this rank
                    content = self._model_changes(name, named_tensors(value))
                if content is not None:
                    self._write(name, content)
                else:  # a failed attempt may have left a file
                    self._folder.weights_of(name).unlink(missing_ok=True)
        self._send_values()

    @property
    def returns_models(self) -> bool:
        """Whether the notebook gets a model back."""
        return any(map(is_model, self._objects.values()))

    def copy_models(self) -> tuple[dict[str, ModelCopy], dict[str, str]]:
        """Copy the models as they are now. Every rank must call this after the same step.

        Returns, by name, the copies, in rank 0 only, and why others could not be copied. The copies
        share no memory with the models. What was copied counts as changed for `send`, because the
        notebook may have this copy by then.
        """
        copies, troubles = dict[str, ModelCopy](), dict[str, str]()
        for name, model in self._objects.items():
            if not is_model(model):
                continue
            try:
                _reshard(model)
                self._check_is_in_no_stage(model)
                is_sharded = self._is_sharded(model)
                tensors = self._gather_model(model) if is_sharded else named_tensors(model)
                if self._rank == 0 and tensors:
                    copies[name] = self._copy_model(name, tensors)
            except Exception as error:  # as in `_reporting`
                troubles[name] = _describe_trouble(error)
        return copies, troubles

    def has_whole(self, parameters: Iterable[Any]) -> bool:
        """Return whether parameters are of the notebook's models, and whole in this rank."""
        models = [model for model in self._objects.values() if is_model(model)]
        known = {id(t) for m in models if not self._is_in_parts(m) for t in m.parameters()}
        return known.issuperset(map(id, parameters))

    def _copy_model(self, name: str, tensors: Mapping[str, Any]) -> ModelCopy:
        """Return a copy of a model, given its whole `tensors`.

        A frozen parameter that is as it was at the start is not copied. To know that, it is read:
        the code may train one by itself, such as a moving average.
        """
        model, start = self._objects[name], self._at_start.get(name)
        copy = self._read_model(name, tensors)
        frozen = {id(p) for p in model.parameters() if not p.requires_grad}
        read = {n: t for n, t in copy.tensors.items() if id(t) in frozen and n in copy.before}
        marks = fingerprints(read)
        same = {n: mark for n, mark in marks.items() if mark == copy.before[n]}
        taken = {n: tensor for n, tensor in copy.tensors.items() if n not in same}
        # Of a tensor that is no block, the address is 0: it is always cloned.
        live = {0, *map(storage_address, named_tensors(model).values())}
        copies = {id(t): _clone(t, live) for t in taken.values()}
        earlier = start.earlier_names(model) if start is not None else {}
        gone = {earlier.get(n, n) for n, tensor in taken.items() if can_be_saved(tensor)}
        known = self._before[name].items()
        self._before[name] = {n: m for n, m in known if n not in {*gone, *copy.states}}
        return replace(
            copy,
            tensors={n: copies[id(tensor)] for n, tensor in taken.items()},
            before={n: mark for n, mark in copy.before.items() if n not in same},
            unchanged={**copy.unchanged, **same},
        )

    def save_copies(self, copies: Mapping[str, ModelCopy], folder: RunFolder) -> dict[str, str]:
        """Save copies as the weights of a folder; return, by name, why others could not be saved.

        A model that has not changed has no file. May be called in any thread: the models may train.
        """
        troubles = dict[str, str]()
        for name, copy in copies.items():
            try:
                content = self._find_changes(name, copy)
                if content is not None:
                    folder.weights.mkdir(mode=0o700, exist_ok=True)
                    save(content, folder.weights_of(name))
            except Exception as error:  # a full disk, a tensor of an unknown type
                troubles[name] = _describe_trouble(error)
        return troubles

    def _model_changes(
        self, name: str, tensors: Mapping[str, Any], *, entire: bool = False
    ) -> WeightFile | None:
        """Return what is sent of a model, given its whole `tensors`; None if nothing changed.

        With `entire`, has all other tensors if any changed. Raises `NbtrainError` for a tensor that
        no file can have.
        """
        return self._find_changes(name, self._read_model(name, tensors), entire=entire)

    def _read_model(self, name: str, tensors: Mapping[str, Any]) -> ModelCopy:
        """Return a model as it is now, given its whole `tensors`, which are not copied.

        Tensors in memory that the notebook shares are left out: other ranks may train them still.
        """
        model, start = self._objects[name], self._at_start.get(name)
        shared = self._shared_names(tensors)
        before = {n: mark for n, mark in self._before[name].items() if n not in shared}
        if start is not None:  # the model can be read
            before = start.move_to_current_names(before, model)
        about: dict[str, Any] = {}
        if start is not None:
            about = {"adapters": start.find_new_adapters(model), "remedy": ""}
            with contextlib.suppress(Exception):  # a model of an unknown kind gets no advice
                if not self._is_in_parts(model) and (change := start.find_change(model)):
                    about["remedy"] = change.remedy
        own = {n: tensor for n, tensor in tensors.items() if n not in shared}
        marks = dict.fromkeys(shared, state_io.SHARED)
        return ModelCopy(own, state_io.extra_states(model), before, about, marks)

    def _find_changes(
        self, name: str, copy: ModelCopy, *, entire: bool = False
    ) -> WeightFile | None:
        """Return the content of a model's file. See `_model_changes`."""
        content = state_io.module_changes(
            self._objects[name], copy.tensors, copy.states, copy.before, entire=entire
        )
        if content is None:
            return None
        unchanged = {**content.about["unchanged"], **copy.unchanged}
        return replace(content, about={**content.about, **copy.about, "unchanged": unchanged})

    def _shared_names(self, tensors: Mapping[Any, Any]) -> list[Any]:
        """Return the names of tensors that are where the notebook shares them with the ranks."""
        return [
            name
            for name, tensor in tensors.items()
            if (place := self._addresses.get(id(tensor))) and place == shared_address(tensor)
        ]

    def _read_unasked_state(self, name: str, value: Any) -> WeightFile | None:
        """Return what is sent of an optimizer or a scheduler that no `--out` names, or None.

        None if it is unchanged, or the notebook cannot use it. An optimizer that is changed but
        sharded, too large or unreadable is added to `_unsent`. Its scheduler is then not sent
        either: call this for optimizers first.
        """
        is_set = _describe_settings(value) != self._settings[name]
        if is_scheduler(value):
            if is_set and id(getattr(value, "optimizer", None)) not in self._left_out:
                with contextlib.suppress(Exception):  # of a user's class: `--out` reports why
                    return state_io.state_file(value)
            return None
        parts = _state_values(value)
        if not is_set and not (id(value) in self._stepped and parts):
            return None
        self._left_out.add(id(value))
        models = [model for model in self._returned.values() if is_model(model)]
        known = {id(tensor) for model in models for tensor in named_tensors(model).values()}
        if not all(id(p) in known for group in value.param_groups for p in group["params"]):
            return None  # what it trains is not copied back either
        tensors = [part for part in parts if hasattr(part, "element_size")]
        if self._shared_names(dict(enumerate(tensors))):
            return None  # the notebook's optimizer has them
        is_apart = any(map(is_sharded, tensors)) or any(map(self._is_in_parts, models))
        if not is_apart and sum(map(size_of, tensors)) <= RESCUE_MAX_BYTES:
            with contextlib.suppress(Exception):  # of a user's class: `--out` reports why
                content = state_io.state_file(value)
                self._left_out.discard(id(value))
                return content
        self._unsent.add(name)
        return None

    def rescue(self) -> None:
        """Save small models (up to `RESCUE_MAX_BYTES`) that changed, as they are, after a failure.

        The other ranks may be dead, so a sharded model is not saved. Only rank 0 saves. Raises
        nothing.
        """
        for name, value in self._sent.items():
            with contextlib.suppress(Exception):  # the failure itself is what is reported
                _reshard(value)
                if not is_model(value) or self._is_in_parts(value):
                    continue
                tensors = named_tensors(value)
                if sum(map(size_of, tensors.values())) <= RESCUE_MAX_BYTES:
                    # All tensors: the user may load them into another model.
                    content = self._model_changes(name, tensors, entire=True)
                    if content is not None:
                        self._write(name, content)

    @contextlib.contextmanager
    def _reporting(self, name: str) -> Iterator[None]:
        """Report an exception of the block as why `name` was not saved, and swallow it."""
        try:
            yield
        except _FolderError as error:
            self._report(name, **error.about, lost=name not in self._unasked)
        except Exception as error:  # a destroyed process group, a tensor of an unknown type
            self._report(name, trouble=_describe_trouble(error))

    def _report(self, name: str, **about: Any) -> None:
        """Record that a value was saved, or with `trouble` why it was not."""
        self._writer.write(ev.ArtifactSaved(clock.now(), self._rank, name, **about))

    def _write(self, name: str, content: WeightFile) -> None:
        """Save weights under a name, whole or not at all, and report them.

        Replaces an earlier file. Raises `_FolderError` if the folder cannot be written to.
        """
        path = self._folder.weights_of(name)
        partial = path.with_suffix(".partial")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                not_finite = save(content, partial)
                partial.rename(path)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise _FolderError(error) from error
        kind, count = content.about["kind"], content.about.get("parameters", 0)
        adapters = () if self._ranks_stay else content.about.get("adapters", ())
        known = named_parameters(self._objects[name]) if count else ()
        self._report(
            name,
            what=kind,
            parameters=count,
            size=path.stat().st_size,
            stamp=stamp(path),
            # A buffer may rightly be infinite: a mask, for example.
            not_finite=next((n for n in not_finite if n in known), ""),
            adapters=", ".join(f"`{each['name']}`" for each in adapters),
        )

    def _is_sharded(self, module: Any) -> bool:
        has_flat = self._find_flat_root(module) is not None
        return has_flat or any(map(is_sharded, named_tensors(module).values()))

    def _is_in_parts(self, module: Any) -> bool:
        return self._is_sharded(module) or self._is_in_stages(module)

    def _is_in_stages(self, module: Any) -> bool:
        return any(id(tensor) in self._staged for tensor in named_tensors(module).values())

    def _find_flat_root(self, module: Any) -> Any:
        """Return what FSDP version 1 can gather: the model's wrapper, the model itself, or None."""
        wrappers = [wrapper for model, wrapper in self._flattened if model is module]
        inside = any(type(part).__name__ == FSDP for part in module.modules())
        return wrappers[-1] if wrappers else module if inside else None

    def _gather_model(self, module: Any) -> dict[str, Any] | None:
        """Return the whole tensors of a sharded model, on the CPU, in rank 0 only.

        Every rank must call this. Raises `NbtrainError` if the process group is gone, and in rank 0
        if another node got the whole model.
        """
        dist: Any = sys.modules["torch.distributed"]
        if not dist.is_initialized():
            raise NbtrainError(
                "its parts are on several ranks, but the function has destroyed the process group. "
                "Do not destroy the group in the function; nbtrain does so afterwards"
            )
        root = self._find_flat_root(module)
        if root is not None:
            flat = _gather_flat(root, module, keep=self._rank == 0)
            if self._rank == 0 and flat is None:
                raise NbtrainError(
                    "only the first node has the whole model; save it in the function"
                )
            return flat
        # `get_model_state_dict` names tensors as the model's own state_dict does, and leaves out
        # buffers that are not persistent.
        tensors, copies = named_tensors(module), dict[int, Any]()
        for tensor in tensors.values():
            if id(tensor) not in copies:
                entire = state_io.gather_tensor(tensor).detach()  # one at a time
                copies[id(tensor)] = None if self._rank else entire.cpu()
        if self._rank:
            return None
        return {name: copies[id(tensor)] for name, tensor in tensors.items()}

    # Variables

    def _send_values(self) -> None:
        """Save the variables that ``--out`` names, and report those that are missing.

        Rank 0 saves all of these, other ranks those with a name for all ranks. What is copied back
        as weights is skipped. No file is written if nothing can be pickled.
        """
        wanted = [n for n in self._plan.out if n.endswith(OF_ALL) or self._rank == 0]
        pickled: dict[str, bytes] = {}
        variables = named_values(self._plan.task)
        # A new optimizer refers to the notebook's model, but not to a layer that has replaced one
        # of the notebook's. The models of other ranks may differ.
        parts = find_parts(self._returned) if wanted and self._rank == 0 else {}
        known = {key: part for key, part in parts.items() if self._parts.get(part, key) == key}
        for asked in wanted:
            name = asked.removesuffix(OF_ALL)
            with self._reporting(name):
                if name not in variables:
                    own = public(namespace(self._plan.task))
                    new = [n for n, v in own.items() if self._names.get(n) != id(v)]
                    text = (
                        f"there is no variable `{name}`. Local variables of a function end when it "
                        f"returns. The run assigned: {', '.join(new[-8:]) or 'none'}"
                    )
                    self._report(name, trouble=text, code=ev.NO_VARIABLE)
                    continue
                value = unwrap(variables[name])
                if any(value is other for other in self._returned.values()) and name == asked:
                    continue
                models = filter(is_model, self._returned.values())
                if hasattr(value, "param_groups") and any(map(self._is_sharded, models)):
                    raise NbtrainError("its state is sharded over the ranks, like the model")
                if name == asked:
                    self._check_is_in_no_stage(value)
                pickled[asked] = result_pickler.dump_variable(value, self._shared, known)
        if not pickled:
            return
        about: dict[str, Any] = {}
        try:
            write_atomically(self._folder.out(self._rank), pickle.dumps(pickled))
        except OSError as error:
            about = {**_FolderError(error).about, "lost": True}
        for asked, data in pickled.items():
            self._report(asked.removesuffix(OF_ALL), size=len(data), **about)

    def _check_is_in_no_stage(self, value: Any) -> None:
        """Raise `NbtrainError` if pipeline stages hold a model's layers, or an optimizer's.

        For an optimizer, any returned model in stages counts. Other values always pass.
        """
        models = [value] if is_model(value) else []
        if hasattr(value, "param_groups"):
            models = [model for model in self._returned.values() if is_model(model)]
        if any(map(self._is_in_stages, models)):
            raise NbtrainError(
                "its layers were trained in pipeline stages, so no rank has all of them. Return "
                "each stage's state_dict() from the function"
            )


def _find_shared_addresses(values: Iterable[Any]) -> dict[int, int]:
    """Return where tensors of models and optimizers are in shared memory, by their ids.

    The address is 0 for a tensor that is not in shared memory.
    """
    places = {}
    for value in values:
        with contextlib.suppress(Exception):  # it may be of a user's class
            is_module = is_model(value)
            own = [*value.parameters(), *value.buffers()] if is_module else _state_values(value)
            places.update({id(t): shared_address(t) for t in own if hasattr(t, "element_size")})
    return places


def _state_values(optimizer: Any) -> list[Any]:
    """Return the values that are set in an optimizer's state: tensors and numbers."""
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    return [part for state in states for part in state.values() if part is not None]


def _describe_settings(value: Any) -> str:
    """Return the settings of an optimizer or the state of a scheduler as a text, to compare it.

    "" if it cannot be read.
    """
    with contextlib.suppress(Exception):  # users' own classes
        if is_optimizer(value):
            groups = value.param_groups
            return repr([{k: v for k, v in group.items() if k != "params"} for group in groups])
        return repr(value.state_dict())
    return ""


def _clone(tensor: Any, live: Collection[int]) -> Any:
    """Return a tensor on the CPU that has no memory of the model, whose addresses are `live`."""
    here = to_cpu(tensor)
    is_live = not has_no_bytes(here) and storage_address(here) in live
    return here.clone() if is_live else here


def _describe_trouble(error: Exception) -> str:
    return str(error) if isinstance(error, NbtrainError) else f"{type(error).__name__}: {error}"


class _FolderError(OSError):
    """A file cannot be saved in the run's folder."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.about = {
            "trouble": error.strerror or str(error),
            "code": errno.errorcode.get(error.errno or 0, ""),
        }


def _reshard(value: Any) -> None:
    """Free the whole, cast tensors that an evaluation leaves in FSDP version 2.

    Does nothing for other values.
    """
    cls: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for part in value.modules() if cls and is_model(value) else ():
        if isinstance(part, cls):
            part.reshard()


def _gather_flat(root: Any, module: Any, *, keep: bool) -> dict[str, Any] | None:
    """Return the whole tensors of a model in FSDP version 1, on the CPU. Every rank must call this.

    None in ranks that do not `keep` them, or did not get them. On the CPU not by the state_dict:
    with ``offload_to_cpu`` that reads freed memory, and the rank dies (SIGSEGV; torch 2.13).
    """
    flat = next(part for part in root.modules() if type(part).__name__ == FSDP)
    if getattr(flat, "compute_device", None) == sys.modules["torch"].device("cpu"):
        with type(flat).summon_full_params(root, writeback=False):
            tensors = named_tensors(module) if keep else {}
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
