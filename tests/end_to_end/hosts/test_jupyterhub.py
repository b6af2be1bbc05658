"""JupyterHub: a real hub with its proxy, a user who logs in, and her server behind them.

A page's kernel is behind the hub's proxy and the user's server; ranks are the kernel's children.
"""

from __future__ import annotations

import http.cookiejar
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.kernel import Outputs, record
from tests.support.ports import free_port
from tests.support.waiting import is_gone, wait_until

PROXY = shutil.which("configurable-http-proxy")
pytestmark = [
    pytest.mark.skipif(
        find_spec("jupyterhub") is None,
        reason="needs jupyterhub: pip install -r tests/requirements/hosts.txt",
    ),
    pytest.mark.skipif(
        PROXY is None,
        reason="needs configurable-http-proxy on the path: npm install configurable-http-proxy",
    ),
]

CONFIG = """
c.JupyterHub.bind_url = "http://127.0.0.1:{page}"
c.JupyterHub.hub_bind_url = "http://127.0.0.1:{hub}"
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{api}"
c.ConfigurableHTTPProxy.command = [{proxy!r}]
c.ConfigurableHTTPProxy.pid_file = "proxy.pid"
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = "{folder}/{{username}}"
c.Spawner.cmd = [{python!r}, "-m", "jupyterhub.singleuser"]
c.Spawner.args = ["--allow-root"]
c.Spawner.environment = {variables!r}
c.Spawner.ip = "127.0.0.1"
c.Spawner.http_timeout = c.Spawner.start_timeout = 180
"""
LOAD = "%load_ext nbtrain\nimport nbtrain, os, time, torch"
MARK = "%%distributed -n 2\nopen(f'rank-{nbtrain.rank()}', 'x').write(str(os.getpid()))\n"
WAITS = MARK + "while not os.path.exists('go'):\n    time.sleep(0.05)\nnbtrain.rank()"
USER = "ada"


class Hub:
    """The hub as ada's browser uses it."""

    def __init__(self, port: int, home: Path) -> None:
        self.home = home
        self.address = f"127.0.0.1:{port}"
        self.token = ""
        self._cookies = http.cookiejar.CookieJar()
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor(self._cookies)
        )

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
        url = f"http://{self.address}{path}"
        if self.token:
            headers["Authorization"] = f"token {self.token}"
        request = urllib.request.Request(url, body, headers, method=method)
        with self._opener.open(request, timeout=60) as answer:
            return bytes(answer.read())

    def api(self, method: str, path: str, **body: object) -> Any:
        data = json.dumps(body).encode() if body else None
        answer = self.request(method, path, data, **{"Content-Type": "application/json"})
        return json.loads(answer or "null")

    def answers(self) -> bool:
        try:
            return bool(self.request("GET", "/hub/api/"))
        except OSError:
            return False

    def log_in(self) -> None:
        """Fill in the form of the login page, then make a token as the page of tokens does."""
        self.request("GET", "/hub/login")
        form = {"username": USER, "password": "any", "_xsrf": self._xsrf()}
        self.request("POST", "/hub/login?next=/hub/home", urllib.parse.urlencode(form).encode())
        self.request("GET", "/hub/home")  # only whom the hub knows gets this page and its cookie
        answer = self.request(
            "POST",
            f"/hub/api/users/{USER}/tokens",
            b"{}",
            **{"X-XSRFToken": self._xsrf(), "Content-Type": "application/json"},
        )
        self.token = json.loads(answer)["token"]
        self._cookies.clear()

    def _xsrf(self) -> str:
        (value,) = {str(c.value) for c in self._cookies if c.name == "_xsrf"}
        return value

    def start_server(self) -> None:
        self.api("POST", f"/hub/api/users/{USER}/server")
        wait_until(self._server_is_ready, timeout=180)

    def stop_server(self) -> None:
        self.api("DELETE", f"/hub/api/users/{USER}/server")
        wait_until(lambda: not self.api("GET", f"/hub/api/users/{USER}")["servers"], timeout=120)

    def _server_is_ready(self) -> bool:
        servers = self.api("GET", f"/hub/api/users/{USER}")["servers"]
        return bool(servers and servers[""]["ready"])

    def ranks(self) -> list[psutil.Process]:
        """Wait until both ranks run; return them."""
        files = [self.home / f"rank-{rank}" for rank in (0, 1)]
        wait_until(lambda: all(f.exists() and f.read_text() for f in files), timeout=60)
        ranks = [psutil.Process(int(file.read_text())) for file in files]
        for file in files:
            file.unlink()
        return ranks


class Page:
    """A page with a kernel, behind the hub's proxy."""

    def __init__(self, hub: Hub, path: str, connection: Any) -> None:
        self._hub, self._path, self._connection = hub, path, connection

    def post(self, what: str) -> None:
        """Interrupt or restart the kernel, as the page's buttons do."""
        self._hub.api("POST", f"{self._path}/{what}")

    def send(self, kind: str, content: dict[str, Any]) -> str:
        header = {
            "msg_id": uuid.uuid4().hex,
            "msg_type": kind,
            "session": "page",
            "username": USER,
            "version": "5.3",
        }
        metadata = {"cellId": uuid.uuid4().hex} if kind == "execute_request" else {}
        message = {"header": header, "parent_header": {}, "metadata": metadata, "content": content}
        self._connection.send(json.dumps({**message, "channel": "shell", "buffers": []}))
        return header["msg_id"]

    def run(self, cell: str, during: Callable[[Outputs], object] = lambda _out: None) -> Outputs:
        """Execute a cell; return what it left on the page when it was idle again."""
        request = self.send("execute_request", {"code": cell, "allow_stdin": True})
        out = Outputs()
        while True:
            try:
                message = json.loads(self._connection.recv(timeout=120))
            except TimeoutError:
                raise AssertionError(f"nothing came from the kernel: {out}") from None
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["channel"] != "iopub":
                continue
            record(out, message["msg_type"], message["content"])
            during(out)
            if message["content"].get("execution_state") == "idle":
                return out

    def click(self, model_id: str) -> None:
        data = {"method": "custom", "content": {"event": "click"}}
        self.send("comm_msg", {"comm_id": model_id, "data": data})


@contextmanager
def opened(hub: Hub) -> Iterator[Page]:
    """Open a page with a new kernel that has loaded nbtrain."""
    from websockets.sync.client import connect

    kernel = hub.api("POST", f"/user/{USER}/api/kernels", name="python3")["id"]
    path = f"/user/{USER}/api/kernels/{kernel}"
    token = {"Authorization": f"token {hub.token}"}
    url = f"ws://{hub.address}{path}/channels"
    with connect(url, additional_headers=token, max_size=None) as connection:
        page = Page(hub, path, connection)
        loaded = page.run(LOAD)
        assert loaded.ename == "", loaded.traceback
        yield page


@pytest.fixture(autouse=True)
def leaves_no_process() -> None:
    """The hub, its servers and kernels stay for all tests here; `hub` ends them."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder: Path = tmp_path_factory.mktemp("hub")
    page, api, inner = (free_port() for _ in range(3))
    paths = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    variables = {
        "PYTHONPATH": paths,
        "NBTRAIN_HOME": str(folder / "runs"),
        "IPYTHONDIR": str(folder / "ipython"),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    text = CONFIG.format(
        page=page, hub=inner, api=api, folder=folder, variables=variables, proxy=PROXY,
        python=sys.executable,
    )  # fmt: skip
    (folder / "jupyterhub_config.py").write_text(text)
    with (
        open(folder / "hub.log", "w") as log,
        _ended_with_all_below(
            subprocess.Popen(
                [sys.executable, "-m", "jupyterhub"], cwd=folder, stdout=log, stderr=log
            )
        ) as process,
    ):
        hub = Hub(page, folder / USER)
        wait_until(lambda: process.poll() is not None or hub.answers(), timeout=180)
        assert process.poll() is None, (folder / "hub.log").read_text()
        hub.log_in()
        hub.start_server()
        yield hub


@contextmanager
def _ended_with_all_below(
    process: subprocess.Popen[bytes],
) -> Iterator[subprocess.Popen[bytes]]:
    """End a hub as its administrator does, and what it then left behind by its number."""
    try:
        yield process
    finally:
        below = psutil.Process(process.pid).children(recursive=True) if not process.poll() else []
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for left in below:
            if not is_gone(left):
                left.kill()
        wait_until(lambda: all(map(is_gone, below)))


@pytest.fixture
def page(hub: Hub) -> Iterator[Page]:
    with opened(hub) as page:
        yield page
    for file in hub.home.glob("rank-*"):
        file.unlink()


def once(act: Callable[[Outputs], object]) -> Callable[[Outputs], None]:
    """Act once, when the board is there."""
    acted: list[object] = []

    def during(out: Outputs) -> None:
        if out.displays and not acted:
            acted.append(True)
            act(out)

    return during


TRIED = "a real hub, its proxy and a user's server"


@pytest.mark.host("JupyterHub", works="live board, summary that stays, results", tried=TRIED)
def test_a_cell_trains_through_the_hub(hub: Hub, page: Page) -> None:
    go = hub.home / "go"
    out = page.run(WAITS, during=once(lambda _out: hub.ranks() and go.touch()))
    go.unlink()
    assert out.ename == "", out.traceback
    assert len(out.displays) == 1
    assert "succeeded" in out.updates[-1]["text/html"]
    assert "[0, 1]" in page.run("print(nbtrain.last_run().results)").stdout
    assert "JupyterHub" in page.run("%nbtrain doctor").stdout


@pytest.mark.host("JupyterHub", works="the Stop button and ■ end the ranks", tried=TRIED)
@pytest.mark.parametrize("how", ["button", "interrupt"])
def test_ranks_are_stopped_through_the_hub(hub: Hub, page: Page, how: str) -> None:
    ranks: list[psutil.Process] = []

    def stop(out: Outputs) -> None:
        ranks.extend(hub.ranks())
        page.click(out.button()[0]) if how == "button" else page.post("interrupt")

    out = page.run(WAITS, during=once(stop))
    assert out.ename == "KeyboardInterrupt"
    assert ("by the Stop button" in out.evalue) is (how == "button")
    wait_until(lambda: all(map(is_gone, ranks)))
    assert "2" in page.run("print(1 + 1)").stdout


@pytest.mark.host(
    "JupyterHub",
    works="no rank stays when the kernel is restarted or the server stopped and started",
    tried=TRIED,
)
@pytest.mark.parametrize("what", ["kernel", "server"])
def test_no_rank_stays_when_the_kernel_or_the_server_goes(hub: Hub, page: Page, what: str) -> None:
    page.send("execute_request", {"code": WAITS, "allow_stdin": True})
    ranks = hub.ranks()
    if what == "kernel":
        page.post("restart")
    else:
        hub.stop_server()
        hub.start_server()
    wait_until(lambda: all(map(is_gone, ranks)))
    with opened(hub) as again:
        after = again.run("%%distributed -n 2\nnbtrain.rank()")
        assert after.ename == "", after.traceback
        assert "[0, 1]" in again.run("print(nbtrain.last_run().results)").stdout
