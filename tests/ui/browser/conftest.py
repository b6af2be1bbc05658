"""A real Chromium on a real JupyterLab and a real Notebook 7; neither touches the user's own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.waiting import wait_until

SHOTS = ROOT / "artifacts" / "browser"
OUTPUT = ".jp-OutputArea-output"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


VIOLATIONS = """async (scope) => {
    const found = await axe.run(scope || 'main', {resultTypes: ['violations']});
    return found.violations.flatMap(v => v.nodes.map(
        n => `${v.id}: ${n.html.slice(0, 160)} ${n.any.map(a => a.message).join('; ')}`));
}"""
"""What axe-core finds in a part of the page, by a selector."""


def _chromium() -> str | None:
    """Return the browser: ``$CHROMIUM``, else one on the path. Nothing is downloaded."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def _missing() -> str | None:
    """Return why these tests cannot run here; None where they can."""
    for module in ("playwright", "jupyterlab", "notebook"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed (pip install -e '.[test,lab,browser]')"
    return None if _chromium() else "no Chromium here (apt install chromium, or set CHROMIUM)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, saying why, where a part is missing."""
    reason = _missing()
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.browser)
        item.add_marker(pytest.mark.timeout(180))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def leaves_no_process() -> None:
    """Servers and the browser outlive a test; `_no_process_left` looks when they have ended."""


@pytest.fixture(scope="module", autouse=True)
def _no_process_left() -> Iterator[None]:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    wait_until(lambda: {p.pid for p in psutil.Process().children(recursive=True)} <= before)


@pytest.fixture(scope="module")
def browser(_no_process_left: None) -> Iterator[Any]:
    """A Chromium without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=_chromium(), args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of axe-core: of the file ``$AXE_CORE``, else of npm's package."""
    if known := os.environ.get("AXE_CORE"):
        return Path(known).read_text()
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("axe")
    if npm is None:
        pytest.skip("axe-core is not here: set AXE_CORE to axe.min.js, or install npm")
    pack = [npm, "pack", "--silent", "axe-core@4"]
    try:
        subprocess.run(pack, cwd=folder, check=True, capture_output=True, timeout=60)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"axe-core could not be fetched with npm: {error}")
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as package:
        member = package.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


@dataclass
class Server:
    """A Jupyter server of the tests' own, on a loopback port."""

    kind: str
    url: str
    root: Path
    pid: int

    def ranks(self) -> list[int]:
        """Return the processes below the kernels."""
        kernels = psutil.Process(self.pid).children()
        return [p.pid for kernel in kernels for p in kernel.children(recursive=True)]

    def ask(self, path: str, method: str = "GET") -> Any:
        """Ask the server's REST interface."""
        request = urllib.request.Request(self.url + path, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or "null")

    def end_kernels(self) -> None:
        """End every kernel."""
        for session in self.ask("api/sessions"):
            self.ask(f"api/sessions/{session['id']}", "DELETE")

    def write(self, name: str, cells: list[str], metadata: dict[str, Any] | None = None) -> Path:
        """Write a notebook of code cells."""
        spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        book = {
            "nbformat": 4,
            "nbformat_minor": 5,
            "metadata": {"kernelspec": spec, **(metadata or {})},
            "cells": [
                {
                    "cell_type": "code",
                    "id": f"cell-{number}",
                    "source": source,
                    "metadata": {},
                    "outputs": [],
                    "execution_count": None,
                }
                for number, source in enumerate(cells)
            ],
        }
        path = self.root / name
        path.write_text(json.dumps(book))
        return path


def _start(kind: str, folder: Path) -> tuple[subprocess.Popen[bytes], Server]:
    root, port = folder / "notebooks", free_port()
    root.mkdir()
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
    application = {"lab": "LabApp", "notebook": "JupyterNotebookApp"}[kind]
    environment = {
        **os.environ,
        **{f"JUPYTER_{n}_DIR": str(folder / n) for n in ("CONFIG", "DATA", "RUNTIME")},
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "IPYTHONDIR": str(folder / "ipython"),
        "NBTRAIN_HOME": str(folder / "home"),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    arguments = [
        f"--{application}.expose_app_in_browser=True",
        "--no-browser",
        "--allow-root",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=",
        "--ServerApp.disable_check_xsrf=True",
        f"--ServerApp.root_dir={root}",
    ]
    log = (folder / "server.log").open("wb")
    module = {"lab": "jupyterlab", "notebook": "notebook"}[kind]
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
    log.close()
    return process, Server(kind, f"http://127.0.0.1:{port}/", root, process.pid)


@pytest.fixture(scope="module", params=["lab", "notebook"])
def server(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    _no_process_left: None,
) -> Iterator[Server]:
    """JupyterLab, then Notebook 7."""
    folder = tmp_path_factory.mktemp(request.param)
    process, running = _start(request.param, folder)

    def answers() -> bool:
        assert process.poll() is None, (folder / "server.log").read_text()
        with contextlib.suppress(OSError):
            return bool(running.ask("api/status"))
        return False

    try:
        wait_until(answers, timeout=60)
        yield running
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server, and the kernels it may leave."""
    kernels = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for kernel in kernels:
        with contextlib.suppress(psutil.NoSuchProcess):
            kernel.kill()
    psutil.wait_procs(kernels, timeout=10)


class Page:
    """A notebook open in the browser."""

    def __init__(self, page: Any, server: Server, name: str) -> None:
        self.page = page
        self.server = server
        self.name = name

    def open(self) -> None:
        """Open the notebook and wait until its kernel is there."""
        path = {"lab": "lab/tree/", "notebook": "notebooks/"}[self.server.kind]
        reset = "?reset" if self.server.kind == "lab" else ""
        self.page.goto(f"{self.server.url}{path}{self.name}{reset}")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell")
        self.page.wait_for_function("() => window.jupyterapp !== undefined")

    def wait_for_kernel(self) -> None:
        """Wait until the kernel is connected and idle."""
        self.page.wait_for_function(_KERNEL_IS_IDLE)

    def run_all(self) -> None:
        """Run all cells; does not wait for them."""
        self.command("notebook:run-all-cells")

    def command(self, name: str, **arguments: str) -> None:
        """Execute a command of the application, without waiting for its end."""
        call = f"'{name}', {json.dumps(arguments)}"
        self.page.evaluate(f"void window.jupyterapp.commands.execute({call})")

    def save(self) -> None:
        """Save the notebook; wait until that is done."""
        self.page.evaluate(
            "() => window.jupyterapp.commands.execute('docmanager:save').then(() => null)"
        )

    @property
    def output(self) -> Any:
        """The outputs of the page's cells."""
        return self.page.locator(OUTPUT)

    @property
    def button(self) -> Any:
        """The Stop button."""
        return self.page.locator(f"{OUTPUT} button", has_text=re.compile("stop", re.IGNORECASE))

    @property
    def board(self) -> str:
        """The text of the last output."""
        return str(self.output.last.inner_text())

    def wait_for(self, text: str) -> None:
        """Wait until an output shows a text."""
        self.output.filter(has_text=text).first.wait_for()

    def shot(self, name: str) -> None:
        """Keep pictures of the page, at 1280 and at 800 pixels."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        for width in (1280, 800):
            self.page.set_viewport_size({"width": width, "height": 900})
            self.page.screenshot(path=SHOTS / f"{self.server.kind}-{name}-{width}.png")
        self.page.set_viewport_size({"width": 1280, "height": 900})


_KERNEL_IS_IDLE = """() => {
    const widget = window.jupyterapp.shell.currentWidget;
    const kernel = widget && widget.sessionContext
        && widget.sessionContext.session && widget.sessionContext.session.kernel;
    return kernel && kernel.status === 'idle' && kernel.connectionStatus === 'connected';
}"""


@pytest.fixture
def open_notebook(browser: Any, server: Server) -> Iterator[Callable[..., Page]]:
    """Open notebooks in pages of their own; end their kernels afterwards."""
    contexts: list[Any] = []

    def open_one(name: str, cells: list[str] | None = None, **options: Any) -> Page:
        if cells is not None:
            server.write(name, cells)
        context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        context.set_default_timeout(30_000)
        contexts.append(context)
        page = Page(context.new_page(), server, name)
        page.open()
        return page

    yield open_one
    for context in contexts:
        context.close()
    server.end_kernels()
