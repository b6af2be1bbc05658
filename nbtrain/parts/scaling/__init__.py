"""Measures the speed-up of a function on 1, 2, 4, … ranks."""

from .measure import ask, scaling
from .report import ScalingReport

__all__ = ["ScalingReport", "ask", "scaling"]
