"""Requests to steer a run, from any process of its user: files in the run's folder."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...lifecycle.run import load_peeked
from ...part_api import (
    POLL_INTERVAL_S,
    NbtrainError,
    PlanError,
    Run,
    RunFolder,
    RunState,
    check_allowed,
    is_queued,
    read_regular,
    wait_for_state,
    write_atomically,
)
from ...part_api import events as ev
from ...planning.task_values import is_optimizer, is_scheduler
from ...tracking.pruning import Mark, is_in_use
from ...worker.checkpoints import is_complete
from . import kept
from .limits import ANSWER_TIMEOUT_S, FIRST_STEP_TIMEOUT_S, MAX_TITLE_CHARS
from .orders import AFTER, REQUESTS, SAVED, Action, Setting
from .settings import TurnError, check

NOT_STEERABLE = (
    "this run cannot be steered. It is of an older nbtrain, or was started with `--engine inline`, "
    "without `steps` in `--telemetry`, with `steering` in NBTRAIN_DISABLE, on live ranks of a "
    "cluster, or as one of several launches. `run.stop()` ends it"
)

_WAITS = (
    "not all ranks of {} made a step within {:g} s. This call waits for the next step of an "
    "optimizer of torch. An interrupt ends the wait, and the training continues. A training "
    "without such an optimizer makes no step that nbtrain sees"
)

_SHARED = (
    "`{0}` is in memory that the ranks share with the notebook (share_memory()), so it is not "
    "copied: the notebook's `{0}` has the weights as they are now"
)


@dataclass(frozen=True)
class Request:
    """What a user wants of a run."""

    token: str
    """Names the request in the run's events."""
    by: str
    """Who made it, and how."""
    action: Action


def can_be_steered(folder: RunFolder) -> bool:
    """Return whether the process that watches a run takes requests."""
    return (folder.path / "bell").exists()


def write(folder: RunFolder, action: Action, by: str) -> str:
    """Write a request into the folder of a run; return its token.

    The request to peek also makes the folder that they are saved in: it counts while
    that folder exists. Raises `NbtrainError` if the run cannot be steered, and `OSError` on a full
    disk.
    """
    check_allowed("steering", "steering a run")
    folder.check_exists()
    folder.check_trust()
    if not can_be_steered(folder):
        if folder.manifest.exists() and is_queued(folder.read_manifest()):
            raise NbtrainError("this run waits in a queue, so it has no training to steer yet")
        raise NbtrainError(NOT_STEERABLE)
    token = f"{time.time_ns()}-{secrets.token_hex(4)}"  # in the order of time
    if action.name == "peek":
        (folder.peeks / token).mkdir(mode=0o700, parents=True)
    data = json.dumps(asdict(Request(token, by, action))).encode()
    try:
        (folder.path / REQUESTS).mkdir(mode=0o700, exist_ok=True)
        write_atomically(folder.path / REQUESTS / f"{token}.json", data)
    except OSError:
        shutil.rmtree(folder.peeks / token, ignore_errors=True)
        raise
    return token


def take(folder: Path) -> Iterator[Request]:
    """Yield the requests that were made since the last call, in their order, and delete them.

    A file that is damaged is deleted, too. What cannot be read now is read later.
    """
    names: list[str] = []
    with contextlib.suppress(OSError):  # mostly because there never was a request
        names += sorted(name for name in os.listdir(folder / REQUESTS) if name.endswith(".json"))
    for path in (folder / REQUESTS / name for name in names):
        with contextlib.suppress(OSError):
            data = read_regular(path, 1 << 16)
            path.unlink()
            with contextlib.suppress(Exception):  # damaged, or of another version
                record = json.loads(data)
                action = Action.decode(record["action"])
                yield Request(str(record["token"]), str(record["by"]), action)


def finish(run: Run, after: str = "step", by: str = "by run.finish()") -> ev.Steered | None:
    """Do what `Run.finish` does, and return the status of the request, if it is known in time."""
    if after not in AFTER:
        raise PlanError(f'a training finishes after a "step" or an "epoch", not after {after!r}')
    _check_running(run)
    for earlier in active(run.state, "finish"):
        raise NbtrainError(f"{run.folder.name} was asked to finish already, {earlier.by}")
    return _ask(run, Action("finish", after), by)


def turn(
    run: Run,
    settings: Mapping[str, Setting],
    optimizer: int | str | None = None,
    group: int | None = None,
    by: str = "by run.turn()",
) -> ev.Steered | None:
    """Do what `Run.turn` does, and return the status of the request, as `finish`."""
    try:
        check(settings)
    except TurnError as error:
        raise PlanError(str(error)) from None
    _check_running(run)
    return _ask(run, Action("turn", settings=settings, optimizer=optimizer, group=group), by)


def _check_running(run: Run) -> None:
    if run.state.is_over:
        raise NbtrainError(f"{run.folder.name} has ended already: {run.state.outcome}")


def peek(
    run: Run,
    model: Any = None,
    name: str | None = None,
    by: str = "by run.peek()",
    timeout_s: float = math.inf,
) -> ev.Steered:
    """Do what `Run.peek` does, and return the status of the request.

    Waits up to `timeout_s` for the next step. Raises `NbtrainError` after that. Warns once if the
    step takes long.
    """
    if is_optimizer(model) or is_scheduler(model):
        raise PlanError(
            "run.peek() loads models. A run gives its optimizers and schedulers back when it ends"
        )
    _check_running(run)
    token = write(RunFolder(run.folder), Action("peek"), by)
    folder = RunFolder(RunFolder(run.folder).peeks / token)
    mark = None
    try:
        with contextlib.suppress(OSError):  # without a mark it is deleted when the run ends
            mark = Mark(folder)
        answer = _wait_for_step(run, token, timeout_s)
        if answer is None or answer.status == "pending":
            _check_running(run)
            raise NbtrainError(
                f"not all ranks of {run.folder.name} made a step within {timeout_s:.3g} s. Try it "
                "again later, or call `run.peek()` in a cell: it waits for the next step, and an "
                "interrupt ends only the wait"
            )
        _wait_for_models(run, folder, answer.attempt)
        left_out, shared = json.loads(read_regular(folder.path / SAVED))
        for each, reason in left_out.items():
            warnings.warn(f"`{each}` was not copied: {reason}", stacklevel=3)
        if folder.list_weights():
            load_peeked(run, folder, model, name)
        elif left_out:
            raise NbtrainError(f"no model was copied: {next(iter(left_out.values()))}")
        elif shared and model is not None:
            raise NbtrainError(_SHARED.format(shared[0]))
        elif model is not None:
            raise NbtrainError("no model has changed since the run began, so none was copied")
        return answer
    finally:  # also after an interrupt: then the request is called off
        if mark is not None:
            mark.release()
        shutil.rmtree(folder.path, ignore_errors=True)


def keep(run: Run, name: str = "", by: str = "by run.keep()") -> Path:
    """Do what `Run.keep` does."""
    if not isinstance(name, str) or len(name) > MAX_TITLE_CHARS or not name.isprintable():
        most = f"a text of at most {MAX_TITLE_CHARS} characters in one line"
        raise PlanError(f"the name of a checkpoint must be {most}, not {name!r:.99}")
    _check_running(run)
    of_run = RunFolder(run.folder)
    answer = _wait_for_step(run, write(of_run, Action("keep", title=name), by), math.inf)
    if answer is None or answer.step is None:
        raise NbtrainError(f"{run.folder.name} ended before its next step")
    folder = kept.folder_of(of_run, answer.step)
    failed = kept.failure_file(folder, answer.attempt)
    while not is_complete(folder):
        is_last = run.state.is_over or run.state.attempt != answer.attempt
        if failed.exists() and (reason := read_regular(failed).decode()):
            raise NbtrainError(f"the checkpoint of step {answer.step:,} was not saved: {reason}")
        if is_last and not is_complete(folder):
            of_run.check_exists()
            raise NbtrainError("the ranks ended before they saved the checkpoint")
        time.sleep(POLL_INTERVAL_S)
    content = kept.content_of(folder)
    if (content / SAVED).exists():
        left_out, _ = json.loads(read_regular(content / SAVED))
        for each, reason in left_out.items():
            warnings.warn(f"`{each}` is not in the checkpoint: {reason}", stacklevel=3)
    return content


def write_request(
    folder: RunFolder, name: str, title: str, values: Mapping[str, Any], by: str
) -> str:
    """Request what another part does, and return the token of the request. Raises as `write`."""
    return write(folder, Action(name, title=title, values=values), by)


def request_step(run: Run, name: str, title: str, values: Mapping[str, Any], by: str) -> ev.Steered:
    """Have the ranks do what another part does, after one step; return what became of it.

    Waits for the next step. Raises `NbtrainError` if it is called off.
    """
    _check_running(run)
    token = write_request(RunFolder(run.folder), name, title, values, by)
    answer = _wait_for_step(run, token, math.inf)
    if answer is None or answer.step is None:
        raise NbtrainError(f"{run.folder.name} ended before its next step")
    return answer


def delete_abandoned_peeks(folder: RunFolder) -> None:
    """Delete the models that ranks saved for processes that have ended since."""
    with contextlib.suppress(OSError):
        for path in folder.peeks.iterdir():
            if not is_in_use(RunFolder(path)):
                shutil.rmtree(path, ignore_errors=True)


def _wait_for_step(run: Run, token: str, timeout_s: float) -> ev.Steered | None:
    """Return what became of a request as `_wait_for_answer`; warn once if the step takes long."""
    answer = _wait_for_answer(run, token, min(timeout_s, FIRST_STEP_TIMEOUT_S))
    if timeout_s > FIRST_STEP_TIMEOUT_S and not run.state.is_over and _is_pending(answer):
        warnings.warn(_WAITS.format(run.folder.name, FIRST_STEP_TIMEOUT_S), stacklevel=4)
        answer = _wait_for_answer(run, token, timeout_s - FIRST_STEP_TIMEOUT_S)
    return answer


def _is_pending(answer: ev.Steered | None) -> bool:
    return answer is None or answer.status == "pending"


def _wait_for_models(run: Run, folder: RunFolder, attempt: int) -> None:
    """Wait until an attempt has saved the models. Raises `NbtrainError` if it will not."""
    of_run = RunFolder(run.folder)
    while not (folder.path / SAVED).exists():
        if run.state.is_over or run.state.attempt != attempt:
            raise NbtrainError(f"the ranks of {run.folder.name} ended before they saved the models")
        if not folder.path.exists():
            of_run.check_exists()
            raise NbtrainError("the models could not be saved: the disk is full")
        if of_run.questions.exists():  # the ranks are on other hosts
            of_run.ask_remote("peeks", [0])
        time.sleep(POLL_INTERVAL_S)


def _ask(run: Run, action: Action, by: str) -> ev.Steered | None:
    """Make a request, and wait a moment for what becomes of it.

    Raises `NbtrainError` if it is called off, and what `write` raises.
    """
    return _wait_for_answer(run, write(RunFolder(run.folder), action, by), ANSWER_TIMEOUT_S)


def _wait_for_answer(run: Run, token: str, timeout_s: float) -> ev.Steered | None:
    """Return what became of a request within a time, if it is known.

    Raises `NbtrainError` if it is called off.
    """

    def answers(state: RunState) -> list[ev.Steered]:
        return [s for s in state.steered if s.token == token]

    state = wait_for_state(
        run, lambda state: any(s.status != "pending" for s in answers(state)), timeout_s
    )
    answer = next(iter(answers(state)), None)
    if answer is not None and answer.status == "called off":
        raise NbtrainError(answer.text)
    return answer


def active(state: RunState, action: str) -> list[ev.Steered]:
    """Return the requests for an action that are pending or were carried out."""
    return [s for s in state.steered if s.action == action and s.status != "called off"]
