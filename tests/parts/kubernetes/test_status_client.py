"""The process that posts statuses, against a server of HTTPS that checks them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbtrain.parts.kubernetes import status_client
from tests.support.status_server import StatusServer, make_certificate
from tests.support.waiting import wait_until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StatusServer]:
    server = StatusServer(tmp_path)
    yield server
    server.close()


class Client:
    """A process that posts."""

    def __init__(self, address: tuple[str, ...], folder: Path) -> None:
        self.log = folder / "launcher.log"
        command = [sys.executable, "-I", "-S", status_client.__file__, *address, str(self.log)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)

    def send(self, status: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(status).encode() + b"\n")
        self.process.stdin.flush()

    def end(self) -> str:
        """End it as the end of a run does; return what it wrote to the log."""
        _, errors = self.process.communicate(b"\n", timeout=20)
        assert not errors, errors
        return self.log.read_text() if self.log.exists() else ""


def test_the_first_status_is_posted_at_once_and_of_the_rest_the_newest(
    server: StatusServer, tmp_path: Path
) -> None:
    client = Client(server.address, tmp_path)
    client.send({"progressPercentage": 1})
    wait_until(lambda: server.statuses)
    for percent in (2, 3, 4):
        client.send({"progressPercentage": percent})
    assert client.end() == ""
    assert [each["progressPercentage"] for each in server.statuses] == [1, 4]
    assert not server.refused


def test_a_token_that_was_replaced_is_read_again(server: StatusServer, tmp_path: Path) -> None:
    client = Client(server.address, tmp_path)
    client.send({})
    wait_until(lambda: server.statuses)
    server.write_token("second")
    client.send({"progressPercentage": 50})
    assert client.end() == ""
    assert len(server.statuses) == 2


def test_a_server_that_refuses_is_noted_once(server: StatusServer, tmp_path: Path) -> None:
    server.answer = 403
    client = Client(server.address, tmp_path)
    client.send({})
    wait_until(lambda: server.statuses)
    client.send({})
    log = client.end()
    assert len(server.statuses) == 2
    assert log.count("HTTP 403") == 1
    assert server.token not in log


def test_the_token_is_not_sent_to_where_the_server_redirects(
    server: StatusServer, tmp_path: Path
) -> None:
    server.answer = 307
    client = Client(server.address, tmp_path)
    client.send({})
    assert "HTTP 307" in client.end()
    assert len(server.statuses) == 1


def test_a_server_of_another_ca_gets_nothing(server: StatusServer, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    make_certificate(other)
    url, token, _ = server.address
    client = Client((url, token, str(other / "ca.crt")), tmp_path)
    client.send({})
    assert "SSLCertVerificationError" in client.end()
    assert not server.statuses + server.refused


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("https://127.0.0.1:1/status", "ConnectionRefusedError"),
        ("https://127.0.0.1:port/status", "ValueError"),
        ("no address", "InvalidURL"),
    ],
)
def test_an_address_without_a_server_is_noted(
    url: str, problem: str, server: StatusServer, tmp_path: Path
) -> None:
    client = Client((url, *server.address[1:]), tmp_path)
    client.send({})
    assert problem in client.end()


def test_a_missing_token_is_noted(server: StatusServer, tmp_path: Path) -> None:
    url, _, ca = server.address
    client = Client((url, str(tmp_path / "none"), ca), tmp_path)
    client.send({})
    assert "FileNotFoundError" in client.end()


@pytest.mark.slow
def test_the_process_ends_although_the_server_hangs(server: StatusServer, tmp_path: Path) -> None:
    server.hangs.set()
    client = Client(server.address, tmp_path)
    client.send({})
    assert "TimeoutError" in client.end()
