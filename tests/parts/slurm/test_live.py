"""Ranks that stay between cells, on the nodes of a Slurm job: the contract of every engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parts.live import contract
from tests.support.kernel import Notebook

pytestmark = pytest.mark.slurm


@pytest.fixture
def live(notebook: Notebook) -> Notebook:
    """Two live ranks, each on its own node."""
    if not notebook.value("'model' in globals()"):
        notebook.run(contract.SETUP)
    contract.begin(notebook, "-e slurm")
    assert len(set(notebook.value("list(ranks.nodes.values())"))) == 2
    return notebook


@pytest.mark.parametrize("check", contract.WITHOUT_THE_RECORDER, ids=lambda check: check.__name__)
def test_live_ranks(live: Notebook, check: Callable[[Notebook], None]) -> None:
    check(live)


def test_all_live_ranks_end_with_stop(live: Notebook) -> None:
    live.run("%nbtrain stop")
    assert "there are no live ranks" in live.run("%nbtrain status").evalue
