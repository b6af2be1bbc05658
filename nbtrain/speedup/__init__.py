"""What more ranks bring: the same function on 1, 2, 4, … of them, and where the rest is lost."""

from .options import ask
from .report import Lost, ScalingReport, Size
from .sizes import scaling

__all__ = ["Lost", "ScalingReport", "Size", "ask", "scaling"]
