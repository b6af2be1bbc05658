"""What the README says is so."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import nbtrain
from nbtrain import cell

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_table_lists_every_option_with_its_choices() -> None:
    for action in cell.parser()._actions:
        for name in action.option_strings:
            assert f"`{name}" in README, name
        for choice in action.choices or ():
            assert choice in README, choice


def test_the_tables_options_are_keywords_of_launch_as_it_says() -> None:
    taken = inspect.signature(nbtrain.launch).parameters.keys()
    options = {action.dest for action in cell.parser()._actions}
    assert options - taken == {"bind", "save"}  # --as and --save
    assert "not `--as` and `--save`" in README


@pytest.mark.parametrize("name", nbtrain.__all__)
def test_it_names_all_that_is_public(name: str) -> None:
    assert re.search(rf"`(nbtrain\.|an? )?{name}\b|nbtrain\.{name}\b", README)


def test_the_file_tree_is_the_packages() -> None:
    listed = set(re.findall(r"(\w+\.py)\b", README.partition("## The code")[2]))
    real = {p.name for p in (ROOT / "nbtrain").rglob("*.py") if p.name != "__init__.py"}
    assert real <= listed, real - listed
    assert listed - real <= {
        "conftest.py",
        "test_structure.py",
        "test_failures.py",
        "fronts.py",
    } | {"test_engines.py"}


@pytest.mark.parametrize(
    "name",
    [
        "value",
        "results",
        "out",
        "logs",
        "state",
        "exception",
        "stop",
        "wait",
        "load",
        "history",
        "plot",
        "stacks",
        "summary",
    ],
)
def test_what_it_says_of_a_run_exists(name: str) -> None:
    assert f"run.{name}" in README
    assert hasattr(nbtrain.Run, name)


def test_links_lead_to_files() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_it_names_the_commands_that_ci_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for command in ('pip install -q -e ".[lab]"', 'pip install -q -e ".[test]"', "jupyter execute"):
        assert command in script
        assert command.replace(" -q", "") in README
