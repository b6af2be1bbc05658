"""Copies what the ranks of a run saved into the notebook: trained weights and variables."""

from __future__ import annotations

import contextlib
import pickle
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ...errors import NbtrainError
from ...findings import Finding
from ...planning.option_types import OF_ALL
from ...planning.plan import Plan
from ...planning.task_values import is_model, is_scheduler, namespace, synced_objects
from ...system.files import read_regular
from ...tracking import clock
from ...tracking import events as ev
from ...tracking.event_log import EventWriter
from ...tracking.reducers import fold
from ...tracking.run_folder import RunFolder
from ...tracking.state import RunState
from .. import result_pickler
from ..limits import RESCUE_MAX_BYTES
from . import state_io
from .models import get_part, named_tensors, stepped_parameters, unwrap
from .state_io import WeightReader


class ModelKind(Protocol):
    """Models of another library than torch, which a part of nbtrain copies back."""

    def find(self, plan: Plan) -> dict[str, Any]:
        """Return the models of this kind that a plan copies back, by name."""

    def fingerprint(self, model: Any) -> Any:
        """Return a value that differs once a weight of the model does. May raise anything."""

    def load(self, model: Any, path: Path) -> None:
        """Set a model's weights to those of a file. Raises if they do not fit."""


model_kinds: list[ModelKind] = []
"""The kinds that parts of nbtrain add."""

_CHANGED = "the notebook changed it after the launch, so it keeps the notebook's values"


_WHILE_IT_TRAINS = (
    "While a run trains, only models are copied: those that its function or cell refers to and "
    "that changed, but not those in memory that the ranks share with the notebook (share_memory())"
)
_AT_ITS_END = (
    "A run saves the models that its function or cell refers to and that changed, unless it has "
    "sync=False (--no-sync). Return the state_dict() of a model that the function itself makes. "
    "After an interrupt or a failure, a model is saved only if it is smaller than "
    f"{RESCUE_MAX_BYTES >> 30} GiB, and none is saved if rank 0 was stopped because another rank "
    "failed"
)


class ResultReceiver:
    """Copies results into the notebook's own objects, as long as they live, and its variables.

    Made before the run starts.
    """

    def __init__(self, plan: Plan) -> None:
        self._objects = {name: weakref.ref(value) for name, value in synced_objects(plan).items()}
        self._others = {
            name: (kind, weakref.ref(model))
            for kind in model_kinds
            for name, model in kind.find(plan).items()
        }
        self._fingerprints = dict[str, Any]()
        self._namespace = namespace(plan.task)
        self.has_received = False
        """Whether `take` was called."""
        self._out = [name.removesuffix(OF_ALL) for name in plan.out]
        self._launch = _Launch({}, {}, ())

    def remember(self) -> None:
        """Remember what the notebook has now, as it may change that before the run has ended.

        Reads all weights. Without this call, for a cell that waits, `take` overwrites changes.
        """
        self._launch = _Launch(self.objects(), self._namespace, self._out)
        for name, (kind, ref) in self._others.items():
            with contextlib.suppress(Exception):  # the library's: then changes are not noticed
                self._fingerprints[name] = kind.fingerprint(ref())

    def remember_loaded(self, values: Collection[Any]) -> None:
        """Remember what these objects have now: it is of the run, not a change of the notebook.

        Of other objects, what they share with these is remembered.
        """
        loaded = set[int]().union(*map(_tensor_ids, values))
        for name, value in self.objects().items():
            if any(value is other for other in values):
                self._launch.remember(name, value)
            elif is_model(value):
                tensors = named_tensors(value)
                shared = {n for n, tensor in tensors.items() if id(tensor) in loaded}
                self._launch.remember(name, value, shared)

    def objects(self) -> dict[str, Any]:
        """Return the objects that are copied back and still exist, by name.

        They are models, optimizers and schedulers of torch, not those of `model_kinds`.
        """
        return {name: value for name, ref in self._objects.items() if (value := ref()) is not None}

    def take(self, folder: RunFolder, state: RunState) -> RunState:
        """Copy what the ranks saved, weights in place and variables by assignment, once.

        Returns the run's state afterwards; from the second call on, `state` as it is. Writes an
        event for each value. Raises nothing: the state and a warning report what cannot be copied.
        """
        if self.has_received:
            return state
        self.has_received = True
        saved = [saved for rank in state.ranks for saved in rank.saved]
        lost = {sent.name for sent in saved if sent.lost}  # the run's error names them
        events = self._receive(folder, saved)
        self._launch = _Launch({}, {}, ())
        if not events:
            return state
        with contextlib.suppress(OSError):  # no descriptor is left: the state in memory has it
            writer = EventWriter(folder.launcher_events)
            for event in events:
                writer.write(event)
            writer.close()
        for event in events:
            if event.trouble and event.name not in lost:  # the board, if any, shows it too
                message = ev.describe_failed_update(event)
                with contextlib.suppress(Warning):  # where warnings are errors
                    warnings.warn_explicit(message, UserWarning, "nbtrain", 1)
        return fold(state, events)

    def _receive(
        self, folder: RunFolder, saved: Sequence[ev.ArtifactSaved]
    ) -> list[ev.ArtifactLoaded]:
        """Load all that was saved into the notebook; return an event for each value.

        The event of a value that cannot be loaded has the reason; it stays as the notebook has it.
        Raises nothing for a missing or damaged file.
        """
        troubles: dict[str, Finding] = {}
        for sent in saved:
            if sent.trouble:
                troubles.setdefault(sent.name, Finding(sent.code, sent.trouble))
        names = [sent.name for sent in saved if sent.what != "value" and sent.name not in troubles]
        stamps = {sent.name: sent.stamp for sent in saved}
        own = [name for name in names if name not in self._others]
        unchanged = self._load_weights(folder, own, stamps, troubles)
        for name in names:
            if name in self._others:
                try:
                    self._load_other(folder, name)
                except Exception as error:  # the library's, if the weights do not fit
                    troubles[name] = Finding("", _describe_error(error))
        try:
            values, lost = _unpickle_values(folder, self)
        except Exception as error:  # a file that is gone or damaged
            values, lost = {}, {sent.name: error for sent in saved if sent.what == "value"}
        for name, reason in lost.items():
            troubles.setdefault(name, Finding("", f"{type(reason).__name__}: {reason}"))
        troubles |= self._launch.find_reassigned(values, self._namespace)
        self._namespace.update({n: v for n, v in values.items() if n not in troubles})
        fine = {
            name: Finding(ev.OTHER_VARIABLE, "")
            for name, value in self.objects().items()
            if is_model(value) and is_model(current := self._namespace.get(name))
            if unwrap(current) is not value and not _tensor_ids(current) & _tensor_ids(value)
        }
        fine |= {name: Finding(ev.SAME, "") for name in unchanged}
        now = clock.now()
        return [
            ev.ArtifactLoaded(now, -1, name, finding.text, finding.code)
            for name in dict.fromkeys([*(sent.name for sent in saved), *troubles])
            for finding in [troubles.get(name) or fine.get(name, Finding("", ""))]
        ]

    def _load_other(self, folder: RunFolder, name: str) -> None:
        """Load the weights of a model of another library, in place.

        Raises `NbtrainError` if the model is gone or the notebook has changed it since `remember`,
        else any exception of that library.
        """
        kind, ref = self._others[name]
        before = self._fingerprints.get(name)
        if (model := ref()) is None:
            raise NbtrainError("the notebook's object no longer exists")
        if before is not None and kind.fingerprint(model) != before:
            raise NbtrainError(_CHANGED)
        kind.load(model, folder.weights_of(name))

    def _load_weights(
        self,
        folder: RunFolder,
        names: Collection[str],
        stamps: Mapping[str, str],
        troubles: dict[str, Finding],
    ) -> list[str]:
        """Load weights in place; return the names of the objects that had the same values.

        Adds to `troubles` why some are not loaded, or only in part. Every file is checked before
        any is loaded. What shares tensors with an object that cannot be loaded is not loaded
        either, because that would change a part of this object.
        """
        objects, unchanged = self.objects(), list[str]()
        ready = dict[str, Callable[[], bool]]()
        with contextlib.ExitStack() as files:
            for name in names:
                try:
                    with _only_nbtrain_errors():
                        value = objects.get(name)
                        file = _open_weights(folder, name, stamps, files, value)
                        load_weights = state_io.prepare_load(file, value, is_handed_over=True)
                        self._launch.check_unchanged(name, value, file)
                        ready[name] = load_weights
                except NbtrainError as error:
                    troubles[name] = Finding("", str(error))
            for name in [each for each in objects if each in ready.keys() - troubles.keys()]:
                try:
                    if held := _find_blocking_object(objects[name], objects, troubles):
                        how = "shares tensors with" if is_model(objects[name]) else "belongs to"
                        raise NbtrainError(f"it {how} `{held}`, which was not updated")
                    with _only_nbtrain_errors():
                        if not ready[name]():
                            unchanged.append(name)
                except NbtrainError as error:
                    code = ev.IN_PART if isinstance(error, state_io.PartlyLoaded) else ""
                    troubles[name] = Finding(code, str(error))
        return unchanged


class _Launch:
    """What the notebook had when a run began that its cell does not wait for.

    Models are compared by fingerprints, which take 0.2 s per GB: `Tensor._version` misses what
    ``.data`` and fused optimizers write.
    """

    def __init__(
        self, objects: Mapping[str, Any], namespace: Mapping[str, Any], out: Collection[str]
    ) -> None:
        self._fingerprints = dict[str, Any]()
        for name, value in objects.items():
            with contextlib.suppress(Exception):  # users' own classes may raise anything
                self._fingerprints[name] = state_io.state_fingerprints(value)
        self._values = {name: namespace.get(name) for name in out if name not in objects}

    def remember(self, name: str, value: Any, only: Collection[str] | None = None) -> None:
        """Remember the present state of an object that is compared, or `only` these tensors."""
        if name not in self._fingerprints or (only is not None and not only):
            return
        with contextlib.suppress(Exception):  # as in `__init__`
            now = state_io.state_fingerprints(value)
            chosen = now if only is None else {n: m for n, m in now.items() if n in only}
            before = {} if only is None else self._fingerprints[name]
            self._fingerprints[name] = {**before, **chosen}

    def check_unchanged(self, name: str, value: Any, file: WeightReader) -> None:
        """Raise `NbtrainError` if the notebook has changed an object since the launch.

        Does nothing for an object without fingerprints, as when the cell waits for the run. Tensors
        in memory that is shared with the ranks do not count.
        """
        if name not in self._fingerprints:  # the cell waited for the run
            return
        changed = list[str]()
        with contextlib.suppress(Exception):  # as above
            changed = state_io.changed_names(value, self._fingerprints[name])
        unsaved = file.about.get("unchanged", {})
        changed = [n for n in changed if unsaved.get(n) != state_io.SHARED]  # the ranks did
        if not changed:
            return
        kind = state_io.kind_of(value)
        raise NbtrainError(f"{_CHANGED}. run.load({kind}) loads what the run saved")

    def find_reassigned(
        self, values: Collection[str], namespace: Mapping[str, Any]
    ) -> dict[str, Finding]:
        """Return a finding, by name, for each of `values` that was assigned since the launch.

        Empty when the cell waits for the run. Only another object counts, not one changed in place.
        """
        text = (
            "the notebook changed it after the launch, so it keeps the notebook's value. "
            "run.out[{!r}] is the run's value"
        )
        return {
            name: Finding("", text.format(name))
            for name, before in self._values.items()
            if name in values and namespace.get(name) is not before
        }


def _find_blocking_object(
    value: Any, objects: Mapping[str, Any], troubles: Mapping[str, Finding]
) -> str:
    """Return the name of an object with trouble that `value` depends on; "" without one.

    A model depends on those that it shares tensors with, an optimizer on the models that it trains,
    a scheduler on its optimizer, too.
    """
    optimizer = getattr(value, "optimizer", None) if is_scheduler(value) else None
    own = _tensor_ids(value)
    if not is_model(value):
        own = {*map(id, stepped_parameters(value))}
    left = {n: objects[n] for n in troubles if n in objects}
    return next((n for n, v in left.items() if v is optimizer or _tensor_ids(v) & own), "")


def _tensor_ids(value: Any) -> set[int]:
    return set(map(id, named_tensors(value).values())) if is_model(value) else set()


def _open_weights(
    folder: RunFolder,
    name: str,
    stamps: Mapping[str, str],
    files: contextlib.ExitStack,
    target: Any,
) -> WeightReader:
    """Open a file of weights, which `files` closes. Raises `NbtrainError` without a `target`.

    Also raises what `WeightReader` raises for a file that is gone or damaged. `target` is not used
    otherwise.
    """
    if target is None:
        raise NbtrainError(
            "the notebook's object no longer exists. "
            f"run.load(model, {name!r}) loads the weights into another model or optimizer"
        )
    return files.enter_context(WeightReader(folder.weights_of(name), stamps.get(name, "")))


@contextlib.contextmanager
def _only_nbtrain_errors(prefix: str = "") -> Iterator[None]:
    """Raise every exception as an `NbtrainError`, with the prefix before its text.

    A file may be gone, a target of any class. A subclass of `NbtrainError` stays that.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, NbtrainError) and not prefix:
            raise
        cls = type(error) if isinstance(error, NbtrainError) else NbtrainError
        raise cls(f"{prefix}{_describe_error(error)}") from error


def _describe_error(error: Exception) -> str:
    return str(error) if isinstance(error, NbtrainError) else f"{type(error).__name__}: {error}"


def load_variables(folder: RunFolder, receiver: ResultReceiver | None) -> dict[str, Any]:
    """Unpickle the returned variables, by name; warn about those that cannot be unpickled.

    A variable that every rank returned is a list by rank, with None for a rank without it. If all
    fail, raises the first error.
    """
    variables, lost = _unpickle_values(folder, receiver)
    if lost and not variables:
        raise next(iter(lost.values()))
    for name, error in lost.items():
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"{name} could not be loaded: {reason}", stacklevel=3)
    return variables


def _unpickle_values(
    folder: RunFolder, receiver: ResultReceiver | None
) -> tuple[dict[str, Any], dict[str, Exception]]:
    """Unpickle the returned variables; return them by name, and why others could not be.

    A variable that every rank returned is a list by rank, with None for a rank without it. A
    reference to a model of the notebook needs that model to exist, in `receiver`. Raises if a
    rank's file cannot be read.
    """
    objects = receiver.objects() if receiver is not None else {}
    find = partial(get_part, values=objects)
    ranks = range(folder.read_manifest()["num_processes"])
    paths = [folder.out(rank) for rank in ranks]
    sent = [pickle.loads(read_regular(path)) if path.exists() else {} for path in paths]
    variables, lost = dict[str, Any](), dict[str, Exception]()
    for asked in dict.fromkeys(name for by_name in sent for name in by_name):
        each = (s.get(asked) for s in (sent if asked.endswith(OF_ALL) else sent[:1]))
        name = asked.removesuffix(OF_ALL)
        try:
            every = [data if data is None else result_pickler.loads(data, find) for data in each]
        except Exception as error:  # from a user's class: the other values are still loaded
            lost[name] = error
        else:
            variables[name] = every if asked.endswith(OF_ALL) else every[0]
    return variables, lost


def load(
    folder: RunFolder,
    state: RunState,
    receiver: ResultReceiver | None,
    target: Any,
    name: str | None,
    call: str = "run.load",
) -> None:
    """Load weights that a run saved into `target`, or if it is None, the notebook's objects.

    The weights come from the run's folder; `receiver` knows the notebook's objects by name. `name`
    chooses among several saved ones. `call` is what the user called. Raises `NbtrainError`: the
    objects are unchanged then, unless writing itself fails (`PartlyLoaded`).
    """
    folder.check_exists()
    known = receiver.objects() if receiver is not None else {}
    names = _select_weights(folder, known, target, name, call)
    targets = {each: known.get(each) if target is None else target for each in names}
    stamps = {sent.name: sent.stamp for rank in state.ranks for sent in rank.saved}
    load_all(folder, targets, stamps)
    if receiver is not None:
        receiver.remember_loaded(targets.values())


def load_all(
    folder: RunFolder, targets: Mapping[str, Any], stamps: Mapping[str, str] | None = None
) -> None:
    """Load saved weights into models or optimizers by the names of the weights: all, or none.

    Raises `NbtrainError`, as `load`.
    """
    ready = {}
    with contextlib.ExitStack() as files:
        for each, into in targets.items():  # all of them are checked before any is loaded
            with _only_nbtrain_errors(f"`{each}` was not loaded, and nothing changed: "):
                file = _open_weights(folder, each, stamps or {}, files, into)
                ready[each] = state_io.prepare_load(file, into)
        for each, load_weights in ready.items():
            with _only_nbtrain_errors(f"`{each}`: "):
                load_weights()


def _select_weights(
    folder: RunFolder, known: Mapping[str, Any], target: Any, name: str | None, call: str
) -> list[str]:
    """Return the names of the saved weights to load, at least one.

    `name` if given, else those of `target`, else the only ones of its kind; with None, all that the
    kernel has. Raises `NbtrainError` if nothing fits, or several do.
    """
    saved = folder.list_weights()
    targets = {n: value for n, value in known.items() if value is target or target is None}
    wanted = [n for n in saved if n in targets]
    if name is not None:
        wanted = [name]
    elif target is not None and not targets:
        kinds = (state_io.kind_of(target), "")
        wanted = [each for each in saved if _read_kind(folder, each) in kinds]
        if len(wanted) > 1:
            every = _join_names(wanted)
            raise NbtrainError(f"this run saved {every}. Choose one: {call}(model, NAME)")
    is_unsaved = name not in saved if name is not None else target is not None and not wanted
    if not saved or is_unsaved:
        missing = name or next(iter(targets), None)
        what = f"no weights of `{missing}`" if missing else "no weights"
        rest = f"; it saved {_join_names(saved)}" if saved else ""
        advice = _WHILE_IT_TRAINS if call == "run.peek" else _AT_ITS_END
        raise NbtrainError(f"this run saved {what}{rest}. {advice}")
    if target is None and not any(n in known for n in wanted):
        raise NbtrainError(
            f"the notebook's own objects are not in this kernel: pass one, {call}(model)"
        )
    return wanted


def _read_kind(folder: RunFolder, name: str) -> str:
    """Return what a file holds, as `state_io.kind_of`; "" for one that cannot be read."""
    with contextlib.suppress(NbtrainError, OSError), WeightReader(folder.weights_of(name)) as file:
        return str(file.about["kind"])
    return ""


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
