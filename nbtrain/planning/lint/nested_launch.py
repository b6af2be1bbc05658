"""The rule about launches within a launch: every rank would start ranks of its own.

Reported only of a call that every rank is certain to reach; others are refused in the rank that
reaches them (`worker.nested_launches`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from ...findings import Finding
from ..task_values import is_class, module_of
from .program import Program
from .source_index import MISSING, Unit, called, dotted, is_function, receiver
from .value_kinds import name_of

_SPAWNS = re.compile(r"torch\.multiprocessing(\.spawn)?\.(spawn|start_processes)")
_WITH_RANK = re.compile(rf"{_SPAWNS.pattern}|torch_xla(\..+)?\.(xla_multiprocessing\.spawn|launch)")
"""What hands a function its rank, as the first argument."""

_AS_IT_IS = re.compile(
    r"(accelerate|nbtrain)(\..+)?\.(notebook_launcher|debug_launcher)|nbtrain(\..+)?\.launch"
    r"|torch\.distributed(\..+)?\.elastic_launch"
)
_NO_HELP = r"(?!([^;&|\n]*\s)?--?(h|help|version)(\s|$))"
_COMMAND = re.compile(
    r"(^|[;&|])\s*((\w+=\S*|nohup|time|exec)\s+)*(\S*/)?"
    r"(torchrun|accelerate[ -]launch|mpirun|horovodrun)\s" + _NO_HELP + "|"
    r"-m\s+(torch\.distributed\.(run|launch)|accelerate\.commands\.launch)\s" + _NO_HELP,
    re.MULTILINE,
)
_RUNS_A_COMMAND = re.compile(
    r"os\.(system|popen)|subprocess\.(run|call|check_call|check_output|getoutput|Popen)"
)
_MAGICS = ("system", "getoutput", "run_cell_magic", "run_line_magic")
_MAGICS_OF_COMMANDS = ("bash", "sh", "script", "system", "sx", "!", "run")


def nested_launches(program: Program, ranks: int | None = None) -> Iterator[Finding]:
    """A call by which every rank would launch ranks itself. A single rank may start helpers."""
    launches = [(u, call, text) for u, call in program.calls if (text := _remedy(call, u))]
    exits = _exits(program) if launches else {}
    certain = _certainly_run(program, exits) if launches else set()
    for unit, call, remedy in launches:
        if unit.function_around(call) in certain and _is_unconditional(call, unit, exits):
            shown = _shown(call)
            if ranks == 1 and _SPAWNS.fullmatch(path_of_call(call, unit)):
                yield unit.finding(
                    call,
                    "nested-launch",
                    f"{shown} starts processes that are no ranks of this run. If they are meant to "
                    "train, choose the number of ranks with -n (num_processes), and "
                    f"{remedy[0].lower()}{remedy[1:]}",
                )
                continue
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
        trains = called(call) in ("Trainer", "Fabric")
        if trains and keyword.arg == "strategy" and str(text).startswith("ddp_notebook"):
            return 'Write `strategy="ddp"`: the ranks are there already.'
    path = path_of_call(call, unit)
    if _runs_a_command(call, path):
        return f"Delete {_lines(call)}, or run it in a cell of its own without %%distributed."
    if _WITH_RANK.fullmatch(path):
        return _call_instead(call, path, unit, with_rank=True)
    if _AS_IT_IS.fullmatch(path):
        return _call_instead(call, path, unit, with_rank=False)
    return ""


def path_of_call(call: ast.Call, unit: Unit) -> str:
    """Return what a call calls, from the library on; '' for what is the user's own, or unknown."""
    root = call.func
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name):
        return ""
    value, bound = unit.value(root), unit.bindings(root)
    origins = {_imported(b.statement, root.id) for b in bound}
    if value is not MISSING:
        origins = {_path_of(value)}
    origin = min(origins, default="")
    return origin + dotted(call.func)[len(root.id) :] if origin else ""


def _imported(statement: ast.AST, name: str) -> str:
    """Return what an import binds to a name; '' for other statements."""
    match statement:
        case ast.Import(names=aliases):
            plain = {(a.asname or a.name.partition(".")[0]): a for a in aliases}
            return plain[name].name if plain[name].asname else name
        case ast.ImportFrom(names=aliases, module=str(module), level=0):
            return next((f"{module}.{a.name}" for a in aliases if name in (a.asname, a.name)), "")
    return ""


def _path_of(value: Any) -> str:
    """Return the path of a module, or of a function or class of one, without asking the value."""
    if type(value) is ModuleType:
        return str(vars(value).get("__name__"))
    if is_class(value):
        return f"{module_of(value)}.{name_of(value)}"
    return f"{value.__module__}.{value.__name__}" if type(value) is FunctionType else ""


def _runs_a_command(call: ast.Call, path: str) -> bool:
    owner = receiver(call)
    is_magic = isinstance(owner, ast.Call) and called(owner) == "get_ipython"
    if not _RUNS_A_COMMAND.fullmatch(path) and not (is_magic and called(call) in _MAGICS):
        return False
    texts = [
        " ".join(str(n.value) for n in ast.walk(argument) if isinstance(n, ast.Constant))
        for argument in call.args
    ]
    if is_magic and "magic" in called(call) and texts[0] not in _MAGICS_OF_COMMANDS:
        return False
    return _COMMAND.search("\n".join(texts)) is not None


def _call_instead(call: ast.Call, path: str, unit: Unit, *, with_rank: bool) -> str:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    function = call.args[0] if call.args else keywords.get("function", keywords.get("fn"))
    if function is None:
        return f"Delete {_lines(call)}."
    takes_arguments = path.endswith(".launch") and not with_rank
    count = keywords.get("nprocs", keywords.get("num_processes"))
    if count is None and len(call.args) > 2 and not takes_arguments:
        count = call.args[2]
    if not with_rank and isinstance(count, ast.Constant) and count.value == 1:
        return ""  # which is a plain call
    given = call.args[1] if len(call.args) > 1 else keywords.get("args")
    if takes_arguments:
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


_ALWAYS = (
    *(ast.Expr, ast.Assign, ast.AnnAssign, ast.Return, ast.Await, ast.With, ast.Try),
    *(ast.Call, ast.Attribute),  # Trainer(…).fit(…)
)


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
