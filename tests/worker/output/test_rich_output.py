"""What ranks of ordinary runs display arrives in the cell, as what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernel import Notebook, Outputs

_OWN = 'class="tex2jax_ignore', '<div style="opacity'


def forms(out: Outputs, kind: str) -> list[str]:
    """The displays of a cell that have a form, but for the board and the labels."""
    shown = [each for each in out.displays if kind in each]
    return [d[kind] for d in shown if not any(own in d.get("text/html", "") for own in _OWN)]


@pytest.mark.parametrize("engine", ["fork", "spawn"])
def test_figures_and_tables_of_rank_0_are_outputs_below_the_board(
    notebook: Notebook, engine: str
) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    out = notebook.run(
        f"%%distributed -n 2 -e {engine}\n"
        "import matplotlib.pyplot as plt, pandas as pd\n"
        "from IPython.display import HTML, display\n"
        "display(HTML(f'<b>bold {nbtrain.rank()}</b>'))\n"
        "plt.plot([1, 2]); plt.show()\n"
        "figure, axes = plt.subplots(); display(figure); plt.close(figure)\n"
        "display(pd.DataFrame({'a': [1]}))\n"
        "plt.plot([3, 4])"
    )
    assert out.ename == "", out.traceback
    assert forms(out, "text/html")[0] == "<b>bold 0</b>"
    assert len(forms(out, "image/png")) == 3  # the last one was not shown by hand
    assert sum("<table" in form for form in forms(out, "text/html")) == 1
    texts = [each["text/plain"] for each in out.displays]
    assert "rank 0:" in texts[1]  # the board stays the first output
    assert texts[-1] == "rank 1 has displays, too: run.show(rank=1)"
    shown = notebook.run("nbtrain.last_run().show(rank=1)")
    assert "<b>bold 1</b>" in forms(shown, "text/html")
    again = notebook.run("%nbtrain show")
    assert "<b>bold 0</b>" in forms(again, "text/html")


def test_a_display_is_there_while_the_run_goes_on(notebook: Notebook, tmp_path: Path) -> None:
    def during(out: Outputs) -> None:
        if "<i>early</i>" in forms(out, "text/html"):
            (tmp_path / "go").touch()

    out = notebook.run(
        "%%distributed -n 2\n"
        "import pathlib, time\n"
        "from IPython.display import HTML\n"
        "display(HTML('<i>early</i>'))\n"
        f"while not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.01)",
        during=during,
    )
    assert out.ename == ""


def test_of_too_many_displays_the_last_is_shown_with_the_number_left_out(
    notebook: Notebook,
) -> None:
    """Also by a task that fails."""
    out = notebook.run(
        "%%distributed -n 2\n"
        "from IPython.display import HTML\n"
        "if nbtrain.rank() == 0:\n"
        "    for n in range(120): display(HTML(f'<i>{n}</i>'))\n"
        "    display(HTML('last'))\n"
        "    raise ValueError"
    )
    assert out.ename == "ValueError"
    shown = forms(out, "text/html")
    assert "<i>49</i>" in shown
    assert "<i>50</i>" not in shown
    assert "last" in shown
    texts = [each["text/plain"] for each in [*out.displays, *out.updates]]
    assert "… 70 displays left out" in texts


def test_without_a_page_a_display_is_its_text(notebook: Notebook) -> None:
    notebook.allow_stdin = False  # as a program that executes notebooks
    out = notebook.run(
        "%%distributed -n 1\nfrom IPython.display import HTML\ndisplay(HTML('<b>x</b>'))"
    )
    assert "[rank 0] x\n" in out.stdout
    assert "HTML object" not in out.stdout
    assert "<b>x</b>" in forms(out, "text/html")  # which is what the saved notebook shows


HTML = "<style>p {{}}</style><p>state&nbsp;<b>{}</b></p><table><tr><td>1</td><td>2</td></tr>"


@pytest.mark.parametrize(
    ("show", "update"),
    [
        ("handle = display(HTML(TEXT.format(-1)), display_id=True)", "handle.update(HTML(text))"),
        (
            "display({'text/plain': TEXT.format(-1)}, raw=True, display_id='a')",
            "update_display({'text/plain': text}, raw=True, display_id='a')",
        ),
    ],
    ids=["a handle", "HTML as text"],
)
def test_an_updated_display_has_one_line_of_words_in_the_log(
    notebook: Notebook, show: str, update: str
) -> None:
    out = notebook.run(
        "%%distributed -n 1\n"
        "from IPython.display import HTML, update_display\n"
        f"TEXT = {HTML!r}\n{show}\n"
        f"for n in range(100):\n    text = TEXT.format(n)\n    {update}\n"
        "print('printed')\n"
    )
    assert not out.ename, out.traceback
    lines = notebook.value("nbtrain.last_run().logs(0)").splitlines()
    assert [line.strip() for line in lines if "nbtrain" not in line] == [
        "state\xa0-1",
        "1  2",
        "printed",
        "state\xa099",
        "1  2",
    ]


@pytest.mark.parametrize("made", ["", "label = Label('made here')\n"])
def test_a_widget_that_a_rank_changes_is_noted_once(notebook: Notebook, made: str) -> None:
    notebook.run("from ipywidgets import Label\nlabel = Label('before')")
    out = notebook.run(f"%%distributed -n 2\n{made}for n in 'ab': label.value = n")
    note = "a rank changed a widget (Label), which the notebook does not show. Print the value, log"
    assert out.board.count(note) == 1
    assert notebook.value("label.value") == "before"
    out = notebook.run("%%distributed -n 2\nfrom tqdm.notebook import tqdm\nlist(tqdm(range(3)))")
    assert "widget" not in out.board
