"""What a run took and what came of it, in numbers: `run.summary()`."""

from .figures import Card, Part, Summary, summary

__all__ = ["Card", "Part", "Summary", "summary"]
