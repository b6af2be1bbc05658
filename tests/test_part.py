"""Parts can be taken away: of each, a copy of the package without its folder and its row works."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import nbtrain
from nbtrain import part
from nbtrain.errors import PlanError
from nbtrain.planning import option_parser
from tests.tools.without_parts import copy_package

PACKAGE = Path(nbtrain.__file__).parent

WORKS = """
import importlib, pathlib, pkgutil, sys, nbtrain
assert pathlib.Path(nbtrain.__file__).parents[1] == pathlib.Path.cwd()
for module in pkgutil.walk_packages(nbtrain.__path__, 'nbtrain.'):
    if not module.name.endswith('__main__') and '.parts.ray.' not in module.name:
        importlib.import_module(module.name)

from IPython.testing.globalipapp import start_ipython
shell = start_ipython()
shell.run_line_magic('load_ext', 'nbtrain')
from nbtrain.commands.magics import _nbtrain_help
assert 'nbtrain doctor' in _nbtrain_help()
from nbtrain.commands.cli import main
assert main([]) == 0

def add(a):
    return a + nbtrain.rank()

assert nbtrain.launch(add, 1, num_processes=1, engine='inline', view='none').results == [1]
assert nbtrain.launch(add, 1, num_processes=2, view='none').results == [1, 2]
shell.run_cell_magic('distributed', '-n 2 --view none', '1 + 1')
assert nbtrain.last_run().results == [2, 2]
shell.run_line_magic('nbtrain', 'runs')
print('works')
"""


def run(script: str, folder: Path, home: Path) -> str:
    """Run a script with the package that is in a folder."""
    env = {**os.environ, "PYTHONPATH": str(folder), "NBTRAIN_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "names",
    [part.TABLE, *(pytest.param((name,), marks=pytest.mark.slow) for name in part.TABLE)],
    ids="-".join,
)
def test_without_a_part_everything_else_works(names: tuple[str, ...], tmp_path: Path) -> None:
    folder = copy_package(names, tmp_path / "copy")
    assert run(WORKS, folder, tmp_path / "home").splitlines()[-1] == "works"


def test_what_a_missing_part_did_is_one_clear_error(tmp_path: Path) -> None:
    folder = copy_package(part.TABLE, tmp_path / "copy")
    (folder / "tpu.yaml").write_text("distributed_type: XLA\nnum_processes: 8\n")
    script = """
import nbtrain
from IPython.testing.globalipapp import start_ipython
shell = start_ipython()
shell.run_line_magic('load_ext', 'nbtrain')
def words(call, *args, **options):
    try:
        call(*args, **options)
    except Exception as error:
        print(f'{type(error).__name__}: {error}')
launch = lambda **options: nbtrain.launch(int, view='none', **options)
words(launch, debug=True)
words(launch, track='tensorboard')
words(launch, engine='ray')
words(launch, address='auto')
words(launch, engine='tpu')
words(launch, config='tpu.yaml')
words(shell.run_line_magic, 'nbtrain', 'start -n 2')
words(shell.run_cell_magic, 'distributed', '--ranks 0', '1')
words(shell.run_cell_magic, 'distributed', '--save x.py', '1')
words(lambda: nbtrain.memory_needed)
"""
    out = run(script, folder, tmp_path / "home").splitlines()
    expected = [
        ("PlanError", "part `debugger`"),
        ("PlanError", "part `forwarding`"),
        ("PlanError", "engine 'ray'"),
        ("PlanError", "part `ray`"),
        ("PlanError", "engine 'tpu'"),
        ("PlanError", "part `tpu`"),
        ("PlanError", "command 'start -n 2'"),
        ("PlanError", "unrecognized arguments: --ranks"),
        ("PlanError", "unrecognized arguments: --save"),
        ("AttributeError", "nbtrain.parts.memory"),
    ]
    for line, (name, named) in zip(out, expected, strict=True):
        assert line.startswith(f"{name}: "), line
        assert named in line


def test_every_reference_of_a_part_can_be_imported() -> None:
    for name, each in part.parts().items():
        references = [
            *(command.run for command in each.commands.values()),
            *(command.run for command in each.cell_magics.values()),
            *(command.run for command in each.shell_commands.values()),
            *(command.arguments for command in each.shell_commands.values()),
            *each.engines.values(),
            *each.provides.values(),
            each.default_engine,
            each.launch_side,
            each.rank_side,
        ]
        for reference in filter(None, references):
            assert reference.startswith(f"{name}."), "of another part"
            assert callable(part.load(reference))


def test_an_option_of_a_part_names_one() -> None:
    named = {option.part for option in option_parser.cell_options().values() if option.part}
    assert (
        named
        == {
            "debugger",
            "forwarding",
            "memory_snapshot",
            "profile",
            "ray",
            "slurm",
            "steering",
            "tpu",
        }
        <= {*part.TABLE}
    )


def test_the_core_names_no_part() -> None:
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE)
        if place.parts[0] in ("parts", "part.py", "__init__.py"):
            continue
        assert not re.search(r"nbtrain\.parts\.\w|[\"']parts\.\w", path.read_text()), place


def test_what_a_part_lacks_is_said() -> None:
    with pytest.raises(PlanError, match=r"`x` needs the part `gone` of nbtrain, which is not"):
        part.load_provided("gone", "thing", "`x`")


PACKAGE_OF_ANOTHER = {
    "pyproject.toml": """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "nbtrain-tally"
version = "1.0"

[project.entry-points."nbtrain.parts"]
tally = "tally:PART"
absent = "no_such_module:PART"
sideless = "tally:SIDELESS"

[tool.setuptools]
packages = ["tally"]
""",
    "tally/__init__.py": '''
"""Counts optimizer steps in each rank, and launches around the notebook."""
from nbtrain.part_api import Command, Part

PART = Part(
    commands={
        "tally": Command("tally.notebook:command", "%nbtrain tally        print the count"),
        "vars": Command("tally.notebook:command", "not this one"),
    },
    engines={"loud": "tally.engine:LoudEngine"},
    launch_side="tally.notebook:TallyLaunch",
    rank_side="tally.rank:TallyRank",
)
SIDELESS = Part(launch_side="tally.nowhere:Side")
''',
    "tally/notebook.py": """
from nbtrain.part_api import LaunchSide, Option, Plan, Typed

seen = []

class TallyLaunch(LaunchSide):
    cell_options = (
        Option("--as", "taken", field="taken"),
        Option("bare", "no flag", field="bare"),
        Option("--half", "50% of it", field="half"),
        Option("--nameless", "no field"),
        Option("--greet", "whom to greet before the cell runs", field="greet", metavar="NAME"),
    )

    def check(self, plan: Plan) -> None:
        seen.append(plan.name)

    def before_cell(self, cell, raw, history, failures, options):
        print("hello", options.greet, {"taken", "bare", "half", ""} & vars(options).keys())

def command(typed: Typed) -> str:
    return f"{len(seen)} launches{typed.text}"
""",
    "tally/rank.py": """
from nbtrain.part_api import Observer, RankContext, RankSide, hooks, log_values

class Counter(Observer):
    steps = 0

    def on_step(self, optimizer):
        self.steps += 1

    def on_training_end(self, wait):
        log_values(None, {"tally": self.steps})

class TallyRank(RankSide):
    def begin(self, context: RankContext) -> None:
        hooks.add(Counter())
""",
    "tally/engine.py": """
from nbtrain.part_api import ForkEngine

class LoudEngine(ForkEngine):
    name = "loud"
""",
}

USES_IT = """
import nbtrain, torch
from IPython.testing.globalipapp import start_ipython
shell = start_ipython()
shell.run_line_magic('load_ext', 'nbtrain')

def train():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        (weight ** 2).sum().backward()
        optimizer.step()

for engine in ('loud', 'spawn'):
    run = nbtrain.launch(train, num_processes=2, engine=engine, view='none')
    print(run.state.engine, [rank.metrics['tally'] for rank in run.state.ranks])
print(shell.run_line_magic('nbtrain', 'tally !'))
shell.run_cell_magic('distributed', '-n 1 --view none --as run --greet you', '1 + 1')
from nbtrain.commands.magics import _distributed_help, _nbtrain_help
print(shell.user_ns['run'].value, '--greet NAME' in _distributed_help())
print('%nbtrain tally' in _nbtrain_help(), 'not this one' in _nbtrain_help())
from nbtrain.commands import doctor
print(*[text for label, text in doctor._versions(None, '') if label == 'parts'], sep=chr(10))
"""


def install_by_hand(project: Path, folder: Path) -> None:
    """Install a package as pip does, which takes longer."""
    info = folder / "tally-1.0.dist-info"
    shutil.copytree(project / "tally", folder / "tally")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tally\nVersion: 1.0\n")
    points = (project / "pyproject.toml").read_text().partition('"nbtrain.parts"]')[2]
    points = points.partition("[tool")[0].replace('"', "")
    (info / "entry_points.txt").write_text(f"[nbtrain.parts]{points}")


def install_by_pip(project: Path, folder: Path) -> None:
    """Install a package into a folder."""
    if not all(map(importlib.util.find_spec, ("pip", "setuptools"))):
        pytest.skip("needs pip and setuptools")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    options = ["--no-build-isolation", "--disable-pip-version-check", "--target", str(folder)]
    subprocess.run([*pip, *options, str(project)], check=True, timeout=120)


@pytest.mark.parametrize("install", [install_by_hand, install_by_pip], ids=["hand", "pip"])
def test_another_package_adds_a_part(install: Callable[[Path, Path], None], tmp_path: Path) -> None:
    project, installed = tmp_path / "project", tmp_path / "installed"
    for name, text in PACKAGE_OF_ANOTHER.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    install(project, installed)
    (tmp_path / "script.py").write_text(USES_IT)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(installed), str(PACKAGE.parent)]),
        "NBTRAIN_HOME": str(tmp_path / "home"),
    }
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [
        "loud [3, 3]",
        "spawn [3, 3]",
        "2 launches !",
        "hello you set()",
        "2 True",
        "True False",
        "tally (of other packages)",
        "without absent, which cannot be imported "
        "(ModuleNotFoundError: No module named 'no_such_module')",
        "without sideless, which cannot be imported "
        "(ModuleNotFoundError: No module named 'tally.nowhere')",
    ], done.stderr[-3000:]
