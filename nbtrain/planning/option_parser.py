"""Reads the options of a launch, from the line of a magic or the keywords of a function."""

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

from .. import part
from ..errors import PlanError
from ..findings import Finding
from ..system.text import did_you_mean, with_article
from .option_types import Option, is_variable, variable_name
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
)
"""The core's options of magics only. `Plan` has no fields for them."""


@functools.cache
def cell_options() -> Mapping[str, Option]:
    """Return the options of ``%%distributed`` by their fields: the core's, then those of parts.

    A part's option is left out if its field or a flag is taken, or the parser refuses it.
    """
    found = {option.field: option for option in (*OPTIONS, *MAGIC_ONLY)}
    taken = {flag for option in found.values() for flag in option.flags.split()}
    for option in part.cell_options():
        flags = set(option.flags.split())
        if option.field not in found and not flags & taken and _is_usable(option):
            found[option.field], taken = option, taken | flags
    return found


def _is_usable(option: Option) -> bool:
    """Return whether a parser can read an option, and show its help."""
    trial = OptionParser("", "")
    with suppress(Exception):  # of argparse, for a flag without "-" or a "%" in the help
        _add_option(trial, option)
        return bool(trial.format_help()) and is_variable(option.field)
    return False


def plan_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of `Plan` from the arguments of a launch that have the names of options.

    Other arguments are ignored. Values are converted, but not checked for their range. Raises
    `PlanError` for a value of a wrong type: the user's function may have been meant.
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


def split_launch_kwargs(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], list[Finding]]:
    """Split the keywords of a launch between it and a function with arguments of the same names.

    Returns the function's keywords, the options, and notes. `kwargs` are the function's, `options`
    those of the launch. A shared name goes to the function if its value does not fit the option;
    else it is the option, and the function keeps its default. Raises `PlanError` if it has no
    default, and for an unknown name that resembles a known one.
    """
    name, own = getattr(function, "__name__", "the function"), dict(kwargs)
    left, notes = dict(options), list[Finding]()
    parameters = _signature_parameters(function)
    by_name = dict(list(parameters.items())[len(args) :])
    for option in OPTIONS:
        key = option.argument
        value, parameter = left.get(key, option.default), by_name.get(key)
        if parameter is None or _is_default(value, option.default):
            continue
        if not _accepts(option, value):
            own[key] = left.pop(key)
            continue
        if parameter.default is parameter.empty:
            raise PlanError(
                f"`{key}` is an option of nbtrain and an argument that {name}() needs. "
                f"For {name}() alone, write functools.partial({name}, {key}=...)."
            )
        types = {type(value), type(parameter.default)}
        if (len(types) == 1 or types == {int, float}) and value != parameter.default:
            notes.append(
                Finding(
                    "shared-name",
                    f"`{key}` is nbtrain's option here; {name}() keeps its default.",
                    f"To change that, write functools.partial({name}, {key}=...).",
                )
            )
    _check_keywords(name, _signature_parameters(function, follow_wrapped=False), own)
    return own, left, notes


def explain_shared_name(task: Task, key: str) -> str:
    """Return how to pass a value to the function's argument that an option has the name of; or "".

    "" if the task is a cell, or its function has no argument `key`.
    """
    if not isinstance(task, Call) or key not in _signature_parameters(task.function):
        return ""
    name = getattr(task.function, "__name__", "function")
    return (
        f"`{key}` is nbtrain's option here; for the argument of {name}(), write "
        f"functools.partial({name}, {key}=...)."
    )


def _is_default(value: Any, default: Any) -> bool:
    """Return whether a value equals the default. False if the comparison raises."""
    with suppress(Exception):  # the comparison of an array is no bool
        return value is default or bool(value == default)
    return False


def _signature_parameters(
    function: Callable[..., Any], *, follow_wrapped: bool = True
) -> dict[str, inspect.Parameter]:
    """Return a function's parameters: those of the wrapped one, or of the outermost decorator.

    Empty for a function whose signature is unknown, as of many in C.
    """
    try:
        return dict(inspect.signature(function, follow_wrapped=follow_wrapped).parameters)
    except (TypeError, ValueError):  # written in C
        return {}


def _accepts(option: Option, value: Any) -> bool:
    """Return whether an option accepts a value. Never raises for a value of any type.

    False also for a value that is not the default if the option is switched off on this host, or if
    its part is not installed.
    """
    if option.types and not isinstance(value, option.types):
        return False
    try:
        option.check(option.convert(value), option.argument)
    except Exception:  # PlanError, or anything that the comparison of the value raises
        return False
    return not option.is_switch or isinstance(value, bool)


def _check_keywords(name: str, parameters: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise `PlanError` for a keyword that the function lacks and that resembles a known name.

    Other unknown keywords pass, and all do if the function takes any or its parameters are unknown.
    """
    if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for key in sorted(given.keys() - parameters.keys()):
        known = [*parameters, *(option.argument for option in OPTIONS)]
        if guess := did_you_mean(key, known):
            raise PlanError(f"neither {name}() nor nbtrain has an argument `{key}`{guess}")


def read_arguments(args: Any) -> tuple[Any, ...]:
    """Return the arguments of `notebook_launcher` from any iterable, as Accelerate does.

    Raises `PlanError` for None, and for what must be a single argument without its comma: a text, a
    dictionary, an array or tensor, a model, a data set, a loader, or no iterable.
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
    """Raise `PlanError` for a function that lacks its first argument, as one for `mp.spawn` does.

    Such functions take their rank first, by any name. A decorator may supply arguments, so only its
    own signature counts. A call that lacks other arguments passes.
    """
    parameters = _signature_parameters(function, follow_wrapped=False).values()
    if not parameters or _fits_call(function, args, given):
        return
    call = Call(function, tuple(args), given)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in _POSITIONAL]
    inner: Any = getattr(function, "__func__", function)
    is_plain = type(inner) is FunctionType and not (
        hasattr(inner, "__wrapped__") or hasattr(inner, "__signature__")
    )
    lacks_one = _fits_call(function, (0, *args), given)
    if not needed or not (needed[0] in _RANK or (is_plain and lacks_one)):
        return
    problem = f"{call.name}() takes its rank first, as for mp.spawn."
    if needed[0] not in _RANK:
        problem = f"{call.name}() lacks one argument: `{needed[0]}` is the rank, as for mp.spawn?"
    remedy = f"Remove its parameter `{needed[0]}`, and call `nbtrain.rank()` in it instead."
    name = expression_of(call)
    if name and lacks_one:
        remedy = f"Pass `lambda *args, **kw: {name}(nbtrain.rank(), *args, **kw)` instead."
    elif name and needed[1:] == ["world_size"]:
        remedy = f"Pass `lambda: {call_with_rank(name, needed)}` instead."
    raise PlanError(f"{problem} {remedy}")


def call_with_rank(name: str, parameters: Sequence[str]) -> str:
    """Return source that calls a function with its rank first: ``f(nbtrain.rank())``.

    Other parameters are passed as variables of their names, except ``world_size``.
    """
    known = {parameters[0]: "nbtrain.rank()", "world_size": "nbtrain.world_size()"}
    return f"{name}({', '.join(known.get(parameter, parameter) for parameter in parameters)})"


def _fits_call(function: Callable[..., Any], args: Sequence[Any], given: Any) -> bool:
    """Return whether a function can be called with these arguments, without calling it.

    Raises `ValueError` if its signature is unknown.
    """
    try:
        inspect.signature(function, follow_wrapped=False).bind(*args, **given)
    except TypeError:
        return False
    return True


def _make_reader(option: Option) -> Callable[[str], Any]:
    """Return the function that argparse reads an option's text by.

    The option's word for nothing becomes None. A `ValueError` of the option's type becomes an
    `ArgumentTypeError` with the option's own words.
    """

    def read(text: str) -> Any:
        try:
            return None if option.none and text == option.none else option.read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(option.describe_problem(text, option.none)) from None

    return read


class OptionParser(argparse.ArgumentParser):
    """A parser of a magic's options. Raises `PlanError` with one line and a hint."""

    def __init__(self, prog: str, hint: str) -> None:
        super().__init__(prog, usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
        self.hint = hint
        self.with_flags: set[str] = set()
        """Its flags whose values may begin with a dash."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Join the flags of `with_flags` with their values: argparse would refuse these."""
        words = iter(args)
        joined = [
            f"{word}={value}"
            if word in self.with_flags and (value := next(words, None)) is not None
            else word
            for word in words
        ]
        return super().parse_known_args(joined, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise `PlanError` with argparse's message, and the option that was probably meant."""
        if unknown := re.match(r"unrecognized arguments: (-[^\s=]+)", message):
            flags = [name for name in self._option_string_actions if name.startswith("--")]
            counts_ranks = re.search(r"nproc|gpus|world.size|devices", unknown[1])
            guess = "--num-processes" if counts_ranks else unknown[1]
            message += did_you_mean(guess, flags)
        raise PlanError(f"{self.prog}: {message}{self.hint}")


def parser(
    fields: Iterable[str] | None = None,
    prog: str = "%distributed",
    hint: str = " (%%distributed? shows the options)",
    more: Iterable[Option] = (),
) -> OptionParser:
    """Make a parser of the options with these fields (by default all) and of `more`.

    Its help documents them. `prog` and `hint` are the start and the end of its errors. Raises
    `KeyError` for a field that is no option.
    """
    result, known = OptionParser(prog, hint), cell_options()
    for option in (*(known[field] for field in (known if fields is None else fields)), *more):
        _add_option(result, option)
    return result


def _add_option(parser: OptionParser, option: Option) -> None:
    """Have a parser read an option. Raises what argparse raises."""
    traits: dict[str, Any] = {"metavar": option.metavar, "type": _make_reader(option)}
    if option.is_switch:
        traits = {"action": "store_false" if option.default else "store_true"}
    elif option.repeats:
        traits |= {"action": "extend" if option.nargs else "append", "nargs": option.nargs}
    if option.bare is not None:
        traits |= {"nargs": "?", "const": option.bare}
    traits["default"] = [] if option.repeats else option.default
    if option.has_flags:
        parser.with_flags.update(option.flags.split())
    parser.add_argument(*option.flags.split(), dest=option.field, help=option.help, **traits)


_cell_parser = functools.cache(parser)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the options of ``%%distributed``. Raises `PlanError` with one line."""
    return check_parsed(_cell_parser().parse_args(arguments))


def check_parsed(parsed: argparse.Namespace, more: Iterable[Option] = ()) -> argparse.Namespace:
    """Convert parsed options, in place, to the values of `Plan`'s fields; return them.

    Raises `PlanError` for one out of range. Attributes that are no options, nor of `more`, stay.
    """
    options = {**cell_options(), **{option.field: option for option in more}}
    for name, value in vars(parsed).items():
        if (option := options.get(name)) is not None:
            setattr(parsed, name, option.convert(value))
            option.check(getattr(parsed, name), option.flags.split()[-1])
    return parsed


def split_options(line: str, more_flags: Collection[str] = ()) -> tuple[str, str]:
    """Split a line magic's text into its options and the expression behind them, "" without one.

    The expression begins at the first word that is neither an option nor its value, or behind
    ``--``. `more_flags` are flags without a value that `OPTIONS` does not contain. Options are not
    checked: an unknown flag is assumed to have a value.
    """
    switches = {flag for o in cell_options().values() if o.is_switch for flag in o.flags.split()}
    position, expects_value = 0, False
    for word in re.finditer(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""", line):
        text = word.group()
        if line[position : word.start()].strip():  # an open quote
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
