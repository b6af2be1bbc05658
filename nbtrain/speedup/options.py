"""``%nbtrain scaling``: from what was typed to what is measured."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from .. import cell
from ..errors import PlanError
from ..plan import Call, Plan
from .report import KINDS, ScalingReport
from .sizes import Asked, measure

USAGE = (
    "%nbtrain scaling [--ranks 1,2,4] [--repeat N] [--warmup STEPS] [--weak|--strong] "
    "[-e, -p, --downcast-bf16, --config, --env, --timeout, --hang-after, --as: as %%distributed] "
    "FUNCTION(ARGUMENTS)"
)
_FLAGS = frozenset(f"--{kind}" for kind in KINDS)
_TAKEN = ("engine", "mixed_precision", "downcast_bf16", "config", "env", "timeout", "hang_after")
"""The options of ``%%distributed`` that make sense here; `bind` is the report's."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PlanError(f"%nbtrain scaling: {message}\n{USAGE}")


def _ranks(text: str) -> tuple[int, ...]:
    numbers = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} are not numbers of ranks, as 1,2,4")
    return tuple(map(int, numbers))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=_ranks, default=(1, 2, 4))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--warmup", type=int, dest="warm_up")
    which = parser.add_mutually_exclusive_group()
    for kind in KINDS:
        which.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind)
    return parser


def read(
    line: str, namespace: Mapping[str, Any], fill: Callable[[str], str] = str
) -> tuple[Plan, Asked, str | None]:
    """Return what to run, how, and the name that the report is bound to.

    The function and its arguments are evaluated here; nothing is called. What is before them goes
    through `fill`. Raises `PlanError`.
    """
    words, expression = cell.split_options(line, _FLAGS)
    own, others = _parser().parse_known_args(cell.split_words(fill(words)))
    options = cell.parse_options(others)
    default = cell.Options()
    for name, value in vars(options).items():
        if name not in (*_TAKEN, "bind") and value != getattr(default, name):
            raise PlanError(f"%nbtrain scaling: {_option(name)} is not for here\n{USAGE}")
    plan = Plan(
        task=_call(expression, namespace),
        name=expression if len(expression) <= 60 else expression[:59] + "…",
        **{name: getattr(options, name) for name in _TAKEN},
    )
    return plan, Asked(**vars(own)), options.bind


def _option(name: str) -> str:
    actions = cell.parser()._actions
    return next(a.option_strings[-1] for a in actions if a.dest == name)


def _call(expression: str, namespace: Mapping[str, Any]) -> Call:
    """Evaluate the function and the arguments of a call, in the notebook; do not call."""
    try:
        tree = ast.parse(expression.strip(), "<%nbtrain scaling>", "eval")
    except SyntaxError as error:
        raise PlanError(f"%nbtrain scaling: {error.msg} in {expression!r}\n{USAGE}") from None
    call = tree.body
    if not isinstance(call, ast.Call):
        raise PlanError(f"%nbtrain scaling: {expression!r} is no call, as train(model)\n{USAGE}")
    taken = ast.Name("call as it stands", ast.Load())  # a name that no notebook has
    tree.body = ast.Call(taken, [call.func, *call.args], call.keywords)
    code = compile(ast.fix_missing_locations(tree), "<%nbtrain scaling>", "eval")
    try:
        found: Call = eval(code, dict(namespace), {taken.id: _as_it_stands})
    except NameError as error:
        name = cell.with_lookalikes(str(error.name), namespace)
        raise PlanError(
            f"%nbtrain scaling: the notebook has no {name}; what a %%distributed cell defines "
            "stays in its ranks: define it in an ordinary cell"
        ) from None
    except Exception as error:  # the user's own expressions
        told = f"{type(error).__name__}: {error}"
        raise PlanError(f"%nbtrain scaling: {expression}: {told}") from error
    if not callable(found.function):
        raise PlanError(f"%nbtrain scaling: {ast.unparse(call.func)} is not a function")
    return found


def _as_it_stands(function: Any, /, *args: Any, **kwargs: Any) -> Call:
    return Call(function, args, kwargs)


def ask(line: str, namespace: dict[str, Any], fill: Callable[[str], str] = str) -> ScalingReport:
    """Do what ``%nbtrain scaling`` says, and return the report; it is bound by ``--as``."""
    plan, asked, name = read(line, namespace, fill)
    report = measure(plan, asked)
    if name is not None:
        namespace[name] = report
    return report
