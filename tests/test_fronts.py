"""What a page gets while a run goes on, and what it may send meanwhile, through a real kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import Notebook, Outputs

from nbtrain.view.widget import _VIEW

WAITS = "%%distributed -n 2\nprint('ready', flush=True)\ntime.sleep(60)"


def _once(ready: str, act: Callable[[Outputs], None]) -> Callable[[Outputs], None]:
    """Return what acts once, when the board shows the text."""
    done: list[bool] = []

    def during(out: Outputs) -> None:
        shown = any(ready in str(state.get("value", "")) for state in out.models.values())
        if shown and not done:
            done.append(True)
            act(out)

    return during


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
    assert out.models == {}
    assert notebook.value("len(__import__('ipywidgets').Widget.widgets)") == 0


def test_a_click_ends_the_run_and_says_so(notebook: Notebook) -> None:
    states: list[dict[str, Any]] = []

    def click(out: Outputs) -> None:
        button, state = out.widget("Button")
        states.append(dict(state))
        for _ in range(3):
            notebook.click(button)

    def look(out: Outputs) -> None:
        stop(out)
        states.extend(dict(s) for s in out.models.values() if s.get("disabled"))

    stop = _once("ready", click)
    out = notebook.run(WAITS, during=look)
    assert out.ename == "KeyboardInterrupt", out
    assert "by the Stop button" in out.evalue
    assert "interrupted" in out.updates[-1]["text/html"]
    assert "by the Stop button" in out.updates[-1]["text/html"]
    assert states[0]["description"] == "Stop"
    assert states[0]["tooltip"]
    assert states[-1]["description"] == "stopping…"
    assert out.models == {}
    assert notebook.value("nbtrain.last_run().state.status") == "interrupted"


def test_a_click_on_the_button_of_an_older_run_is_harmless(notebook: Notebook) -> None:
    buttons: list[str] = []

    def keep(out: Outputs) -> None:
        buttons.append(out.widget("Button")[0])

    notebook.run("%%distributed -n 1\nprint('ready')\ntime.sleep(0.5)", during=_once("ready", keep))
    (old,) = buttons
    notebook.click(old)
    out = notebook.run(
        "%%distributed -n 1\nprint('ready')\ntime.sleep(0.5)\n7",
        during=_once("ready", lambda _: notebook.click(old) and None),
    )
    assert out.ename == "", out.traceback
    assert notebook.value("nbtrain.last_run().value") == 7


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
        notebook.click(out.widget("Button")[0])

    replies: list[dict[str, Any]] = []
    out = notebook.run(WAITS, during=_once("ready", queue), replies=replies)
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


def test_queued_cells_are_dropped_after_a_failure_as_always(notebook: Notebook) -> None:
    """A page runs several cells with stop_on_error: the ones behind a failing one do not run."""
    notebook.run("seen = []")
    behind: list[str] = []

    def queue(_out: Outputs) -> None:
        behind.append(notebook.client.execute("seen.append(1)"))

    out = notebook.run(
        "%%distributed -n 1\nprint('ready')\ntime.sleep(1)\n1 / 0",
        during=_once("ready", queue),
        stop_on_error=True,
    )
    assert out.ename == "ZeroDivisionError"
    assert notebook.read_reply(behind[0])["content"]["status"] == "aborted"
    assert notebook.value("seen") == []


def test_a_page_that_is_reloaded_gets_the_widgets_while_the_cell_runs(notebook: Notebook) -> None:
    found: list[dict[str, Any]] = []
    button: list[str] = []

    def reload(out: Outputs) -> None:
        button.append(out.widget("Button")[0])
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

    start = _once("ready", reload)
    out = notebook.run(WAITS, during=look)
    assert out.ename == "KeyboardInterrupt"
    assert button[0] in found[0]
    assert button[0] in states[0]
    # Only its widget reaches that page now: it stays, with the last picture and no button.
    assert "interrupted" in out.widget("HTML")[1]["value"]
    assert button[0] not in out.models
    assert "interrupted" in out.updates[-1]["text/html"]


def test_other_widgets_wait_until_the_cell_is_over(notebook: Notebook) -> None:
    slider = "import ipywidgets\ns = ipywidgets.IntSlider(); seen = []"
    notebook.run(f"{slider}\ns.observe(lambda c: seen.append(nbtrain.last_run().state.status))")
    model = notebook.value("s.model_id")

    def act(out: Outputs) -> None:
        data = {"method": "update", "state": {"value": 7}, "buffer_paths": []}
        notebook.send("comm_msg", {"comm_id": model, "data": data})
        notebook.click(out.widget("Button")[0])

    assert notebook.run(WAITS, during=_once("ready", act)).ename == "KeyboardInterrupt"
    assert notebook.value("s.value, set(seen)") == (7, {"interrupted"})
    notebook.run("s.close(); s.layout.close(); s.style.close()")


@pytest.mark.parametrize(
    "damage",
    [
        "stream.flush = 1 / 0 if False else None",
        "stream.flush = lambda *a: 1 / 0",
        "stream._recv_callback, kept = None, stream._recv_callback",
    ],
)
def test_an_ipykernel_that_is_not_as_expected_costs_the_button_only(
    start_kernel: Callable[..., Notebook], damage: str
) -> None:
    kernel = start_kernel()
    kernel.run("%load_ext nbtrain\nimport nbtrain, time\nfrom nbtrain.view import comms")
    kernel.run("stream = comms._main_stream(get_ipython().kernel)[0]")
    out = kernel.run(
        f"{damage}\nrun = nbtrain.launch(print, 'ready', num_processes=1)\n"
        "del stream.__dict__['flush']"
        if "flush" in damage
        else f"{damage}\nrun = nbtrain.launch(print, 'ready', num_processes=1)\n"
        "stream._recv_callback = kept"
    )
    assert out.ename == "", out.traceback
    assert "succeeded" in out.updates[-1]["text/html"]
    assert kernel.value("run.state.status") == "succeeded"


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
    overhead = 30  # opening and closing
    assert out.comm_count - overhead <= 20 * seconds
    assert out.comm_bytes <= 150_000 * (seconds + 1)
