"""The exceptions nbtrain raises, all under one base.

NbtrainError
├── PlanError (ValueError)            an option, a cell or an argument that cannot be run as written
│   └── CellSyntaxError               the cell's own syntax error
├── PreflightError (RuntimeError)     the kernel's state forbids this launch
│   └── AcceleratorInitializedError   it has initialised an accelerator: no fork can use that
├── AcceleratorBlockedError (RuntimeError)  ``%nbtrain guard block`` kept it from doing so
├── MissingExtra (ImportError)        what was asked for needs an optional package; says which
├── LaunchError (RuntimeError)        the ranks could not be started
├── RankDied (RuntimeError)           a rank ended by a signal or an exit code
├── ResultsLost (RuntimeError)        the ranks ended well, but what they trained could not be saved
├── RankError (RuntimeError)          stands for a rank's exception that could not travel
├── ResultNotPicklable (TypeError)    a rank's return value that could not travel
└── RunTimeout (TimeoutError)         the run exceeded its ``--timeout``

A rank's own exception is none of these: it is raised in the notebook with its own type.
"""

from __future__ import annotations

from typing import Any


class NbtrainError(Exception):
    """Base of everything nbtrain raises of its own; `nbtrain.errors` draws what is below it.

    What a rank's code raises is none of these: it comes with its own type.
    """

    # Every field of a subclass has a default, so that ``cls(*args)`` followed by ``__dict__``
    # restores an instance: that is how exceptions are pickled.

    def _render_traceback_(self) -> list[str]:
        """Show one clear message in IPython instead of a launcher's frames (IPython's protocol)."""
        notes: list[str] = getattr(self, "__notes__", [])
        return [f"{type(self).__name__}: {self}", *notes]


class PlanError(NbtrainError, ValueError):
    """What was asked for cannot be run as written; nothing was started."""


class CellSyntaxError(PlanError):
    """The cell has a syntax error; drawn as IPython draws it, without the launcher's frames.

    No `SyntaxError` itself: IPython draws those with every frame that led to them. That one is
    its ``__cause__``.
    """

    def __init__(self, message: str = "", *, drawn: str = "") -> None:
        super().__init__(message)
        self.drawn = drawn

    def _render_traceback_(self) -> list[str]:
        return [self.drawn or str(self)]


class PreflightError(NbtrainError, RuntimeError):
    """The kernel is in a state in which this launch cannot work; nothing was started."""


class AcceleratorInitializedError(PreflightError):
    """An accelerator is initialised in the kernel: it cannot be forked into ranks that use it."""


class AcceleratorBlockedError(NbtrainError, RuntimeError):
    """The notebook was about to initialise an accelerator, which ``guard block`` forbids."""

    @property
    def _render_traceback_(self) -> Any:
        raise AttributeError  # it is raised in the user's own code: IPython shows where


class MissingExtra(NbtrainError, ImportError):
    """An optional package is not installed; the message says how to install it."""


class LaunchError(NbtrainError, RuntimeError):
    """The ranks could not be started; those that were have been ended.

    `code` is 'fork refused' where the system gave no process.
    """

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class RankDied(NbtrainError, RuntimeError):
    """A rank ended without an exception of its own: by a signal or with an exit code.

    `rank` says which, `signal` or `exitcode` by what, `log` what it had printed last.
    """

    def __init__(
        self,
        message: str = "",
        *,
        rank: int = -1,
        exitcode: int | None = None,
        signal: int | None = None,
        log: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exitcode = exitcode
        self.signal = signal
        self.log = log


class ResultsLost(NbtrainError, RuntimeError):
    """The ranks ended well, but the disk could not take what they trained; says what is left."""


class RankError(NbtrainError, RuntimeError):
    """Stands for a rank's exception that cannot be rebuilt here; keeps its type's name."""

    def __init__(self, message: str = "", *, type_name: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name


class ResultNotPicklable(NbtrainError, TypeError):
    """A rank returned a value that cannot travel between processes."""


class RunTimeout(NbtrainError, TimeoutError):
    """The run did not end within its timeout and was stopped."""
