"""Writes YAML without a package for it, which users would have to install."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][\w./-]*", re.ASCII)
_NOT_TEXT = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
"""Words that YAML 1.1 reads as other values than text."""


def to_yaml(value: Mapping[str, Any], indent: int = 0) -> str:
    """Return a mapping of texts, whole numbers, lists and mappings as lines of YAML.

    Text of several lines becomes a block, as it was typed. Text that a block cannot hold, as one
    with control characters, is quoted. Empty lists and mappings are not supported.
    """
    return "".join(_entry(f"{_scalar(key)}:", item, indent) for key, item in value.items())


def _entry(start: str, value: Any, indent: int) -> str:
    """Return the lines of a value that follows a key or a dash."""
    margin = " " * indent
    if isinstance(value, Mapping):
        return f"{margin}{start}\n{to_yaml(value, indent + 2)}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{margin}{start}\n" + "".join(_item(item, indent + 2) for item in value)
    if isinstance(value, str) and _fits_block(value):
        lines = value.split("\n")[:-1]  # which are not all that `splitlines` would find
        return "\n".join(
            [f"{margin}{start} |", *(line and f"{margin}  {line}" for line in lines), ""]
        )
    return f"{margin}{start} {_scalar(value)}\n"


def _item(value: Any, indent: int) -> str:
    """Return the lines of a list's item: a mapping begins behind the dash."""
    if isinstance(value, Mapping):
        lines = to_yaml(value, indent + 2)
        return f"{' ' * indent}- {lines[indent + 2 :]}"
    return _entry("-", value, indent)


def _fits_block(text: str) -> bool:
    """Return whether a block reads back as exactly this text."""
    lines = text.split("\n")
    if len(lines) == 1:
        return False
    # The first line sets the indentation, and a block ends with one newline.
    starts_well = lines[0][:1] not in ("", " ", "\t")
    ends_well = not lines[-1] and lines[-2].strip() != ""
    is_printable = all(line.replace("\t", "").isprintable() for line in lines)
    return starts_well and ends_well and is_printable


def _scalar(value: str | int) -> str:
    """Return a number, or text: quoted unless YAML reads it as the same text without."""
    if isinstance(value, int):
        return str(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(sign if sign.isprintable() else _escape(sign) for sign in quoted)


def _escape(sign: str) -> str:
    return f"\\U{ord(sign):08x}" if ord(sign) > 0xFFFF else f"\\u{ord(sign):04x}"
