"""The page of hosts says what the tests of hosts say."""

from __future__ import annotations

from tests.tools import host_table

HOSTS = (
    "Colab, Databricks, Deepnote, IPython, JupyterHub, JupyterLab, Kaggle, SageMaker, Spyder, "
    "VS Code, jupyter-console, marimo, nbconvert, papermill, qtconsole"
)


def test_the_page_has_the_table_that_the_tests_make() -> None:
    text = host_table.PAGE.read_text()
    assert text == host_table.page(text), "run `python tests/tools/host_table.py`"


def test_every_host_is_played_by_a_test() -> None:
    assert {row[0] for row in host_table.rows()} == {*HOSTS.split(", ")}
