"""Live ranks that were forked, and spawned, do what those of every engine do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from tests.support.kernel import Notebook

from . import contract


@pytest.fixture(scope="module", params=["fork", "spawn"])
def notebook(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Notebook, str]]:
    """A kernel, and the options of its live ranks."""
    folder = tmp_path_factory.mktemp("kernel")
    with closing(Notebook(folder / "home", folder, warm=True)) as kernel:
        kernel.run("%load_ext nbtrain" + contract.SETUP)
        yield kernel, f"-e {request.param}"


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_live_ranks(notebook: tuple[Notebook, str], check: Callable[[Notebook], None]) -> None:
    contract.begin(*notebook)
    check(notebook[0])
