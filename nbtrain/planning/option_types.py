"""Declares an option of a launch in one place: its flags, default, values and help.

The fields of `Plan` are the options (`option` declares each). The parser of ``%%distributed``, its
help, and the checks of values are made from these declarations. `nbtrain.launch` repeats them as
keywords, because editors read those; a test compares the two. Ranks import this module, so it loads
no parser.
"""

from __future__ import annotations

import dataclasses
import keyword
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .. import part
from ..errors import PlanError
from ..part import require
from ..system.text import did_you_mean

ENGINES = ("auto", "fork", "spawn", "tpu", "xla", "torch_tpu", "ray", "slurm", "inline")
View = Literal["auto", "widget", "html", "text", "none"]
OnHang = Literal["deadlock", "stop", "report"]
Source = Literal["bars", "steps", "loss", "data", "phases", "trainer", "tracker"]
PRECISIONS = ("no", "fp16", "bf16", "fp8")
VIEWS: tuple[View, ...] = get_args(View)
SOURCES: tuple[Source, ...] = get_args(Source)
"""The sources of a rank's telemetry: tqdm bars; optimizer steps and learning rate; the loss of
`backward`; batches and the time spent waiting for them; joining the other ranks, saving and
compiling; the logs of transformers' Trainer; Accelerate's tracker."""

TRACKERS = (
    "tensorboard",
    "mlflow",
    "wandb",
    "trackio",
    "comet_ml",
    "aim",
    "clearml",
    "dvclive",
    "swanlab",
)
"""The trackers of experiments that Accelerate has a class for."""

OF_ALL = "@all"
"""The end of a name in `Plan.out` that asks for the variable's values in all ranks, as a list."""


def engine_plugins() -> dict[str, str]:
    """Return the engines that other packages add, as name and ``module:Class``.

    A package adds them by entry points of the group ``nbtrain.engines``, or with a part.
    """
    # Imported here: it loads email and zipfile, which ranks do not need.
    from importlib.metadata import entry_points

    points = entry_points(group="nbtrain.engines")
    return {**part.engines_of_packages(), **{point.name: point.value for point in points}}


DISABLED = "NBTRAIN_DISABLE"
"""The environment variable that switches options, engines or ``live`` off on this host."""


def read_disabled(env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names in the variable `DISABLED`, ``max_restarts`` for ``--max-restarts``.

    Names are not checked. Empty if it is not set.
    """
    words = re.split(r"[\s,]+", env.get(DISABLED, ""))
    return [word.lstrip("-").replace("-", "_") for word in words if word]


def check_allowed(name: str, label: str) -> None:
    """Raise `PlanError` if `name` is switched off on this host; `label` names it in the error."""
    if name in read_disabled():
        raise PlanError(f"{label} is switched off on this host, by the variable {DISABLED}")


@dataclass(frozen=True)
class Option:
    """An option of ``%%distributed``, of `nbtrain.launch`, or of both."""

    flags: str
    """The flags, separated by spaces, the long one last."""

    help: str
    default: Any = None
    field: str = ""
    """The field of `Plan`, or the attribute of the parsed options."""

    keyword: str = ""
    """The argument of `nbtrain.launch`, if its name is not the field's."""

    metavar: str | None = None
    read: Callable[[str], Any] = str
    """Converts the text behind the flag to a value. Raises `ValueError`."""

    convert: Callable[[Any], Any] = lambda value: value
    """Converts the value of `read`, or of Python, to the field's. Keeps a converted value."""

    must_be: tuple[str, Callable[[Any], bool]] = ("", lambda value: True)
    """The accepted values, for a message after "must be", and the test of a value. Each item of a
    mapping is tested, and each value of an option that takes several."""

    types: tuple[type, ...] = ()
    """The types of the argument. A value of another type was meant for the user's function."""

    none: str = ""
    """The text for None."""

    nargs: str | None = None

    bare: Any = None
    """The value of the flag alone, where it may be alone."""

    part: str = ""
    """The part that an option of `Plan` needs, or ""."""

    has_flags: bool = False
    """Whether its value is a text of flags, and so may begin with a dash."""

    @property
    def argument(self) -> str:
        return self.keyword or self.field

    @property
    def names(self) -> set[str]:
        """The keyword and the long flag, spelled as in `read_disabled`."""
        return {self.argument, self.flags.split()[-1].lstrip("-").replace("-", "_")}

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)

    @property
    def repeats(self) -> bool:
        """Whether the flag may be given several times, each adding to the value."""
        return self.nargs is not None or self.field == "env"

    def check(self, value: Any, label: str) -> None:
        """Raise `PlanError` for a field's value that is out of range or switched off on this host.

        Also if the option's part is not installed. `label` names the option in the error. A default
        is not checked.
        """
        if value is self.default:  # most are, and each cell makes a few plans
            return
        if value != self.default:
            if self.part:
                require(self.part, label)
            for name in self.names:
                check_allowed(name, label)
            if self.field == "engine":
                check_allowed(str(value).replace("-", "_"), f"{label} {value}")
        items = value.items() if isinstance(value, Mapping) else value if self.nargs else (value,)
        for item in items:
            if not (self.must_be[1](item) or (item is None and self.may_be_none)):
                none = self.none if label.startswith("-") else "None"
                raise PlanError(f"{label} {self.describe_problem(item, none)}")

    def describe_problem(self, value: Any, none: str) -> str:
        """Describe what is wrong with a value that does not fit; does not check that.

        `none` is the user's spelling of None ("" leaves it out). The text continues a sentence that
        begins with the option: "must be one of a, b or off, not 'c'".
        """
        choice = f" or {none}" if none and self.may_be_none else ""
        known = (self.metavar or "").split("|") if self.must_be[0].startswith("one of") else ()
        guess = did_you_mean(value, known) if isinstance(value, str) else ""
        return f"must be {self.must_be[0]}{choice}, not {value!r}{guess}"

    @property
    def may_be_none(self) -> bool:
        return bool(self.none) or self.default is None


def option(flags: str, help: str, default: Any = None, **traits: Any) -> Any:
    """Declare a field of `Plan` as an option."""
    metadata = {"option": Option(flags, help, default, **traits)}
    if default == {}:
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def choice(
    names: Sequence[str], more: Callable[[], Iterable[str]] = tuple[str, ...]
) -> dict[str, Any]:
    """Return the traits of an option that takes one of `names`, or of `more`, which help omits."""
    must_be = (f"one of {', '.join(names)}", lambda name: name in names or name in list(more()))
    return {"metavar": "|".join(names), "must_be": must_be}


def is_seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < 1e9


SECONDS: dict[str, Any] = {
    "read": float,
    "must_be": ("a number of seconds > 0 and < 1e9", is_seconds),
}


def is_resource(item: tuple[str, Any]) -> bool:
    """Return whether a pair is a resource's name and its amount, which is whole for a GPU."""
    name, amount = item
    is_amount = isinstance(amount, (int, float)) and 0 <= amount < 1e15
    return is_amount and (name != "GPU" or amount % 1 == 0)


def is_variable(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def is_output(name: str) -> bool:
    return is_variable(name.removesuffix(OF_ALL))


def is_whole(number: Any, least: int = 1) -> bool:
    return type(number) is int and number >= least


def is_environment(pair: tuple[Any, Any]) -> bool:
    """Return whether a pair of texts is a valid environment variable and its value."""
    key, value = pair
    texts = isinstance(key, str) and isinstance(value, str)
    return texts and key != "" and "=" not in key and "\0" not in key + value


_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def check_environment(env: Mapping[str, str]) -> None:
    """Raise `PlanError` for variables that would keep ranks from joining each other.

    These are ranks and world sizes, and a MASTER_PORT that is no port.
    """
    for name in _RANK_VARIABLES:
        if name in env:
            raise PlanError(
                f"--env {name}={env[name]} would be the same for all ranks. Leave it out: nbtrain "
                f"sets {name} in each rank; -n (num_processes) says how many there are."
            )
    port = env.get("MASTER_PORT", "1")
    if not (port.isdecimal() and 0 < int(port) < 65536):
        raise PlanError(f"--env MASTER_PORT must be a port from 1 to 65535, not {port!r}")


def read_pair(text: str) -> tuple[str, str]:
    """Split ``KEY=VALUE`` at the first equals sign. Raises `ValueError` without one."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError
    return key, value


def read_node_counts(text: str) -> int | tuple[int, ...]:
    counts = tuple(map(int, text.split(":")))
    return counts[0] if len(counts) == 1 else counts


def is_range(pair: Any) -> bool:
    is_pair = isinstance(pair, tuple) and len(pair) == 2 and all(map(is_whole, pair))
    return is_pair and pair[0] <= pair[1]


def split_names(texts: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names in texts, each once, where commas or spaces separate them."""
    texts = [texts] if isinstance(texts, str) else texts
    return tuple(
        dict.fromkeys(name for text in texts for name in re.split(r"[,\s]+", text) if name)
    )


def variable_name(text: str) -> str:
    """Return a name as Python stores it: in NFKC, which replaces the sign `µ` by a Greek letter."""
    return unicodedata.normalize("NFKC", text)


def read_variables(texts: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of variables in texts, each once, in Python's spelling. Checks no name."""
    return tuple(dict.fromkeys(map(variable_name, split_names(texts))))


class Secret(str):
    """A text whose `repr` hides it, also in the `repr` of an object that contains it."""

    def __repr__(self) -> str:
        return "'…'"


def read_start(start: str | os.PathLike[str] | None) -> str | None:
    """Return the path of the checkpoint to start from. Raises `PlanError` without one."""
    if start is None:
        return None
    return str(part.load_provided("steering", "find_start", "start_from")(os.fspath(start)))


def read_profile(profile: object) -> tuple[int, int] | None:
    """Return the steps before a profile and those in it, if there is one.

    Raises `PlanError` for other values than those of `nbtrain.launch`.
    """
    if profile is None or profile is False:
        return None
    read: Callable[[object], tuple[int, int]]
    read = part.load_provided("profile", "read_steps", "profile")
    return read(profile)


def read_turn(settings: Mapping[str, Any] | Iterable[str] | None) -> dict[str, Any]:
    """Return settings of optimizers by name, also from texts such as ``lr=/3``.

    Raises `PlanError` for a name or a value that is impossible.
    """
    if not settings:
        return {}
    read = part.load_provided("steering", "read_settings", "turn")
    return dict(read(settings))


def read_secrets(texts: str | Iterable[str] | None) -> tuple[Secret, ...]:
    """Return texts as secrets, each once and without spaces around; () for None."""
    texts = [texts] if isinstance(texts, str) else texts or ()
    return tuple(dict.fromkeys(Secret(str(text).strip()) for text in texts))


def read_sources(asked: str | Iterable[str]) -> tuple[Source, ...]:
    """Return the sources of telemetry for their names, "all" or "none".

    Names with a minus are left out of the others, or of all if every name has a minus. Raises
    `PlanError` for an unknown name, and for a text without names.
    """
    names = split_names(asked)
    known = {"all", "none", *SOURCES, *(f"-{source}" for source in SOURCES)}
    unknown = [n for n in names if n not in known]
    if unknown or (isinstance(asked, str) and not names):
        name = repr(unknown[0]) if unknown else "without a name"
        guess = did_you_mean(unknown[0], SOURCES) if unknown else ""
        raise PlanError(f"there is no telemetry {name}: use all, none, {', '.join(SOURCES)}{guess}")
    left_out = {n[1:] for n in names if n.startswith("-")}
    has_all = "all" in names or (left_out and len(left_out) == len(names))
    return tuple(s for s in SOURCES if (has_all or s in names) and s not in left_out)
