"""Hosted pages whose software cannot be had: their environment, and the messages of a page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cells import must_run
from tests.support.kernel import Notebook, Outputs

CELL = """%%distributed -n 2
while not os.path.exists("go"):
    time.sleep(0.05)
nbtrain.rank()
"""
HOSTS = {
    "Kaggle": {"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "KAGGLE_CONTAINER_NAME": "kaggle"},
    "JupyterHub": {"JUPYTERHUB_USER": "ada", "JUPYTERHUB_SERVICE_PREFIX": "/user/ada/"},
    "SageMaker": {"SAGEMAKER_APP_TYPE": "JupyterLab", "AWS_REGION": "eu-west-1"},
    "Deepnote": {"DEEPNOTE_PROJECT_ID": "1", "DEEPNOTE_RUNTIME_UUID": "1"},
    "Databricks": {"DATABRICKS_RUNTIME_VERSION": "17.3"},
}


WORKS = "live board, summary that stays"
TRIED = "its variables and a page's messages to a real kernel"
UNNAMED = "its variable, and cells without a name"


@pytest.mark.host("Kaggle", works=WORKS, tried=TRIED)
@pytest.mark.host("JupyterHub", works=WORKS, tried=TRIED)
@pytest.mark.host("SageMaker", works=WORKS, tried=TRIED)
@pytest.mark.host("Deepnote", works=WORKS, tried=TRIED)
@pytest.mark.host("Databricks", works=WORKS, tried=UNNAMED)
@pytest.mark.parametrize("host", HOSTS)
def test_a_hosted_page(host: str, start_kernel: Callable[..., Notebook]) -> None:
    page = start_kernel(environment=HOSTS[host])
    page.run("%load_ext nbtrain\nimport nbtrain, os, time, torch")
    page.metadata = {} if host == "Databricks" else None
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
