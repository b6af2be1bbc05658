"""The rule about launches within a launch: every rank would start ranks of its own.

Reported only of a call that every rank is certain to reach; others are refused in the rank that
reaches them (`worker.nested_launches`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from ..findings import CodeFinding
from ..task_values import function_of
from .program import Program
from .source_index import MISSING, Unit, called, dotted, is_function

_WITH_RANK = re.compile(
    r"(.+\.)?(mp|multiprocessing|xmp|xla_multiprocessing)\.(spawn|start_processes)|torch_xla\.launch"
)
"""What hands a function its rank, as the first argument."""

_AS_IT_IS = re.compile(
    r"(.+\.)?(notebook_launcher|debug_launcher)|nbtrain\.launch|(.+\.)?elastic_launch"
)
_LIBRARIES = ("accelerate", "torch", "torch_xla", "nbtrain")
_COMMAND = re.compile(
    r"(^|[;&|])\s*((\w+=\S*|nohup|time|exec)\s+)*(\S*/)?"
    r"(torchrun|accelerate[ -]launch|mpirun|horovodrun)\s"
    r"|-m\s+(torch\.distributed\.(run|launch)|accelerate\.commands\.launch)\s",
    re.MULTILINE,
)
_RUNS_A_COMMAND = frozenset(
    {"system", "getoutput", "run_cell_magic", "run_line_magic", "sx"}
    | {"run", "call", "check_call", "check_output", "Popen"}
)


def nested_launches(program: Program) -> Iterator[CodeFinding]:
    """A call by which every rank would launch ranks itself."""
    launches = [(u, call, text) for u, call in program.calls if (text := _remedy(call, u))]
    exits = _exits(program) if launches else {}
    certain = _certainly_run(program, exits) if launches else set()
    for unit, call, remedy in launches:
        if unit.function_around(call) in certain and _is_unconditional(call, unit, exits):
            shown = _shown(call)
            yield unit.finding(
                call,
                "nested-launch",
                f"{shown} would start more ranks in every rank of this run. {remedy}",
                refuse=True,
            )


def _remedy(call: ast.Call, unit: Unit) -> str:
    """Return what to write instead of a call that launches ranks; '' for any other call."""
    for keyword in call.keywords:
        text = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if keyword.arg == "strategy" and str(text).startswith("ddp_notebook"):
            return 'Write `strategy="ddp"`: the ranks are there already.'
    if _runs_a_command(call):
        return f"Delete {_lines(call)}, or run it in a cell of its own without %%distributed."
    path = _path(call, unit)
    if _WITH_RANK.fullmatch(path):
        return _call_instead(call, unit, with_rank=True)
    if _AS_IT_IS.fullmatch(path):
        return _call_instead(call, unit, with_rank=False)
    return ""


def _path(call: ast.Call, unit: Unit) -> str:
    """Return what a call calls, as its library names it; '' for a function of the user's own."""
    path = dotted(call.func)
    if not isinstance(call.func, ast.Name):
        return path
    bound = unit.bindings(call.func)
    imports = [b.statement for b in bound if isinstance(b.statement, ast.ImportFrom)]
    if len(imports) < len(bound):
        return ""
    modules = [str(statement.module) for statement in imports]
    value = unit.value(call.func)
    if value is not MISSING:
        modules = [_module_of(value)]
    elif not bound and path != "notebook_launcher":
        return ""
    if any(module.partition(".")[0] not in _LIBRARIES for module in modules):
        return ""
    is_own = bool(modules) and modules[0].startswith("nbtrain")
    return f"nbtrain.{path}" if is_own else f"multiprocessing.{path}" if path == "spawn" else path


def _module_of(value: Any) -> str:
    function = function_of(value)
    return str(function.__module__) if function is not None else ""


def _runs_a_command(call: ast.Call) -> bool:
    if called(call) not in _RUNS_A_COMMAND:
        return False
    texts = [
        " ".join(str(n.value) for n in ast.walk(argument) if isinstance(n, ast.Constant))
        for argument in call.args
    ]
    return _COMMAND.search("\n".join(texts)) is not None


def _call_instead(call: ast.Call, unit: Unit, *, with_rank: bool) -> str:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    function = call.args[0] if call.args else keywords.get("function", keywords.get("fn"))
    if function is None:
        return f"Delete {_lines(call)}."
    count = keywords.get("nprocs", keywords.get("num_processes"))
    if not with_rank and isinstance(count, ast.Constant) and count.value == 1:
        return ""  # which is a plain call
    given = call.args[1] if len(call.args) > 1 else keywords.get("args")
    if called(call) == "launch" and not with_rank:
        arguments = [ast.unparse(argument) for argument in call.args[1:]]
    else:
        arguments = _unpacked(given, count if with_rank else None)
    name = ast.unparse(function)
    if not with_rank and _is_last_function(name, arguments, call, unit):
        return f"Delete {_lines(call)}: %%distributed itself calls {name}() on every rank."
    text = ", ".join(["nbtrain.rank()"] * with_rank + arguments)
    return f"Write `{name}({text})` instead: every rank runs this line."


def _unpacked(given: ast.expr | None, count: ast.expr | None) -> list[str]:
    if given is None:
        return []
    if not isinstance(given, (ast.Tuple, ast.List)):
        return [f"*{ast.unparse(given)}"]
    texts = [ast.unparse(element) for element in given.elts]
    number = ast.unparse(count) if isinstance(count, ast.Name) else ""
    return ["nbtrain.world_size()" if text == number else text for text in texts]


def _is_last_function(name: str, arguments: list[str], call: ast.Call, unit: Unit) -> bool:
    """Return whether the cell, without the call, would end in that function, so called."""
    body = unit.module.body if unit.is_cell else []
    if len(body) < 2 or body[-1] not in unit.ancestors(call):
        return False
    last = body[-2]
    if not is_function(last) or last.name != name:
        return False
    names = [arg.arg for arg in (*last.args.posonlyargs, *last.args.args)]
    return arguments == names[: len(arguments)]


def _lines(call: ast.Call) -> str:
    last = call.end_lineno or call.lineno
    return f"line {call.lineno}" if last == call.lineno else f"lines {call.lineno} to {last}"


def _shown(call: ast.Call) -> str:
    """Return a call as the user wrote it: a magic's command too."""
    texts = [str(a.value) for a in call.args if isinstance(a, ast.Constant) and a.value]
    text = ast.unparse(call)
    if called(call) in ("system", "getoutput") and texts:
        text = f"!{texts[0]}"
    elif called(call) == "run_cell_magic":
        text = f"%%{' '.join(texts)}"
    text = " ".join(text.split())
    return f"`{text if len(text) <= 80 else text[:79] + '…'}`"


def _certainly_run(program: Program, exits: Exits) -> set[ast.AST]:
    """Return the functions, and the cell, whose first statement every rank comes to."""
    result: set[ast.AST] = {unit.entry for unit in program.units if unit.entry is not None}
    result |= {unit.tree for unit in program.units if unit.is_cell}
    own = [
        (unit.function_around(call), known[0][1])
        for unit, call in program.calls
        if isinstance(call.func, ast.Name)
        and len(known := program.functions.get(call.func.id, [])) == 1
        and _is_unconditional(call, unit, exits)
    ]
    size = 0
    while size < len(result):
        size = len(result)
        result |= {function for caller, function in own if caller in result}
    return result


Exits = dict[ast.AST, int]
"""The first line at which a function may end early."""


def _exits(program: Program) -> Exits:
    lines: Exits = {}
    for unit in program.units:
        for node in unit.nodes:
            if isinstance(node, (ast.Return, ast.Raise)):
                function = unit.function_around(node)
                lines[function] = min(node.lineno, lines.get(function, node.lineno))
    return lines


_ALWAYS = (ast.Expr, ast.Assign, ast.AnnAssign, ast.Return, ast.Await, ast.With, ast.Try, ast.Call)


def _is_unconditional(call: ast.Call, unit: Unit, exits: Exits) -> bool:
    """Return whether a call is made whenever its function is, whatever the values are."""
    function = unit.function_around(call)
    if exits.get(function, call.lineno) < call.lineno:
        return False
    below: ast.AST = call
    for above in unit.ancestors(call):
        if above is function:
            return True
        is_main = isinstance(above, ast.If) and below in above.body and _asks_for_main(above.test)
        if not is_main and not isinstance(above, _ALWAYS):
            return isinstance(above, ast.Module)
        if isinstance(above, ast.Try) and below not in above.body:
            return False
        below = above
    return True


def _asks_for_main(test: ast.expr) -> bool:
    return ast.unparse(test).replace('"', "'") in (
        "__name__ == '__main__'",
        "'__main__' == __name__",
    )
