"""Reads the options of a launch: from a magic's line, and from the keywords of a function."""

from __future__ import annotations

import argparse
import functools
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any, NoReturn

from ..errors import PlanError
from ..findings import Finding
from ..system.text import did_you_mean, with_article
from .option_types import SECONDS, Option, is_variable, variable_name
from .plan import OPTIONS, Call, Task
from .task_values import expression_of, is_model

MAGIC_ONLY = (
    Option(
        "--as",
        "assign the Run to this notebook variable; nbtrain.last_run() always returns it",
        field="bind",
        metavar="NAME",
        convert=lambda name: name and variable_name(name),
        must_be=("a variable name", is_variable),
    ),
    Option(
        "--name",
        "the name of the run on its board, in %%nbtrain runs and in the name of its folder",
        field="title",
        metavar="NAME",
    ),
    Option(
        "--save",
        "write this cell and the cells before it to a script, then run the cell; the script works "
        "with python, torchrun and accelerate launch",
        field="save",
        part="export",
        metavar="FILE.py",
    ),
    Option(
        "--new",
        "start new ranks for this cell, even if live ranks (%%nbtrain start) are running",
        False,
        field="new",
        part="live",
    ),
    Option(
        "--ranks",
        "which of the live ranks run the cell: 0 or 0,2-3 (by default all)",
        field="ranks",
        part="live",
        metavar="RANKS",
    ),
)
"""The options that `nbtrain.launch` lacks: their fields are none of `Plan`'s."""

IDLE_TIMEOUT = Option(
    "--idle-timeout",
    "end the live ranks after this many seconds without a cell for them",
    **SECONDS,
    field="idle_timeout",
    part="live",
    metavar="SECONDS",
)
"""The option that only live ranks have."""

_BY_FIELD = {option.field: option for option in (*OPTIONS, *MAGIC_ONLY, IDLE_TIMEOUT)}
_OF_CELLS = tuple(option.field for option in (*OPTIONS, *MAGIC_ONLY))


_OF_OTHERS = ("nprocpernode", "nprocs", "nproc", "numgpus", "gpus", "ngpus", "worldsize", "devices")
"""What other launchers call the number of ranks, without hyphens."""


def plan_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of `Plan` from the arguments of a function that are named as options.

    Raises `PlanError` for a value that cannot be an option's: it was meant for the user's function.
    """
    fields = {}
    for option in OPTIONS:
        if option.argument not in arguments:
            continue
        name, value = option.argument, arguments[option.argument]
        if option.types and value is not None and not isinstance(value, option.types):
            raise PlanError(
                f"`{name}` is an option of nbtrain, and a value of type "
                f"{type(value).__name__} does not fit it. To pass `{name}` to your function "
                f"instead, give it by position, or with functools.partial(function, {name}=...)."
            )
        fields[option.field] = option.convert(value)
    return fields


def shared_out(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], list[Finding]]:
    """Share keywords between a launch and the function that has arguments of the same names.

    Returns the function's keywords, the options, and notes. A value that cannot be the option's is
    the function's. Raises `PlanError` where both may be meant, and for a name that neither has.
    """
    name, own = getattr(function, "__name__", "the function"), dict(kwargs)
    left, notes = dict(options), list[Finding]()
    parameters = _parameters(function)
    by_name = dict(list(parameters.items())[len(args) :])
    for option in OPTIONS:
        key = option.argument
        value, parameter = left.get(key, option.default), by_name.get(key)
        if parameter is None or _are_same(value, option.default):
            continue
        if not _fits(option, value):
            own[key] = left.pop(key)
        elif parameter.default is parameter.empty:
            raise PlanError(
                f"`{key}` is an option of nbtrain and an argument that {name}() needs. "
                f"For {name}() alone, write functools.partial({name}, {key}=...)."
            )
        elif _are_alike(value, parameter.default) and value != parameter.default:
            notes.append(
                Finding(
                    "shared-name",
                    f"`{key}` is nbtrain's option here; {name}() keeps its default.",
                    f"To change that, write functools.partial({name}, {key}=...).",
                )
            )
    _check_names(name, _parameters(function, follow_wrapped=False), own)
    return own, left, notes


def for_the_function(task: Task, key: str) -> str:
    """Return how to hand an option's value to a function that has an argument so named; or ''."""
    if not isinstance(task, Call) or key not in _parameters(task.function):
        return ""
    name = getattr(task.function, "__name__", "function")
    return (
        f"`{key}` is nbtrain's option here; for the argument of {name}(), write "
        f"functools.partial({name}, {key}=...)."
    )


def _are_same(value: Any, default: Any) -> bool:
    with suppress(Exception):  # an array is no bool, and may be of another shape
        return value is default or bool(value == default)
    return False


def _are_alike(one: Any, other: Any) -> bool:
    both_numbers = all(type(each) in (int, float) for each in (one, other))
    return both_numbers or type(one) is type(other)


def _parameters(
    function: Callable[..., Any], *, follow_wrapped: bool = True
) -> dict[str, inspect.Parameter]:
    """Return what a function takes; not followed, what its outermost decorator takes."""
    try:
        return dict(inspect.signature(function, follow_wrapped=follow_wrapped).parameters)
    except (TypeError, ValueError):  # written in C
        return {}


def _fits(option: Option, value: Any) -> bool:
    if option.types and not isinstance(value, option.types):
        return False
    try:
        option.check(option.convert(value), option.argument)
    except Exception:  # PlanError, or whatever a value of any kind raises
        return False
    return not option.is_switch or isinstance(value, bool)


def _check_names(name: str, parameters: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse a keyword that the function lacks, and that looks like one of it or of nbtrain."""
    if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for key in given.keys() - parameters.keys():
        known = [*parameters, *(option.argument for option in OPTIONS)]
        if guess := did_you_mean(key, known):
            raise PlanError(f"neither {name}() nor nbtrain has an argument `{key}`{guess}")


def read_arguments(args: Any) -> tuple[Any, ...]:
    """Return the arguments of `notebook_launcher`, as Accelerate takes them: from any iterable.

    What is rather one argument without its comma raises `PlanError`: a text, a dictionary, an array
    or a tensor, a model, a data set, a loader.
    """
    cls = type(args)
    torch_data: Any = sys.modules.get("torch.utils.data")
    is_dict = hasattr(cls, "keys")
    is_one_value = (
        issubclass(cls, (str, bytes, bytearray))
        or hasattr(cls, "shape")
        or is_model(args)
        or (torch_data and issubclass(cls, (torch_data.DataLoader, torch_data.Dataset)))
    )
    if issubclass(cls, Iterable) and not (is_dict or is_one_value):
        return tuple(args)
    if args is None:
        raise PlanError("args is None: leave it out if the function takes no arguments")
    remedy = "write args=(x,), with the comma, for one argument x"
    if is_dict:
        remedy += ", or args=x.values() for one argument per value"
    raise PlanError(
        f"args must be a tuple of the function's arguments, not {with_article(cls.__name__)}: "
        f"{remedy}"
    )


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_RANK = ("rank", "local_rank", "global_rank", "gpu", "index", "process_index")


def check_rank_argument(function: Callable[..., Any], args: Sequence[Any], given: Any) -> None:
    """Refuse a function that lacks its first argument, as one written for `mp.spawn` does.

    Such functions take their rank first, by any name. A decorator may supply arguments, so that
    only its own signature counts. Raises `PlanError`.
    """
    parameters = _parameters(function, follow_wrapped=False)
    try:
        inspect.signature(function, follow_wrapped=False).bind(*args, **given)
    except ValueError:  # written in C
        return
    except TypeError:
        call = Call(function, tuple(args), given)
        needed = [p for p in parameters.values() if p.default is p.empty]
        names = [p.name for p in needed if p.kind in _POSITIONAL]
        if rank_call(call.name, names):
            raise PlanError(
                f"{call.name}() takes its rank first, as for mp.spawn. {_rank_remedy(call, names)}"
            ) from None
        if names and _is_plain(function) and _fits_behind_rank(call):
            remedy = _rank_remedy(call, names)
            raise PlanError(
                f"{call.name}() lacks one argument. If its first one, `{names[0]}`, is the rank, "
                f"as for mp.spawn, {remedy[0].lower()}{remedy[1:]}"
            ) from None


def _is_plain(function: Any) -> bool:
    """Whether nothing supplies arguments in between, whatever signature it shows."""
    inner: Any = getattr(function, "__func__", function)
    decorated = hasattr(inner, "__wrapped__") or hasattr(inner, "__signature__")
    return type(inner) is FunctionType and not decorated


def _fits_behind_rank(call: Call) -> bool:
    try:
        inspect.signature(call.function, follow_wrapped=False).bind(0, *call.args, **call.kwargs)
    except TypeError:
        return False
    return True


def _rank_remedy(call: Call, parameters: Sequence[str]) -> str:
    """Return what to pass in place of a function that takes its rank: a line that runs as it is."""
    name = expression_of(call)
    if not name:
        return f"Remove its parameter `{parameters[0]}`, and call `nbtrain.rank()` in it instead."
    if _fits_behind_rank(call):
        stars = [*(["*args"] if call.args else []), *(["**kwargs"] if call.kwargs else [])]
        if stars:
            rest = ", ".join(stars)
            return f"Pass `lambda {rest}: {name}(nbtrain.rank(), {rest})` instead."
    return f"Pass `lambda: {call_with_rank(name, parameters)}` instead."


def rank_call(name: str, parameters: Sequence[str]) -> str:
    """Return the call in every rank of a function that takes its rank first; '' for others."""
    is_rank_first = bool(parameters) and parameters[0] in _RANK
    return call_with_rank(name, parameters) if is_rank_first else ""


def call_with_rank(name: str, parameters: Sequence[str]) -> str:
    """Return the call in every rank of a function whose first parameter is the rank."""
    known = {"world_size": "nbtrain.world_size()", "nprocs": "nbtrain.world_size()"}
    rest = [known.get(parameter, parameter) for parameter in parameters[1:]]
    return f"{name}({', '.join(['nbtrain.rank()', *rest])})"


def _reader(option: Option) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return None if option.none and text == option.none else option.read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(option.problem(text, option.none)) from None

    return read


class OptionParser(argparse.ArgumentParser):
    """A parser of a magic's options. Its errors are `PlanError`s of one line and a hint."""

    def __init__(self, prog: str, hint: str) -> None:
        super().__init__(prog, usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
        self.hint = hint

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (-\S+)", message)
        if unknown:
            message += self._guess(unknown[1].partition("=")[0])
        raise PlanError(f"{self.prog}: {message}{self.hint}")

    def _guess(self, flag: str) -> str:
        flags = [name for name in self._option_string_actions if name.startswith("--")]
        if re.sub(r"[-_]", "", flag) in _OF_OTHERS and "--num-processes" in flags:
            return " (did you mean --num-processes?)"
        return did_you_mean(flag, flags)


def parser(
    fields: Iterable[str] = _OF_CELLS,
    prog: str = "%distributed",
    hint: str = " (%%distributed? shows the options)",
) -> OptionParser:
    """Return a parser of the options with these fields; its help documents them."""
    result = OptionParser(prog, hint)
    for option in (_BY_FIELD[field] for field in fields):
        traits: dict[str, Any] = {"metavar": option.metavar, "type": _reader(option)}
        if option.is_switch:
            traits = {"action": "store_false" if option.default else "store_true"}
        elif option.repeats:
            traits |= {"action": "extend" if option.nargs else "append", "nargs": option.nargs}
        traits["default"] = [] if option.repeats else option.default
        result.add_argument(*option.flags.split(), dest=option.field, help=option.help, **traits)
    return result


@functools.cache
def _parser_of_cells() -> OptionParser:
    return parser()


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the options of ``%%distributed``. Raises `PlanError`, in one line."""
    return checked(_parser_of_cells().parse_args(arguments))


def checked(parsed: argparse.Namespace) -> argparse.Namespace:
    """Return what a parser made of options as values of `Plan`'s fields. Raises `PlanError`."""
    for name, value in vars(parsed).items():
        if (option := _BY_FIELD.get(name)) is not None:
            setattr(parsed, name, option.convert(value))
            option.check(getattr(parsed, name), option.flags.split()[-1])
    return parsed


def split_options(line: str, more_flags: Collection[str] = ()) -> tuple[str, str]:
    """Split a line magic's text into its options and the expression after them.

    The expression begins at the first word that is neither an option nor an option's value, or
    after ``--``. `more_flags` are options without a value that `OPTIONS` does not have.
    """
    switches = {flag for o in OPTIONS if o.is_switch for flag in o.flags.split()}
    position, expects_value = 0, False
    for word in re.finditer(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""", line):
        text = word.group()
        if line[position : word.start()].strip():  # a quote that nobody closed
            return line[:position], line[position:].strip()
        if expects_value:
            expects_value = False
        elif text == "--":
            return line[:position], line[word.end() :].strip()
        elif text.startswith("-"):
            has_value = "=" in text or re.fullmatch(r"-\w.+", text)
            expects_value = not (has_value or text in switches or text in more_flags)
        else:
            return line[:position], line[word.start() :].strip()
        position = word.end()
    return line, ""


def split_line(line: str) -> list[str]:
    """Split a magic's line as a shell would. Raises `PlanError` for an open quote."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise PlanError(f"%distributed: {str(error).lower()} in {line.strip()!r}") from None
