"""The run folder: which file holds what, where folders live, and when they go.

<root>/20261120-101500-train-4f2a/
    run.json             what was launched, by whom
    launcher.jsonl       events the launcher saw
    rank-0000.jsonl      events rank 0 wrote
    rank-0000.log        rank 0's raw stdout and stderr
    rank-0000.result     its return value   (cloudpickle, renamed into place)
    rank-0000.failure    or its exception   (cloudpickle, renamed into place)
    rank-0000.stacks     its Python stacks, each time somebody asked
    rank-0000.recorder   the socket of its flight recorder, while it runs
    stop                 there once ranks were asked to stop
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import LaunchError

KEEP = 20
FORMAT = 1


@dataclass(frozen=True)
class RunFolder:
    """Names the files of one run."""

    path: Path

    @property
    def manifest(self) -> Path:
        return self.path / "run.json"

    @property
    def launcher_events(self) -> Path:
        return self.path / "launcher.jsonl"

    @property
    def stop_request(self) -> Path:
        return self.path / "stop"

    def events(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.jsonl"

    def log(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.log"

    def result(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.result"

    def failure(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.failure"

    def stacks(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.stacks"

    def recorder(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.recorder"

    def read_manifest(self) -> dict[str, Any]:
        """Return what `create` wrote."""
        manifest: dict[str, Any] = json.loads(self.manifest.read_text())
        return manifest


def root() -> Path:
    """Return where run folders live: ``$NBTRAIN_HOME``, else the user's cache."""
    home = os.environ.get("NBTRAIN_HOME")
    if home:
        return Path(home).expanduser().absolute() / "runs"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache").absolute() / "nbtrain" / "runs"


def create(name: str, manifest: Mapping[str, Any]) -> RunFolder:
    """Make a private folder for a new run. Raises `LaunchError` where it cannot be written."""
    label = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:24] or "run"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        root().mkdir(mode=0o700, parents=True, exist_ok=True)
        path = root() / f"{stamp}-{label}-{os.urandom(3).hex()}"
        path.mkdir(mode=0o700)
        folder = RunFolder(path)
        write_atomically(folder.manifest, json.dumps({"format": FORMAT, **manifest}).encode())
    except OSError as error:
        raise LaunchError(
            f"the run folder cannot be written under {root()}: {error.strerror or error}. "
            "Set NBTRAIN_HOME to a folder that can."
        ) from error
    return folder


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    partial.rename(path)


def runs() -> list[RunFolder]:
    """Return the runs kept under the root, oldest first."""
    found: list[tuple[int, RunFolder]] = []
    with contextlib.suppress(OSError):
        for path in root().glob("*/run.json"):
            with contextlib.suppress(FileNotFoundError):  # another kernel prunes, too
                found.append((path.stat().st_mtime_ns, RunFolder(path.parent)))
    return [folder for _, folder in sorted(found, key=lambda pair: pair[0])]


def prune(keep: int = KEEP, in_use: Collection[Path] = ()) -> None:
    """Delete all but the newest `keep` runs, those `in_use`, and those still watched."""
    for folder in runs()[:-keep]:
        if folder.path not in in_use and not is_watched(folder):
            shutil.rmtree(folder.path, ignore_errors=True)


def is_watched(folder: RunFolder) -> bool:
    """Whether the process that launched the run lives, and has not written its end yet."""
    try:
        manifest = folder.read_manifest()
        if '"kind":"finished"' in folder.launcher_events.read_text():
            return False
        if manifest["host"] == platform.node():  # elsewhere, nobody here can tell
            os.kill(int(manifest["launcher"]), 0)
    except FileNotFoundError:  # it is about to start
        return True
    except (OSError, ValueError, KeyError):
        return False
    return True
