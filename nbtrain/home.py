"""Taking home what the ranks of a run left (`nbtrain.homecoming`): in the notebook's process."""

from __future__ import annotations

import contextlib
import pickle
import time
import warnings
import weakref
from collections.abc import Sequence
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
                warnings.warn_explicit(words, UserWarning, "nbtrain", 1)
        return fold(state, told)

    def _taken(self, folder: RunFolder, saved: Sequence[ev.Saved]) -> list[ev.Loaded]:
        troubles: dict[str, str] = {}
        for sent in saved:
            troubles[sent.name] = troubles.get(sent.name) or sent.trouble
        objects = self.objects()
        for sent in saved:
            if sent.what != "value" and not troubles[sent.name]:
                troubles[sent.name] = _load(folder, sent.name, objects.get(sent.name))
        try:
            found = values(folder, self)
        except Exception as error:  # whatever a value raises while it is unpickled
            for sent in saved:
                if sent.what == "value" and not troubles[sent.name]:
                    troubles[sent.name] = f"{type(error).__name__}: {error}"
        else:
            self._namespace.update({n: v for n, v in found.items() if not troubles.get(n)})
        now = time.time()
        return [ev.Loaded(now, -1, name, trouble) for name, trouble in troubles.items()]


def not_home(name: str, trouble: str) -> str:
    """Say what did not come home, and why."""
    return f"{name}: not updated, as it was before the run: {trouble}"


def _load(folder: RunFolder, name: str, target: Any) -> str:
    """Load weights in place; return what was in the way."""
    if target is None:
        return f"what was handed over is gone; run.load(model, {name!r}) loads it into another"
    try:
        weights.load(folder.weights_of(name), target)
    except NbtrainError as error:
        return str(error)
    except Exception as error:  # a file that is gone or damaged, a target of an unknown kind
        return f"{type(error).__name__}: {error}"
    return ""


def values(folder: RunFolder, home: Home | None) -> dict[str, Any]:
    """Return the variables that came back, by name. Raises what unpickling them does.

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
    found: dict[str, Any] = {}
    for asked in dict.fromkeys(name for by_name in sent for name in by_name):
        each = (s.get(asked) for s in (sent if asked.endswith(OF_ALL) else sent[:1]))
        every = [None if data is None else serialize.loads(data, find) for data in each]
        found[asked.removesuffix(OF_ALL)] = every if asked.endswith(OF_ALL) else every[0]
    return found


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
            f"this run saved {what}{rest}. A model comes home that was handed to the function by "
            f"name and was changed; after an interrupt or a failure, if it takes < {QUICK >> 20} MB"
        )
    if target is None and not any(n in known for n in wanted):
        raise NbtrainError("what was handed over is not in this kernel: run.load(model)")
    for found in wanted:
        trouble = _load(folder, found, target if target is not None else known[found])
        if trouble:
            raise NbtrainError(f"`{found}` was not loaded, and nothing changed: {trouble}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
