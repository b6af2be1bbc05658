"""From a running notebook to a script: its variables as they are, functions as they were written.

A variable becomes a literal where it has a short one; functions, classes and imports come from
the cells that made them; tensors go into a safetensors file beside the script, anything else into
a pickle. A model is made again by its statement and given its weights where that is all there is
to it (`models`), else it is pickled too: what the script starts from is what the ranks start from.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import serialize
from ..cell import Options
from ..errors import PlanError
from ..names import is_secret
from ..plan import Cell
from ..ship import check_graphs, submodules
from . import script
from .models import made_again
from .slicing import seeds
from .statements import Statement, import_of, read_earlier
from .static import training_of, wanted
from .values import NEEDED_BY, are_tensors, as_safetensors, literal, pickled


def save(cell: Cell, raw: str, history: Sequence[str], options: Options) -> str:
    """Write the script of a cell that is about to run, as its options ask; say what was written.

    `history` has the inputs of the cells before it. Raises `PlanError` for what cannot be there.
    """
    importlib.import_module("torch")  # of each value is asked whether it is a tensor
    path = Path(options.save or "train.py").expanduser()
    where = f"In[{cell.number}]" if cell.number is not None else "a notebook"
    training = replace(training_of(raw, where, cell.flags), options=options)
    earlier = [
        statement
        for number, text in enumerate(history)
        if not text.lstrip().startswith("%%distributed")
        for statement in read_earlier(text, f"In[{number}]")
    ]
    names = wanted(training, cell.namespace.keys())
    check_graphs({n: cell.namespace[n] for n in names & cell.namespace.keys()})
    gathered = _Gathered(cell.namespace, earlier, path.stem)
    gathered.add(names)
    gathered.add_models()
    text = "\n\n".join([*(piece.text for piece in gathered.pieces), script.body(training)])
    gathered.add_files(text)
    # ``import xml`` alone brings no ``xml.etree``.
    named = [f"import {name}" for name in submodules(text, cell.namespace)]
    imports = [*gathered.import_lines(), *named]
    parts = [*dict.fromkeys(imports), *gathered.in_order()]
    material = script.Material(parts, script.futures(earlier), gathered.files)
    source = script.text(training, material, cell.namespace.keys(), path.name)
    script.write(path, source, material.files)
    return f"nbtrain: wrote {', '.join([str(path), *material.files])}"


@dataclass(frozen=True)
class _Piece:
    """A part of the script: the names it binds, and those it needs to be bound before."""

    text: str
    binds: frozenset[str]
    needs: frozenset[str] = frozenset()


class _Gathered:
    """What the script needs of a notebook, name by name."""

    def __init__(self, namespace: Mapping[str, Any], earlier: Sequence[Statement], stem: str):
        self.namespace = namespace
        self.stem = stem
        self.earlier = earlier
        self.last = {name: s for s in earlier for name in s.binds}
        self.places = {s: i for i, s in enumerate(earlier)}
        self.imports: list[str] = []
        self.imported: dict[Statement, set[str]] = {}
        self.sources: dict[Statement, _Piece] = {}
        self.literals: dict[str, _Piece] = {}
        self.loads: list[_Piece] = []
        self.values: dict[str, Any] = {}
        self.tensors: dict[str, Any] = {}
        self.weights: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self._seen: set[str] = set()

    @property
    def pieces(self) -> list[_Piece]:
        """Literals, then what cells defined, as it was, then what is loaded."""
        literals = sorted(self.literals.items(), key=lambda item: self._place(item[0]))
        sources = sorted(self.sources.items(), key=lambda item: self.places[item[0]])
        return [*(piece for _, piece in (*literals, *sources)), *self.loads]

    def _place(self, name: str) -> tuple[int, str]:
        return self.places.get(self.last[name], -1) if name in self.last else -1, name

    def import_lines(self) -> list[str]:
        """Return the notebook's own imports, as far as they are needed, and those it lacks."""
        own = sorted(self.imported.items(), key=lambda item: self.places[item[0]])
        return [*(import_of(statement, names) for statement, names in own), *self.imports]

    def add(self, names: Iterable[str]) -> None:
        """Find out how each variable gets into the script, and what that needs."""
        waiting = sorted(names)
        while waiting:
            name = waiting.pop()
            if name in self._seen or name not in self.namespace:
                continue
            self._seen.add(name)
            waiting += sorted(self._add(name, self.namespace[name]))

    def _add(self, name: str, value: Any) -> frozenset[str]:
        """Put one variable where it belongs; return the names that it needs."""
        if name == "get_ipython":
            raise PlanError("the cell calls get_ipython(), which a script does not have")
        if type(value) is types.FunctionType and "_torchdynamo_orig_callable" in vars(value):
            raise PlanError(f"`{name}` is compiled; compile it inside the training function")
        made = self.last.get(name)
        expression = literal(value)
        if expression is not None and is_secret(name, value):
            self.literals[name] = _Piece(
                f"{name} = os.environ[{name.upper()!r}]  # not written here", frozenset({name})
            )
            self.imports.append("import os")
        elif expression is not None:
            self.literals[name] = _Piece(f"{name} = {expression}", frozenset({name}))
            self.imports += [i for start, i in NEEDED_BY.items() if expression.startswith(start)]
        elif hasattr(builtins, name) and _is_ipythons(value):  # display, and its own open, exit
            self.imports += [script.DISPLAY] if name == "display" else []
        elif made is not None and (made.is_definition or _has_no_other_form(value, made)):
            return self._copy(made)
        elif made is not None and made.is_import and name in made.binds:
            self.imported.setdefault(made, set()).add(name)
        elif type(value) is types.ModuleType or _is_importable(value):
            self.imports.append(_import(name, value))
        elif are_tensors(value):
            self.tensors[name] = value
        else:
            self.values[name] = value
        return frozenset()

    def _copy(self, made: Statement) -> frozenset[str]:
        """Take a statement as it is; return the names that it needs."""
        made.refuse_what_no_script_can()
        self.sources[made] = _Piece(made.text, made.binds, made.reads_at_once)
        return made.reads

    def add_models(self) -> None:
        """Make models again and load their weights, if nothing else has to be pickled."""

        def is_literal(name: str) -> bool:
            return name in self.namespace and literal(self.namespace[name]) is not None

        for name, made in made_again(self.values, self.earlier, is_literal).items():
            self.weights[name] = self.values.pop(name)
            self.add(self._copy(made))

    def add_files(self, text: str) -> None:
        """Write tensors, and pickle the rest; the classes in there may need more of both.

        Where nothing of the text seeds, torch's random state goes along, as with the ranks.
        """
        known = re.search(r"torch|accelerat|transformers", text, re.IGNORECASE)
        drawn = bool(known or self.values or self.weights) and not seeds(text)
        if drawn:
            self.tensors["_random_state"] = sys.modules["torch"].get_rng_state()
            self.imports.append("import torch")
        made = {n for n, s in self.last.items() if s.is_definition} & self.namespace.keys()
        defined = {name: self.namespace[name] for name in made}
        data, seen = b"", -1
        while len(self._seen) > seen:
            seen = len(self._seen)
            data, referred = pickled(self.values, defined)
            self.add(referred)
        if self.tensors or self.weights:
            name = f"{self.stem}.nbtrain.safetensors"
            states = {n: dict(model.state_dict()) for n, model in self.weights.items()}
            self.files[name] = as_safetensors({**self.tensors, **states})
            self.loads += _tensor_loads(self.tensors, self.weights, name)
        if self.values:
            name = f"{self.stem}.nbtrain.pkl"
            self.files[name] = data
            self.loads.append(_pickle_load(self.values, name, frozenset(referred)))
        if drawn:
            needs = frozenset({"_random_state", *self.weights, *self.values})
            self.loads.append(_Piece("torch.set_rng_state(_random_state)", frozenset(), needs))

    def in_order(self) -> list[str]:
        """Return the pieces such that each comes after what it needs at once."""
        waiting, out = self.pieces, list[str]()
        bound = {n for piece in waiting for n in piece.binds}
        while waiting:
            ready = next((p for p in waiting if not p.needs & bound - p.binds), waiting[0])
            waiting.remove(ready)
            bound -= ready.binds
            out.append(ready.text)
        return out


def _has_no_other_form(value: Any, made: Statement) -> bool:
    """Return whether a value is what pickle knows by its name alone: a lambda, a `TypeVar`."""
    plain = type(value) is types.FunctionType and value.__name__ == "<lambda>"
    named = (plain and not value.__closure__) or type(value).__module__ == "typing"
    return named and isinstance(made.node, (ast.Assign, ast.AnnAssign))


def _is_ipythons(value: Any) -> bool:
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(module).startswith("IPython.") or getattr(value, "__wrapped__", None) is open


def _is_importable(value: Any) -> bool:
    """Return whether a function or class is to be had from the module it names."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module in (None, "__main__") or not isinstance(name, str):
        return False
    return getattr(sys.modules.get(str(module)), name, None) is value


def _import(name: str, value: Any) -> str:
    full = str(value.__name__)
    if type(value) is types.ModuleType:
        return f"import {full}" if full == name else f"import {full} as {name}"
    renamed = "" if value.__qualname__ == name else f" as {name}"
    return f"from {value.__module__} import {value.__qualname__}{renamed}"


# Modules by their full names: a notebook may have a `Path` of its own.
_HERE = 'pathlib.Path(__file__).with_name("{}")'


def _tensor_loads(
    tensors: Mapping[str, Any], weights: Mapping[str, Any], file: str
) -> list[_Piece]:
    lines = [
        "# Tensors of the notebook, as they were when this was written.",
        "import pathlib",
        "",
        "import safetensors.torch",
        "",
        f"_tensors = safetensors.torch.load_file({_HERE.format(file)})",
    ]
    for name, value in tensors.items():
        kept = f'_tensors["{name}"]'
        if type(value) is dict:
            kept = f'{{k: _tensors[f"{name}/{{k}}"] for k in {list(value)!r}}}'
        lines.append(f"{name} = {kept}")
    pieces = [_Piece("\n".join(lines), frozenset({"_tensors", *tensors}))]
    for name, model in weights.items():
        mine = f'k.removeprefix("{name}/"): v for k, v in _tensors.items()'
        loads = f'{name}.load_state_dict({{{mine} if k.startswith("{name}/")}})'
        mode = "" if model.training else f"\n{name}.eval()"
        pieces.append(_Piece(loads + mode, frozenset(), frozenset({name, "_tensors"})))
    return pieces


def _pickle_load(values: Mapping[str, Any], file: str, needs: frozenset[str]) -> _Piece:
    lines = [
        "# Values of the notebook that have no short form, as they were when this was written.",
        "import pathlib",
        "import pickle",
        "",
        f"_values = pickle.loads({_HERE.format(file)}.read_bytes())",
        *(f'{n} = _values["{n}"]  # {serialize.type_name(v)}' for n, v in values.items()),
    ]
    return _Piece("\n".join(lines), frozenset(values), needs)
