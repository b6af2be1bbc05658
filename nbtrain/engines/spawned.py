"""What runs in a fresh interpreter before it is a rank: `main`, called by the spawn engine."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from .. import exceptions, inspection, ship, worker
from ..folder import RunFolder
from ..nodes import World
from ..plan import Call, Plan
from ..worker import Job
from . import CRASHED
from .finish import finish_process
from .leave_kernel import die_with
from .streams import text_stream


def main(order: dict[str, Any]) -> NoReturn:
    """Load the parcel, be the rank, and end the process."""
    code = CRASHED
    try:
        code = _be_rank(order)
    except BaseException:  # nothing is left to return to
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(code)


def _be_rank(order: dict[str, Any]) -> int:
    folder = RunFolder(Path(order["folder"]))
    die_with(order["parent"])
    _die_when_asked(folder)
    sys.stdout = sys.__stdout__ = text_stream(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = text_stream(2)  # type: ignore[misc]
    faulthandler.enable(file=2)
    inspection.answer_with_stacks(folder, order["rank"])  # now: an import may hang, too
    cargo = _load(order)
    job = Job(
        plan=cargo.plan,
        folder=folder,
        world_size=order["world_size"],
        device=order["device"],
        threads=order["threads"],
        port=order["port"],
        attempt=order["attempt"],
        scratch=order["scratch"],
        world=None if order["world"] is None else World(**order["world"]),
        shared_classes=cargo.classes,
    )
    code = worker.main(job, order["rank"])
    finish_process()
    return code


def _die_when_asked(folder: RunFolder) -> None:
    """Until the rank has begun, an interrupt that the launcher sends ends it at once."""

    def end(_signum: int, _frame: FrameType | None) -> None:
        if folder.stop_request.exists():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _load(order: dict[str, Any]) -> ship.Cargo:
    """Unpack the parcel; what goes wrong in it is the rank's own failure, told as any other."""
    try:
        return ship.unpack(order["parcel"])
    except Exception as error:  # whatever the import of a user's module raises
        where = f"while loading {ship.loading()} in a fresh process"
        exceptions.set_notes(error.with_traceback(None), [where])
        return ship.Cargo(Plan(Call(_fail, (error,)), name="load"), frozenset())
    finally:
        for descriptor in order["descriptors"]:
            os.close(descriptor)


def _fail(error: Exception) -> NoReturn:
    raise error
