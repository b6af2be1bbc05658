"""The shape of the package: what is public, which way imports go, and that importing is inert."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

import nbtrain

PACKAGE = Path(nbtrain.__file__).parent
ROOMS = (
    "errors",
    "part",
    "findings",
    "system",
    "planning",
    "tracking",
    "transport",
    "checks",
    "hangs",
    "worker",
    "engines",
    "ui",
    "lifecycle",
    "commands",
    "__main__",
    "part_api",
    "parts",
)
"""From the ground up: a room may import itself and those that stand before it. A part imports the
rooms and no other part; no room imports a part."""


def test_what_is_listed_as_slow_is_there() -> None:
    tests = Path(__file__).parent
    listed = [line for line in (tests / "slow.txt").read_text().splitlines() if line[0] != "#"]
    assert listed == sorted({*listed})
    for line in listed:
        file, _, name = line.partition("::")
        source = (tests.parent / file).read_text()
        assert f"def {name.partition('[')[0]}(" in source if name else True, line


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in PACKAGE.rglob("*.py")}


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def _imports(path: Path) -> set[str]:
    """Return the modules of nbtrain that a file imports, anywhere in it."""
    package = path.relative_to(PACKAGE).parts[:-1]
    imported: set[str] = set()
    for node in _nodes(path):
        if isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".")
            if node.level:
                base = [*package[: len(package) - node.level + 1], *base]
            elif base.pop(0) != "nbtrain":
                continue
            base = [part for part in base if part]
            for alias in node.names:
                inner = ".".join([*base, alias.name])
                imported.add(inner if inner in MODULES else ".".join(base))
    return imported


@functools.cache
def _all_imports() -> dict[str, set[str]]:
    """Return what each module imports; not when the tests are collected, as it takes seconds."""
    return {name: _imports(path) for name, path in MODULES.items() if name}


def _part(name: str) -> str:
    return name.split(".")[1] if name.startswith("parts.") else ""


def test_rooms_only_import_rooms_below_them() -> None:
    for name, imported in _all_imports().items():
        level = ROOMS.index(name.split(".")[0])
        for other in imported:
            assert other, f"{name} imports from the package's root"
            assert ROOMS.index(other.split(".")[0]) <= level, f"{name} imports {other}"
            assert _part(other) in ("", _part(name)), f"{name} imports {other}, of another part"


def test_observers_patch_nothing() -> None:
    """They are told by `worker/hooks`; `integrations` changes what libraries draw and know."""
    for name, path in MODULES.items():
        if name.startswith("worker.observers.") and not name.endswith("integrations"):
            assert "system.instrumentation" not in _all_imports()[name], path


def test_no_module_imports_itself_by_way_of_others() -> None:
    left = dict(_all_imports())
    while leaves := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in leaves:
            del left[name]
    assert not left, f"a circle among {sorted(left)}"


def test_the_house_is_small_enough_to_be_known() -> None:
    packages = [path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    assert len(packages) <= 12
    assert len(list(PACKAGE.glob("*.py"))) <= 6
    for folder in {path.parent for path in MODULES.values()}:
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= 12, f"{folder.name} has {len(files)} files"


TESTED_TOGETHER = {
    "commands/cell_watch": "system/test_cuda_initialisers.py",  # cell by cell, in real kernels
    "engines/limits": "engines/test_spawn.py",
    "engines/remote/*": "parts/ray/test_driver.py",
    "engines/[bfir]*": "engines/test_contract.py",  # one suite for every engine
    "engines/spawn_main": "engines/test_spawn.py",
    "engines/process/*": "end_to_end/test_kernel_health.py",  # what they leave in a kernel
    "findings": "checks/preflight/test_preflight.py",
    "errors": "end_to_end/test_readme.py",  # every exception is in the reference
    "transport/weights/[mr]*": "transport/weights/test_sender.py",  # what is sent, and arrives
    "lifecycle/run_info": "tracking/overview/test_history.py",  # tables of runs
    "lifecycle/*": "lifecycle/test_launcher.py",  # whole runs
    "checks/lint/*": "checks/lint/test_lint.py",  # cells in, findings out
    "checks/preflight/*": "checks/preflight/test_preflight.py",
    "checks/limits": "checks/preflight/test_preflight.py",
    "parts/*/launch_side": "test_part.py",  # with the part, and without it
    "parts/frameworks/[ir]*": "parts/frameworks/test_kernel_state.py",  # in real ranks
    "parts/frameworks/keras_models": "parts/frameworks/test_values.py",
    "parts/frameworks/world": "parts/frameworks/test_joining.py",
    "parts/frameworks/progress/*": "parts/frameworks/test_keras_progress.py",
    "parts/debugger/*": "parts/debugger/test_conversation.py",
    "parts/live/*": "parts/live/test_live_ranks.py",  # a kernel, cell by cell
    "parts/memory/*": "parts/memory/test_memory.py",  # estimates against real allocations
    "parts/memory_snapshot/*": "parts/memory_snapshot/test_rank_side.py",  # whole runs
    "parts/profile/*": "parts/profile/test_recorder.py",  # whole trainings
    "parts/ray/*": "parts/ray/cluster/test_engine.py",  # a real Ray
    "parts/slurm/*": "parts/slurm/test_engine.py",  # a real Slurm
    "parts/scaling/*": "parts/scaling/test_scaling.py",
    "parts/steering/*": "parts/steering/test_finish.py",  # whole trainings
    "parts/tpu/rank_side": "parts/tpu/test_xla_telemetry.py",
    "parts/tpu/other_ranks": "parts/tpu/test_without_a_tpu.py",
    "parts/tpu/compilation": "parts/tpu/test_xla_telemetry.py",
    "planning/limits": "planning/test_task_values.py",
    "planning/[fop]*": "planning/test_option_types.py",
    "planning/world": "worker/test_rank_environment.py",
    "system/files": "tracking/test_event_log.py",
    "system/network": "system/test_host.py",
    "system/processes": "system/test_host.py",
    "system/source_files": "transport/test_exceptions.py",
    "hangs/failures": "transport/test_exceptions.py",
    "hangs/limits": "hangs/test_watchdog.py",
    "tracking/[er]*": "tracking/test_state.py",  # events in, the picture out
    "transport/*": "transport/test_payload.py",
    "ui/board/*": "ui/board/test_board.py",  # the whole board, read as a browser would
    "ui/displays/*": "ui/displays/test_select.py",  # through a real kernel
    "ui/*": "tracking/test_state.py",
    "tracking/limits": "tracking/test_pruning.py",
    "worker/limits": "worker/observers/test_reports.py",
    "worker/hooks/*": "worker/hooks/test_hooks.py",
    "worker/observers/*": "worker/observers/test_reports.py",
    "worker/*": "engines/test_contract.py",
}
"""Modules without a test file of their own, by the test file that tries them with others."""


def test_every_module_has_a_test_file() -> None:
    tests, unused = Path(__file__).parent, set(TESTED_TOGETHER)
    for path in MODULES.values():
        if path.name in ("__init__.py", "__main__.py"):
            continue
        place = path.relative_to(PACKAGE).with_suffix("")
        if not (tests / place.parent / f"test_{place.name}.py").exists():
            pattern = next((p for p in TESTED_TOGETHER if fnmatch(str(place), p)), None)
            assert pattern, f"{place} has no test file"
            assert (tests / TESTED_TOGETHER[pattern]).exists(), TESTED_TOGETHER[pattern]
            unused.discard(pattern)
    assert not unused, f"not needed any more: {unused}"


def test_no_test_file_imports_another() -> None:
    for path in Path(__file__).parent.rglob("test_*.py"):
        assert not re.search(r"^ *from (\S*\.)?test_\w+ import", path.read_text(), re.M), path


def test_the_public_names_are_few_and_have_docstrings() -> None:
    assert len(nbtrain.__all__) < 25  # `tests/public_surface.txt` has them
    for name in nbtrain.__all__:
        assert getattr(nbtrain, name).__doc__
    assert set(nbtrain.__all__) <= set(dir(nbtrain))


def test_editors_see_the_public_names_where_they_are_imported_from() -> None:
    for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text())):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            imports = [part for part in node.body if isinstance(part, ast.ImportFrom)]
    assert {alias.name: part.module for part in imports for alias in part.names} == nbtrain._PUBLIC


def test_loading_the_extension_imports_only_what_watches_cells() -> None:
    script = """
import sys, IPython
shell = IPython.core.interactiveshell.InteractiveShell.instance()
before = set(sys.modules)
shell.run_line_magic('load_ext', 'nbtrain')
packages = {name.partition('.')[0] for name in set(sys.modules) - before if name[0] != '_'}
assert packages - sys.stdlib_module_names <= {'nbtrain', 'IPython'}, packages
assert 'importlib.metadata' in before or 'importlib.metadata' not in sys.modules
names = [name for name in sys.modules if name.startswith('nbtrain.')]
of_parts = [name for name in names if name.startswith('nbtrain.parts')]
assert all(name.count('.') < 3 for name in of_parts), of_parts  # what they list, no code
own = [name for name in names if name not in of_parts]
for late in ('engines', 'lifecycle', 'planning', 'tracking', 'ui', 'worker', 'commands.doctor'):
    assert 'nbtrain.' + late not in own, late
assert len(own) < 15, own
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_importing_is_inert_and_a_launch_imports_what_it_uses_and_the_rest_is_there_late() -> None:
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
assert 'nbtrain.lifecycle' not in sys.modules and 'nbtrain.planning' not in sys.modules

nbtrain.launch(int, num_processes=1, view='none')
for late in ('accelerate', 'ray', 'transformers', *(f'nbtrain.{part}' for part in (
        'parts.export.export', 'parts.memory.estimate', 'parts.scaling.measure',
        'parts.ray.engine', 'parts.live.live_ranks', 'parts.forwarding.forwarder'))):
    assert late not in sys.modules, late

import nbtrain.lifecycle.launcher, nbtrain.parts.scaling  # a module's name hides no function
assert callable(nbtrain.launch) and callable(nbtrain.scaling)
assert issubclass(nbtrain.errors.PlanError, nbtrain.NbtrainError)
assert not hasattr(nbtrain, 'nonsense') and not hasattr(nbtrain, '__wrapped__')
names = {}
exec('from nbtrain import *', names)
assert set(nbtrain.__all__) <= set(names)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_functions_stay_readable() -> None:
    for path in MODULES.values():
        for node in _nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                documented = len((ast.get_docstring(node, clean=False) or "").splitlines())
                length = (node.end_lineno or 0) - node.lineno + 1 - documented
                assert length <= 60, f"{path.name}: {node.name} has {length} lines"


def test_what_users_may_rely_on_changes_only_on_purpose() -> None:
    """After one: `python tests/tools/public_surface.py --write`, and a line in CHANGELOG.md."""
    from tests.tools import public_surface

    assert public_surface.text().splitlines() == public_surface.FILE.read_text().splitlines()


def test_the_conda_recipe_asks_for_what_the_package_asks_for() -> None:
    toml = pytest.importorskip("tomllib")  # Python 3.11
    yaml = pytest.importorskip("yaml")
    root = PACKAGE.parent
    project = toml.loads((root / "pyproject.toml").read_text())
    recipe = yaml.safe_load((root / ".github/conda/recipe.yaml").read_text())
    asked = [line.replace("torch>", "pytorch>") for line in project["project"]["dependencies"]]
    python, *others = recipe["requirements"]["run"]
    assert python == "python >=${{ python_min }}"
    assert [line.replace(" ", "") for line in others] == asked
    hatchling = recipe["requirements"]["host"][-1].replace(" ", "")
    assert [hatchling] == project["build-system"]["requires"]
    assert recipe["context"]["version"] == nbtrain.__version__
    assert ">=" + recipe["context"]["python_min"] == project["project"]["requires-python"]
    commands = [f"{name} = {path}" for name, path in project["project"]["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == commands
