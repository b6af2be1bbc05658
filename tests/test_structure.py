"""The shape of the package: what is public, which way imports go, and that importing is inert."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import nbtrain

PACKAGE = Path(nbtrain.__file__).parent
LAYERS = [
    {
        "errors",
        "nodes",
        "ladder",
        "plan",
        "events",
        "writer",
        "tail",
        "folder",
        "pruning",
        "guard",
        "imports",
        "late",
        "lazy",
        "ambient",
        "stopping",
        "checkpoints",
        "xla",
        "moving",
        "names",
        "plain",
        "preview",
        "fingerprints",
    },
    {"serialize", "reader", "weights", "config"},
    {"exceptions", "devices", "tpus", "host", "report", "stages"},
    {"homecoming"},
    {"outcome", "telemetry", "preflight", "cell", "gate", "lint", "resources", "pace", "series"}
    | {"inspection", "stacks", "collectives", "witness", "cards"},
    {"taken"},
    {"folding"},
    {"state", "worker", "pickling", "estimate", "history", "hang"},
    {"ship", "reopen", "home", "stragglers", "verdict", "tensorboard"},
    {"engines", "view", "digest", "export"},
    {"lookout", "manifest", "memory", "deaths", "summary"},
    {"supervise", "follow"},
    {"attempts"},
    {"keeper"},
    {"run"},
    {"launcher", "kept"},
    {"speedup"},
    {"blame"},
    {"doctor"},
    {"magics", "cli"},
    {"__main__"},
]


def _imports(path: Path) -> set[str]:
    package = path.relative_to(PACKAGE).parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            inner = [*base, *(node.module or "").split(".")]
            names = [n for n in inner if n]
            found |= {names[0]} if names else {alias.name for alias in node.names}
    return found


def test_imports_only_go_up_the_layers() -> None:
    level = {name: i for i, names in enumerate(LAYERS) for name in names}
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        assert own in level, f"{own} belongs to no layer"
        for name in _imports(path):
            if name != own:
                allowed = level[name] < level[own] or (level[own] == 0 and level[name] == 0)
                assert allowed, f"{path.name} imports {name}"


def test_the_public_names_are_these() -> None:
    assert sorted(nbtrain.__all__) == [
        "NbtrainError",
        "RankDied",
        "Run",
        "attempt",
        "checkpoint",
        "checkpoint_dir",
        "last_checkpoint",
        "last_run",
        "launch",
        "log",
        "memory_needed",
        "notebook_launcher",
        "progress",
        "rank",
        "runs",
        "scaling",
        "should_stop",
        "world_size",
    ]
    for name in nbtrain.__all__:
        assert getattr(nbtrain, name).__doc__
    assert set(nbtrain.__all__) <= set(dir(nbtrain))


def test_what_is_imported_late_is_there_all_the_same() -> None:
    script = """
import sys, nbtrain
assert 'nbtrain.run' not in sys.modules and 'nbtrain.plan' not in sys.modules
assert nbtrain.plan.SOURCES
assert issubclass(nbtrain.errors.PlanError, nbtrain.NbtrainError)
import nbtrain.launcher, nbtrain.speedup  # a module's name hides no function
assert callable(nbtrain.launch) and callable(nbtrain.scaling)
assert not hasattr(nbtrain, 'nonsense') and not hasattr(nbtrain, '__wrapped__')
names = {}
exec('from nbtrain import *', names)
assert set(nbtrain.__all__) <= set(names)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_importing_is_inert() -> None:
    script = """
import os, signal, sys, threading, logging, warnings
def look():
    return ({s: signal.getsignal(s) for s in signal.Signals if s not in (9, 19)},
            dict(os.environ), threading.enumerate(), logging.getLogger().handlers,
            os.listdir('/proc/self/fd'), len(warnings.filters), os.getcwd())
before = look()
import nbtrain
assert look() == before
for heavy in ('torch', 'IPython', 'ipywidgets', 'accelerate', 'tqdm', 'pynvml'):
    assert heavy not in sys.modules, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_files_and_functions_stay_readable() -> None:
    for path in PACKAGE.rglob("*.py"):
        lines = path.read_text().splitlines()
        assert len(lines) <= 400, f"{path.name} has {len(lines)} lines"
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                told = len((ast.get_docstring(node, clean=False) or "").splitlines())
                length = (node.end_lineno or 0) - node.lineno + 1 - told
                assert length <= 60, f"{path.name}: {node.name} has {length} lines"
