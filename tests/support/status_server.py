"""A server like Kubeflow Trainer's for the status of a TrainJob: HTTPS with a CA of its own."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/train/status"


def make_certificate(folder: Path) -> None:
    """Make a CA (``ca.crt``) and a certificate for 127.0.0.1 (``server.crt``, ``server.key``)."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing, which makes the server's certificate")
    (folder / "extensions").write_text("subjectAltName=IP:127.0.0.1\n")
    days = ("-days", "2")
    ca = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "extensions")
    request = ("req", "-newkey", "rsa:2048", "-nodes", "-subj")
    for words in (
        (*request, "/CN=test CA", "-x509", "-keyout", "ca.key", "-out", "ca.crt", *days),
        (*request, "/CN=server", "-keyout", "server.key", "-out", "server.csr"),
        ("x509", "-req", "-in", "server.csr", "-out", "server.crt", *ca, *days),
    ):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


class StatusServer:
    """Takes statuses as Kubeflow Trainer does, and refuses what its CRD would refuse."""

    def __init__(self, folder: Path) -> None:
        make_certificate(folder)
        self.token = "first"
        self.answer = 200
        self.statuses: list[dict[str, Any]] = []
        self.refused: list[str] = []
        """Why a request was refused."""
        self.hangs = threading.Event()
        """While it is set, requests get no answer."""
        self._folder = folder
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(outer.take(self.path, dict(self.headers), body))
                self.send_header("Location", "https://127.0.0.1:1/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
        # The handshake is left to the first read, in the thread of the request.
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.write_token("first")

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the controller sets."""
        return {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{self._server.server_port}{PATH}",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(self._folder / "ca.crt"),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(self._folder / "token"),
        }

    @property
    def address(self) -> tuple[str, str, str]:
        """The address as a `StatusReporter` wants it."""
        url, ca, token = self.environment.values()
        return url, token, ca

    def write_token(self, token: str) -> None:
        """Replace the token, as Kubernetes does every hour."""
        self.token = token
        (self._folder / "token").write_text(f"{token}\n")

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        """Return the code of the answer to a request."""
        while self.hangs.is_set():
            threading.Event().wait(0.05)
        problem = self._problem(path, headers, body)
        if problem:
            self.refused.append(problem)
            return 422
        self.statuses.append(json.loads(body)["trainerStatus"])
        return self.answer

    def _problem(self, path: str, headers: dict[str, str], body: bytes) -> str:
        if path != PATH:
            return f"path {path}"
        if headers.get("Authorization") != f"Bearer {self.token}":
            return f"token {headers.get('Authorization')}"
        if headers.get("Content-Type") != "application/json":
            return "type"
        try:
            check_status(json.loads(body))
        except AssertionError as error:
            return f"body: {error}"
        return ""

    def close(self) -> None:
        """Stop listening."""
        self.hangs.clear()
        self._server.shutdown()
        self._server.server_close()


LIMITS = {"progressPercentage": 100, "estimatedRemainingSeconds": 2**31 - 1}


def check_status(request: dict[str, Any]) -> None:
    """Check what is posted, by the limits of the CRD. Raises `AssertionError`."""
    assert request.keys() == {"trainerStatus"}, request.keys()
    status = request["trainerStatus"]
    datetime.strptime(status["lastUpdatedTime"], "%Y-%m-%dT%H:%M:%SZ")
    unknown = status.keys() - {*LIMITS, "lastUpdatedTime", "metrics"}
    assert not unknown, unknown
    for name, most in LIMITS.items():
        value = status.get(name, 0)
        assert isinstance(value, int), value
        assert 0 <= value <= most, value
    assert len(status.get("metrics", [])) <= 256
    for metric in status.get("metrics", []):
        assert metric.keys() == {"name", "value"}, metric
        for text in metric.values():
            assert isinstance(text, str), text
            assert 1 <= len(text) <= 64, text
