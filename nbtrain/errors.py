"""The exceptions that nbtrain raises, all under one base.

NbtrainError
├── PlanError (ValueError)            an option, a cell or an argument that cannot be run as written
│   └── CellSyntaxError               the cell's own syntax error
├── PreflightError (RuntimeError)     the kernel's state forbids this launch
│   └── AcceleratorInitializedError   it has initialised an accelerator: no fork can use that
├── AcceleratorBlockedError (RuntimeError)  ``%nbtrain guard block`` kept it from doing so
├── MissingExtra (ImportError)        an optional package is not installed; the message names it
├── LaunchError (RuntimeError)        the ranks could not be started
├── RankDied (RuntimeError)           a rank ended by a signal or an exit code
├── ResultsLost (RuntimeError)        the ranks ended well, but what they trained could not be saved
├── RankError (RuntimeError)          stands for a rank's exception that could not be copied
├── ResultNotPicklable (TypeError)    a rank's return value that could not be copied
└── RunTimeout (TimeoutError)         the run exceeded its ``--timeout``, or hung

An exception of the training function is raised in the notebook with its own type.
"""

from __future__ import annotations

from typing import Any


class NbtrainError(Exception):
    """The base of all exceptions of nbtrain; `nbtrain.errors` shows them as a tree.

    An exception of your training function keeps its own type.
    """

    # Every field of a subclass has a default, so that ``cls(*args)`` followed by ``__dict__``
    # restores an instance: that is how exceptions are pickled.

    def _render_traceback_(self) -> list[str]:
        """Show one clear message in IPython instead of a launcher's frames (IPython's protocol)."""
        notes: list[str] = getattr(self, "__notes__", [])
        return [f"{type(self).__name__}: {self}", *notes]


class PlanError(NbtrainError, ValueError):
    """An option, a cell or an argument cannot be used as written; nothing was started."""


class CellSyntaxError(PlanError):
    """The cell has a syntax error; shown as IPython shows it, without the launcher's frames.

    It is not a `SyntaxError`, because IPython would show every frame. The original error is its
    ``__cause__``.
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
    """The ranks could not be started; those that had started were ended.

    `code` is 'fork refused' if the system refused a new process.
    """

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class RankDied(NbtrainError, RuntimeError):
    """A rank's process ended without an exception: by a signal, or with an exit code.

    `rank` is its number, `signal` or `exitcode` how it ended, and `log` what it printed last.
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
    """The ranks ended well, but what they trained could not be saved; the message says the rest."""


class RankError(NbtrainError, RuntimeError):
    """Stands for a rank's exception that cannot be rebuilt here; `type_name` is its type's name."""

    def __init__(self, message: str = "", *, type_name: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name


class ResultNotPicklable(NbtrainError, TypeError):
    """A rank returned a value that cannot be copied to the notebook."""


class RunTimeout(NbtrainError, TimeoutError):
    """The run exceeded its timeout, or hung, and was stopped."""
