"""The driver's end of the socket: requests, carried out one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from ...errors import LaunchError

_Task = asyncio.Task[None]
_Handlers = Callable[[str], Callable[..., Any]]
_Tell = Callable[[str, Any], None]


async def serve(link: Connection[Any, Any], handlers: _Handlers, tell: _Tell) -> None:
    """Answer requests until the other end is closed, which calls off what goes on.

    So does a request to close: nobody waits for what was asked before. Each has its answer all
    the same, in their order.
    """
    loop = asyncio.get_running_loop()
    owed: list[_Task] = []
    while True:
        try:
            kind, payload = await loop.run_in_executor(None, link.recv)
            if kind == "parcel":
                payload = {"descriptor": reduction.recv_handle(link)}
        except (EOFError, OSError):
            break
        owed = [task for task in owed if not task.done()]
        if kind == "close":
            await _call_off(owed, tell)
        owed.append(loop.create_task(_carry_out(handlers, kind, payload, tell, owed[-1:])))
    await _call_off(owed, tell)


async def _call_off(owed: list[_Task], tell: _Tell) -> None:
    for task in owed:  # in their order: so are their answers
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                tell("refusal", "it was called off")


async def _carry_out(
    handlers: _Handlers, kind: str, payload: Mapping[str, Any], tell: _Tell, before: list[_Task]
) -> None:
    """Do what was asked, once what was asked before is done, and answer."""
    try:
        if before:
            await asyncio.wait(before)
        found = handlers(kind)(**payload)
        tell("answer", await found if isinstance(found, Awaitable) else found)
    except Exception as error:  # Ray's own troubles are many: the launcher tells them
        tell("refusal", told(error))


def told(error: BaseException, where: str = "") -> str:
    """Word what went wrong, here or in an agent: the one on `where`, if that is known."""
    cause: BaseException = getattr(error, "cause", None) or error
    if isinstance(cause, LaunchError):
        return f"{where}: {cause}" if where else str(cause)
    far = cause is not error
    if far or where:
        where = f"in nbtrain's process on {where or 'a node'}: "
    lines = str(cause).strip().splitlines() or [""]
    return f"{where}{type(cause).__name__}: {(lines[-1] if far else lines[0])[:300]}"
