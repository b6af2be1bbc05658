"""What README, guides and reference pages say is so."""

from __future__ import annotations

import dataclasses
import inspect
import re
from importlib import metadata
from pathlib import Path

import nbformat
import pytest

import nbtrain
from nbtrain import errors
from nbtrain.commands import cli, magics
from nbtrain.planning.option_parser import cell_options
from nbtrain.planning.option_types import ENGINES, PRECISIONS, VIEWS
from nbtrain.tracking import events, run_folder
from tests.support.kernel import Notebook
from tests.support.paths import NOTEBOOKS, ROOT
from tests.support.waiting import wait_until

README = (ROOT / "README.md").read_text()
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / ".github/CONTRIBUTING.md",
    ROOT / ".github/SECURITY.md",
    *sorted(NOTEBOOKS.rglob("*.md")),
]
TUTORIALS = sorted([*NOTEBOOKS.glob("*.ipynb"), *NOTEBOOKS.glob("tutorials/*.ipynb")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def reference(name: str) -> str:
    return (NOTEBOOKS / "reference" / f"{name}.md").read_text()


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len(README.split()) <= 750


def test_the_readme_has_the_two_commands_that_ci_runs() -> None:
    commands = re.findall(r"^    (pip install .*) && (.*)$", README, re.M)  # as in .ci/steps.py
    assert [run.split()[0] for _install, run in commands] == ["nbtrain", "pytest"]


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


def prose(page: Path) -> str:
    """Return the text of a page; of a notebook, the text of its markdown cells."""
    if page.suffix != ".ipynb":
        return page.read_text()
    cells = nbformat.read(page, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", prose(page), flags=re.S), re.M)
    texts = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", [*PAGES, *TUTORIALS], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_to_headings(page: Path) -> None:
    for link in LINK.findall(prose(page)):
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
    for option in cell_options().values():
        for flag in option.flags.split():
            assert f"`{flag}" in page, flag
    for choice in (*ENGINES, *PRECISIONS, *VIEWS):
        assert choice in page, choice


@pytest.mark.part("export", "live")
def test_the_options_are_keywords_of_launch_as_the_page_says() -> None:
    page, keywords = reference("magics"), inspect.signature(nbtrain.launch).parameters.keys()
    options = {option.argument for option in cell_options().values()}
    assert options - keywords == {"bind", "title", "save", "new", "ranks"}
    assert "not `--as`, `--name`, `--save`, `--ranks` and `--new`" in page
    for name in options & keywords:
        assert re.search(rf"\| `{name}\b", page), name


@pytest.mark.part("live", "memory", "scaling")
def test_the_options_page_lists_what_nbtrain_answers() -> None:
    page = reference("magics")
    documented = re.findall(r"%nbtrain ([a-z]+)", magics._nbtrain_help())
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
    texts = [prose(page) for page in [*pages, *TUTORIALS]]
    names = {name for text in texts for name in re.findall(r"\brun\.(\w+)", text)}
    assert [name for name in names - {"json", "csv", "png"} if not hasattr(nbtrain.Run, name)] == []


def test_the_command_lines_page_lists_every_command_and_option() -> None:
    page, parser = reference("magics"), cli._parser()
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
    assert [name for name in names if f"`{name}`" not in reference("magics")] == []


def test_the_exceptions_page_draws_every_exception() -> None:
    page = reference("python-api")
    names = [n for n, cls in vars(errors).items() if inspect.isclass(cls) and n != "Any"]
    assert len(names) >= 12
    assert [name for name in names if not re.search(rf"^ +[│├└─ ]*{name}\b", page, re.M)] == []
    assert {*re.findall(r"autoexception:: nbtrain\.errors\.(\w+)", page)} == {*names}


@pytest.mark.part("live")
def test_the_docstrings_page_has_all_that_is_public() -> None:
    page = reference("python-api")
    shown = {*re.findall(r"auto(?:function|class):: nbtrain\.(\w+)", page)}
    assert {*nbtrain.__all__} - shown == {"NbtrainError", "RankDied"}
    (members,) = re.findall(r"nbtrain\.LiveRanks\(\)\n   :members: (.*)", page)
    documented = set(re.findall(r"`ranks\.(\w+)\(", reference("python-api")))
    assert documented == {*members.split(", ")}
    assert [name for name in documented if not hasattr(nbtrain.LiveRanks, name)] == []


@pytest.mark.parametrize(
    ("command", "guide"), [("memory", "parallelism.ipynb"), ("scaling", "tutorials/scaling.ipynb")]
)
@pytest.mark.part("memory", "scaling")
def test_the_guides_of_memory_and_scaling_list_their_options(command: str, guide: str) -> None:
    folder = Path(nbtrain.__file__).parent / "parts" / command
    sources = "".join(path.read_text() for path in folder.glob("*.py"))
    options = {*re.findall(r"add_argument\(\"(--[\w-]+)\"", sources)}
    assert len(options) >= 2
    page = prose(NOTEBOOKS / guide)
    assert [name for name in options if f"`{name}" not in page] == []
    (row,) = re.findall(rf"^\| `%nbtrain {command} .*$", reference("magics"), re.M)
    assert [name for name in options if name not in row] == []


def test_the_install_page_lists_every_extra() -> None:
    page = (NOTEBOOKS / "install.md").read_text()
    extras = metadata.metadata("nbtrain").get_all("Provides-Extra") or []
    assert len(extras) >= 8
    assert [extra for extra in extras if f"`{extra}`" not in page] == []


@pytest.mark.parametrize("page", [*PAGES, *TUTORIALS], ids=lambda p: str(p.relative_to(ROOT)))
def test_every_table_has_a_head(page: Path) -> None:
    """A table that a blank line cuts in two is shown as text from there on."""
    lines = re.sub(r"```.*?```", "", prose(page), flags=re.S).splitlines()
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        if line.startswith("|") and not before.startswith("|"):
            assert after.startswith("|---"), line


def test_what_programs_are_shown_of_the_site_exists() -> None:
    links = [link for link in LINK.findall((NOTEBOOKS / "llms.txt").read_text()) if ".html" in link]
    assert len(links) > 10
    assert [link for link in links if not list(NOTEBOOKS.glob(link.replace("html", "*")))] == []


@pytest.mark.part("live", "ray", "steering", "tpu")
def test_the_messages_that_one_looks_up_are_those_of_nbtrain() -> None:
    page = (NOTEBOOKS / "troubleshooting.md").read_text()
    own = page.partition("## nbtrain's own")[2].partition("## Other launchers'")[0]
    sources = "".join(p.read_text() for p in Path(nbtrain.__file__).parent.rglob("*.py"))
    joined = re.sub(r"\"\s+f?\"", "", sources)
    headings = re.findall(r"^### (.+)$", own, re.M)
    others = re.findall(r"^Also: (.+?)\.$", own, re.M)
    messages = [m for heading in headings for m in heading.split(" · ")]
    messages += [m for line in others for m in re.findall(r"\"(.+?)\"", line)]
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


TINY = """
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

words = {"[PAD]": 0, "good": 1, "bad": 2}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), pad_token="[PAD]")
rows = [{"input_ids": [1 + n % 2] * (2 + n % 3), "label": n % 2} for n in range(64)]
texts = {"train": rows, "test": rows[:16]}
config = BertConfig(vocab_size=3, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
model = BertForSequenceClassification(config)
before = {name: p.clone() for name, p in model.classifier.named_parameters()}
"""
"""In place of what the README downloads."""


def test_what_the_readme_shows_is_what_happens(notebook: Notebook) -> None:
    cells = re.findall(r"```python\n(.*?)```", README, re.S)
    download, trainer, prepare, train, spawned = [source.rstrip() for source in cells]
    imports = [line for line in download.splitlines() if line.startswith("from transformers")]
    assert notebook.run("\n".join(["%load_ext nbtrain", *imports, TINY])).ename == ""
    assert len(trainer.splitlines()) == 12
    assert notebook.run(trainer).ename == ""
    after = "model.classifier.named_parameters()"
    trained = f"print(all((p != before[n]).any().item() for n, p in {after}))"
    assert notebook.run(trained).stdout == "True\n"
    losses = "import nbtrain\nprint([r['eval_loss'] for r in nbtrain.last_run().results])"
    first, second = notebook.run(losses).stdout.strip("[]\n").split(", ")
    assert first == second
    for source in (prepare, train):
        assert notebook.run(source).ename == ""
    printed = notebook.run("print((model(x).argmax(1) == data.tensors[1]).float().mean().item())")
    assert float(printed.stdout) > 0.9
    files = "print(*(path.name for path in nbtrain.last_run().folder.iterdir()))"
    names = notebook.run(files).stdout.replace("rank-0001", "rank-0000").split()
    assert [name for name in names if f"`{name}" not in reference("run-folder")] == []
    assert (
        notebook.run(f"{spawned}\ndef train(model):\n    return model.weight.sum().item()").ename
        == ""
    )
    weights = "print(nbtrain.last_run().results == [model.weight.sum().item()] * 2)"
    assert notebook.run(weights).stdout == "True\n"


def test_the_page_for_agents_starts_asks_and_takes_the_results(notebook: Notebook) -> None:
    page = prose(NOTEBOOKS / "tutorials/overnight.ipynb").partition("from an agent")[2]
    cells = re.findall(r"```python\n(.*?)```", page, re.S)
    start, name, ask, take = cells
    notebook.run("%load_ext nbtrain\nimport torch\nmodel = torch.nn.Linear(2, 2)")
    body = "    model.weight.data.fill_(7)\n    nbtrain.log(loss=0.5)\n    return nbtrain.rank()\n"
    assert notebook.run(f"{start.replace('    ...', body)}").ename == ""
    assert notebook.run(f"import nbtrain\n{name}").stdout.strip().split("-")[2] == "train"

    def answer() -> str:
        return notebook.run(ask).stdout

    wait_until(lambda: not answer().startswith(("starting", "running", "stopping")), timeout=60)
    assert answer() == "succeeded None {'loss': 0.5} succeeded\n"
    assert notebook.run(take).stdout == "None [0, 1]\n"
    assert notebook.value("model.weight.tolist()") == [[7.0, 7.0], [7.0, 7.0]]
