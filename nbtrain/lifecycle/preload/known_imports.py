"""What earlier trials found, by environment: kept in a file beside the runs."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import NbtrainError
from ...system.files import read_own, write_atomically
from ...tracking.run_folder import root

if TYPE_CHECKING:
    from .trial import Trial

FORMAT = 2
"""Which files can be read: those of 1 had another order."""

_LARGEST = 16 << 20
"""Bytes of a file that may still be one of these."""

Stamp = tuple[str, int, int]
"""Where a package is, when that was changed (ns), and its size: another one is another version."""


@dataclass(frozen=True)
class KnownImports:
    """Which modules can be imported ahead of time, and which not."""

    harmless: tuple[str, ...] = ()
    """In the order in which each import is a small one: see `trial`."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Modules that change the process that imports them, and how."""
    reads: tuple[str, ...] = ()
    """Environment variables that they read when they are imported."""
    seconds: float = 0.0
    bytes: int = 0
    stamps: Mapping[str, Stamp] = field(default_factory=dict)
    """The packages that were tried."""

    def untried(self, names: Iterable[str]) -> list[str]:
        """Return the modules of which nothing is known, nor of a package that they are in."""
        known = {*self.harmless}
        return [n for n in names if n not in known and not self.is_refused(n)]

    def is_refused(self, name: str) -> bool:
        """Whether a module, or a package that it is in, changes the process."""
        parts = name.split(".")
        return any(".".join(parts[: n + 1]) in self.refused for n in range(len(parts)))

    def with_trial(self, trial: Trial) -> KnownImports:
        """Return what is known after another trial."""
        harmless = dict.fromkeys((*self.harmless, *trial.harmless))
        tops = {_top(name) for name in (*harmless, *trial.refused, *self.refused)}
        return KnownImports(
            tuple(harmless),
            {**self.refused, **trial.refused},
            tuple(sorted({*self.reads, *trial.reads})),
            self.seconds + trial.seconds,
            self.bytes + trial.bytes,
            stamps(sorted(tops)),
        )


def read() -> KnownImports:
    """Return what is known of this environment; nothing where a package has changed since."""
    with contextlib.suppress(
        OSError, ValueError, TypeError, LookupError, AttributeError, NbtrainError
    ):
        found = json.loads(read_own(_path(), _LARGEST))
        found["stamps"] = {name: tuple(stamp) for name, stamp in found["stamps"].items()}
        lists = {name: tuple(map(str, found[name])) for name in ("harmless", "reads")}
        known = KnownImports(**{**found, **lists})
        if stamps(known.stamps) == known.stamps:
            return known
    return KnownImports()


def write(known: KnownImports) -> None:
    """Keep what is known, for other kernels and other days."""
    with contextlib.suppress(OSError):  # it only saves time
        _path().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(_path(), json.dumps(asdict(known)).encode())


def stamps(packages: Iterable[str]) -> dict[str, Stamp]:
    """Return what tells the installed version of each package from others; nothing is imported."""
    found: dict[str, Stamp] = {}
    for name in packages:
        with contextlib.suppress(ImportError, ValueError, AttributeError, OSError):
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin not in (None, "built-in", "frozen"):
                status = Path(str(spec.origin)).stat()
                found[name] = (str(spec.origin), status.st_mtime_ns, status.st_size)
    return found


def packages(names: Sequence[str]) -> list[str]:
    """Return the outermost packages of modules, each once."""
    return [*dict.fromkeys(_top(name) for name in names)]


def _top(name: str) -> str:
    return name.partition(".")[0]


def _path() -> Path:
    environment = f"{FORMAT}\n{sys.version}\n{sys.executable}\n{sys.prefix}"
    name = hashlib.sha256(environment.encode()).hexdigest()[:16]
    return root().parent / "imports" / f"{name}.json"
