"""Reports the progress of a run to Kubeflow Trainer, which shows it with the TrainJob.

The controller sets the variables if its feature gate `TrainJobStatus` is on. `kubectl describe
trainjob` shows the percentage, the time left and the metrics.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...part_api import Companion, Job, RankState, RunState, clock
from ...part_api import events as ev
from ...tracking.overview.epochs import metric_order
from ...ui import eta
from . import status_client

_PREFIXES = ("KUBEFLOW_TRAINER_SERVER_", "KUBEFLOW_TRAINER_STATUS_")
"""Of the variables: the first in Kubeflow Trainer 2.2 and 2.3, the second in its proposal."""

_MAX_TEXT_CHARS = 64
"""Kubeflow refuses longer names and values of metrics."""

_MAX_SECONDS = 2**31 - 1
"""Kubeflow counts seconds in 32 bits."""

_END_WAIT_S = 2.0
"""The end of a run waits this many seconds for the last post: a pod ends with its main process."""


def status_address(env: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the address for the status, and the files of the token and of the CA.

    None if there is no address, and on all nodes of a TrainJob but the first: only one reports.
    """
    if env.get("PET_NODE_RANK", "0") != "0":
        return None
    for prefix in _PREFIXES:
        if url := env.get(f"{prefix}URL"):
            return url, env.get(f"{prefix}TOKEN", ""), env.get(f"{prefix}CA_CERT", "")
    return None


def describe_status(state: RunState, *, has_succeeded: bool = False) -> dict[str, Any]:
    """Return the status of a run as Kubeflow wants it, without what is unknown.

    Its metrics are those of the first rank that has any, the most important ones first.
    """
    status: dict[str, Any] = {}
    known = eta.progress(state, clock.now(state.clock_offset))
    done, remaining = (1.0, 0.0) if has_succeeded else (known.fraction, known.remaining)
    if done is not None:
        status["progressPercentage"] = math.floor(100 * done)
    if remaining is not None:
        status["estimatedRemainingSeconds"] = round(min(remaining, _MAX_SECONDS))
    metrics: Mapping[str, Any] = next(filter(None, map(_read_metrics, state.ranks)), {})
    if metrics:
        names = sorted(metrics, key=metric_order)
        status["metrics"] = [_metric(name, metrics[name]) for name in names]
    return status


def _read_metrics(rank: RankState) -> dict[str, float | str]:
    """Return what a rank has logged, and the loss that nbtrain read."""
    loss = rank.progress.loss if rank.progress is not None else None
    return {**({} if loss is None else {"loss": loss}), **rank.metrics}


def _metric(name: str, value: float | str) -> dict[str, str]:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return {"name": name[:_MAX_TEXT_CHARS], "value": text[:_MAX_TEXT_CHARS] or "-"}


class StatusReporter(Companion):
    """Gives the status of a run to a process that posts it, and never waits for that process."""

    def __init__(self, address: tuple[str, str, str], log: Path) -> None:
        """Start the process. Raises `OSError` if none can be started."""
        command = [sys.executable, "-I", "-S", status_client.__file__, *address, str(log)]
        null = subprocess.DEVNULL
        # Of a session of its own: an interrupt of the kernel must not end it.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)
        self._state: RunState | None = None
        self._next_report = 0.0

    def attend(self, state: RunState) -> float:
        """Report the status every few seconds."""
        self._state = state
        if time.monotonic() >= self._next_report:
            self._next_report = time.monotonic() + status_client.POST_INTERVAL_S
            self._send(describe_status(state))
        return math.inf

    def describe_success(self, state: RunState) -> str:
        """Take the state with the last events of the ranks, which `finish` does not get."""
        self._state = state
        return ""

    def finish(self, end: ev.Finished, is_pressed: Callable[[], bool]) -> Sequence[ev.Event]:
        """Report the last status, and wait up to 2 s until it is posted."""
        if self._state is not None:
            self._send(describe_status(self._state, has_succeeded=end.status == "succeeded"))
        with contextlib.suppress(OSError):
            os.write(self._pipe.fileno(), b"\n")
        with contextlib.suppress(OSError):
            self._pipe.close()
        try:
            self._process.wait(0 if end.status == "interrupted" else _END_WAIT_S)
        except subprocess.TimeoutExpired:  # it ends later, and must not stay a zombie
            threading.Thread(target=self._process.wait, daemon=True).start()
        return ()

    def _send(self, status: dict[str, Any]) -> None:
        """Write a status to the pipe in one piece; drop it if the process has not read the last."""
        line = json.dumps(status).encode()
        while len(line) >= select.PIPE_BUF and status["metrics"]:
            del status["metrics"][-1]
            line = json.dumps(status).encode()
        with contextlib.suppress(OSError):  # a full pipe, or the process has ended
            os.write(self._pipe.fileno(), line + b"\n")


def start_reporter(job: Job) -> StatusReporter | None:
    """Return what reports a run, if this is a pod of a TrainJob whose status is reported.

    Raises `OSError` if no process can be started.
    """
    address = status_address(os.environ)
    return StatusReporter(address, job.folder.launcher_log) if address else None
