"""What a rank does at the agreed step, for each kind of action."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....part_api import RankContext
from ..orders import Action, Decided
from ..settings import TurnError
from .finish import Finishing
from .keep import Keeping
from .peek import Peeking
from .turn import Turning


@dataclass(frozen=True)
class Prepared:
    """What a rank reports when it waits: fields of `events.StepBoundary`."""

    bars: int = 0
    detail: str = ""
    is_refused: bool = False


class Actions:
    """The actions of one task."""

    def __init__(self, context: RankContext) -> None:
        self._of_parts = context.step_actions
        self._finishing, self._turning = Finishing(context), Turning(context)
        self._peeking, self._keeping = Peeking(context), Keeping(context)

    def prepare(self, action: Action, optimizer: Any) -> Prepared:
        """Get ready for an action, and return what the launcher needs to decide about it.

        `optimizer` has made the present step.
        """
        if action.name == "finish":
            return Prepared(self._finishing.prepare())
        if action.name in ("peek", "keep"):
            is_peek = action.name == "peek"
            peeking, keeping = self._peeking.find_refusal, self._keeping.find_refusal
            refusal = peeking() if is_peek else keeping(optimizer)
            return Prepared(detail=refusal, is_refused=bool(refusal))
        if action.name != "turn":
            refusal = self._find_refusal(action, optimizer)
            return Prepared(detail=refusal, is_refused=bool(refusal))
        try:
            return Prepared(detail=self._turning.describe(action))
        except TurnError as error:
            return Prepared(detail=str(error), is_refused=True)
        except Exception as error:  # groups of other optimizers may hold anything
            return Prepared(detail=f"{type(error).__name__}: {error}", is_refused=True)

    def apply(self, decided: Decided, optimizer: Any) -> None:
        """Carry out what all ranks carry out after this step, which `optimizer` has made."""
        if decided.action.name == "finish":
            self._finishing.apply(decided)
        elif decided.action.name == "peek":
            self._peeking.apply(decided)
        elif decided.action.name == "keep":
            self._turning.restore()  # the checkpoint has the settings of the code
            self._keeping.apply(decided, optimizer)
        elif decided.action.name == "turn":
            self._turning.apply(decided.action)
        else:
            self._of_parts[decided.action.name].apply(decided.action.values, decided.step)

    def _find_refusal(self, action: Action, optimizer: Any) -> str:
        """Return why what another part does is impossible, for people; "" if it is possible."""
        of_part = self._of_parts.get(action.name)
        if of_part is None:
            return f"this rank has no part that can {action.name}"
        try:
            return of_part.prepare(action.values, optimizer)
        except Exception as error:  # whatever another part raises
            return f"{type(error).__name__}: {error}"
