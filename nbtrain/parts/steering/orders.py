"""The orders of the launcher to the ranks: the present request, and the decided ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

AFTER = ("step", "epoch")
"""What a training may finish after."""

REQUESTS = "requests"
"""The folder of requests, within that of the run on the launcher's host."""

SAVED = "saved.json"
"""The last file of a folder in `RunFolder.peeks`: why models are missing there, by name, and which
models are in memory that the ranks share with the notebook."""

STILL_TRAINS = "finish-still-trains"
"""The code of the finding that nothing ended the training."""

Setting = float | str | tuple[float, float] | None
"""A new value of a setting: a number, two for betas, or a factor such as ``*0.5`` or ``/3``. None
gives the setting back to the training code."""


OWN = ("finish", "turn", "peek", "keep")
"""The requests of this part."""


@dataclass(frozen=True)
class Action:
    """What all ranks do at the agreed step. Its values fit into JSON."""

    name: str
    """One of `OWN`, or of `RankContext.step_actions`."""
    after: str = "step"
    """To finish: one of `AFTER`."""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """To turn: the new values, by name."""
    optimizer: int | str | None = None
    """The number of an optimizer, or the name of its class; without one, all optimizers."""
    group: int | None = None
    """The number of a parameter group; without one, all groups."""
    title: str = ""
    """To keep a checkpoint: what the user calls it. Of another part: what is done, for people."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What another part needs to know."""

    @property
    def label(self) -> str:
        """What is changed, in a few words: ``finish``, ``lr 0.0003``; "" for nothing."""
        if self.name == "finish":
            return "finish" if self.after == "step" else f"finish after this {self.after}"
        if self.name == "peek":
            return ""
        if self.name == "keep":
            return f'checkpoint "{self.title}"' if self.title else "checkpoint"
        if self.name != "turn":
            return self.title
        return ", ".join(map(_describe_setting, self.settings.items()))

    @property
    def setting_texts(self) -> dict[str, float | str]:
        """The new values as a user types them: a number, ``/3``, ``0.9,0.95`` or ``back``."""
        return {name: _type(value) for name, value in self.settings.items()}

    @classmethod
    def decode(cls, record: Mapping[str, Any]) -> Action:
        """Return the action of a decoded record. Raises `ValueError` or `TypeError`."""
        settings = {str(name): _decode(value) for name, value in record["settings"].items()}
        action = cls(**{**record, "settings": settings})
        if not isinstance(action.name, str) or action.after not in AFTER:
            raise ValueError(f"{action} is unknown to this version of nbtrain")
        return action


def _decode(value: Any) -> Setting:
    """Return a setting. Raises `ValueError` or `TypeError` for anything else."""
    if isinstance(value, list):
        first, second = value
        return float(first), float(second)
    return value if value is None or isinstance(value, (str, int)) else float(value)


def _type(value: Setting) -> float | str:
    if isinstance(value, tuple):
        return f"{value[0]!r},{value[1]!r}"
    return "back" if value is None else value


def _describe_setting(item: tuple[str, Setting]) -> str:
    """Return a setting with its new value: ``lr 0.0003``, ``betas 0.9 0.95``, ``lr back``."""
    name, value = item
    if value is None:
        return f"{name} back"
    numbers = value if isinstance(value, tuple) else (value,)
    return " ".join([name, *(v if isinstance(v, str) else f"{v:g}" for v in numbers)])


@dataclass(frozen=True)
class Asked:
    """The present request: ranks wait for each other."""

    request: int
    target: int
    """As `Agreement.target`."""
    action: Action


@dataclass(frozen=True)
class Decided:
    """A request that was carried out, or called off."""

    request: int
    action: Action
    token: str = ""
    """As in `requests.Request`."""
    is_applied: bool = False
    ends_bars: bool = False
    """Whether bars that the training iterates over end: all ranks have the same number of them."""
    step: int = 0
    """The number of the agreed step, in all attempts."""


@dataclass(frozen=True)
class Orders:
    """The orders to the ranks of an attempt."""

    asked: Asked | None = None
    decided: tuple[Decided, ...] = ()

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Orders:
        """Return the orders of `encode`. Raises `ValueError`, `KeyError` or `TypeError`."""
        record = json.loads(data or b"{}")
        asked = record.get("asked")
        decided = record.get("decided", ())
        return cls(
            None if asked is None else Asked(**_with_action(asked)),
            tuple(Decided(**_with_action(each)) for each in decided),
        )


def _with_action(record: Mapping[str, Any]) -> dict[str, Any]:
    return {**record, "action": Action.decode(record["action"])}
