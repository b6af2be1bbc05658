"""What a page gets while a run goes on, and what it may send meanwhile, through a real kernel."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import pytest

from nbtrain.ui.displays import select
from nbtrain.ui.displays.widget_board import _VIEW
from tests.support.kernel import Notebook, Outputs, once

WAITS = "%%distributed -n 2\nprint('ready', flush=True)\ntime.sleep(60)"


def _check_what_is_left(out: Outputs) -> None:
    """The last picture alone: for pages that were reloaded, or come later."""
    kinds = sorted(state["_model_name"] for state in out.models.values())
    assert "ButtonModel" not in kinds
    assert kinds.count("HTMLModel") == kinds.count("VBoxModel") <= 1


def test_a_board_with_a_stop_button_becomes_a_static_summary(notebook: Notebook) -> None:
    boards: set[str] = set()

    def look(out: Outputs) -> None:
        boards.update(
            s["value"] for s in out.models.values() if s.get("_model_name") == "HTMLModel"
        )

    out = notebook.run("%%distributed -n 2\nprint('said')\ntime.sleep(1)\n{'a': 1}", during=look)
    assert out.ename == "", out.traceback
    (display,) = out.displays
    assert set(display) == {_VIEW, "text/html", "text/plain"}
    assert len(boards) > 2
    assert any("running" in board for board in boards)
    assert set(out.updates[-1]) == {"text/html", "text/plain"}
    assert "succeeded" in out.updates[-1]["text/html"]
    _check_what_is_left(out)
    assert "succeeded" in out.widget("HTML")[1]["value"]


def test_a_click_ends_the_run_and_says_so(notebook: Notebook) -> None:
    states: list[dict[str, Any]] = []

    def click(out: Outputs) -> None:
        button, state = out.button()
        states.append(dict(state))
        for _ in range(3):
            notebook.click(button)

    def look(out: Outputs) -> None:
        stop(out)
        off = (s for s in out.models.values() if s.get("disabled") and s["icon"] == "stop")
        states.extend(map(dict, off))

    stop = once("ready", click)
    out = notebook.run(WAITS, during=look)
    assert out.ename == "KeyboardInterrupt", out
    assert "by the Stop button" in out.evalue
    assert "interrupted" in out.updates[-1]["text/html"]
    assert "by the Stop button" in out.updates[-1]["text/html"]
    assert states[0]["description"] == "Stop"
    assert states[0]["tooltip"]
    assert states[-1]["description"] == "stopping…"
    _check_what_is_left(out)
    assert notebook.value("nbtrain.last_run().state.status") == "interrupted"


def test_a_click_shows_where_every_rank_is_and_another_hides_it(notebook: Notebook) -> None:
    panels: list[str] = []
    stopped: list[str] = []

    def look(out: Outputs) -> None:
        start(out)
        shown = [str(m.get("value", "")) for m in out.models.values()]
        stacks = [v for v in shown if "time.sleep(60)" in v]
        if stacks and not panels:
            panels.extend(stacks)
            notebook.click(out.button("search")[0])
        if panels and not stacks and not stopped:
            stopped.append(notebook.click(out.button()[0]))

    start = once("ready", lambda out: notebook.click(out.button("search")[0]) and None)
    out = notebook.run(WAITS, during=look)
    assert out.ename == "KeyboardInterrupt"
    assert "rank 0" in panels[0]
    assert "rank 1" in panels[0]
    assert re.search(r"In\[\d+\], line 3", panels[0])
    _check_what_is_left(out)


def test_what_waits_behind_the_cell_is_done_after_it_once_and_in_order(notebook: Notebook) -> None:
    notebook.run("seen = []")
    requests: list[str] = []

    def queue(out: Outputs) -> None:
        for number in range(5):
            code = f"seen.append(({number}, nbtrain.last_run().state.status))"
            requests.append(notebook.client.execute(code, allow_stdin=False))
            requests.append(notebook.client.complete("nbtrain.la"))
            requests.append(notebook.client.inspect("nbtrain"))
            requests.append(notebook.client.kernel_info())
        notebook.send("comm_msg", {"comm_id": "of nobody", "data": {"method": "update"}})
        requests.append(notebook.client.execute("seen.append('last')"))
        notebook.client.history(hist_access_type="tail", n=1)
        notebook.click(out.button()[0])

    replies: list[dict[str, Any]] = []
    out = notebook.run(WAITS, during=once("ready", queue), replies=replies)
    assert out.ename == "KeyboardInterrupt"
    while len(replies) < len(requests) + 2:
        replies.append(notebook.client.get_shell_msg(timeout=30))
    answered = [r["parent_header"]["msg_id"] for r in replies]
    assert set(requests) <= set(answered)
    assert len(answered) == len(set(answered))
    asked = [r for r in requests if r in _of(replies, "execute_reply")]
    assert [r for r in answered if r in asked] == asked
    statuses = {r["content"]["status"] for r in replies if r["msg_type"] == "execute_reply"}
    assert statuses == {"ok", "error"}
    expected = [*((number, "interrupted") for number in range(5)), "last"]
    assert notebook.value("seen") == expected


def _of(replies: list[dict[str, Any]], kind: str) -> set[str]:
    return {r["parent_header"]["msg_id"] for r in replies if r["msg_type"] == kind}


def test_a_page_that_is_reloaded_gets_the_widgets_while_the_cell_runs(notebook: Notebook) -> None:
    found: list[dict[str, Any]] = []
    button: list[str] = []

    def reload(out: Outputs) -> None:
        button.append(out.button()[0])
        info = notebook.client.kernel_info()
        assert notebook.read_reply(info)["content"]["status"] == "ok"
        comms = notebook.client.comm_info("jupyter.widget")
        found.append(notebook.read_reply(comms)["content"]["comms"])
        control = {"comm_id": "control-1", "target_name": "jupyter.widget.control", "data": {}}
        notebook.send("comm_open", control, {"version": "1.0.0"})
        data = {"method": "request_states"}
        notebook.send("comm_msg", {"comm_id": "control-1", "data": data})

    states: list[dict[str, Any]] = []

    def look(out: Outputs) -> None:
        start(out)
        answer = out.custom.pop("control-1", None)
        if answer is not None:
            states.append(answer["states"])
            notebook.click(button[0])

    start = once("ready", reload)
    out = notebook.run(WAITS, during=look)
    assert out.ename == "KeyboardInterrupt"
    assert button[0] in found[0]
    assert button[0] in states[0]
    # Only its widget reaches that page now: it stays, with the last picture and no button.
    assert "interrupted" in out.widget("HTML")[1]["value"]
    _check_what_is_left(out)
    assert "interrupted" in out.updates[-1]["text/html"]


DAMAGES = {
    "no stream": "del comms._main_stream",
    "a stream that breaks later": "stream.flush = lambda *limits: 1 / 0",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_ipykernel_that_is_not_as_expected_costs_the_button_only(
    notebook: Notebook, damage: str
) -> None:
    """In one cell, and put back in it: the kernel must go on."""
    buttons: set[bool] = set()

    def look(out: Outputs) -> None:
        buttons.add(any(s.get("_model_name") == "ButtonModel" for s in out.models.values()))

    out = notebook.run(
        "from nbtrain.ui.displays import kernel_comms as comms\n"
        "find, kernel = comms._main_stream, get_ipython().kernel\n"
        "stream, _ = find(kernel)\n"
        "callback, handlers = stream._recv_callback, kernel.shell_handlers\n"
        "try:\n"
        f"    {DAMAGES[damage]}\n"
        "    run = nbtrain.launch(time.sleep, 0.5, num_processes=1)\n"
        "finally:\n"
        "    comms._main_stream, stream._recv_callback = find, callback\n"
        "    kernel.shell_handlers = handlers\n"
        "    stream.__dict__.pop('flush', None)",
        during=look,
    )
    assert out.ename == "", out.traceback
    assert "succeeded" in (out.updates or out.displays)[-1]["text/html"]
    assert buttons == ({True, False} if "later" in damage else {False})
    _check_what_is_left(out)
    assert notebook.value("run.state.status") == "succeeded"


def test_a_board_that_cannot_be_drawn_leaves_the_summary_and_no_dead_button(
    notebook: Notebook,
) -> None:
    out = notebook.run(
        "from nbtrain.ui.board import board\n"
        "parts = board._parts\n"
        "board._parts = lambda s, *a: 1 / 0 if s.status == 'running' else parts(s, *a)\n"
        "try: run = nbtrain.launch(time.sleep, 0.5, num_processes=1)\n"
        "finally: board._parts = parts"
    )
    assert out.ename == "", out.traceback
    assert out.stderr.count("the display failed (ZeroDivisionError") == 1
    assert "succeeded" in (out.updates or out.displays)[-1]["text/html"]  # was it drawn before?
    _check_what_is_left(out)


def test_the_board_costs_few_messages_and_bytes_whatever_its_size(notebook: Notebook) -> None:
    """At most 20 messages and 150 KB a second; by the run's own clock, so that a slow host is."""
    out = notebook.run(
        "%%distributed -n 2\n"
        "for i in nbtrain.progress(range(300)):\n"
        "    print('a line that is long enough to be one ' * 4, i)\n"
        "    nbtrain.log(step=i, loss=i / 7); time.sleep(0.01)"
    )
    assert out.ename == "", out.traceback
    seconds = notebook.value("nbtrain.last_run().state.elapsed(0)")
    overhead = 80  # opening and closing 37 widgets, their layouts and styles among them
    assert out.comm_count - overhead <= 20 * seconds
    assert out.comm_bytes <= 150_000 * (seconds + 1)


def test_a_click_that_comes_through_a_subshell_is_heard_too(notebook: Notebook) -> None:
    """JupyterLab sends comms through subshells where the kernel has them: ipykernel 7."""
    features = notebook.client.kernel_info(reply=True)["content"].get("supported_features", [])
    if "kernel subshells" not in features:
        pytest.skip("this ipykernel has no subshells")
    client = notebook.client
    client.control_channel.send(client.session.msg("create_subshell_request", {}))
    subshell = client.get_control_msg(timeout=30)["content"]["subshell_id"]

    def click(out: Outputs) -> None:
        data = {"method": "custom", "content": {"event": "click"}}
        content = {"comm_id": out.button()[0], "data": data}
        message = client.session.msg("comm_msg", content)
        message["header"]["subshell_id"] = subshell
        client.shell_channel.send(message)

    out = notebook.run(WAITS, during=once("ready", click))
    assert out.ename == "KeyboardInterrupt"
    assert "by the Stop button" in out.evalue
    client.control_channel.send(
        client.session.msg("delete_subshell_request", {"subshell_id": subshell})
    )
    client.get_control_msg(timeout=30)


def test_a_console_gets_lines_of_text_and_the_summary(notebook: Notebook) -> None:
    """jupyter-console, Spyder and qtconsole: they show no HTML, and never update an output."""
    notebook.metadata = {}
    try:
        out = notebook.run("%%distributed -n 2\nprint('ready', flush=True)\n7")
        text = notebook.run("nbtrain.launch(int, num_processes=1, view='widget');")
    finally:
        notebook.metadata = None
    assert out.ename == "", out.traceback
    assert not out.displays
    assert "[ranks 0–1] ready" in out.stdout
    assert "succeeded" in out.stdout
    assert text.displays  # asked for


class _Shell:
    """A stand-in for IPython's shell in a kernel."""

    kernel = object()

    def __init__(self, name: str = "ipykernel.zmqshell", allow_stdin: bool = True) -> None:
        self._name = name
        self._allow_stdin = allow_stdin

    def __str__(self) -> str:
        return f"<{self._name}.Shell>"

    def get_parent(self) -> dict[str, Any]:
        return {"content": {"allow_stdin": self._allow_stdin}}


def test_the_front_is_chosen_by_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(shell: object, view: str = "auto", *, hears: bool = True, **options: bool) -> str:
        monkeypatch.setattr(select, "ipython_shell", lambda: shell)
        monkeypatch.setattr(
            select.kernel_comms, "find_pump", lambda _shell: object() if hears else None
        )
        return type(select.choose(view, **options)).__name__

    assert chosen(_Shell()) == "WidgetDisplay"
    assert chosen(_Shell(), hears=False) == "HtmlDisplay"
    assert chosen(_Shell("google.colab._shell")) == "HtmlDisplay"
    assert chosen(_Shell(), inline=True) == "HtmlDisplay"
    assert chosen(_Shell(allow_stdin=False)) == "TextDisplay"
    assert chosen(None) == "TextDisplay"
    assert chosen(_Shell(), "html") == "HtmlDisplay"
    assert chosen(_Shell(), "widget", hears=False) == "WidgetDisplay"
    assert chosen(_Shell(), "text") == "TextDisplay"
    assert chosen(_Shell(), "none") == "Display"
    monkeypatch.setitem(sys.modules, "ipywidgets", ModuleType("ipywidgets"))  # without a spec
    assert chosen(_Shell()) == "HtmlDisplay"
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda _name: None)
    assert chosen(_Shell()) == "HtmlDisplay"
