"""Text of ranks as it may be shown: what would steer a terminal is taken out. Pure."""

from __future__ import annotations

import re

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\ud800-\udfff]")


def plain(line: str, width: int = 400) -> str:
    """Return what a terminal would be left with after `line`: no colours, the last overwrite."""
    text = _ANSI.sub("", line[-16 * width :]).rstrip("\r")
    text = _CONTROL.sub("", text.rsplit("\r", 1)[-1])
    return text if len(text) <= width else text[: width - 1] + "…"


def plain_lines(text: str | None) -> str | None:
    """Return a text of several lines, each as `plain` leaves it but for what it overwrites."""
    lines = (text or "").replace("\r", " ").split("\n")
    return text and "\n".join(plain(line, 2000) for line in lines)
