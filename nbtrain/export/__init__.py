"""A notebook's training cell as a script that runs without the notebook."""

from __future__ import annotations

from .live import save
from .static import export

__all__ = ["export", "save"]
