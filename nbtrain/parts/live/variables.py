"""Sends variables between the notebook and the live ranks."""

from __future__ import annotations

import functools
import pickle
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ...part_api import NbtrainError, PlanError, payload, result_pickler, task_values
from ...transport.weights.models import Part, find_parts, get_part
from .engine import Message
from .model_state import classes, dump_state, layout, load_state, select_stateful, shapes

_PLAIN = (int, float, complex, str, bytes, bool, type(None))


def notebook() -> dict[str, Any]:
    """Return the notebook's variables."""
    return vars(sys.modules["__main__"])


class Snapshot:
    """What the ranks got of the notebook, without keeping it alive.

    Plain values are remembered by value, others by identity.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._marks = {name: _mark(value) for name, value in list(namespace.items())}

    def take(self, names: Iterable[str], namespace: Mapping[str, Any]) -> None:
        """Take a new snapshot of the variables."""
        self._marks.update({name: _mark(namespace[name]) for name in names if name in namespace})

    def is_same(self, name: str, value: Any) -> bool:
        """Whether the ranks got this very object under this name."""
        kind, mark = self._marks.get(name, ("unknown", None))
        return mark() is value if kind == "weak" else kind == "id" and mark == id(value)

    def differs(self, name: str, value: Any) -> bool:
        """Whether a variable is another value than the ranks got; False if they never got one."""
        kind, mark = self._marks.get(name, ("unknown", None))
        if kind == "plain":
            is_nan = value != value and mark != mark  # which differs from itself
            return type(value) is not type(mark) or bool(value != mark and not is_nan)
        if kind == "weak":
            return mark() is not value
        return kind == "id" and mark != id(value)


def _mark(value: Any) -> tuple[str, Any]:
    """Return what a value is recognised by: the value, a weak reference, or its id."""
    if type(value) in _PLAIN:
        return "plain", value
    try:
        return "weak", weakref.ref(value)
    except TypeError:
        return "id", id(value)


class Variables:
    """What each rank has, by name, and what of the notebook's it was when the ranks got it."""

    def __init__(
        self, ask: Callable[..., dict[int, Message]], names: dict[int, set[str]], snapshot: Snapshot
    ) -> None:
        """Begin with the `names` that each rank has.

        `ask` sends a message to ranks and returns their answers: `LiveRanks._ask`.
        """
        self._ask = ask
        self.names, self.snapshot = names, snapshot

    def find_changes(self, values: Mapping[str, Any], has: Collection[str]) -> list[str]:
        """Return which of the notebook's variables the ranks have as something else."""
        names = [name for name in values if name in has]
        return [name for name in names if self.snapshot.differs(name, values[name])]

    def fetch(
        self,
        names: Sequence[str],
        limit: int | None,
        ranks: Iterable[int],
        pulled: Sequence[str] = (),
        own: Mapping[str, Any] | None = None,
    ) -> dict[int, dict[str, Any]]:
        """Return variables of ranks, by rank and name; `Unsent` for one that cannot be sent.

        Where a value refers to models and optimizers in `pulled`, it gets those of `own`. A value
        of more than `limit` bytes is not sent. Waits for the ranks. Raises `NbtrainError` for a
        name that is no variable of a rank.
        """
        has = {name: shapes(value) for name, value in select_stateful(own or {}).items()}
        message = {"do": "get", "names": names, "limit": limit, "has": has, "pulled": pulled}
        answers = self._ask(ranks, message)
        fetched = {}
        for rank, answer in sorted(answers.items()):
            with open(answer.pop("data"), "rb") as file:
                file.seek(0)
                packed = pickle.load(file)
            known = dict(own or {})
            for name, (data, reason) in packed.items():
                known[name] = _value(data, reason, functools.partial(get_part, values=known))
            fetched[rank] = {name: known[name] for name in names}
        return fetched

    def push(self, names: Sequence[str], values: Mapping[str, Any], ranks: Iterable[int]) -> None:
        """Send variables of the notebook, and other values by name, to all ranks.

        Models and optimizers with the same layout are loaded in place. Prints which variables of
        the ranks still refer to what was replaced. Raises `PlanError` for a name that is no
        variable of the notebook, and for an optimizer without its model.
        """
        own = notebook()
        missing = [name for name in names if name not in own]
        if missing:
            raise PlanError(f"the notebook has no variable `{missing[0]}`")
        sent = {**{name: own[name] for name in names}, **values}
        alike = self._alike(sent, ranks)
        new = {name: value for name, value in sent.items() if name not in alike}
        states = {name: dump_state(value) for name, value in alike.items()}
        there = self.find_known_parts(new, list(self.names), alike)
        packed = payload.pack_values(new, states, there)
        try:
            message = {"do": "put", "sent": list(new)}
            answers = self._ask(ranks, message, packed.descriptors[0])
        finally:
            packed.close()
        self.snapshot.take(sent, sent)
        stale = dict.fromkeys(n for a in answers.values() for n in a["stale"])
        if stale:
            left, them = ", ".join(f"`{n}`" for n in stale), ", ".join([*new, *stale])
            print(
                f"nbtrain: in the ranks, {left} still refers to what was replaced. "
                f"%nbtrain push {them} replaces all of them."
            )

    def _alike(self, values: Mapping[str, Any], ranks: Iterable[int]) -> dict[str, Any]:
        """Return those of the notebook's models and optimizers that all ranks can load in place."""
        known = {
            name: value
            for name, value in select_stateful(values).items()
            if self._have(name, self.names) and all(map(self._know_class, classes(value)))
        }
        if not known:
            return {}
        answers = self._ask(ranks, {"do": "layouts", "names": list(known)}).values()
        models = {n: v for n, v in {**notebook(), **values}.items() if task_values.is_model(v)}
        return {
            name: value
            for name, value in known.items()
            if (own := layout(value, models)) and all(a["layouts"][name] == own for a in answers)
        }

    def _know_class(self, cls: type) -> bool:
        """Whether the ranks have this class, and not one that a cell defined before."""
        return cls.__module__ != "__main__" or self.snapshot.is_same(cls.__qualname__, cls)

    def _have(self, name: str, ranks: Iterable[int]) -> bool:
        return all(name in self.names[rank] for rank in ranks)

    def find_known_parts(
        self, sent: Mapping[str, Any], ranks: Sequence[int], alike: Mapping[str, Any] | None = None
    ) -> dict[int, Part]:
        """Return the parts of models that `ranks` have as the notebook has them.

        Those of `alike` become the same. Raises `PlanError` if an optimizer in `sent` belongs to a
        model whose version in the ranks is another one.
        """
        known = {n: v for n, v in select_stateful(notebook()).items() if n not in sent}
        has = {n: v for n, v in known.items() if self._have(n, ranks)}
        same = {n: v for n, v in has.items() if n in (alike or ()) or self.snapshot.is_same(n, v)}
        there = find_parts({**same, **(alike or {})})
        others = find_parts({name: value for name, value in has.items() if name not in same})
        for name, value in sent.items():
            for part in find_parts({name: value} if not task_values.is_model(value) else {}):
                if part in others and part not in there:
                    model = others[part][0]
                    raise PlanError(
                        f"`{name}` belongs to the notebook's `{model}`, and the ranks have another "
                        f"`{model}`. `%nbtrain push {model}, {name}` sends both"
                    )
        return there

    def pull(
        self,
        names: Sequence[str],
        rank: int,
        in_place: Callable[[Sequence[str], dict[str, Any]], None] | None,
    ) -> None:
        """Bring variables of a rank into the notebook.

        `in_place` brings models, optimizers and schedulers by a task of all ranks, as sharded ones
        need it. None: a copy of the rank's is loaded into the notebook's.
        """
        own = notebook()
        known = select_stateful({name: own.get(name) for name in names})
        if known and in_place is not None:
            in_place(list(known), own)
        elif known:
            self._load_copies(known, rank)
        self.snapshot.take(known, own)
        rest = [name for name in names if name not in known]
        if rest:
            fetched = self._fetch_from(rest, rank, list(known), own)
            own.update(fetched)
            self.snapshot.take(fetched, fetched)

    def _load_copies(self, known: Mapping[str, Any], rank: int) -> None:
        """Load models of a rank into the notebook's. Raises `NbtrainError` if they differ."""
        fetched = self._fetch_from(known, rank)
        for name, value in fetched.items():  # all, before any of the notebook's is changed
            own_layout = layout(known[name], known)
            if own_layout is None or layout(value, fetched) != own_layout:
                raise NbtrainError(
                    f"`{name}` of rank {rank} and the notebook's `{name}` differ in more than "
                    "their values, so one cannot be loaded into the other. "
                    f"ranks[{name!r}][{rank}] returns a copy, if it is small"
                )
        for name, value in fetched.items():
            load_state(known[name], dump_state(value))

    def _fetch_from(
        self,
        names: Iterable[str],
        rank: int,
        pulled: Sequence[str] = (),
        own: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return variables of a rank. Raises `NbtrainError` for one that cannot be sent."""
        fetched = self.fetch(list(names), None, [rank], pulled, own)[rank]
        for name, value in fetched.items():
            if isinstance(value, Unsent):
                raise NbtrainError(f"`{name}` of rank {rank} cannot be sent: {value.reason}")
        return fetched


def _value(data: bytes | None, reason: str, find: Callable[[Part], Any]) -> Any:
    """Return the value that a rank sent, or `Unsent` with the reason without one.

    The reason may also be that the value cannot be unpickled here.
    """
    if data is None:
        return Unsent(reason)
    try:
        return result_pickler.loads(data, find)
    except Exception as error:  # a class that only the ranks have
        return Unsent(f"it cannot be read here: {type(error).__name__}: {error}")


class Unsent:
    """Represents a value that was not sent, with the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"<not sent: {self.reason}>"
