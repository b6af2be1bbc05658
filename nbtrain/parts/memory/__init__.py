"""Estimates the memory that a training needs on each rank, before anything is allocated."""

from .estimate import memory_needed, read
from .report import MemoryAnatomy

__all__ = ["MemoryAnatomy", "memory_needed", "read"]
