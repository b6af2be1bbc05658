"""What more ranks bring: the same function on 1, 2, 4, … of them."""

from .measure import ask, scaling
from .report import ScalingReport

__all__ = ["ScalingReport", "ask", "scaling"]
