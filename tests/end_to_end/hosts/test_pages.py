"""Hosted pages whose software cannot be had: their environment, and the messages of a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cells import must_run
from tests.support.kernel import Notebook, Outputs

CELL = """%%distributed -n 2
while not os.path.exists("go"):
    time.sleep(0.05)
nbtrain.rank()
"""
HUB = {"JUPYTERHUB_USER": "ada", "JUPYTERHUB_SERVICE_PREFIX": "/user/ada/"}
KAGGLE = {"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "KAGGLE_CONTAINER_NAME": "kaggle"}
SAGEMAKER = {"SAGEMAKER_APP_TYPE": "JupyterLab", "AWS_REGION": "eu-west-1"}
DEEPNOTE = {"DEEPNOTE_PROJECT_ID": "1", "DEEPNOTE_RUNTIME_UUID": "1"}
DATABRICKS = {"DATABRICKS_RUNTIME_VERSION": "17.3"}


@pytest.fixture
def page(request: pytest.FixtureRequest, tmp_path: Path, run_root: Path) -> Iterator[Notebook]:
    variables: dict[str, str] = request.param
    kernel = Notebook(run_root, tmp_path, environment=variables)
    try:
        kernel.run("%load_ext nbtrain\nimport nbtrain, os, time, torch")
        yield kernel
    finally:
        kernel.close()


def check(page: Notebook, host: str, metadata: dict[str, Any] | None = None) -> None:
    page.metadata = metadata
    go = Path(page.process.cwd()) / "go"

    def look(out: Outputs) -> None:  # until the board has moved, the ranks wait
        widgets = [str(model.get("value", "")) for model in out.models.values()]
        pages = [update.get("text/html", "") for update in out.updates]
        if any("running" in board for board in widgets + pages):
            go.touch()

    out = must_run(page, CELL, during=look)
    assert "succeeded" in out.updates[-1]["text/html"]
    assert page.value("nbtrain.last_run().results") == [0, 1]
    page.metadata = None
    assert host in page.run("%nbtrain doctor").stdout


TRIED = "its environment variables and a page's messages to a real kernel"


@pytest.mark.host("Kaggle", works="live board, summary that stays", tried=TRIED)
@pytest.mark.parametrize("page", [KAGGLE], indirect=True)
def test_kaggle(page: Notebook) -> None:
    check(page, "Kaggle")


@pytest.mark.host("JupyterHub", works="live board, summary that stays", tried=TRIED)
@pytest.mark.parametrize("page", [HUB], indirect=True)
def test_jupyterhub(page: Notebook) -> None:
    check(page, "JupyterHub")


@pytest.mark.host("SageMaker", works="live board, summary that stays", tried=TRIED)
@pytest.mark.parametrize("page", [SAGEMAKER], indirect=True)
def test_sagemaker(page: Notebook) -> None:
    check(page, "SageMaker")


@pytest.mark.host("Deepnote", works="live board, summary that stays", tried=TRIED)
@pytest.mark.parametrize("page", [DEEPNOTE], indirect=True)
def test_deepnote(page: Notebook) -> None:
    check(page, "Deepnote")


@pytest.mark.host(
    "Databricks",
    works="live board, summary that stays",
    tried="its environment variable, and cells sent without a name, as consoles send them",
)
@pytest.mark.parametrize("page", [DATABRICKS], indirect=True)
def test_databricks(page: Notebook) -> None:
    check(page, "Databricks", metadata={})
