"""A notebook's training cell as a script that runs without the notebook."""

from __future__ import annotations

from .from_kernel import save
from .from_notebook import export

__all__ = ["export", "save"]
