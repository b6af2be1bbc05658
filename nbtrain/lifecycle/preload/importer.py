"""Imports modules that are known to be harmless, in a thread of the kernel.

In a thread, because an interrupt raised in the middle of an import leaves half a module behind,
and torch's cannot be imported a second time. No process is forked meanwhile: a forked copy would
wait for ever for the lock of a module that is being imported by a thread it does not have.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...tracking.launch_log import LOGGER
from ...worker.job import Job
from ...worker.rank_environment import rank_environment
from . import known_imports
from .known_imports import KnownImports

SWITCH = "NBTRAIN_PRELOAD"
"""The environment variable that turns all of this off: ``0`` or ``off``."""

IDLE = 0.5
"""Seconds without a cell after which the kernel counts as idle."""

IMPORTING = "Importing, once for all ranks of this kernel, what they need."
"""What the board says meanwhile."""

ROUNDS = 6
"""Trials after which the modules that are left are given up: each ends at one that is refused."""

_OURS = ("nbtrain.lifecycle.launcher", "nbtrain.engines.fork", "nbtrain.worker.telemetry")
"""What the first launch of a kernel imports of nbtrain itself."""


def is_on() -> bool:
    """Whether modules may be imported ahead of time."""
    wanted = os.environ.get(SWITCH, "").strip().lower()
    return wanted not in ("0", "off", "no", "false") and hasattr(os, "register_at_fork")


@dataclass(frozen=True)
class Importing:
    """The imports before a run's ranks start."""

    thread: threading.Thread | None
    notes: Callable[[], list[str]]
    """Returns what is to be said of modules that were imported ahead of time."""

    def is_going_on(self) -> bool:
        """Whether modules are being imported now."""
        return self.thread is not None and self.thread.is_alive()


class Importer:
    """The kernel's one importer: see `importer`."""

    def __init__(self) -> None:
        self._importing = threading.RLock()
        """Held while a module is imported, and around every fork."""
        self._guards_forks = False
        self._busy = threading.Event()
        """Set while a cell runs: the idle thread goes on after it."""
        self._thread: threading.Thread | None = None
        self._needed: set[str] = set()
        """What ranks of this kernel had to import."""
        self._failed: set[str] = set()
        self._read: dict[str, str | None] = {}
        """Environment variables that imported modules may have read, as they were then."""
        self._set: dict[str, str] = {}
        """Environment variables that modules have set: kept for the ranks, not in the kernel."""
        self._stamps: dict[str, known_imports.Stamp] = {}

    # Before ranks start

    def prepare(self, variables: Mapping[str, str]) -> Importing:
        """Begin to import what ranks will need.

        `variables` are those that the user gives to the ranks only. Where a module that has not
        been imported yet would read one of them, all are left to the ranks.
        """
        known = known_imports.read() if is_on() else KnownImports()
        names = [] if {*variables} & {*known.reads} else self._wanted(known)
        if names:
            self._start(lambda: self._import(names, known))
        environment = {**os.environ, **variables}
        return Importing(self._thread if names else None, lambda: self._differences(environment))

    @contextlib.contextmanager
    def inherited(self) -> Iterator[None]:
        """Have ranks that are forked meanwhile inherit what the imported modules had set."""
        added = {name: value for name, value in self._set.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)

    def _differences(self, environment: Mapping[str, str]) -> list[str]:
        """Return notes on what ranks would find if they imported the modules themselves."""
        notes = []
        changed = [name for name, value in self._read.items() if environment.get(name) != value]
        if changed:
            notes.append(
                f"{', '.join(changed)} changed after nbtrain had imported modules that read it, so "
                f"the ranks may not see the change. If it matters, restart the kernel and set it "
                "before the first launch."
            )
        now = known_imports.stamps(self._stamps)
        renewed = [name for name, stamp in self._stamps.items() if now.get(name) != stamp]
        if renewed:
            notes.append(
                f"{', '.join(renewed)} was installed again after nbtrain had imported it, so the "
                "ranks use the version from before. Restart the kernel to use the new one."
            )
        return notes

    # After a run

    def learn(self, job: Job) -> None:
        """Take note of what a rank had to import, and try what is new in a process of its own."""
        names = _reported(job)
        if not is_on() or not names:
            return
        self._needed |= {*names}
        own = {*rank_environment(job, 0, {})} - {*job.plan.env}
        if known_imports.read().untried(names) and not self._is_active():
            self._start(lambda: self._try(names, sorted(own)))

    def _try(self, names: Sequence[str], own: Sequence[str]) -> None:
        from .trial import try_imports  # here: no start of a kernel waits for it

        loaded = [name for name in known_imports.packages(names) if name in sys.modules]
        known = known_imports.read()
        for _ in range(ROUNDS):
            # Those that are known are imported again: others may have come with them.
            left = [name for name in names if not known.is_refused(name)]
            if not known.untried(left):
                break
            try:
                trial = try_imports(left, loaded, own)
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                LOGGER.info("the trial of imports failed: %s", error)
                return
            known = known.with_trial(trial)
        known_imports.write(known)
        for name, reason in known.refused.items():
            LOGGER.info("%s is not imported ahead of time: %s", name, reason)
        self._import_when_idle()

    # While the kernel is idle

    def watch(self, shell: Any) -> None:
        """Import while a shell is idle, from now on."""
        shell.events.register("pre_run_cell", self._cell_begins)
        shell.events.register("post_run_cell", self._cell_ends)

    def unwatch(self, shell: Any) -> None:
        """Stop that."""
        with contextlib.suppress(ValueError):
            shell.events.unregister("pre_run_cell", self._cell_begins)
            shell.events.unregister("post_run_cell", self._cell_ends)

    def _cell_begins(self, _info: Any = None) -> None:
        self._busy.set()

    def _cell_ends(self, _result: Any = None) -> None:
        self._busy.clear()
        # Whoever has not imported torch may not be about to train.
        if "torch" in sys.modules and is_on() and not self._is_active():
            self._start(self._import_when_idle)

    def _import_when_idle(self) -> None:
        if self._busy.wait(IDLE):
            return
        known = known_imports.read()
        self._import((*_OURS, *self._wanted(known)), known, self._busy.is_set)

    # The thread

    def _is_active(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        """Have a thread do some work, after what it may be at."""
        if not self._guards_forks:
            self._guards_forks = True
            lock = self._importing
            os.register_at_fork(
                before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
            )
        self._thread = threading.Thread(target=work, name="nbtrain-import", daemon=True)
        self._thread.start()
        return self._thread

    def _wanted(self, known: KnownImports) -> list[str]:
        """Return what is to be imported: of packages that the kernel or its ranks have in use."""
        return [
            name
            for name in known.harmless
            if name not in sys.modules
            and name not in self._failed
            and (name in self._needed or name.partition(".")[0] in sys.modules)
        ]

    def _import(
        self,
        names: Sequence[str],
        known: KnownImports,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        for name in names:
            if is_stopped():
                return
            if name in sys.modules:
                continue
            with self._importing:
                if not name.startswith("nbtrain."):
                    self._read = {n: os.environ.get(n) for n in known.reads} | self._read
                    self._stamps |= known_imports.stamps(known_imports.packages([name]))
                self._import_one(name, known.sets)

    def _import_one(self, name: str, sets: Sequence[str]) -> None:
        new = [variable for variable in sets if variable not in os.environ]
        try:
            importlib.import_module(name)
        except BaseException as error:  # it did not raise in the trial: no reason to end a thread
            self._failed.add(name)
            LOGGER.info("%s was not imported ahead of time: %r", name, error)
        for variable in new:
            if variable in os.environ:
                self._set[variable] = os.environ.pop(variable)


def _reported(job: Job) -> list[str]:
    first = job.world.begin if job.world else 0
    with contextlib.suppress(OSError, ValueError):
        return [str(name) for name in json.loads(job.folder.imports(first).read_bytes())]
    return []


importer = Importer()
"""The one of this process: modules are imported once."""
