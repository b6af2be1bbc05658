"""What a test assumes of versions, as a mark that says so."""

from __future__ import annotations

from importlib.metadata import version

import pytest


def is_below(package: str, least: str) -> bool:
    """Whether the installed version of a package comes before another one: `"2.5"`."""
    return _numbers(version(package)) < _numbers(least)


def needs(package: str, least: str, what: str) -> pytest.MarkDecorator:
    """Mark a test that needs at least a version of a package, for what it brings."""
    reason = f"{what}: {package} {least} or newer"
    return pytest.mark.skipif(is_below(package, least), reason=reason)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])
