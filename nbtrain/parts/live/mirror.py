"""Copies what a live rank on another host writes of a task to the notebook, through its channel."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from ...part_api import POLL_INTERVAL_S, Channel, RunFolder
from ...transport.channel import fill_memory_file
from ...transport.file_sync import read_appended


@contextlib.contextmanager
def mirror_folder(channel: Channel, task: int, place: str, rank: int) -> Iterator[RunFolder]:
    """Yield a new folder in `place`, and copy it to the notebook through the channel.

    Events and log are sent as they grow, by a thread. At the end of the block the other files are
    sent, and the folder is deleted. If the notebook is gone, nothing is raised.
    """
    folder = RunFolder(Path(tempfile.mkdtemp(prefix=f"task-{task}-", dir=place)))
    is_over = threading.Event()
    have = {path.name: 0 for path in (folder.events(rank), folder.log(rank))}

    def follow() -> None:
        with contextlib.suppress(OSError):  # the notebook is gone
            while not is_over.wait(POLL_INTERVAL_S):
                _send_growth(channel, task, folder, have)

    copying = threading.Thread(target=follow, name="nbtrain-mirror", daemon=True)
    copying.start()
    try:
        yield folder
    finally:
        is_over.set()
        copying.join()
        with contextlib.suppress(OSError):
            for name in folder.list_result_files(rank):  # before the report that it is there
                _send(channel, task, name, folder.path / name)
            while _send_growth(channel, task, folder, have):
                pass
        shutil.rmtree(folder.path, ignore_errors=True)


def _send_growth(channel: Channel, task: int, folder: RunFolder, have: dict[str, int]) -> bool:
    """Send what has been appended to the files; return whether that was anything.

    `have` gets the bytes of each file that are sent. Raises `OSError` if the notebook is gone.
    """
    parts = read_appended(folder.path, have)
    for name, (offset, data) in parts.items():
        with fill_memory_file(lambda file, data=data: file.write(data)) as file:  # type: ignore[misc]
            channel.send({"file": name, "task": task, "grows": True}, file.fileno())
        have[name] = offset + len(data)
    return bool(parts)


def _send(channel: Channel, task: int, name: str, path: Path) -> None:
    """Send a whole file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        channel.send({"file": name, "task": task, "grows": False}, descriptor)
    finally:
        os.close(descriptor)
