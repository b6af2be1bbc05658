"""Modules beside the notebook, on a node that does not see the notebook's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.parts.slurm.conftest import kernel_in
from tests.support.kernel import Notebook
from tests.support.slurm import Job, SlurmCluster, can_hide_folders
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that n1 alone sees."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def cluster(disk: Path) -> Iterator[SlurmCluster]:
    if not can_hide_folders():
        pytest.skip("needs the right to mount")
    with SlurmCluster(hidden={"n2": disk}) as found:
        yield found


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for temporary files on both nodes."""
    return tmp_path_factory.mktemp("temporary")


@contextmanager
def start_kernel(job: Job, disk: Path, temporary: Path) -> Iterator[Notebook]:
    """Start a kernel in a folder that n2 does not see."""
    folder = disk / "notebook"
    folder.mkdir(exist_ok=True)
    with closing(kernel_in(job, folder)) as kernel:
        kernel.run(f"import sys; os.environ['TMPDIR'] = {str(temporary)!r}")
        yield kernel


@pytest.fixture(scope="module")
def notebook(job: Job, disk: Path, temporary: Path) -> Iterator[Notebook]:
    with start_kernel(job, disk, temporary) as kernel:
        yield kernel


def run(notebook: Notebook, cell: str) -> list[Any]:
    """Run a cell on a rank of each node; return the results in the order of nodes."""
    out = notebook.run(f"%%distributed -n 2 --view none\n{cell}", timeout=120)
    assert not out.ename, out.traceback
    assert notebook.value("[r.node for r in nbtrain.last_run().state.ranks]") == ["n1", "n2"]
    return list(notebook.value("nbtrain.last_run().results"))


def write(notebook: Notebook, **sources: str) -> None:
    """Write modules beside the notebook; `a__b` is the module b of the package a."""
    for name, source in sources.items():
        path = f"{name.replace('__', '/')}.py"
        notebook.run(f"os.makedirs(os.path.dirname({path!r}) or '.', exist_ok=True)")
        notebook.run(f"_ = open({path!r}, 'w').write({source!r})")


PLACES = "import beside_it, travels.deep.leaf\nbeside_it.number, beside_it.__file__"


def test_a_node_without_the_folder_gets_the_modules_as_they_are_at_each_launch(
    notebook: Notebook, disk: Path, temporary: Path
) -> None:
    write(notebook, beside_it="number = 1", travels__deep__leaf="", travels__other="")
    (disk / "notebook/travels/data.csv").write_text("data")
    here, there = run(notebook, PLACES)
    assert here == (1, str(disk / "notebook/beside_it.py"))  # it has no copy
    assert there[0] == 1
    copy = Path(there[1]).parent
    assert copy.parent == temporary
    assert copy.stat().st_mode & 0o777 == 0o700
    files = [str(path.relative_to(copy)) for path in copy.rglob("*.*") if path.suffix != ".pyc"]
    assert sorted(files) == ["beside_it.py", "travels/deep/leaf.py", "travels/other.py"]
    assert run(notebook, PLACES) == [here, there]  # the same copy

    write(notebook, beside_it="number = 2")  # of the same size, and often in the same second
    here, there = run(notebook, PLACES)
    assert (here[0], there[0]) == (2, 2)
    assert not copy.exists()
    assert Path(there[1]).exists()
    run(notebook, "os.environ['RANK']")  # needs no module beside the notebook
    assert not Path(there[1]).exists()


def test_a_folder_of_modules_in_the_notebooks_folder_is_found_by_its_path(
    notebook: Notebook,
) -> None:
    write(notebook, lib__inner="number = 5")
    notebook.run("sys.path.insert(0, 'lib'); import inner")
    assert run(notebook, "import inner\ninner.number") == [5, 5]


def test_what_is_neither_beside_the_notebook_nor_on_the_node_is_named(
    notebook: Notebook, disk: Path
) -> None:
    (disk / "elsewhere").mkdir()
    (disk / "elsewhere/only_here.py").write_text("x = 1")
    notebook.run("sys.path.append('../elsewhere'); import only_here")
    out = notebook.run("%%distributed -n 2 --view none\nonly_here.x", timeout=60)
    assert "n2 lacks only_here" in out.evalue


def test_the_error_of_a_sent_module_is_shown_with_its_line(notebook: Notebook) -> None:
    source = "def fail(rank):\n    if rank == '1':\n        raise ValueError('of n2')\n"
    write(notebook, failing=source)
    cell = "%%distributed -n 2\nimport failing\nfailing.fail(os.environ['RANK'])"
    out = notebook.run(cell, timeout=60)
    assert out.ename == "ValueError"
    assert "raise ValueError('of n2')" in out.traceback


def test_live_ranks_have_the_modules_and_the_copy_ends_with_the_kernel(
    job: Job, disk: Path, temporary: Path
) -> None:
    with start_kernel(job, disk, temporary) as kernel:
        write(kernel, beside_it="number = 3")
        started = kernel.run("%nbtrain start -e slurm -n 2", timeout=120)
        assert not started.ename, started.traceback
        kernel.run("%%distributed\nimport beside_it\nplace = beside_it.__file__", timeout=60)
        here, there = map(Path, kernel.value("list(ranks['place'])"))
        assert here == disk / "notebook/beside_it.py"
        assert there.read_text() == "number = 3"
    wait_until(lambda: not there.parent.exists())
