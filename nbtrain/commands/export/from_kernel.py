"""From a running notebook to a script: variables as they are, functions as they were written.

A variable becomes a literal if it has a short one. Functions, classes and imports come from the
cells that made them. Tensors go into a safetensors file beside the script, other values into a
pickle. A model is built by its statement and loaded with its weights if that suffices,
else it is pickled too: the script starts from the same values as the ranks.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import sys
import types
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import PlanError
from ...planning.plan import Cell
from ...planning.secrets import without_secrets
from ...transport.payload import check_graphs, submodules
from ...transport.result_pickler import type_name
from . import script
from .slicing import seeds
from .statements import Statement, import_of, read_earlier
from .values import (
    NEEDED_BY,
    FromEnvironment,
    as_safetensors,
    is_tensor,
    literal,
    made_again,
    pickled,
)


def save(cell: Cell, raw: str, history: Sequence[str], options: Namespace) -> str:
    """Write the script of a cell that is about to run; return a message with the files' names.

    `history` has the inputs of earlier cells. Raises `PlanError` for what cannot be exported.
    """
    importlib.import_module("torch")  # every value is checked for tensors
    path = Path(options.save or "train.py").expanduser()
    training = script.read_training_cell(raw, f"In[{cell.number}]", cell.flags)
    training = replace(training, options=options)
    earlier = read_earlier(
        (text, f"In[{number}]")
        for number, text in enumerate(history)
        if not text.lstrip().startswith("%%distributed")
    )
    names = training.needs(cell.namespace.keys())
    check_graphs({n: cell.namespace[n] for n in names & cell.namespace.keys()})
    gathered = _Gathered(cell.namespace, earlier, path.stem)
    gathered.add(names)
    parts = gathered.finish(training.body())
    script.write(path, training, earlier, parts, cell.namespace.keys(), gathered.files)
    return f"nbtrain: wrote {', '.join([str(path), *gathered.files])}"


@dataclass(frozen=True)
class _Piece:
    """A part of the script: the names it binds, and those it needs before."""

    text: str
    binds: frozenset[str]
    needs: frozenset[str] = frozenset()


class _Gathered:
    """What the script needs from a notebook, name by name."""

    def __init__(self, namespace: Mapping[str, Any], earlier: Sequence[Statement], stem: str):
        self.namespace = namespace
        self.stem = stem
        self.earlier = earlier
        self.last = {name: s for s in earlier for name in s.binds}
        self.imports: list[str] = []
        self.imported: dict[Statement, set[str]] = {}
        self.sources: dict[Statement, _Piece] = {}
        self.literals: dict[str, _Piece] = {}
        self.loads: list[_Piece] = []
        self.values: dict[str, Any] = {}
        self.tensors: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self._seen: set[str] = set()

    def add(self, names: Iterable[str]) -> None:
        """Decide how each variable gets into the script, and add what that needs."""
        waiting = sorted(names)
        while waiting:
            name = waiting.pop()
            if name not in self._seen and name in self.namespace:
                self._seen.add(name)
                waiting += sorted(self._add(name, self.namespace[name]))

    def _add(self, name: str, value: Any) -> frozenset[str]:
        """Add one variable to its group; return the names that it needs."""
        if type(value) is types.FunctionType and "_torchdynamo_orig_callable" in vars(value):
            raise PlanError(
                f"`{name}` was compiled with torch.compile, and a compiled function cannot be "
                "exported: call torch.compile in the training function"
            )
        made = self.last.get(name)
        expression = literal(value)
        if expression is not None:
            masked = without_secrets(name, value, FromEnvironment)
            if masked is not value:
                expression = f"{masked!r}  # secret: not written here"
                self.imports.append("import os")
            self.literals[name] = _Piece(f"{name} = {expression}", frozenset({name}))
            self.imports += [i for start, i in NEEDED_BY.items() if expression.startswith(start)]
        elif hasattr(builtins, name) and _is_ipythons(value):  # display, IPython's open
            self.imports += [script.DISPLAY] if name == "display" else []
        elif made is not None and (made.is_definition or _has_no_other_form(value, made)):
            return self._copy(made)
        elif made is not None and made.is_import:
            self.imported.setdefault(made, set()).add(name)
        elif type(value) is types.ModuleType or _is_importable(value):
            self.imports.append(_import(name, value))
        elif is_tensor(value):
            self.tensors[name] = value
        else:
            self.values[name] = value
        return frozenset()

    def _copy(self, made: Statement) -> frozenset[str]:
        """Add a statement as it was written; return the names that it needs."""
        made.check()
        self.sources[made] = _Piece(made.text, made.binds, made.reads_at_once)
        return made.reads

    def finish(self, cell: str) -> list[str]:
        """Fill `files`; return what precedes the cell: imports, then literals, sources and loads.

        If nothing seeds, torch's random state is added, as the ranks get it.
        """
        # Models are built and loaded with their weights, if no other value has to be pickled.
        models = made_again(self.values, self.earlier, self.namespace)
        weights = {name: self.values.pop(name) for name in models}
        for made in models.values():
            self.add(self._copy(made))
        text = "\n\n".join(
            [*(p.text for p in (*self.literals.values(), *self.sources.values())), cell]
        )
        known = re.search(r"torch|accelerat|transformers", text, re.IGNORECASE)
        drawn = bool(known or self.values or weights) and not seeds(text)
        if drawn:
            self.tensors["_random_state"] = sys.modules["torch"].get_rng_state()
            self.imports.append("import torch")
        self._add_pickle()
        self._add_tensors(weights)
        if drawn:
            needs = frozenset({"_random_state", *weights, *self.values})
            self.loads.append(_Piece("torch.set_rng_state(_random_state)", frozenset(), needs))
        # ``import xml`` alone does not import ``xml.etree``.
        self.imports += [f"import {name}" for name in submodules(text, self.namespace)]
        own = [import_of(s, self.imported[s]) for s in self.earlier if s in self.imported]
        return [*dict.fromkeys([*own, *self.imports]), *self._in_order()]

    def _add_pickle(self) -> None:
        """Pickle the values that have no other form; their classes may need more variables."""
        made = {n for n, s in self.last.items() if s.is_definition} & self.namespace.keys()
        defined = {name: self.namespace[name] for name in made}
        data, referred, seen = b"", set[str](), -1
        while len(self._seen) > seen:
            seen = len(self._seen)
            data, referred = pickled(self.values, defined)
            self.add(referred)
        if self.values:
            lines = [
                "# The notebook's other values, as they were when nbtrain wrote this file.",
                f"_values = pickle.loads({self._file('pkl', data)}.read_bytes())",
                *(f'{n} = _values["{n}"]  # {type_name(v)}' for n, v in self.values.items()),
            ]
            self.imports.append("import pickle")
            self.loads.append(_Piece("\n".join(lines), frozenset(self.values), frozenset(referred)))

    def _add_tensors(self, weights: Mapping[str, Any]) -> None:
        tensors = dict(self.tensors)
        for name, model in weights.items():
            tensors |= {f"{name}/{key}": value for key, value in model.state_dict().items()}
            items = f'k.removeprefix("{name}/"): v for k, v in _tensors.items()'
            text = f'{name}.load_state_dict({{{items} if k.startswith("{name}/")}})'
            text += "" if model.training else f"\n{name}.eval()"
            self.loads.append(_Piece(text, frozenset(), frozenset({name, "_tensors"})))
        if tensors:
            file = self._file("safetensors", as_safetensors(tensors))
            lines = [
                "# The notebook's tensors, as they were when nbtrain wrote this file.",
                f"_tensors = safetensors.torch.load_file({file})",
                *(f'{name} = _tensors["{name}"]' for name in self.tensors),
            ]
            self.imports.append("import safetensors.torch")
            self.loads.append(_Piece("\n".join(lines), frozenset({"_tensors", *self.tensors})))

    def _file(self, kind: str, data: bytes) -> str:
        """Add a file; return its path as an expression. A notebook may have a `Path` of its own."""
        name = f"{self.stem}.nbtrain.{kind}"
        self.files[name] = data
        self.imports.append("import pathlib")
        return f'pathlib.Path(__file__).with_name("{name}")'

    def _in_order(self) -> list[str]:
        """Return the pieces, each after what it needs at once."""
        sources = [self.sources[s] for s in self.earlier if s in self.sources]
        literals = [self.literals[name] for name in sorted(self.literals)]
        waiting, texts = [*literals, *sources, *self.loads], list[str]()
        bound = {n for piece in waiting for n in piece.binds}
        while waiting:
            ready = next((p for p in waiting if not p.needs & bound - p.binds), waiting[0])
            waiting.remove(ready)
            bound -= ready.binds
            texts.append(ready.text)
        return texts


def _has_no_other_form(value: Any, made: Statement) -> bool:
    """Return whether pickle knows a value only by its name: a lambda, a `TypeVar`."""
    plain = type(value) is types.FunctionType and value.__name__ == "<lambda>"
    named = (plain and not value.__closure__) or type(value).__module__ == "typing"
    return named and isinstance(made.node, (ast.Assign, ast.AnnAssign))


def _is_ipythons(value: Any) -> bool:
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(module).startswith("IPython.") or getattr(value, "__wrapped__", None) is open


def _is_importable(value: Any) -> bool:
    """Return whether a function or class can be imported from the module it names."""
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
