"""Imports modules that are known to be harmless, before ranks need them.

Never beside other code: where two threads enter the same circle of imports from two sides, Python
hands out half modules, and torch's cannot be imported a second time. So the main thread imports
them itself, piece by piece, while the kernel is idle (`pieces`); what is left when ranks are to
start, it waits for (`prepare`). That is done in a thread of its own, which an interrupt does not
reach: it would end an import in the middle. And no process is forked meanwhile: a forked copy
would wait for ever for the lock of a module that is being imported by a thread it does not have.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...tracking.launch_log import LOGGER
from ...worker.job import Job
from ...worker.rank_environment import rank_environment
from ...worker.telemetry.import_report import is_on
from . import known_imports
from .known_imports import KnownImports

IMPORTING = "Importing, once for all ranks of this kernel, what they need."
"""What the board says meanwhile."""

ROUNDS = 6
"""Trials after which the modules that are left are given up: each ends at one that is refused."""

OWN = (
    *("nbtrain.planning.option_parser", "nbtrain.tracking.replay", "nbtrain.ui.displays.select"),
    *("nbtrain.worker.main", "nbtrain.engines.fork", "nbtrain.lifecycle.launcher"),
)
"""What the first launch of a kernel imports of nbtrain, in pieces."""

_PRIVATE = ("HOME", "LANG", "LOGNAME", "OLDPWD", "PATH", "PWD", "TERM", "USER", "USERNAME")
"""Environment variables that libraries read at every turn: a change of them means nothing here."""


@dataclass(frozen=True)
class Importing:
    """The imports before a run's ranks start."""

    thread: threading.Thread | None
    notes: Callable[[], list[str]]
    """Returns what is to be said of modules that were imported ahead of time."""

    def is_going_on(self) -> bool:
        """Whether modules are being imported now."""
        return self.thread is not None and self.thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait until all are imported, or for so long."""
        if self.thread is not None:
            self.thread.join(seconds)

    def leave_behind(self) -> None:
        """Return to the user's code, which runs once the module under way is there."""
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is None:
            self._wait()
            return

        def wait(_info: Any) -> None:
            shell.events.unregister("pre_run_cell", wait)
            self._wait()

        shell.events.register("pre_run_cell", wait)

    def _wait(self) -> None:
        while self.is_going_on():
            # An interrupt is for what comes next: user code beside an import may break both.
            with contextlib.suppress(KeyboardInterrupt):
                assert self.thread is not None
                self.thread.join()


class Importer:
    """The kernel's one importer: see `importer`."""

    def __init__(self) -> None:
        self._importing = threading.RLock()
        """Held while a module is imported, and around every fork."""
        self._guards_forks = self._was_interrupted = False
        self._is_stopped = False
        self._trial: threading.Thread | None = None
        self._has_given_up = False
        self._needed: set[str] = set()
        """What ranks of this kernel had to import."""
        self._failed: set[str] = set()
        self._read: dict[str, str | None] = {}
        """Environment variables that imported modules may have read, as they were then."""
        self._set: dict[str, str] = {}
        """Environment variables that modules have set: kept for the ranks, not in the kernel."""
        self._stamps: dict[str, known_imports.Stamp] = {}

    # In idle moments

    def pieces(self) -> Iterator[None]:
        """Import what launches and ranks of this kernel will need, a piece at each turn."""
        if not is_on():
            return
        for name in OWN:
            if name not in sys.modules:
                with contextlib.suppress(Exception):  # broken: the launch will say how
                    importlib.import_module(name)
                yield
        known = known_imports.read()
        self._guard_forks()
        for name in self._wanted(known):
            if name not in sys.modules:
                self._import([name], known)
                yield

    def is_trying(self) -> bool:
        """Whether a process finds out now what else can be imported."""
        return self._trial is not None and self._trial.is_alive()

    # Before ranks start

    def prepare(self, variables: Mapping[str, str]) -> Importing:
        """Begin to import what ranks will need; the caller waits until that is done.

        `variables` are those that the user gives to the ranks only. Where a module that has not
        been imported yet would read one of them, all are left to the ranks.
        """
        known = known_imports.read() if is_on() else KnownImports()
        names = [n for n in self._wanted(known) if n not in sys.modules]
        names = [] if {*variables} & {*known.reads} else names
        thread = None
        if names:
            self._guard_forks()
            self._is_stopped = False
            work = threading.Thread(target=lambda: self._import(names, known), daemon=True)
            thread = work
            thread.start()
        environment = {**os.environ, **variables}
        return Importing(thread, lambda: self._differences(environment))

    def modules(self) -> list[str]:
        """Return what ranks that are not forked from this process will need."""
        return self._wanted(known_imports.read()) if is_on() else []

    def stop(self) -> None:
        """Import no module more than the one under way."""
        self._is_stopped = True

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

    def _wanted(self, known: KnownImports) -> list[str]:
        """Return what is to be imported: of packages that the kernel or its ranks have in use."""
        return [
            name
            for name in known.harmless
            if name not in self._failed
            and (name in self._needed or name.partition(".")[0] in sys.modules)
        ]

    def _differences(self, environment: Mapping[str, str]) -> list[str]:
        """Return notes on what ranks would find if they imported the modules themselves."""
        notes = []
        changed = [name for name, value in self._read.items() if environment.get(name) != value]
        if changed:
            notes.append(
                f"{', '.join(changed)} changed after nbtrain had imported modules that read it, so "
                "the ranks may not see the change. If it matters, restart the kernel and set it by "
                "%env before torch is imported."
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
        self._needed |= {*names}
        if not is_on() or self.is_trying() or self._has_given_up:
            return
        if known_imports.read().untried(names):
            own = {*rank_environment(job, 0, {})} - {*job.plan.env}
            self._trial = threading.Thread(
                target=lambda: self._try(names, sorted(own)), name="nbtrain-trial", daemon=True
            )
            self._trial.start()

    def _try(self, names: Sequence[str], own: Sequence[str]) -> None:
        from .trial import try_imports  # here: no start of a kernel waits for it

        known = known_imports.read()
        loaded = [name for name in known_imports.packages(names) if name in sys.modules]
        loaded += self._wanted(known)
        for _ in range(ROUNDS):
            # Those that are known are imported again: others may have come with them.
            left = [name for name in names if not known.is_refused(name)]
            if not known.untried(left):
                break
            try:
                trial = try_imports(left, loaded, own)
            except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
                LOGGER.info("the trial of imports failed: %s", error)
                self._has_given_up = True
                return
            known = known.with_trial(trial)
        known_imports.write(known)
        for name, reason in known.refused.items():
            LOGGER.info("%s is not imported ahead of time: %s", name, reason)

    # The imports

    def _import(self, names: Sequence[str], known: KnownImports) -> None:
        is_collecting = gc.isenabled()
        gc.disable()  # nothing that is imported is garbage, and to look takes a quarter of the time
        try:
            self._import_each(names, known)
        finally:
            if is_collecting:
                gc.enable()

    def _import_each(self, names: Sequence[str], known: KnownImports) -> None:
        for name in names:
            if self._is_stopped:
                return
            if name in sys.modules:
                continue
            with self._importing:
                reads = [name for name in known.reads if name not in _PRIVATE]
                self._read = {variable: os.environ.get(variable) for variable in reads} | self._read
                self._stamps |= known_imports.stamps(known_imports.packages([name]))
                self._import_one(name)

    def _import_one(self, name: str) -> None:
        before = {*os.environ}
        try:
            with warnings.catch_warnings():  # puts the filters back
                importlib.import_module(name)
        except BaseException as error:  # it did not raise in the trial: no reason to end a thread
            self._failed.add(name)
            LOGGER.info("%s was not imported ahead of time: %r", name, error)
        for variable in {*os.environ} - before:  # the main thread waits: it set none
            self._set[variable] = os.environ.pop(variable)

    # Around every fork

    def _guard_forks(self) -> None:
        if not self._guards_forks:
            self._guards_forks = True
            os.register_at_fork(
                before=self._hold, after_in_parent=self._let_go, after_in_child=self._let_go
            )

    def _hold(self) -> None:
        while True:
            try:
                self._importing.acquire()
                return
            except KeyboardInterrupt:  # Python would drop it, and fork without the lock
                self._was_interrupted = True

    def _let_go(self) -> None:
        self._importing.release()
        if self._was_interrupted:
            self._was_interrupted = False
            _thread.interrupt_main()


def _reported(job: Job) -> list[str]:
    first = job.world.begin if job.world else 0
    with contextlib.suppress(OSError, ValueError, TypeError):
        return [str(name) for name in json.loads(job.folder.imports(first).read_bytes())]
    return []


importer = Importer()
"""The one of this process: modules are imported once."""
