"""Finds the values of the notebook that a task refers to.

A task refers to what its function is given (arguments, those that `functools.partial` binds,
defaults, the object of a bound method), to what its source looks up (a cell's variables, a
function's closure and globals, and the same of the notebook's own functions and classes among
them), and to what lists, dicts and objects among all these hold.

The notebook and every rank, forked or fresh, walk over the same values in the same order, so that
they find the same ones by the same names. Users' values are looked at from outside: their types,
items and instance dictionaries, never a property or a method of theirs.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import linecache
import re
import sys
import textwrap
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from types import (
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

from ..system.source_files import is_library
from .option_types import OF_ALL
from .plan import Call, Cell, Plan, Task
from .source_names import names_read

ITEMS = 100
"""Items of a list, a dict or an object that are looked at, the first ones: it may be a data set."""

DEPTH = 3
"""Containers within each other that are looked into: ``runs[0].nets['g']`` is in three."""

VALUES = 5000
"""Values that are looked at in all."""

_CLASS_DICT: Any = type.__dict__["__dict__"]
_MODULE: Any = type.__dict__["__module__"]
_MRO: Any = type.__dict__["__mro__"]
_BASES: Any = type.__dict__["__bases__"]
_QUALNAME: Any = type.__dict__["__qualname__"]
_CACHED: Any = type(functools.lru_cache(int))
_CALLABLE = (
    *(FunctionType, MethodType, functools.partial, _CACHED),
    *(staticmethod, classmethod, property),
)
"""What `invocation` looks behind."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, range)
_CLOSED = frozenset({"nbtrain", "IPython", "ipykernel", "traitlets", "torch"})
"""Packages whose objects are not looked into: several hold the kernel, with all its variables."""


@dataclass(frozen=True)
class Reference:
    """A value of the notebook that a task refers to."""

    name: str
    """How the notebook reaches it: ``model``, ``config['net']``, ``exp.model``."""

    value: Any

    is_shared: bool = True
    """Whether a fresh process gets this value. A function of an imported module does not look up
    this one there: the process imports the module anew."""


@dataclass(frozen=True)
class Invocation:
    """What stands behind a callable: functions, and what partials and methods hand them."""

    functions: tuple[FunctionType, ...]
    """From the outermost decorator to the function that the user wrote."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    owner: Any = None
    """The object of a bound method, or one that is called itself."""

    rest: Any = None
    """What is called where it is no Python function."""

    def given(self) -> dict[str, Any]:
        """Return the arguments by their parameters' names, ``argument3`` where there is none."""
        names, _ = self._parameters()
        given = {names[i] if i < len(names) else f"argument{i}": v for i, v in enumerate(self.args)}
        return {**given, **{n: v for n, v in self.kwargs.items() if n.isidentifier()}}

    def defaults(self) -> dict[str, Any]:
        """Return the defaults of the parameters."""
        return self._parameters()[1]

    def _parameters(self) -> tuple[tuple[str, ...], dict[str, Any]]:
        if not self.functions:
            return (), {}
        function = self.functions[-1]
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        last = function.__defaults__ or ()
        defaults = dict(zip(names[len(names) - len(last) :], last, strict=False))
        return names, {**defaults, **(function.__kwdefaults__ or {})}


def invocation(
    value: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Invocation:
    """Look behind partials, methods, caches and decorators that name what they wrap."""
    functions: list[FunctionType] = []
    given, owner = dict(kwargs or {}), None
    for _ in range(20):
        if type(value) is FunctionType:
            functions.append(value)
            value = value.__dict__.get("__wrapped__")
        elif type(value) is functools.partial:
            args, given = (*value.args, *args), {**value.keywords, **given}
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
    return Invocation(tuple(functions), args, given, owner, value)


def _invocation_of(call: Call) -> Invocation:
    called = invocation(call.function, call.args, call.kwargs)
    if called.functions:
        return called
    # A class is called by its ``__init__``, any other object by the ``__call__`` of its class.
    is_a_class = is_class(called.rest)
    for cls in _MRO.__get__(called.rest if is_a_class else type(called.rest)):
        method = class_dict(cls).get("__init__" if is_a_class else "__call__")
        if type(method) is FunctionType:
            return invocation(MethodType(method, called.rest), called.args, called.kwargs)
    return called


def function_of(value: Any) -> FunctionType | None:
    """Return the Python function that the user wrote behind a callable; None for other kinds."""
    functions = invocation(value).functions
    return functions[-1] if functions else None


def arguments(task: Task, *, with_defaults: bool = False) -> dict[str, Any]:
    """Return what the task's function is given, by its parameters' names, before anything ran.

    Of a cell's defaults only constants: the ranks alone know the value of any other expression.
    """
    if isinstance(task, Cell):
        given: dict[str, Any] = {}
        for parameter in task.parameters:
            if parameter.name in task.namespace:
                given[parameter.name] = task.namespace[parameter.name]
            elif with_defaults and parameter.default is not None:
                with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                    given[parameter.name] = ast.literal_eval(parameter.default)
        return given
    called = _invocation_of(task)
    return {**(called.defaults() if with_defaults else {}), **called.given()}


def variables(cell: Cell) -> dict[str, Any]:
    """Return the notebook's variables that a cell reads, those of its parameters included."""
    names = {parameter.name for parameter in cell.parameters}
    with suppress(SyntaxError):  # the ranks report it, at the line
        names |= names_read(cell.source, cell.filename)
    return {name: cell.namespace[name] for name in sorted(names & cell.namespace.keys())}


def looked_up(cell: Cell) -> dict[str, Any]:
    """Return the notebook's variables that a cell reads, and those that its functions look up."""
    found = {**{r.name: r.value for r in references(cell)}, **variables(cell)}
    notebook = cell.namespace
    return {n: v for n, v in sorted(found.items()) if n in notebook and notebook[n] is v}


def namespace(task: Task) -> dict[str, Any]:
    """Return where the variables of a task are: the notebook, or the function's module."""
    if isinstance(task, Cell):
        return task.namespace
    functions = _invocation_of(task).functions
    return functions[-1].__globals__ if functions else {}


def public(namespace: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the variables whose names have no underscore; a namespace may have any keys."""
    items = list(namespace.items())
    return {name: value for name, value in items if type(name) is str and name[:1] != "_"}


def by_name(task: Task) -> dict[str, Any]:
    """Return all that a task's variables are, and what its function is given, by name."""
    known = {**namespace(task), **arguments(task)}
    return {name: value for name, value in known.items() if type(name) is str}


def visible(function: FunctionType) -> Mapping[str, Any]:
    """Return all that a function's names can mean: its globals, and what it closes over."""
    if not function.__closure__:
        return function.__globals__
    values = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
        values.pop(name, None)
        with suppress(ValueError):  # not assigned yet
            values[name] = cell.cell_contents
    return values


def _looked_up(function: FunctionType) -> dict[str, Any]:
    """Return what a function names: those of its globals that cloudpickle sends with it, too."""
    known, code = visible(function), function.__code__
    names = (*code.co_freevars, *global_names(code))
    return {name: known[name] for name in names if name in known}


@functools.lru_cache(maxsize=1 << 10)  # also for forked ranks, which ask the same again
def global_names(code: CodeType) -> tuple[str, ...]:
    """Return the global names that a function looks up, and those of functions within it."""
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
    """Return whether a value is a class, without asking its ``__class__``."""
    return issubclass(type(value), type)


def class_dict(cls: type) -> Mapping[str, Any]:
    """Return a class's own ``__dict__``, without asking its metaclass."""
    members: Mapping[str, Any] = _CLASS_DICT.__get__(cls)
    return members


def module_of(cls: type) -> str:
    """Return the module of a class, "" for none, without asking its metaclass."""
    try:
        module = _MODULE.__get__(cls)  # not in the `class_dict` of a class that is written in C
    except AttributeError:  # built at runtime from a namespace without one
        return ""
    return module if type(module) is str else ""


def qualname_of(cls: type) -> str:
    """Return a class's qualified name, without asking its metaclass."""
    return str(_QUALNAME.__get__(cls))


def instance_dict(value: Any) -> dict[Any, Any]:
    """Return an object's own ``__dict__``; nothing where its class has a property of that name."""
    for base in _MRO.__get__(type(value)):
        slot: Any = class_dict(base).get("__dict__")
        if type(slot) in (GetSetDescriptorType, MemberDescriptorType):
            attributes = None
            with suppress(AttributeError):  # a slot of that name, not assigned (mypyc's classes)
                attributes = slot.__get__(value)
            return attributes if type(attributes) is dict else {}
    return {}


def travels_by_value(value: Any) -> bool:
    """Return whether a fresh process gets a callable or a class itself, without an import.

    That is cloudpickle's rule: its module does not have it, or is the notebook.
    """
    while type(value) in (functools.partial, MethodType, staticmethod, classmethod):
        value = value.func if type(value) is functools.partial else value.__func__
    if type(value) not in (FunctionType, _CACHED) and not is_class(value):
        value = type(value)
    if is_class(value):
        home, path = module_of(value), qualname_of(value)
    else:
        home, path = value.__module__, getattr(value, "__qualname__", "")  # a cached partial: none
    if home == "builtins":  # not all of Python's own types are in there
        return False
    member: Any = sys.modules.get(home) if type(home) is str and home != "__main__" else None
    for part in path.split("."):
        member = (class_dict(member) if is_class(member) else instance_dict(member)).get(part)
    return (member.__func__ if type(member) in (staticmethod, classmethod) else member) is not value


_walked: tuple[Task, list[Reference]] | None = None
"""The task whose references are kept, and they; a forked rank begins with those of its kernel."""


def references(task: Task) -> list[Reference]:
    """Return the values that a task refers to, each once, nearest first."""
    return _walked[1] if _walked is not None and _walked[0] is task else _find(task)


def keep_references(task: Task) -> None:
    """Find what a task refers to once, until `forget_references`: a walk takes up to 40 ms."""
    global _walked
    if _walked is None or _walked[0] is not task:
        _walked = task, _find(task)


def forget_references() -> None:
    """Let go of the values: from now on they may change, and nobody else may hold them."""
    global _walked
    _walked = None


def _find(task: Task) -> list[Reference]:
    walk = _Walk([namespace(task)])
    if isinstance(task, Cell):
        for name, value in {**arguments(task), **variables(task)}.items():
            walk.add(name, value)
    else:
        called = _invocation_of(task)
        walk.follow(called, "", travels_by_value(task.function), owner_name(task))
    return walk.run()


def owner_name(call: Call) -> str:
    """Return the notebook's name for the object of a bound method, "" for none.

    Only the notebook itself can know it: a fresh process gets it with the call.
    """
    owner = _invocation_of(call).owner
    if call.owner or owner is None:
        return call.owner
    for known in (vars(sys.modules["__main__"]), namespace(call)):
        for name, value in public(known).items():
            if value is owner:
                return name
    return ""


def expression_of(call: Call) -> str:
    """Return how the notebook can write a call's function: by its name or a variable; or ""."""
    function: Any = call.function
    name = getattr(function, "__name__", "")
    if type(function) is FunctionType and name.isidentifier():
        return str(name)
    if type(function) is MethodType:
        owner = owner_name(call)
        return f"{owner}.{name}" if owner else ""
    known = public(vars(sys.modules["__main__"]))
    return next((name for name, value in known.items() if value is function), "")


class _Walk:
    """Goes over values and what they hold, breadth first, so that short names win."""

    def __init__(self, closed: Iterable[Any] = (), *, follows: bool = True) -> None:
        self._follows = follows
        self._seen = {id(value): value for value in closed}  # alive: an id may come again
        self._names = Counter[str]()
        self._waiting = deque[tuple[Reference, int]]()
        self._unshared: list[tuple[str, Any]] = []

    def add(self, name: str, value: Any, depth: int = 0, is_shared: bool = True) -> None:
        if id(value) in self._seen or type(value) in PLAIN or len(self._seen) >= VALUES:
            return
        self._seen[id(value)] = value
        self._names[name] += 1
        unique = name if self._names[name] == 1 else f"{name} ({self._names[name]})"
        self._waiting.append((Reference(unique, value, is_shared), depth))

    def run(self) -> list[Reference]:
        references = []
        for is_shared in (True, False):  # what is reached in both ways is shared
            for name, value in () if is_shared else self._unshared:
                self.add(name, value, 0, is_shared)
            while self._waiting:
                reference, depth = self._waiting.popleft()
                references.append(reference)
                if len(self._seen) < VALUES:
                    # Whatever an object does that is looked at, it ends no launch and no rank.
                    with suppress(Exception):
                        self._look_into(reference, depth)
        return references

    def _look_into(self, reference: Reference, depth: int) -> None:
        name, value, is_shared = reference.name, reference.value, reference.is_shared
        if type(value) in _CALLABLE:
            if self._follows:
                by_value = travels_by_value(value)
                self.follow(invocation(value), f"{name}.", by_value, "", is_shared)
            return
        cls = value if is_class(value) else type(value)
        if self._follows and travels_by_value(cls):
            if cls is not value:
                self.add(qualname_of(cls), cls, 0, is_shared)
            else:
                self._look_into_class(name, cls, is_shared)
        for path, part in held(value).items() if depth < DEPTH else ():
            self.add(name + path, part, depth + 1, is_shared)

    def _look_into_class(self, name: str, cls: type, is_shared: bool) -> None:
        for base in _BASES.__get__(cls):
            self.add(qualname_of(base), base, 0, is_shared)
        for member, value in sorted(class_dict(cls).items()):  # cloudpickle sorts them, too
            self.add(f"{name}.{member}", value, 1, is_shared)

    def follow(
        self, called: Invocation, prefix: str, by_value: bool, owner: str, is_shared: bool = True
    ) -> None:
        """Add what a callable is given and looks up.

        Of imported ones only the task itself, which has no prefix, is looked into.
        """
        for name, value in called.given().items():
            is_owner = owner and value is called.owner
            self.add(owner if is_owner else prefix + name, value, 0, is_shared)
        if called.rest is not None:
            self.add(f"{prefix}function", called.rest, 0, is_shared)
        if prefix and not by_value:
            return
        own = [(prefix + name, value) for name, value in called.defaults().items()]
        for function in called.functions:
            own += [(function.__name__, function), *_looked_up(function).items()]
        for name, value in own:
            if by_value:
                self.add(name, value, 0, is_shared)
            else:
                self._unshared.append((name, value))


def held(value: Any) -> dict[str, Any]:
    """Return the first of what a list, a dict or an object holds, by ``[0]``, ``['a']``, ``.a``."""
    cls, parts = type(value), dict[str, Any]()
    package = module_of(cls).partition(".")[0]
    if is_model(value) or issubclass(cls, (type, ModuleType)) or package in _CLOSED:
        return parts
    if issubclass(cls, dict):
        for index, (key, item) in enumerate(list(islice(dict.items(value), ITEMS))):
            parts[f"[{_label(key, index)}]"] = item
    elif issubclass(cls, (list, tuple)):
        items = list.__iter__(value) if issubclass(cls, list) else tuple.__iter__(value)
        parts = {f"[{index}]": item for index, item in enumerate(islice(items, ITEMS))}
    for key, item in list(islice(instance_dict(value).items(), ITEMS)):
        if type(key) is str:
            parts[f".{key}"] = item
    for base in _MRO.__get__(cls):
        members = class_dict(base)
        for key, slot in members.items() if "__slots__" in members else ():
            if type(slot) is MemberDescriptorType:
                with suppress(AttributeError):  # not assigned yet
                    parts[f".{key}"] = slot.__get__(value)
    return parts


def _label(key: Any, index: int) -> str:
    """Return what stands for a key in a name, of which a file's name is made."""
    is_short = type(key) is int or (type(key) is str and len(key) <= 24)
    return repr(key) if is_short else f"#{index}"


def is_model(value: Any) -> bool:
    """Return whether a value is a model."""
    # Not isinstance: that asks the object, and a proxy may answer with an exception.
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.nn.Module)


def is_optimizer(value: Any) -> bool:
    """Return whether a value is an optimizer."""
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.optim.Optimizer)


def is_scheduler(value: Any) -> bool:
    """Return whether a value is one of torch's learning rate schedulers."""
    module: Any = sys.modules.get("torch.optim.lr_scheduler")
    return module is not None and issubclass(type(value), module.LRScheduler)


def models(task: Task) -> dict[str, Any]:
    """Return the models that a task refers to, by name."""
    return {r.name: r.value for r in references(task) if is_model(r.value)}


def returned(plan: Plan) -> dict[str, Any]:
    """Return what is copied back into the notebook's own objects, by name.

    Of what `Plan.out` names, models, optimizers and schedulers; with `Plan.sync`, also those that
    the task refers to. Other things that it names come back as new values. A model comes before
    its optimizer, and that one before its scheduler.
    """
    known = by_name(plan.task)
    kinds = (is_model, is_optimizer, is_scheduler)
    pairs = [(name, known.get(name)) for name in plan.out]
    if plan.sync:
        pairs += [(r.name, r.value) for r in references(plan.task) if r.is_shared]
    values: dict[str, Any] = {}
    for is_kind in kinds:
        for name, value in pairs:
            if is_kind(value):
                values.setdefault(name, value)
    first = {id(value): name for name, value in reversed(values.items())}
    return {name: value for name, value in values.items() if first[id(value)] == name}


def not_returned(plan: Plan) -> dict[str, Any]:
    """Return the other models that the notebook has variables for, or in objects, by name."""
    if not plan.sync:
        return {}
    asked_for = {name.removesuffix(OF_ALL) for name in plan.out}
    walk = _Walk([namespace(plan.task), *returned(plan).values()], follows=False)
    for name, value in {**models(plan.task), **by_name(plan.task)}.items():
        variable = re.split(r"[.[]", name)[0]
        if variable not in (*asked_for, "In", "Out") and not variable.startswith("_"):
            walk.add(name, value)
    return {r.name: r.value for r in walk.run() if is_model(r.value)}


class HostNeeds(NamedTuple):
    """What a task needs of the host, as far as its source and values show."""

    source: str = ""

    weights: int = 0
    """Bytes of trainable parameters that it refers to."""

    workers: int = 0
    """DataLoader workers per rank."""


def host_needs(task: Task) -> HostNeeds:
    """Look at a task without running any of it."""
    source = task.source if isinstance(task, Cell) else _source(function_of(task.function))
    values = [reference.value for reference in references(task)]
    loader: Any = getattr(sys.modules.get("torch.utils.data"), "DataLoader", ())
    loaders = [value for value in values if issubclass(type(value), loader)]
    counts = [vars(each).get("num_workers", 0) for each in loaders]
    counts += _written_workers(source) if "num_workers" in source else ()
    return HostNeeds(source, _trainable_bytes(filter(is_model, values)), max(counts, default=0))


def _written_workers(source: str) -> Iterator[int]:
    """Yield the numbers of workers that calls in a source write out."""
    with suppress(SyntaxError):  # a lambda in the middle of a call
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.keyword(
                    arg="num_workers" | "dataloader_num_workers",
                    value=ast.Constant(value=int(count)),
                ):
                    yield count


def _source(function: FunctionType | None) -> str:
    if function is None:
        return ""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError, SyntaxError, IndexError):  # typed at a prompt, or edited since
        return ""


def source_lines(task: Task) -> list[str]:
    """Return the lines of the code that a task runs, as far as that is the user's own.

    Those of the cell, of the notebook's functions and classes that it refers to, and all lines of
    each other file of the user's from which it takes something. Nothing is parsed.
    """
    lines = task.source.splitlines() if isinstance(task, Cell) else []
    files: dict[str, None] = {}
    own = ("__main__", namespace(task).get("__name__"))
    for value in (reference.value for reference in references(task)):
        if type(value) is ModuleType:
            home = vars(value).get("__name__")
        else:
            home = value.__module__ if type(value) is FunctionType else None
            home = module_of(value) if is_class(value) else home
        if home in own:
            members = class_dict(value).values() if is_class(value) else [value]
            for function in filter(None, map(function_of, members)):
                lines += _source(function).splitlines()
        elif type(home) is str and (module := sys.modules.get(home)) is not None:
            file = vars(module).get("__file__")
            files |= {file: None} if type(file) is str and not is_library(file) else {}
    return [*lines, *(line for file in files for line in linecache.getlines(file))]


def _trainable_bytes(models: Iterable[Any]) -> int:
    """Return the bytes of the parameters that training would change, each storage once.

    Only those on the CPU: a rank that writes to them copies the pages it inherited.
    """
    torch: Any = sys.modules.get("torch")
    sizes: dict[int, int] = {}
    waiting, seen = list(models), set[int]()
    while waiting:
        module = waiting.pop()
        if id(module) in seen or not is_model(module):
            continue
        seen.add(id(module))
        inside = vars(module)  # not `parameters()`, which a model may override
        waiting += (inside.get("_modules") or {}).values()
        for parameter in (inside.get("_parameters") or {}).values():
            plain = type(parameter) in (torch.Tensor, torch.nn.Parameter)  # a subclass may compute
            if plain and parameter.requires_grad and parameter.device.type == "cpu":
                storage = parameter.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
