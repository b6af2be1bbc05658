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
import io
import math
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import cloudpickle

from .. import serialize
from ..cell import Options
from ..errors import PlanError
from ..pickling import refuse_what_belongs_to_one_process
from ..plan import Cell
from ..ship import check_graphs, submodules
from . import script
from .models import made_again
from .statements import Statement, import_of, read_earlier
from .static import training_of, wanted

LONGEST_LITERAL = 200
"""Characters of a value that is written into the script itself."""


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
    gathered.add_files()
    imports = [*gathered.import_lines(), *_submodules(gathered, script.body(training))]
    parts = [*dict.fromkeys(imports), *gathered.in_order()]
    material = script.Material(parts, script.futures(earlier), gathered.files)
    source = script.text(training, material, cell.namespace.keys(), path.name)
    script.write(path, source, material.files)
    return f"nbtrain: wrote {', '.join([str(path), *material.files])}"


def _submodules(gathered: _Gathered, cell: str) -> list[str]:
    """Return imports of submodules that are only named: ``xml`` alone brings no ``xml.etree``."""
    source = "\n\n".join([*(p.text for p in gathered.pieces), cell])
    return [f"import {name}" for name in submodules(source, gathered.namespace)]


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
        made = self.last.get(name)
        expression = _literal(value)
        if expression is not None:
            self.literals[name] = _Piece(f"{name} = {expression}", frozenset({name}))
            self.imports += [i for start, i in _NEEDED_BY.items() if expression.startswith(start)]
        elif hasattr(builtins, name) and _is_ipythons(value):  # display, and its own open, exit
            self.imports += [script.DISPLAY] if name == "display" else []
        elif made is not None and (made.is_definition or _is_lambda(value, made)):
            return self._copy(made)
        elif made is not None and made.is_import and name in made.binds:
            self.imported.setdefault(made, set()).add(name)
        elif type(value) is types.ModuleType or _is_importable(value):
            self.imports.append(_import(name, value))
        elif _tensors(value):
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
            return name in self.namespace and _literal(self.namespace[name]) is not None

        for name, made in made_again(self.values, self.earlier, is_literal).items():
            self.weights[name] = self.values.pop(name)
            self.add(self._copy(made))

    def add_files(self) -> None:
        """Write tensors, and pickle the rest; the classes in there may need more of both."""
        made = {n for n, s in self.last.items() if s.is_definition} & self.namespace.keys()
        defined = {name: self.namespace[name] for name in made}
        data, seen = b"", -1
        while len(self._seen) > seen:
            seen = len(self._seen)
            data, referred = _pickled(self.values, defined)
            self.add(referred)
        if self.tensors or self.weights:
            name = f"{self.stem}.nbtrain.safetensors"
            states = {n: dict(model.state_dict()) for n, model in self.weights.items()}
            self.files[name] = _safetensors({**self.tensors, **states})
            self.loads += _tensor_loads(self.tensors, self.weights, name)
        if self.values:
            name = f"{self.stem}.nbtrain.pkl"
            self.files[name] = data
            self.loads.append(_pickle_load(self.values, name, frozenset(referred)))

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


def _literal(value: Any) -> str | None:
    """Return the short expression that makes a value again; None if it has none."""
    kind = type(value)
    if (kind.__module__, kind.__name__) in (("torch", "dtype"), ("torch", "device")):
        return repr(value) if kind.__name__ == "dtype" else f"torch.device({str(value)!r})"
    if isinstance(value, PurePath):
        return f"Path({str(value)!r})"
    if kind is float and not math.isfinite(value):
        return f"float({str(value)!r})"
    shown = repr(value) if _is_plain(value) else ""
    return shown if 0 < len(shown) <= LONGEST_LITERAL else None


_NEEDED_BY = {"torch.": "import torch", "Path(": "from pathlib import Path"}
"""What such an expression needs to be imported, by how it begins."""


def _is_plain(value: Any, depth: int = 4) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is dict:
        return _is_plain([*value, *value.values()], depth)
    if type(value) in (list, tuple):
        short = depth > 0 and len(value) <= LONGEST_LITERAL
        return short and all(_is_plain(v, depth - 1) for v in value)
    return type(value) in (int, complex, bool, str, bytes, type(None))


def _is_lambda(value: Any, made: Statement) -> bool:
    plain = type(value) is types.FunctionType and value.__name__ == "<lambda>"
    return plain and not value.__closure__ and isinstance(made.node, (ast.Assign, ast.AnnAssign))


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


def _tensors(value: Any) -> bool:
    """Return whether a value is a plain tensor on the CPU, or a dictionary of such."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if type(value) is dict:
        items = value.items()
        return bool(value) and all(type(k) is str and _is_tensor(v, torch) for k, v in items)
    return _is_tensor(value, torch)


def _is_tensor(value: Any, torch: Any) -> bool:
    if type(value) is not torch.Tensor or value.device.type != "cpu":
        return False
    odd = value.is_quantized or value.is_complex() or value.is_nested or vars(value)
    plain = value.layout is torch.strided and value.is_contiguous()
    return plain and not (value.requires_grad or odd)


def _flat(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in tensors.items():
        if type(value) is dict:
            yield from ((f"{name}/{key}", v) for key, v in value.items())
        else:
            yield name, value


def _safetensors(tensors: Mapping[str, Any]) -> bytes:
    from safetensors.torch import save as to_bytes

    # Clones: the format refuses memory that two share, as tied weights do.
    data: bytes = to_bytes({k: v.detach().clone().contiguous() for k, v in _flat(tensors)})
    return data


_HERE = 'Path(__file__).with_name("{}")'


def _tensor_loads(
    tensors: Mapping[str, Any], weights: Mapping[str, Any], file: str
) -> list[_Piece]:
    lines = [
        "# Tensors of the notebook, as they were when this was written.",
        "from pathlib import Path",
        "",
        "from safetensors.torch import load_file",
        "",
        f"_tensors = load_file({_HERE.format(file)})",
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
        "import pickle",
        "from pathlib import Path",
        "",
        f"_values = pickle.loads({_HERE.format(file)}.read_bytes())",
        *(f'{n} = _values["{n}"]  # {serialize.type_name(v)}' for n, v in values.items()),
    ]
    return _Piece("\n".join(lines), frozenset(values), needs)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles the notebook's own classes and functions by their names: the script has them."""

    def __init__(self, file: io.BytesIO, defined: Mapping[str, Any]) -> None:
        super().__init__(file, protocol=4)
        self.defined = defined
        self.referred: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        known: Any = obj
        if isinstance(obj, (type, types.FunctionType)):
            if self.defined.get(known.__qualname__) is obj:
                self.referred.add(known.__qualname__)
                return NotImplemented  # as pickle does by itself
        elif isinstance(obj, io.IOBase) and not isinstance(obj, (io.BytesIO, io.StringIO)):
            raise TypeError("an open file")
        elif not isinstance(obj, PurePath):
            refuse_what_belongs_to_one_process(obj)
        return super().reducer_override(obj)


def _pickled(values: Mapping[str, Any], defined: Mapping[str, Any]) -> tuple[bytes, set[str]]:
    """Pickle values together; return the notebook's names that the pickle refers to, too.

    Raises `PlanError` naming the part that cannot be.
    """

    def dump(value: Any) -> tuple[bytes, set[str]]:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, defined)
        pickler.dump(value)
        return buffer.getvalue(), pickler.referred

    try:
        return dump(dict(values))
    except Exception:  # any reducer of any class may raise anything
        for name, value in values.items():
            try:
                dump(value)
            except Exception as reason:  # as above
                path, part = serialize.find_unpicklable(value, dump, name)
                raise PlanError(
                    f"`{path}`, a {serialize.type_name(part)}, cannot be exported ({reason}). "
                    "Make it inside the training function."
                ) from reason
        raise
