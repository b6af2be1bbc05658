"""Posts the status of a run to Kubeflow Trainer, as a process of its own.

So a server that hangs cannot delay the run, and no rank is forked while a thread of the kernel uses
OpenSSL. The process imports only the standard library, because `python -I -S` starts it.

The protocol is Kubeflow's KEP-2779: the token is a file that Kubernetes replaces every hour, and
the server has a certificate of a CA of its own.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import sys
import threading
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

POST_INTERVAL_S = 5.0
"""Between two posts, as in Kubeflow's own clients: each post writes to the cluster's database."""

POST_TIMEOUT_S = 5.0
END_TIMEOUT_S = 10.0
"""The process ends this many seconds after the run, even if the server still hangs."""


class StatusClient:
    """Posts the newest of the statuses that arrive on stdin, one JSON object a line."""

    def __init__(self, address: Sequence[str], log: Path) -> None:
        """Post to an address: its URL, and the files of the token and of the CA ("": none)."""
        self._url, self._token_file, self._ca_file = address
        self._log = log
        self._newest: dict[str, Any] | None = None
        self._has_ended = False
        self._news = threading.Condition()
        self._last_problem = ""

    def run(self) -> None:
        """Post until stdin ends or has an empty line, and then the last status if it is new."""
        threading.Thread(target=self._read, daemon=True).start()
        next_post = 0.0
        while True:
            with self._news:
                self._news.wait_for(lambda: self._has_ended or self._newest is not None)
                wait = next_post - time.monotonic()
                self._news.wait_for(lambda: self._has_ended, max(0.0, wait))
                status, self._newest = self._newest, None
                has_ended = self._has_ended
            if status is not None:
                self._note(self._post(status))
                next_post = time.monotonic() + POST_INTERVAL_S
            if has_ended:
                return

    def _read(self) -> None:
        """Keep the newest status until the end of stdin, or an empty line.

        Forks of the kernel may keep the other end of stdin open.
        """
        while line := sys.stdin.buffer.readline().strip():
            with self._news:
                self._newest = json.loads(line)
                self._news.notify()
        with self._news:
            self._has_ended = True
            self._news.notify()
        time.sleep(END_TIMEOUT_S)
        os._exit(1)

    def _post(self, status: dict[str, Any]) -> str:
        """Post a status; return what went wrong, or ""."""
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = json.dumps({"trainerStatus": {**status, "lastUpdatedTime": now}})
        try:
            address = urlsplit(self._url)
            token = Path(self._token_file).read_text().strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            # Not urllib's opener, which sends the token on to where the server redirects.
            connection = http.client.HTTPSConnection(
                address.hostname or "",
                address.port,
                timeout=POST_TIMEOUT_S,
                context=ssl.create_default_context(cafile=self._ca_file or None),
            )
            try:
                connection.request("POST", address.path, body, headers)
                code = connection.getresponse().status
            finally:
                connection.close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            return type(error).__name__
        return "" if code == 200 else f"HTTP {code}"

    def _note(self, problem: str) -> None:
        """Write a new problem, or its end, to the log of the run."""
        if problem == self._last_problem:
            return
        self._last_problem = problem
        result = f"was not taken: {problem}" if problem else "is taken again"
        now = datetime.now().strftime("%Y-%m-%d %H:%M:%S,000")
        line = f"{now} INFO the status for Kubeflow Trainer {result}\n"
        try:
            descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(descriptor, line.encode())
            os.close(descriptor)
        except OSError:  # a full disk, or a deleted folder
            pass


if __name__ == "__main__":
    _, *address, log = sys.argv
    StatusClient(address, Path(log)).run()
