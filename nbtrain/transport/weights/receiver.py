"""Copies what the ranks of a run left back into the notebook: trained weights and variables."""

from __future__ import annotations

import contextlib
import functools
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
from ...planning.task_values import is_model, is_optimizer, is_scheduler, namespace, synced_objects
from ...system.files import read_regular
from ...tracking import clock
from ...tracking import events as ev
from ...tracking.event_log import EventWriter
from ...tracking.reducers import fold
from ...tracking.run_folder import RunFolder
from ...tracking.state import RunState
from .. import result_pickler
from . import parts, weights
from .sender import QUICK
from .weight_file import WeightReader
from .wrappers import unwrapped


class ModelKind(Protocol):
    """Models of another library than torch, which a part of nbtrain copies back."""

    def find(self, plan: Plan) -> dict[str, Any]:
        """Return the models of this kind that a plan copies back, by name."""

    def fingerprint(self, model: Any) -> Any:
        """Return what differs once a weight of the model does."""

    def load(self, model: Any, path: Path) -> None:
        """Set a model's weights to those of a file. Raises if they do not fit."""


model_kinds: list[ModelKind] = []
"""What parts add."""

CHANGED = "the notebook changed it after the launch, so it keeps the notebook's values"


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
        self._has_received = False
        self._out = [name.removesuffix(OF_ALL) for name in plan.out]
        self._launch: _Launch | None = None

    def remember(self) -> None:
        """Remember what the notebook holds now, as it may change that before the run has ended."""
        self._launch = _Launch(self.objects(), self._namespace, self._out)
        for name, (kind, ref) in self._others.items():
            with contextlib.suppress(Exception):  # whatever the library raises: nobody can tell
                self._fingerprints[name] = kind.fingerprint(ref())

    def objects(self) -> dict[str, Any]:
        """Return the models and optimizers that are copied back, if they are there still."""
        return {name: value for name, ref in self._objects.items() if (value := ref()) is not None}

    def take(self, folder: RunFolder, state: RunState) -> RunState:
        """Copy what the ranks saved, weights in place and variables by assignment, once.

        Return the run's state after it. What cannot be copied raises nothing: the state says so,
        and a warning.
        """
        if self._has_received:
            return state
        self._has_received = True
        saved = [saved for rank in state.ranks for saved in rank.saved]
        lost = {sent.name for sent in saved if sent.lost}  # the run's error names them
        events = self._received(folder, saved)
        if not events:
            return state
        with contextlib.suppress(OSError):  # no descriptor left here: the picture at hand has it
            writer = EventWriter(folder.launcher_events)
            for event in events:
                writer.write(event)
            writer.close()
        for event in events:
            if event.trouble and event.name not in lost:  # on the board too, where there is one
                message = ev.describe_failed_update(event)
                with contextlib.suppress(Warning):  # where warnings are errors
                    warnings.warn_explicit(message, UserWarning, "nbtrain", 1)
        return fold(state, events)

    def _received(
        self, folder: RunFolder, saved: Sequence[ev.ArtifactSaved]
    ) -> list[ev.ArtifactLoaded]:
        troubles: dict[str, Finding] = {}
        for sent in saved:
            if sent.trouble:
                troubles.setdefault(sent.name, Finding(sent.code, sent.trouble))
        names = [sent.name for sent in saved if sent.what != "value" and sent.name not in troubles]
        others = [name for name in names if name in self._others]
        names = [name for name in names if name not in self._others]
        stamps = {sent.name: sent.stamp for sent in saved}
        launch, self._launch = self._launch or _Launch({}, {}, ()), None
        take = functools.partial(_take_weights, folder, names, stamps, self.objects(), troubles)
        more, same = take(launch)
        troubles.update(more)
        troubles.update(self._load_others(folder, others))
        troubles |= launch.bound_anew(self.objects(), self._namespace, troubles)
        try:
            values, lost = _unpickled(folder, self)
        except Exception as error:  # a file that is gone or damaged
            values, lost = {}, {sent.name: error for sent in saved if sent.what == "value"}
        for name, reason in lost.items():
            troubles.setdefault(name, Finding("", f"{type(reason).__name__}: {reason}"))
        troubles |= launch.assigned_anew(values, self._namespace)
        self._namespace.update({n: v for n, v in values.items() if n not in troubles})
        fine = {
            name: Finding(ev.OTHER_VARIABLE, "")
            for name, value in self.objects().items()
            if is_model(value) and is_model(own := self._namespace.get(name))
            if unwrapped(own) is not value and not _ids(own) & _ids(value)  # nor a part of it
        }
        fine |= {name: Finding(ev.SAME, "") for name in same}
        now, unknown = clock.now(), Finding("", "")
        return [
            ev.ArtifactLoaded(now, -1, name, trouble.text, trouble.code)
            for name in dict.fromkeys([*(sent.name for sent in saved), *troubles])
            for trouble in [troubles.get(name) or fine.get(name, unknown)]
        ]

    def _load_others(self, folder: RunFolder, names: Collection[str]) -> dict[str, Finding]:
        """Load the weights of models of other libraries; return why some could not be."""
        troubles = {}
        for name in names:
            kind, ref = self._others[name]
            before = self._fingerprints.get(name)
            if (model := ref()) is None:
                troubles[name] = Finding("", "the notebook's object no longer exists")
            elif before is not None and kind.fingerprint(model) != before:
                troubles[name] = Finding("", CHANGED)
            else:
                try:
                    kind.load(model, folder.weights_of(name))
                except NbtrainError as error:
                    troubles[name] = Finding("", str(error))
                except Exception as error:  # whatever the library raises for what does not fit
                    troubles[name] = Finding("", f"{type(error).__name__}: {error}")
        return troubles


class _Launch:
    """What the notebook held when a run began that its cell does not wait for.

    Told by fingerprints, which take 0.2 s per GB: `Tensor._version` misses what ``.data`` and
    fused optimizers write.
    """

    def __init__(
        self, objects: Mapping[str, Any], namespace: Mapping[str, Any], out: Collection[str]
    ) -> None:
        self._marks = dict[str, Any]()
        for name, value in objects.items():
            with contextlib.suppress(Exception):  # users' own kinds: nobody can tell
                self._marks[name] = weights.marks(value)
        self._bound = [name for name, value in objects.items() if namespace.get(name) is value]
        self._values = {name: _look(namespace, name) for name in out if name not in objects}

    def check(self, name: str, value: Any, file: WeightReader) -> None:
        """Raise `NbtrainError` if the notebook has changed an object since."""
        if name not in self._marks:  # the cell waited for the run
            return
        changed = list[str]()
        with contextlib.suppress(Exception):  # as above
            changed = weights.changed_names(value, self._marks[name])
        unsaved = file.about.get("unchanged", {})
        changed = [n for n in changed if unsaved.get(n) != weights.SHARED]  # the ranks did
        if not changed:
            return
        kind = weights.kind_of(value)
        alone = next((n for n in changed if n in unsaved), None)
        if alone is None:
            remedy = f"run.load({kind}) loads what the run saved"
        else:
            remedy = (
                f"The run did not change {weights.shown_name(alone)}, so its file does not have "
                f"it. Make the {kind} as it was at the launch, then call run.load({kind}, {name!r})"
            )
        raise NbtrainError(f"{CHANGED}. {remedy}")

    def bound_anew(
        self, objects: Mapping[str, Any], namespace: Mapping[str, Any], lost: Collection[str]
    ) -> dict[str, Finding]:
        """Return the names of objects that were updated, and have another one in the notebook."""
        troubles = {}
        for name in self._bound:
            old, new = objects.get(name), unwrapped(namespace.get(name))
            if old is None or new is old or name in lost or not _is_of_kind(new, old):
                continue
            if is_model(new) and _ids(old) <= _ids(new):  # it was wrapped
                continue
            kind = weights.kind_of(old)
            text = (
                f"`{name}` is another {kind} now than at the launch. The run updated the earlier "
                f"one; run.load({kind}, {name!r}) loads the weights into the new one"
            )
            troubles[name] = Finding("", text)
        return troubles

    def assigned_anew(
        self, values: Collection[str], namespace: Mapping[str, Any]
    ) -> dict[str, Finding]:
        """Return which variables the notebook has assigned since, or changed."""
        text = (
            "the notebook changed it after the launch, so it keeps the notebook's value. "
            "run.out[{!r}] is the run's value"
        )
        return {
            name: Finding("", text.format(name))
            for name, before in self._values.items()
            if name in values and not _same(before, _look(namespace, name))
        }


def _look(namespace: Mapping[str, Any], name: str) -> list[Any]:
    """Return a variable, what a list or a dict holds, and how often a tensor was written to."""
    if name not in namespace:
        return []
    value = namespace[name]
    if type(value) is dict:
        return [value, *value.keys(), *value.values()]
    if type(value) is list:
        return [value, *value]
    return [value, getattr(value, "_version", None)]


def _same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    plain = (int, float, str)  # those that are equal are no other ones
    return len(before) == len(now) and all(
        x is y or (type(x) is type(y) and type(x) in plain and x == y)
        for x, y in zip(before, now, strict=True)
    )


def _is_of_kind(new: Any, old: Any) -> bool:
    return any(kind(new) and kind(old) for kind in (is_model, is_optimizer, is_scheduler))


def _take_weights(
    folder: RunFolder,
    names: Collection[str],
    stamps: Mapping[str, str],
    objects: Mapping[str, Any],
    lost: Mapping[str, Finding],
    launch: _Launch,
) -> tuple[dict[str, Finding], list[str]]:
    """Load weights in place; return the reasons why some could not be, by name.

    And the names of those in which no value changed.

    Every file is checked before any is loaded. What shares tensors with a model that cannot be
    loaded, or was `lost` in the rank, is not loaded either: else a part of that one would be
    changed.
    """
    ready, troubles, same = {}, dict(lost), list[str]()
    with contextlib.ExitStack() as files:
        opened = functools.partial(_opened, folder, stamps, files)
        for name in names:
            try:
                ready[name] = _loading(opened, name, objects.get(name), launch)
            except NbtrainError as error:
                troubles[name] = Finding("", str(error))
        _add_what_shares_tensors(ready, objects, troubles)
        for name in [each for each in objects if each in ready.keys() - troubles.keys()]:
            try:
                if held := _held_back(objects[name], objects, troubles):
                    raise NbtrainError(f"it belongs to `{held}`, which was not updated")
                with _as_nbtrain_error():
                    if not ready[name]():
                        same.append(name)
            except NbtrainError as error:
                code = ev.IN_PART if isinstance(error, weights.PartlyLoaded) else ""
                troubles[name] = Finding(code, str(error))
    return troubles, same


def _add_what_shares_tensors(
    ready: Collection[str], objects: Mapping[str, Any], troubles: dict[str, Finding]
) -> None:
    """Add to the troubles what is ready and shares tensors with one of them, or with such."""
    tensors = {name: _ids(value) for name, value in objects.items()}
    out = [name for name in troubles if name in tensors]
    while out:
        first = out.pop()
        for name in set(ready) - troubles.keys():
            if tensors[name] & tensors[first]:
                text = f"it shares tensors with `{first}`, which cannot be loaded"
                troubles[name] = Finding("", text)
                out.append(name)


def _held_back(value: Any, objects: Mapping[str, Any], troubles: Mapping[str, Finding]) -> str:
    """Return what an optimizer or a scheduler belongs to and that is not loaded; "" for none."""
    if is_model(value):
        return ""
    optimizer = getattr(value, "optimizer", None) if is_scheduler(value) else value
    groups = getattr(optimizer, "param_groups", ())
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    late = {n: objects[n] for n in troubles if n in objects}
    return next((n for n, v in late.items() if v is optimizer or _ids(v) & trained), "")


def _ids(value: Any) -> set[int]:
    return set(map(id, weights.named_tensors(value).values())) if is_model(value) else set()


def _opened(
    folder: RunFolder, stamps: Mapping[str, str], files: contextlib.ExitStack, name: str
) -> WeightReader:
    """Open a file of weights, which `files` closes."""
    return files.enter_context(WeightReader(folder.weights_of(name), stamps.get(name, "")))


def _loading(
    opened: Callable[[str], WeightReader], name: str, target: Any, launch: _Launch | None = None
) -> Callable[[], bool]:
    """Return what loads weights in place; at the end of a run, as they were at its `launch`.

    Raises `NbtrainError` if they cannot be loaded.
    """
    if target is None:
        raise NbtrainError(
            "the notebook's object no longer exists. "
            f"run.load(model, {name!r}) loads the weights into another model or optimizer"
        )
    with _as_nbtrain_error():
        file = opened(name)
        ready = weights.prepared_load(file, target, is_handed_over=launch is not None)
        if launch is not None:
            launch.check(name, target, file)
        return ready


@contextlib.contextmanager
def _as_nbtrain_error(prefix: str = "") -> Iterator[None]:
    try:
        yield
    except NbtrainError as error:
        if not prefix:
            raise
        raise type(error)(f"{prefix}{error}") from error
    except Exception as error:  # a file that is gone or damaged, a target of an unknown kind
        raise NbtrainError(f"{prefix}{type(error).__name__}: {error}") from error


def values(folder: RunFolder, home: ResultReceiver | None) -> dict[str, Any]:
    """Return the returned variables by name; warn of those that cannot be unpickled.

    Raises what unpickling raised if there is no other.
    """
    variables, lost = _unpickled(folder, home)
    if lost and not variables:
        raise next(iter(lost.values()))
    for name, error in lost.items():
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"{name} could not be loaded: {reason}", stacklevel=3)
    return variables


def _unpickled(
    folder: RunFolder, home: ResultReceiver | None
) -> tuple[dict[str, Any], dict[str, Exception]]:
    """Return the returned variables by name, and why others could not be unpickled.

    What refers to a model of the notebook does so again, and else is an `NbtrainError`.
    """
    objects = home.objects() if home is not None else {}

    find = partial(parts.find, values=objects)
    ranks = range(folder.read_manifest()["num_processes"])
    paths = [folder.out(rank) for rank in ranks]
    sent = [pickle.loads(read_regular(path)) if path.exists() else {} for path in paths]
    variables, lost = dict[str, Any](), dict[str, Exception]()
    for asked in dict.fromkeys(name for by_name in sent for name in by_name):
        each = (s.get(asked) for s in (sent if asked.endswith(OF_ALL) else sent[:1]))
        name = asked.removesuffix(OF_ALL)
        try:
            every = [None if data is None else result_pickler.loads(data, find) for data in each]
        except Exception as error:  # whatever a value raises: the others are none the worse
            lost[name] = error
        else:
            variables[name] = every if asked.endswith(OF_ALL) else every[0]
    return variables, lost


def load(
    folder: RunFolder, state: RunState, home: ResultReceiver | None, target: Any, name: str | None
) -> None:
    """Load weights that a run saved into `target`, or with None into the notebook's own objects.

    Raises `NbtrainError`, and nothing is changed then.
    """
    folder.check_exists()
    saved = folder.list_weights()
    known = home.objects() if home is not None else {}
    targets = {n: value for n, value in known.items() if value is target or target is None}
    wanted = [n for n in saved if n in targets]
    if name is not None:
        wanted = [name]
    elif target is not None and not targets:
        wanted = [each for each in saved if _kind(folder, each) in (weights.kind_of(target), "")]
        if len(wanted) > 1:
            every = _listed(wanted)
            raise NbtrainError(f"this run saved {every}. Choose one: run.load(model, NAME)")
    is_unsaved = name not in saved if name is not None else target is not None and not wanted
    if not saved or is_unsaved:
        missing = name or next(iter(targets), None)
        what = f"no weights of `{missing}`" if missing else "no weights"
        rest = f"; it saved {_listed(saved)}" if saved else ""
        raise NbtrainError(
            f"this run saved {what}{rest}. A run saves the models that its function or cell "
            "refers to and that changed, unless it has sync=False (--no-sync). Return the "
            "state_dict() of a model that the function itself makes. After an interrupt or a "
            f"failure, a model is saved only if it is smaller than {QUICK >> 20} MiB, and none is "
            "saved if rank 0 was stopped because another rank failed"
        )
    if target is None and not any(n in known for n in wanted):
        raise NbtrainError(
            "the notebook's own objects are not in this kernel: pass one, run.load(model)"
        )
    ready = {}
    stamps = {sent.name: sent.stamp for rank in state.ranks for sent in rank.saved}
    with contextlib.ExitStack() as files:
        opened = functools.partial(_opened, folder, stamps, files)
        for each in wanted:  # all of them are checked before any is loaded
            aim = known[each] if target is None else target
            try:
                ready[each] = _loading(opened, each, aim)
            except NbtrainError as error:
                reason = f"`{each}` was not loaded, and nothing changed: {error}"
                raise NbtrainError(reason) from error
        for each, step in ready.items():
            with _as_nbtrain_error(f"`{each}`: "):
                step()


def _kind(folder: RunFolder, name: str) -> str:
    """Return what a file holds; "" for one that cannot be read."""
    with contextlib.suppress(NbtrainError, OSError), WeightReader(folder.weights_of(name)) as file:
        return str(file.about["kind"])
    return ""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
