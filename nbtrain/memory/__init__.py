"""Will it fit: what training a model takes on each rank, told before anything is allocated."""

from .anatomy import MemoryAnatomy
from .needed import memory_needed
from .options import read

__all__ = ["MemoryAnatomy", "memory_needed", "read"]
