"""Taking home what the ranks of a run left (`nbtrain.homecoming`): in the notebook's process."""

from __future__ import annotations

import contextlib
import pickle
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from . import events as ev
from . import serialize, weights
from .errors import NbtrainError
from .folder import RunFolder
from .homecoming import QUICK, handed_over, namespace_of
from .plan import OF_ALL, Plan
from .state import RunState, fold
from .writer import EventWriter


class Home:
    """Where what comes home goes: the notebook's own objects, as long as they live, and variables.

    Made before the run starts.
    """

    def __init__(self, plan: Plan) -> None:
        self._objects = {name: weakref.ref(value) for name, value in handed_over(plan).items()}
        self._namespace = namespace_of(plan.task)
        self._has_taken = False

    def objects(self) -> dict[str, Any]:
        """Return the models and optimizers that were handed over and are there still."""
        return {name: value for name, ref in self._objects.items() if (value := ref()) is not None}

    def take(self, folder: RunFolder, state: RunState) -> RunState:
        """Take what the ranks saved, weights in place and variables by assignment.

        Once: whoever waits again finds the notebook as it is by then. Returns the picture after
        it, which is kept with the run. Raises nothing: what cannot be taken is told, there and by
        a warning.
        """
        if self._has_taken:
            return state
        self._has_taken = True
        told = self._taken(folder, [saved for rank in state.ranks for saved in rank.saved])
        if not told:
            return state
        with contextlib.suppress(OSError):  # no descriptor left here: the picture at hand has it
            writer = EventWriter(folder.launcher_events)
            for event in told:
                writer.write(event)
            writer.close()
        for event in told:
            if event.trouble:  # on the board too, where there is one
                words = not_home(event.name, event.trouble)
                with contextlib.suppress(Warning):  # where warnings are errors
                    warnings.warn_explicit(words, UserWarning, "nbtrain", 1)
        return fold(state, told)

    def _taken(self, folder: RunFolder, saved: Sequence[ev.Saved]) -> list[ev.Loaded]:
        troubles: dict[str, str] = {}
        for sent in saved:
            troubles[sent.name] = troubles.get(sent.name) or sent.trouble
        names = [sent.name for sent in saved if sent.what != "value" and not troubles[sent.name]]
        troubles.update(_take_weights(folder, names, self.objects(), troubles))
        try:
            found, lost = _unpickled(folder, self)
        except Exception as error:  # a file that is gone or damaged
            found, lost = {}, {sent.name: error for sent in saved if sent.what == "value"}
        for name, why in lost.items():
            troubles[name] = troubles.get(name) or f"{type(why).__name__}: {why}"
        self._namespace.update({n: v for n, v in found.items() if not troubles.get(n)})
        now = time.time()
        return [ev.Loaded(now, -1, name, trouble) for name, trouble in troubles.items()]


def not_home(name: str, trouble: str) -> str:
    """Say what did not come home, and why."""
    return f"{name}: not updated, as it was before the run: {trouble}"


def _take_weights(
    folder: RunFolder, names: Collection[str], objects: Mapping[str, Any], lost: Mapping[str, str]
) -> dict[str, str]:
    """Load weights in place; return what was in the way, by name.

    What shares tensors with a model that cannot be loaded, or was `lost` in the rank, is not
    loaded either: else a part of that one would be changed.
    """
    ready, troubles = {}, {name: why for name, why in lost.items() if why}
    for name in names:
        try:
            ready[name] = _loading(folder, name, objects.get(name), is_handed_over=True)
        except NbtrainError as error:
            troubles[name] = str(error)
    tensors = {name: _ids(value) for name, value in objects.items()}
    out = [name for name in troubles if name in tensors]
    while out:
        first = out.pop()
        for name in ready.keys() - troubles.keys():
            if tensors[name] & tensors[first]:
                troubles[name] = f"it shares tensors with `{first}`, which cannot be loaded"
                out.append(name)
    for name in ready.keys() - troubles.keys():
        try:
            with _as_ours():
                ready[name]()
        except NbtrainError as error:
            troubles[name] = str(error)
    return troubles


def _ids(value: Any) -> set[int]:
    is_model = hasattr(value, "named_parameters")
    return set(map(id, weights.named_tensors(value).values())) if is_model else set()


def _loading(
    folder: RunFolder, name: str, target: Any, *, is_handed_over: bool = False
) -> Callable[[], None]:
    """Return what loads weights in place. Raises `NbtrainError` for whatever is in the way."""
    if target is None:
        raise NbtrainError(
            f"what was handed over is gone; run.load(model, {name!r}) loads it into another"
        )
    with _as_ours():
        return weights.loading(folder.weights_of(name), target, is_handed_over=is_handed_over)


@contextlib.contextmanager
def _as_ours() -> Iterator[None]:
    try:
        yield
    except NbtrainError:
        raise
    except Exception as error:  # a file that is gone or damaged, a target of an unknown kind
        raise NbtrainError(f"{type(error).__name__}: {error}") from error


def values(folder: RunFolder, home: Home | None) -> dict[str, Any]:
    """Return the variables that came back, by name; those that cannot be unpickled by a warning.

    Raises what unpickling raised if there is no other.
    """
    found, lost = _unpickled(folder, home)
    if lost and not found:
        raise next(iter(lost.values()))
    for name, why in lost.items():
        warnings.warn(f"{name} is not among them: {type(why).__name__}: {why}", stacklevel=3)
    return found


def _unpickled(folder: RunFolder, home: Home | None) -> tuple[dict[str, Any], dict[str, Exception]]:
    """Return the variables that came back, by name, and why others did not.

    What refers to a model of the notebook does so again, and else is an `NbtrainError`.
    """
    objects = home.objects() if home is not None else {}

    def find(where: tuple[str, str]) -> Any:
        name, of_tensor = where
        if name not in objects:
            raise NbtrainError(f"it refers to `{name}`, which is not in this kernel any more")
        return weights.named_tensors(objects[name])[of_tensor] if of_tensor else objects[name]

    ranks = range(folder.read_manifest()["num_processes"])
    paths = [folder.out(rank) for rank in ranks]
    sent = [pickle.loads(path.read_bytes()) if path.exists() else {} for path in paths]
    found, lost = dict[str, Any](), dict[str, Exception]()
    for asked in dict.fromkeys(name for by_name in sent for name in by_name):
        each = (s.get(asked) for s in (sent if asked.endswith(OF_ALL) else sent[:1]))
        name = asked.removesuffix(OF_ALL)
        try:
            every = [None if data is None else serialize.loads(data, find) for data in each]
        except Exception as error:  # whatever a value raises: the others are none the worse
            lost[name] = error
        else:
            found[name] = every if asked.endswith(OF_ALL) else every[0]
    return found, lost


def load(folder: RunFolder, home: Home | None, target: Any, name: str | None) -> None:
    """Load weights that a run saved into `target`, or with None into what was handed over.

    Raises `NbtrainError`, and nothing is changed then.
    """
    folder.check_it_is_there()
    there = sorted(path.stem for path in folder.weights.glob("*.safetensors"))
    known = home.objects() if home is not None else {}
    mine = {n: value for n, value in known.items() if value is target or target is None}
    if name is None and len(there) > 1 and target is not None and not mine:
        raise NbtrainError(f"this run saved {_listed(there)}: say which, run.load(model, NAME)")
    wanted = [name] if name is not None else [n for n in there if n in mine or target is not None]
    if name is None and mine:
        wanted = [n for n in there if n in mine]
    if not there or (name is not None and name not in there):
        what = f"no weights of `{name}`" if name else "no weights"
        rest = f"; there are {_listed(there)}" if there else ""
        raise NbtrainError(
            f"this run saved {what}{rest}. A model comes home that the function was given, or "
            "the cell mentions, and that changed; after an interrupt or a failure, if it takes "
            f"< {QUICK >> 20} MB and rank 0 was not ended because another one had failed"
        )
    if target is None and not any(n in known for n in wanted):
        raise NbtrainError("what was handed over is not in this kernel: run.load(model)")
    ready = []
    for found in wanted:  # all of them are checked before any is loaded
        try:
            ready.append(_loading(folder, found, known[found] if target is None else target))
        except NbtrainError as error:
            raise NbtrainError(f"`{found}` was not loaded, and nothing changed: {error}") from error
    for step in ready:
        with _as_ours():
            step()


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
