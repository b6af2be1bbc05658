"""Runs cells on live ranks, while there are any."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ...part_api import CellPlace, Engine, LaunchSide, Option, Plan, PlanError

if TYPE_CHECKING:
    from ...part_api import Display
    from .live_ranks import LiveRanks


class LiveLaunch(LaunchSide):
    """Sends cells to live ranks; imports nothing where there never were any."""

    cell_options = (
        Option(
            "--new",
            "start new ranks for this cell, even if live ranks (%%nbtrain start) are running",
            False,
            field="new",
        ),
        Option(
            "--ranks",
            "which of the live ranks run the cell: 0 or 0,2-3 (by default all)",
            field="ranks",
            metavar="RANKS",
        ),
    )

    def place(self, options: Namespace) -> CellPlace | None:
        """Return the live ranks as the place for a cell; None with ``--new``, or if there are none.

        Raises `PlanError` if the live ranks have ended without being stopped, and for ``--ranks``
        without live ranks.
        """
        ranks = None if options.new else _call_if_imported("current")
        lost = _call_if_imported("find_lost_ranks") if ranks is None and not options.new else None
        if lost is not None:
            raise PlanError(
                f"{lost.end_reason}. This cell was not run. `%nbtrain restart` starts new live "
                "ranks. After `%nbtrain stop`, each cell starts new ranks with the notebook's "
                "variables; --new does that for this cell alone"
            )
        if options.ranks is not None and ranks is None:
            raise PlanError("--ranks is for live ranks: %nbtrain start -n 2 starts two")
        return None if ranks is None else _OnLiveRanks(ranks, options)

    def display(self, plan: Plan, engine: Engine, board: Callable[[], Display]) -> Display | None:
        """Return the output of a cell for a task on live ranks, without another ``--view``.

        It has a board if the task takes longer.
        """
        if not engine.ranks_stay or plan.view != "auto":
            return None
        from .cell_output import CellOutput

        return CellOutput(board)

    def debug(self, error: BaseException) -> bool:
        """Open the debugger if the last task on live ranks raised `error`; return whether it did.

        Waits until the debugger is left.
        """
        ranks = _call_if_imported("current")
        if ranks is None or ranks.error is not error:
            return False
        ranks.debug()
        return True


class _OnLiveRanks:
    """A cell with its options on live ranks, which keep what it defines."""

    def __init__(self, ranks: LiveRanks, options: Namespace) -> None:
        self._ranks, self._options = ranks, options

    @property
    def variables(self) -> Iterable[str]:
        return self._ranks.names[0]

    def run(self, plan: Plan) -> Any:
        """Run a cell on the live ranks that ``--ranks`` names, or on all, and return its run.

        Raises `PlanError` for options that do not suit live ranks, and what the cell raises.
        """
        from .commands import check_options, read_ranks

        check_options(self._options)
        chosen = self._options.ranks
        targets = None if chosen is None else read_ranks(chosen, self._ranks.world_size)
        return self._ranks.run_plan(plan, targets)


def _call_if_imported(function: str) -> LiveRanks | None:
    """Return the live ranks, if `live_ranks` has been imported."""
    module = sys.modules.get("nbtrain.parts.live.live_ranks")
    return None if module is None else getattr(module, function)()
