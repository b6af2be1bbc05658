"""Where things are in a checkout."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""

NOTEBOOKS = ROOT / "notebooks"
