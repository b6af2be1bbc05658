"""Where in the user's code a rank is."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ....system.source_files import RANK_BODY, is_library
from ....tracking.run_folder import RunFolder

_LIGHTNING = ("lightning.", "lightning_fabric.", "pytorch_lightning.")


@dataclass(frozen=True)
class Place:
    """A line of the user's code; none where the file is ""."""

    file: str = ""
    line: int = 0
    library: str = ""
    """What called on to where the rank is, where that is known: 'lightning'."""

    def __str__(self) -> str:
        """Return the place as the notebook names it: ``In[3], line 4``."""
        if not self.file:
            return ""
        cells = RunFolder(Path(os.environ["NBTRAIN_RUN"])).read_manifest().get("cells", {})
        return f"{cells.get(self.file) or Path(self.file).name}, line {self.line}"


def user_place() -> Place:
    """Return the line of the user's code that is running."""
    frame: FrameType | None = sys._getframe(1)
    library = ""
    while frame is not None and frame.f_code.co_filename not in RANK_BODY:
        if str(frame.f_globals.get("__name__", "")).startswith(_LIGHTNING):
            library = "lightning"
        if not is_library(frame.f_code.co_filename):
            return Place(frame.f_code.co_filename, frame.f_lineno, library)
        frame = frame.f_back
    return Place("", 0, library)
