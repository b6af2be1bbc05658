"""``%nbtrain memory``: from what was typed to what is asked. The model is an expression."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ..errors import PlanError
from .anatomy import STRATEGIES
from .needed import PRECISIONS

USAGE = (
    "%nbtrain memory MODEL --batch 8x512 [--optimizer adamw] [--precision no|fp16|bf16] "
    "[--ranks N] [--strategy ddp|fsdp] [--card 16GB] [--batch-from NAME]"
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PlanError(f"%nbtrain memory: {message}\n{USAGE}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser.add_argument("--batch")
    parser.add_argument("--batch-from")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--precision", choices=PRECISIONS, default="no")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--strategy", choices=STRATEGIES, default="ddp")
    parser.add_argument("--card")
    return parser


def read(
    line: str, namespace: Mapping[str, Any], fill: Callable[[str], str] = str
) -> tuple[Any, dict[str, Any]]:
    """Return what `memory_needed` is to be called with: the model, and all else by name.

    A variable's name is that model. Any other expression is one that builds it, to be evaluated
    where nothing is allocated. An optimizer may be named, or be a variable's name. The options
    go through `fill`.
    """
    found = re.split(r"\s+(?=--[a-z])", line.strip(), maxsplit=1)
    expression, words = found[0], shlex.split(fill(found[1]) if len(found) > 1 else "")
    if not expression or expression.startswith("--"):
        raise PlanError(f"%nbtrain memory: which model?\n{USAGE}")
    options = vars(_parser().parse_args(words))
    source, batch = options.pop("batch_from"), options.pop("batch")
    if source is None and batch is None:
        raise PlanError(
            f"%nbtrain memory: which batch? --batch 8x512, or --batch-from NAME\n{USAGE}"
        )
    if source is not None:
        if batch is not None and not batch.isdecimal():
            raise PlanError("beside --batch-from, --batch is a number of rows")
        options |= {"rows": int(batch) if batch else None, "batch": _variable(source, namespace)}
    else:
        options["batch"] = batch
    named = namespace.get(options["optimizer"])
    if hasattr(named, "param_groups"):
        options["optimizer"] = named
    return _model(expression, namespace), options


def _variable(name: str, namespace: Mapping[str, Any]) -> Any:
    if name not in namespace:
        raise PlanError(f"%nbtrain memory: the notebook has no variable {name!r}")
    return namespace[name]


def _model(expression: str, namespace: Mapping[str, Any]) -> Any:
    if expression.isidentifier():
        return _variable(expression, namespace)
    try:
        code = compile(expression, "<%nbtrain memory>", "eval")
    except SyntaxError as error:
        raise PlanError(f"%nbtrain memory: {expression!r} is no expression: {error.msg}") from None
    scope = dict(namespace)
    return lambda: eval(code, scope)  # the user's own expression, as in a cell
