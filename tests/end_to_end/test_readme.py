"""What README, guides and reference pages say is so."""

from __future__ import annotations

import dataclasses
import inspect
import re
from importlib import metadata
from pathlib import Path

import pytest

import nbtrain
from nbtrain import errors
from nbtrain.commands import cli
from nbtrain.commands.magics import NbtrainMagics
from nbtrain.planning.option_parser import MAGIC_ONLY
from nbtrain.planning.option_types import ENGINES, PRECISIONS, VIEWS
from nbtrain.planning.plan import OPTIONS
from nbtrain.tracking import events, run_folder
from tests.support.kernel import Notebook
from tests.support.paths import NOTEBOOKS, ROOT

README = (ROOT / "README.md").read_text()
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / ".github/CONTRIBUTING.md",
    *sorted(NOTEBOOKS.rglob("*.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def reference(name: str) -> str:
    return (NOTEBOOKS / "reference" / f"{name}.md").read_text()


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len(README.splitlines()) <= 150


def test_the_readme_has_the_two_commands_that_ci_runs() -> None:
    commands = re.findall(r"^    (pip install .*) && (.*)$", README, re.M)  # as in .ci/steps.py
    assert [run.split()[0] for _install, run in commands] == ["jupyter", "pytest"]


def test_what_ci_runs_is_there() -> None:
    paths = set(
        re.findall(
            r"\b(?:tests|notebooks|binder)/[\w/.-]*[\w]", (ROOT / ".ci/steps.py").read_text()
        )
    )
    assert len(paths) > 20
    assert [path for path in paths if not list(ROOT.glob(f"{path}*"))] == []


def test_the_modules_that_the_contributing_page_names_exist() -> None:
    page = (ROOT / ".github/CONTRIBUTING.md").read_text()
    ways = page.partition("## The way of a cell")[2].partition("## Rules")[0]
    names = {*re.findall(r"`(\w+/[\w/]+)`", ways)}
    package = Path(nbtrain.__file__).parent
    assert len(names) > 20
    missing = [n for n in names if not list(package.glob(f"{n}.py")) and not (package / n).is_dir()]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M
    )
    texts = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_to_headings(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        linked = (page.parent / target).resolve() if target else page
        assert linked.is_file(), link
        assert linked.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(linked), link


def test_every_page_can_be_found() -> None:
    """From the README, or from the site's contents."""
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in LINK.findall(README)}
    contents = (NOTEBOOKS / "index.md").read_text().splitlines()
    listed = {page for page in [*PAGES, *NOTEBOOKS.glob("*.ipynb")] if _name(page) in contents}
    assert NOTEBOOKS / "index.md" in linked
    assert {*PAGES[1:], *NOTEBOOKS.glob("*.ipynb")} <= linked | listed


def _name(page: Path) -> str:
    """Return what a table of contents calls a page."""
    return str(page.with_suffix("").relative_to(NOTEBOOKS)) if NOTEBOOKS in page.parents else ""


def test_the_options_page_lists_every_option_with_its_choices() -> None:
    page = reference("magics")
    for option in (*OPTIONS, *MAGIC_ONLY):
        for flag in option.flags.split():
            assert f"`{flag}" in page, flag
    for choice in (*ENGINES, *PRECISIONS, *VIEWS):
        assert choice in page, choice


def test_the_options_are_keywords_of_launch_as_the_page_says() -> None:
    page, keywords = reference("magics"), inspect.signature(nbtrain.launch).parameters.keys()
    options = {option.argument for option in (*OPTIONS, *MAGIC_ONLY)}
    assert options - keywords == {"bind", "title", "save", "new", "ranks"}
    assert "not `--as`, `--name`, `--save`, `--ranks` and `--new`" in page
    for name in options & keywords:
        assert re.search(rf"\| `{name}\b", page), name


def test_the_options_page_lists_what_nbtrain_answers() -> None:
    page = reference("magics")
    documented = re.findall(r"%nbtrain ([a-z]+)", NbtrainMagics.nbtrain.__doc__ or "")
    assert len({*documented}) >= 8
    for question in documented:
        assert re.search(rf"`%%?nbtrain {question}\b", page), question


@pytest.mark.parametrize("name", nbtrain.__all__)
def test_the_api_page_names_all_that_is_public(name: str) -> None:
    assert f"`nbtrain.{name}" in reference("python-api")


PUBLIC = [name for name in vars(nbtrain.Run) if not name.startswith("_")]
INTERNAL = {"bring_home", "draw_in", "open"}
"""What modules of nbtrain call; `open` is named with its class."""


@pytest.mark.parametrize("name", sorted({*PUBLIC} - INTERNAL))
def test_the_api_page_names_all_of_a_run(name: str) -> None:
    assert f"`run.{name}" in reference("python-api")


def test_what_the_pages_say_of_a_run_exists() -> None:
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]  # that has what went, too
    names = {name for page in pages for name in re.findall(r"\brun\.(\w+)", page.read_text())}
    assert [name for name in names - {"json", "csv", "png"} if not hasattr(nbtrain.Run, name)] == []


def test_the_command_lines_page_lists_every_command_and_option() -> None:
    page, parser = reference("command-line"), cli._parser()
    (commands,) = [action for action in parser._actions if action.choices]
    assert commands.choices
    for command, subparser in dict(commands.choices).items():
        assert f"`nbtrain {command}" in page, command
        for option in (name for action in subparser._actions for name in action.option_strings):
            assert option in page or option in ("-h", "--help"), option


def test_the_files_page_lists_every_file_of_a_run() -> None:
    page = reference("run-folder")
    files = vars(run_folder.RunFolder).values()
    names = [file._name for file in files if isinstance(file, run_folder._File)]
    of_ranks = {file._name for file in files if isinstance(file, run_folder._RankFile)}
    rows = [f"rank-0000.{name}" if name in of_ranks else name for name in names]
    assert len(rows) > 15
    assert [row for row in rows if not re.search(rf"\| `{re.escape(row)}(/\S*)?` \|", page)] == []


def test_the_variables_page_lists_those_of_nbtrain() -> None:
    sources = "".join(p.read_text() for p in Path(nbtrain.__file__).parent.rglob("*.py"))
    names = {*re.findall(r"\"(NBTRAIN_[A-Z_]+)\"", sources)}
    assert "NBTRAIN_HOME" in names
    assert [name for name in names if f"`{name}`" not in reference("environment")] == []


def test_the_exceptions_page_draws_every_exception() -> None:
    page = reference("exceptions")
    names = [n for n, cls in vars(errors).items() if inspect.isclass(cls) and n != "Any"]
    assert len(names) >= 12
    assert [name for name in names if not re.search(rf"^ +[│├└─ ]*{name}\b", page, re.M)] == []


def test_the_docstrings_page_has_all_that_is_public() -> None:
    page = reference("python-api")
    shown = {*re.findall(r"auto(?:function|class):: nbtrain\.(\w+)", page)}
    assert {*nbtrain.__all__} - shown == {"NbtrainError", "RankDied"}
    assert "automodule:: nbtrain.errors" in page
    (members,) = re.findall(r"nbtrain\.LiveRanks\(\)\n   :members: (.*)", page)
    documented = set(re.findall(r"`ranks\.(\w+)\(", reference("python-api")))
    assert documented == {*members.split(", ")}
    assert [name for name in documented if not hasattr(nbtrain.LiveRanks, name)] == []


@pytest.mark.parametrize("command", ["memory", "scaling"])
def test_the_guides_of_memory_and_scaling_list_their_options(command: str) -> None:
    folder = Path(nbtrain.__file__).parent / "commands" / command
    sources = "".join(path.read_text() for path in folder.glob("*.py"))
    options = {*re.findall(r"add_argument\(\"(--[\w-]+)\"", sources)}
    assert len(options) >= 2
    guide = (NOTEBOOKS / f"guides/{command}.md").read_text()
    assert [name for name in options if f"`{name}" not in guide] == []
    (row,) = re.findall(rf"^\| `%nbtrain {command} .*$", reference("magics"), re.M)
    assert [name for name in options if name not in row] == []


def test_the_install_page_lists_every_extra() -> None:
    page = (NOTEBOOKS / "install.md").read_text()
    extras = metadata.metadata("nbtrain").get_all("Provides-Extra") or []
    assert len(extras) >= 8
    assert [extra for extra in extras if f"`{extra}`" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_table_has_a_head(page: Path) -> None:
    """A table that a blank line cuts in two is shown as text from there on."""
    lines = re.sub(r"```.*?```", "", page.read_text(), flags=re.S).splitlines()
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        if line.startswith("|") and not before.startswith("|"):
            assert after.startswith("|---"), line


def test_what_programs_are_shown_of_the_site_exists() -> None:
    links = LINK.findall((NOTEBOOKS / "llms.txt").read_text())
    assert len(links) > 10
    assert [link for link in links if not list(NOTEBOOKS.glob(link.replace("html", "*")))] == []


def test_the_messages_that_one_looks_up_are_those_of_nbtrain() -> None:
    page = (NOTEBOOKS / "troubleshooting.md").read_text()
    own = page.partition("## nbtrain's own")[2].partition("## Other launchers'")[0]
    sources = "".join(p.read_text() for p in Path(nbtrain.__file__).parent.rglob("*.py"))
    joined = re.sub(r"\"\s+f?\"", "", sources)
    messages = re.findall(r"\*\*(.+?)\*\*", own.replace("\n", " "))
    assert len(messages) > 10
    for message in messages:  # of which some parts are filled in
        parts = re.split(r"\d+(?:–\d+)?|[:(…,`#]|CUDA| ranks? ", message)
        constant = [p.strip() for p in parts if " " in p.strip() or p == message]
        assert any(part in joined for part in constant), message


@pytest.mark.parametrize("kind", events.KINDS)
def test_the_events_page_lists_every_kind_with_its_fields(kind: str) -> None:
    (row,) = re.findall(rf"^\| `{kind}` \|.*$", reference("run-folder"), re.M)
    for name in {f.name for f in dataclasses.fields(events.KINDS[kind])} - {"time", "rank"}:
        assert f"`{name}`" in row, name


def test_what_the_readme_shows_is_what_happens(notebook: Notebook) -> None:
    cells = re.findall(r"```python\n(.*?)```", README, re.S)
    prepare, train, results, failure, spawned = [source.rstrip() for source in cells]
    assert len(train.splitlines()) == 12
    for source in (prepare, train):
        assert notebook.run(source).ename == ""
    printed = notebook.run(results)
    assert printed.ename == ""
    assert float(printed.stdout.split("tensor(")[-1].split(")")[0]) > 0.8
    files = notebook.run("print(*(path.name for path in run.folder.iterdir()))").stdout.split()
    documented = {name.replace("rank-0001", "rank-0000") for name in files}
    assert [name for name in documented if f"`{name}" not in reference("run-folder")] == []
    raised = notebook.run(failure)
    assert (raised.ename, raised.evalue) == ("ValueError", "no images in batch 17")
    assert "rank 0 was stopped" in raised.traceback
    assert "raise ValueError" in raised.traceback
    assert notebook.run("print(nbtrain.last_run().failure)").stdout.startswith("rank 1: ValueError")
    assert notebook.run(spawned).ename == ""
    assert "[" in notebook.run("print(nbtrain.last_run().results)").stdout
