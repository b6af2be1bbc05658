"""Finds the values of the notebook that a task refers to.

A task refers to:

- what its function is given: arguments, those that `functools.partial` binds, defaults, the object
  of a bound method;
- what its source names: a cell's variables, a function's closure and globals, and the same of the
  notebook's own functions and classes among them;
- what lists, dicts and objects among these contain.

The launcher finds these values once (`keep_references`), and everybody reads that result. A forked
rank inherits it. A fresh process finds the values once more, in what it was sent, and must find the
same ones by the same names, so the order of the search depends on nothing else.

The search reads types, items and instance dictionaries. It calls no method of the user's values.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import linecache
import sys
import textwrap
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from ..system.source_files import is_library
from .limits import MAX_CONTAINED_VALUES, MAX_CONTAINER_DEPTH
from .option_types import OF_ALL
from .plan import Call, Cell, Plan, Task
from .source_names import names_read

_CACHED: Any = type(functools.lru_cache(int))
_CALLABLE = (
    *(FunctionType, MethodType, functools.partial, _CACHED),
    *(staticmethod, classmethod, property),
)
"""The types that `unwrap_call` unwraps."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, range)
_CLOSED = frozenset({"nbtrain", "IPython", "ipykernel", "traitlets", "torch"})
"""Packages whose objects are not searched: several hold the kernel, with all its variables."""


@dataclass(frozen=True)
class Reference:
    """A value of the notebook that a task refers to."""

    name: str
    """How the notebook reaches it: ``model``, ``config['net']``, ``exp.model``."""

    value: Any

    is_shared: bool = True
    """Whether a fresh process gets this value. It does not get what a function of an imported
    module looks up there: the process imports the module for itself."""


@dataclass(frozen=True)
class Invocation:
    """The functions inside a callable, and the arguments that its partials and methods bind."""

    functions: tuple[FunctionType, ...]
    """From the outermost decorator to the function that the user wrote."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    owner: Any = None
    """The object of a bound method, or an object that is called itself."""

    callee: Any = None
    """What is called if that is no Python function."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by parameter, ``argument3`` for one without a parameter's name.

        Those that are bound come first. Keywords that are no identifiers are left out, and so are
        defaults.
        """
        names, _ = self._parameters()
        by_position = {
            names[i] if i < len(names) else f"argument{i}": v for i, v in enumerate(self.args)
        }
        return {**by_position, **{n: v for n, v in self.kwargs.items() if n.isidentifier()}}

    def defaults(self) -> dict[str, Any]:
        """Return all defaults of the innermost function, also for parameters that are given."""
        return self._parameters()[1]

    def _parameters(self) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Return the names of the innermost function's positional parameters, and all its defaults.

        Both are empty without a Python function.
        """
        if not self.functions:
            return (), {}
        function = self.functions[-1]
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        last = function.__defaults__ or ()
        defaults = dict(zip(names[len(names) - len(last) :], last, strict=False))
        return names, {**defaults, **(function.__kwdefaults__ or {})}


def unwrap_call(
    value: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Invocation:
    """Return the functions inside a callable, and the arguments of its call.

    Unwraps partials, methods, caches, properties, and decorators that name what they wrap. Calls
    nothing. Without a Python function inside, `functions` is empty, and `callee` is what was
    inside.
    """
    functions: list[FunctionType] = []
    named, owner = dict(kwargs or {}), None
    for _ in range(20):  # a function may name itself as what it wraps
        if type(value) is FunctionType:
            functions.append(value)
            value = value.__dict__.get("__wrapped__")
        elif type(value) is functools.partial:
            args, named = (*value.args, *args), {**value.keywords, **named}
            value = value.func
        elif type(value) is MethodType:
            owner = value.__self__
            args, value = (owner, *args), value.__func__
        elif type(value) in (staticmethod, classmethod):
            value = value.__func__
        elif type(value) is property:
            value = value.fget
        elif type(value) is _CACHED:
            value = value.__wrapped__
        else:
            break
    return Invocation(tuple(functions), args, named, owner, value)


def _unwrap_task(call: Call) -> Invocation:
    """Return what a call will call: through wrappers, bound methods, classes and callable objects.

    Of a class, it is ``__init__`` with the class as its first argument. Without a Python function
    behind the callable, as for a builtin, `functions` is empty.
    """
    called = unwrap_call(call.function, call.args, call.kwargs)
    if called.functions:
        return called
    # A class is called by its ``__init__``, any other object by the ``__call__`` of its class.
    callee = called.callee
    cls, name = (callee, "__init__") if is_class(callee) else (type(callee), "__call__")
    for base in cls.__mro__:
        method = vars(base).get(name)
        if type(method) is FunctionType:
            return unwrap_call(MethodType(method, callee), called.args, called.kwargs)
    return called


def function_of(value: Any) -> FunctionType | None:
    """Return the Python function that the user wrote inside a callable, or None."""
    functions = unwrap_call(value).functions
    return functions[-1] if functions else None


def arguments(task: Task, *, with_defaults: bool = False) -> dict[str, Any]:
    """Return the arguments of the task's function by its parameters' names, before anything ran.

    Of a cell, these are the notebook's variables with such names. `with_defaults` adds defaults: of
    a cell only constants, as the value of any other expression exists only in a rank.
    """
    if isinstance(task, Cell):
        values: dict[str, Any] = {}
        for parameter in task.parameters:
            if parameter.name in task.namespace:
                values[parameter.name] = task.namespace[parameter.name]
            elif with_defaults and parameter.default is not None:
                with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                    values[parameter.name] = ast.literal_eval(parameter.default)
        return values
    called = _unwrap_task(task)
    return {**(called.defaults() if with_defaults else {}), **called.arguments()}


def variables(cell: Cell) -> dict[str, Any]:
    """Return the notebook's variables that a cell reads, those of its parameters included, sorted.

    Those that only its functions' callees read are not among them: see `all_variables`. With a
    syntax error, only the parameters'.
    """
    names = {parameter.name for parameter in cell.parameters}
    with suppress(SyntaxError):  # the ranks report it, at the line
        names |= names_read(cell.source, cell.filename)
    return {name: cell.namespace[name] for name in sorted(names & cell.namespace.keys())}


def all_variables(cell: Cell) -> dict[str, Any]:
    """Return the notebook's variables that a cell reads, and those that its functions read, sorted.

    Searches with `references`.
    """
    found = {**{r.name: r.value for r in references(cell)}, **variables(cell)}
    notebook = cell.namespace
    return {n: v for n, v in sorted(found.items()) if n in notebook and notebook[n] is v}


def namespace(task: Task) -> dict[str, Any]:
    """Return the dictionary of a task's variables: the notebook's, or the function's module's.

    It is the dictionary itself, no copy; a new, empty one for a callable that is not in Python.
    """
    if isinstance(task, Cell):
        return task.namespace
    functions = _unwrap_task(task).functions
    return functions[-1].__globals__ if functions else {}


def public(namespace: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a copy with the variables without a leading underscore.

    A namespace may have keys of any type; others than texts are left out.
    """
    items = list(namespace.items())
    return {name: value for name, value in items if type(name) is str and name[:1] != "_"}


def named_values(task: Task) -> dict[str, Any]:
    """Return all variables of a task and the arguments of its function, by name.

    An argument hides a variable. Also private names; keys that are no texts are left out.
    """
    known = {**namespace(task), **arguments(task)}
    return {name: value for name, value in known.items() if type(name) is str}


def visible(function: FunctionType) -> Mapping[str, Any]:
    """Return the variables that a function can read: its globals, and those it closes over.

    Without a closure, it is the function's own dictionary of globals.
    """
    if not function.__closure__:
        return function.__globals__
    values = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
        values.pop(name, None)
        with suppress(ValueError):  # not assigned yet
            values[name] = cell.cell_contents
    return values


@functools.lru_cache(maxsize=1 << 10)  # forked ranks inherit it
def global_names(code: CodeType) -> tuple[str, ...]:
    """Return the names that a function's code uses as globals, also in functions within it.

    In order, with repetitions. Without attributes, and without what the body of a class reads.
    Cached.
    """
    return tuple(
        step.argval
        for part in code_within(code)
        for step in dis.get_instructions(part)
        if step.opname.endswith("_GLOBAL")
    )


def code_within(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_within(constant)


def is_class(value: Any) -> bool:
    """Return whether a value is a class. Does not read ``__class__``, which a proxy computes."""
    return issubclass(type(value), type)


def module_of(cls: type) -> str:
    """Return the name of a class's module; "" if it has none."""
    try:
        module = cls.__module__
    except Exception:  # built at runtime without a module, or whatever a metaclass raises
        return ""
    return module if type(module) is str else ""


def instance_dict(value: Any) -> dict[Any, Any]:
    """Return an object's ``__dict__``; {} if it has none, or one that is not a plain dict.

    The object's ``__getattribute__`` is not called; a property of that name is.
    """
    try:  # not `vars`, which calls the ``__getattribute__`` of the object's class
        attributes = object.__getattribute__(value, "__dict__")
    except Exception:  # a proxy may raise anything
        return {}
    return attributes if type(attributes) is dict else {}


def is_pickled_by_value(value: Any) -> bool:
    """Return whether a fresh process is sent a callable or a class itself, and imports nothing.

    That is cloudpickle's rule: its module is the notebook, or does not contain it. For another
    value, its class counts; for a partial or method, the function. False for builtins.
    """
    while type(value) in (functools.partial, MethodType, staticmethod, classmethod):
        value = value.func if type(value) is functools.partial else value.__func__
    if type(value) not in (FunctionType, _CACHED) and not is_class(value):
        value = type(value)
    home = module_of(value)
    if home == "builtins":  # which does not contain all of Python's own types
        return False
    member: Any = sys.modules.get(home) if home != "__main__" else None
    for name in getattr(value, "__qualname__", "").split("."):  # a cached partial has no name
        member = (vars(member) if is_class(member) else instance_dict(member)).get(name)
    return (member.__func__ if type(member) in (staticmethod, classmethod) else member) is not value


def references(task: Task) -> list[Reference]:
    """Return the values that a task refers to, each once, nearest first.

    Searches for them, unless `keep_references` keeps the result. Then it is the task's own list,
    which `forget_references` empties.
    """
    return task.references or _search_references(task)


def keep_references(task: Task) -> None:
    """Find what a task refers to, and keep it with the task until `forget_references`.

    Does nothing if it is kept. A search takes 40 ms for 10,000 values, and several checks and
    observers need the result.
    """
    if not task.references:
        task.references.extend(_search_references(task))


def forget_references(task: Task) -> None:
    """Release the values: from now on they may change, and the task keeps none of them alive."""
    task.references.clear()


def _search_references(task: Task) -> list[Reference]:
    """Search what a task refers to, and what that contains; each object once.

    First comes what is shared with the notebook (arguments, a cell's variables, what the function
    is bound to), then what the function looks up by name; nearest first in each. Plain values
    (numbers, texts) are left out. A name that is used twice gets " (2)". A part that raises while
    it is read is skipped.
    """
    lookups: list[tuple[str, Any]] = []
    if isinstance(task, Cell):
        roots = [*arguments(task).items(), *variables(task).items()]
    else:
        called, owner = _unwrap_task(task), owner_name(task)
        roots = [
            (owner if owner and value is called.owner else name, value)
            for name, value in _bound_values(called, "")
        ]
        lookups = _looked_up_values(called, "")
        if is_pickled_by_value(task.function):
            roots, lookups = [*roots, *lookups], []
    # By id, and alive: CPython reuses the ids of freed objects.
    variables_of_task = namespace(task)
    seen: dict[int, Any] = {id(variables_of_task): variables_of_task}
    names = Counter[str]()
    found: list[Reference] = []
    for values, is_shared in ((roots, True), (lookups, False)):  # a value of both is shared
        waiting = deque((name, value, 0) for name, value in values)
        while waiting:  # breadth first, so that short names win
            name, value, depth = waiting.popleft()
            if id(value) in seen or type(value) in PLAIN:
                continue
            seen[id(value)] = value
            names[name] += 1
            unique = name if names[name] == 1 else f"{name} ({names[name]})"
            found.append(Reference(unique, value, is_shared))
            with suppress(Exception):  # an object that raises when it is read ends no launch
                waiting.extend(_referenced_parts(unique, value, depth))
    return found


def _referenced_parts(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any, int]]:
    """Yield what a value refers to, by name and with the number of containers around it.

    Of a callable, its arguments and what it reads; of a class, its bases and members; of others,
    their class and contents, down to MAX_CONTAINER_DEPTH. An imported function's reads and an
    imported class's members are left out.
    """
    if type(value) in _CALLABLE:
        called = unwrap_call(value)
        values = _bound_values(called, f"{name}.")
        if is_pickled_by_value(value):  # of imported functions, only the task's own is searched
            values += _looked_up_values(called, f"{name}.")
        yield from ((path, part, 0) for path, part in values)
        return
    cls = value if is_class(value) else type(value)
    if is_pickled_by_value(cls):
        if cls is not value:
            yield cls.__qualname__, cls, 0
        else:
            yield from ((base.__qualname__, base, 0) for base in cls.__bases__)
            for member, part in sorted(vars(cls).items()):  # cloudpickle sorts them, too
                yield f"{name}.{member}", part, 1
    if depth < MAX_CONTAINER_DEPTH:
        for path, part in contained_values(value).items():
            yield name + path, part, depth + 1


def _bound_values(called: Invocation, prefix: str) -> list[tuple[str, Any]]:
    """Return the arguments of a callable, and the object that is called, which may be None.

    Their names begin with `prefix`.
    """
    values = [(prefix + name, value) for name, value in called.arguments().items()]
    return [*values, (f"{prefix}function", called.callee)]


def _looked_up_values(called: Invocation, prefix: str) -> list[tuple[str, Any]]:
    """Return the defaults of a callable, and its functions with the variables that they read.

    A variable that does not exist yet is left out. Only defaults get the `prefix`.
    """
    values = [(prefix + name, value) for name, value in called.defaults().items()]
    for function in called.functions:
        known, code = visible(function), function.__code__
        names = (*code.co_freevars, *global_names(code))
        values += [(function.__name__, function), *((n, known[n]) for n in names if n in known)]
    return values


def owner_name(call: Call) -> str:
    """Return the notebook's name for the object of a bound method; "" if it has no public name.

    Also "" for another function. Only the notebook's process can look it up: a fresh process gets
    it with the call.
    """
    owner = _unwrap_task(call).owner
    if call.owner or owner is None:
        return call.owner
    for known in (vars(sys.modules["__main__"]), namespace(call)):
        for name, value in public(known).items():
            if value is owner:
                return name
    return ""


def expression_of(call: Call) -> str:
    """Return how the notebook can write a call's function, by its name or a variable; else "".

    The name of a plain function is not looked up.
    """
    function: Any = call.function
    name = getattr(function, "__name__", "")
    if type(function) is FunctionType and name.isidentifier():
        return str(name)
    if type(function) is MethodType:
        owner = owner_name(call)
        return f"{owner}.{name}" if owner else ""
    known = public(vars(sys.modules["__main__"]))
    return next((name for name, value in known.items() if value is function), "")


def contained_values(value: Any) -> dict[str, Any]:
    """Return the first of what a list, a dict or an object contains, by ``[0]``, ``['a']``, ``.a``.

    Up to MAX_CONTAINED_VALUES of each. Empty for models, which are copied back as a whole, for
    classes and modules, and for objects of torch, IPython and the like.
    """
    cls, parts = type(value), dict[str, Any]()
    package = module_of(cls).partition(".")[0]
    if is_model(value) or issubclass(cls, (type, ModuleType)) or package in _CLOSED:
        return parts
    if issubclass(cls, dict):
        for index, (key, item) in enumerate(list(islice(dict.items(value), MAX_CONTAINED_VALUES))):
            parts[f"[{_label(key, index)}]"] = item
    elif issubclass(cls, (list, tuple)):
        items = list.__iter__(value) if issubclass(cls, list) else tuple.__iter__(value)
        first = islice(items, MAX_CONTAINED_VALUES)
        parts = {f"[{index}]": item for index, item in enumerate(first)}
    for key, item in list(islice(instance_dict(value).items(), MAX_CONTAINED_VALUES)):
        if type(key) is str:
            parts[f".{key}"] = item
    return parts


def _label(key: Any, index: int) -> str:
    """Return what stands for a key in a name: a short text, as a file is named after it."""
    is_short = type(key) is int or (type(key) is str and len(key) <= 24)
    return repr(key) if is_short else f"#{index}"


def is_model(value: Any) -> bool:
    """Return whether a value is a model of torch."""
    # Not isinstance: that reads the object's class, and a proxy may raise.
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.nn.Module)


def is_optimizer(value: Any) -> bool:
    """Return whether a value is an optimizer of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.optim.Optimizer)


def is_scheduler(value: Any) -> bool:
    """Return whether a value is one of torch's learning rate schedulers."""
    module: Any = sys.modules.get("torch.optim.lr_scheduler")
    return module is not None and issubclass(type(value), module.LRScheduler)


def models(task: Task) -> dict[str, Any]:
    """Return the models that a task refers to, by name."""
    return {r.name: r.value for r in references(task) if is_model(r.value)}


def synced_objects(plan: Plan) -> dict[str, Any]:
    """Return the notebook's objects that get the ranks' state after the run, by name.

    These are models, optimizers and schedulers, in that order: those that `Plan.out` names and,
    with `Plan.sync`, those that the task refers to. Any other variable of `Plan.out` comes back as
    a new value. An object with two names has its first one only.
    """
    known = named_values(plan.task)
    pairs = [(name, known.get(name)) for name in plan.out]
    if plan.sync:
        pairs += [(r.name, r.value) for r in references(plan.task) if r.is_shared]
    values: dict[str, Any] = {}
    seen = set[int]()
    for is_kind in (is_model, is_optimizer, is_scheduler):
        for name, value in pairs:
            if is_kind(value) and id(value) not in seen and name not in values:
                seen.add(id(value))
                values[name] = value
    return values


def unsynced_models(plan: Plan) -> dict[str, Any]:
    """Return the notebook's models that do not get the ranks' state, by name.

    These are variables, and what those contain. Empty without `Plan.sync`; names in `Plan.out` and
    private ones are left out.
    """
    if not plan.sync:
        return {}
    variables = namespace(plan.task)
    skipped = {name.removesuffix(OF_ALL) for name in plan.out} | {"In", "Out"}
    seen = {id(variables), *map(id, synced_objects(plan).values())}
    found: dict[str, Any] = {}
    for name, value in {**models(plan.task), **named_values(plan.task)}.items():
        variable = name.replace("[", ".").partition(".")[0]
        if variable in skipped or variable.startswith("_") or id(value) in seen:
            continue
        for path, part in {"": value, **contained_values(value)}.items():
            if is_model(part) and id(part) not in seen:
                seen.add(id(part))
                found[name + path] = part
    return found


class HostNeeds(NamedTuple):
    """What a task needs of the host, by its source and its values."""

    source: str = ""

    weights: int = 0
    """Bytes of the trainable parameters that it refers to."""

    workers: int = 0
    """DataLoader workers per rank."""


def host_needs(task: Task) -> HostNeeds:
    """Return what a task needs of the host, without running any of it.

    The workers are the most that a loader or the source has.
    """
    source = task.source if isinstance(task, Cell) else _read_source(function_of(task.function))
    values = [reference.value for reference in references(task)]
    loader: Any = getattr(sys.modules.get("torch.utils.data"), "DataLoader", ())
    loaders = [value for value in values if issubclass(type(value), loader)]
    counts = [vars(each).get("num_workers", 0) for each in loaders]
    counts += _written_workers(source) if "num_workers" in source else ()
    return HostNeeds(source, _trainable_bytes(filter(is_model, values)), max(counts, default=0))


def _written_workers(source: str) -> Iterator[int]:
    """Yield the numbers of workers that calls in a source write out. Ignores a syntax error."""
    with suppress(SyntaxError):  # a lambda in the middle of a call
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.keyword(
                    arg="num_workers" | "dataloader_num_workers",
                    value=ast.Constant(value=int(count)),
                ):
                    yield count


def _read_source(function: FunctionType | None) -> str:
    """Return the source of a function without its indentation; "" where it cannot be read."""
    if function is None:
        return ""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError, SyntaxError, IndexError):  # typed at a prompt, or edited since
        return ""


def source_lines(task: Task) -> list[str]:
    """Return the lines of the user's own code that a task runs. Parses nothing.

    These are the lines of the cell, of the notebook's functions and classes that it refers to, and
    all lines of each other file of the user's that it takes something from.
    """
    lines = task.source.splitlines() if isinstance(task, Cell) else []
    files: dict[str, None] = {}
    own = ("__main__", namespace(task).get("__name__"))
    for value in (reference.value for reference in references(task)):
        if type(value) is ModuleType:
            home = vars(value).get("__name__")
        elif is_class(value) or type(value) is FunctionType:
            home = module_of(value)
        else:
            continue
        if home in own:
            members = vars(value).values() if is_class(value) else [value]
            for function in filter(None, map(function_of, members)):
                lines += _read_source(function).splitlines()
        elif type(home) is str and (module := sys.modules.get(home)) is not None:
            file = vars(module).get("__file__")
            files |= {file: None} if type(file) is str and not is_library(file) else {}
    return [*lines, *(line for file in files for line in linecache.getlines(file))]


def _trainable_bytes(models: Iterable[Any]) -> int:
    """Return the bytes of the parameters that training would change, each storage once.

    Only those on the CPU: a rank that writes to them copies the pages that it inherited.
    """
    torch: Any = sys.modules.get("torch")
    sizes: dict[int, int] = {}
    for model in models:
        # Not `parameters()`, which a model may override; without `__init__` it has no parts.
        with suppress(AttributeError):
            for module in torch.nn.Module.modules(model):
                for parameter in vars(module).get("_parameters", {}).values():
                    # A subclass may compute its storage.
                    is_plain = type(parameter) in (torch.Tensor, torch.nn.Parameter)
                    if is_plain and parameter.requires_grad and parameter.device.type == "cpu":
                        storage = parameter.untyped_storage()
                        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
