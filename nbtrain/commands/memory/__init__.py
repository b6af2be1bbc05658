"""What training a model needs on each rank, estimated before anything is allocated."""

from .estimate import memory_needed, read
from .report import MemoryAnatomy

__all__ = ["MemoryAnatomy", "memory_needed", "read"]
