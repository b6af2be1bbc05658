"""Finds out which of a user's values are secrets, by their names and their shape. Pure.

One rule for all that nbtrain writes into a file or shows: a run's manifest, `nbtrain.runs()`,
exported scripts. What is missed is a password in a file; what is wrongly taken for a secret is a
parameter that is not listed, and a script that asks for it in the environment. So a name alone
counts where it can mean nothing else, and else the look of the value, too.
"""

from __future__ import annotations

import re

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_ALWAYS = re.compile(
    r"(passwor(d|t)|passwd|passphrase|secret|credential|authtoken)s?($|_|\d)"
    r"|(^|_)(pass|pwd|pw|passcode|passkey|creds|auth|authorization|cookies?|dsn|webhook|pat)(_?\d+)?$"
    r"|(^|_)(connection|conn)_(string|str)$|^(pg|ssh)pass(word)?$"
)
"""Names of texts that are secret however short they are."""

_USUALLY = re.compile(r"token(_?\d+)?$|(api|access|private|signing|client)_?keys?(_id)?(_?\d+)?$")
"""Names of texts that are secret unless they are as short as a word."""

_KEY = re.compile(r"(^|_)\w*key(_id)?(_?\d+)?$")
"""Names of texts that are secret if they look drawn by chance."""

_OF_A_TOKENIZER = re.compile(
    r"(^|_)(pad|bos|eos|unk|sep|cls|class|mask|image|img|special|additional|start|end|prompt)_"
)

_WORD = 7
"""Characters of a text that may still be a word."""

_NO_SECRETS = re.compile(r"none|null|true|false|off|on|yes|no|auto|default|both|linear|basic", re.I)

_DRAWN = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[A-Za-z0-9+/=_-]{16,}")
"""A text of letters and digits without the words of a name."""

_SHAPES = re.compile(
    r"""
      [a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@        # a URL with a password
    | [?&](?i:[\w-]*(api[_-]?key|token|signature|credential|sig|password))=[^&\s]{6,}
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----
    | \b(?i:Bearer|Basic)\ [\w.+/=-]{12,}
    | \b(sk|pk|rk)[-_](live|test|proj|ant|or)[-_](?=[\w-]*\d)[\w-]{16,}
    | \bsk-(?=[A-Za-z0-9]*\d)[A-Za-z0-9]{20,}\b
    | \bhf_(?=[A-Za-z0-9]*\d)[A-Za-z0-9]{20,}\b
    | \bgh[pousr]_[A-Za-z0-9]{20,}\b
    | \b(glpat|xox[abprs]|npm|pypi|dckr_pat|r8|gsk|nvapi|lsv2)[-_](?=[\w-]*\d)[\w-]{20,}
    | \bgithub_pat_\w{20,}
    | \b(AKIA|ASIA)[A-Z0-9]{16}\b
    | \bAIza[\w-]{30,}
    | \beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*              # a JSON web token
    """,
    re.VERBOSE,
)
"""What a provider's keys and tokens look like, whatever the variable is called."""


def is_secret(name: str, value: object) -> bool:
    """Whether a text, bytes or a number, by its name or its shape, does not belong into a file."""
    plain = _CAMEL.sub("_", name).replace("-", "_").lower()
    is_named = _ALWAYS.search(plain) is not None
    if isinstance(value, (bytes, bytearray)):
        value = bytes(value[:10_000]).decode("latin-1")
    if type(value) is int:
        return is_named and abs(value) > 999
    if not isinstance(value, str):
        return False
    text = str.__str__(value)[:10_000]  # of a subclass, whatever that does when it is indexed
    if not text or _NO_SECRETS.fullmatch(text):
        return False
    if is_named or _SHAPES.search(text):
        return True
    if _OF_A_TOKENIZER.search(plain) or re.search(r"\s|/|\.\w{2,5}$", text):
        return False
    if _USUALLY.search(plain):
        return len(text) > _WORD and not re.fullmatch(r"<.*>|\[.*\]", text)
    words = re.search(r"[A-Za-z]{4,}[._-][A-Za-z]{4,}", text)
    return bool(_KEY.search(plain) and _DRAWN.fullmatch(text) and not words)


def has_secret(line: str) -> bool:
    """Return whether a line of a shell or a magic has a secret, such as ``%env API_KEY=…``."""
    parts = [word.rpartition("=") for word in line.split()]
    return is_secret("", line) or any(is_secret(name, value) for name, _, value in parts)


_TEXT = re.compile(r"""(?:["']?(\w+)["'\]]*\s*[=:]\s*)?(?<![\w"'])(["'])([^"'\n]+)\2(?!["'])""")
"""A text in quotes, after the name of the variable, key or argument that gets it."""


_LITERAL = re.compile(
    r"""(?:["']?(\w+)["'\]]*\s*[=:,]\s*)?[rbfuRBFU]{0,2}(\"{3}|'{3}|"|')(.*?)(?<!\\)\2"""
)
"""A text of any kind, after the name of what gets it."""


def hidden(line: str) -> str:
    """Return a line of source with ``…`` in place of each text that is or may be a secret."""

    def replaced(match: re.Match[str]) -> str:
        name, quote, text = match.groups("")
        if not is_secret(name, text) and not _DRAWN.fullmatch(text):
            return match[0]
        return f"{match[0][: match.start(2) - match.start()]}{quote}…{quote}"

    return _LITERAL.sub(replaced, line)


def without_secret_texts(source: str) -> tuple[str, set[str]]:
    """Return a source that takes its secrets from the environment, and their names there."""
    secrets: set[str] = set()

    def replaced(match: re.Match[str]) -> str:
        name, _, text = match.groups("")
        if not is_secret(name, text):
            return match[0]
        variable = (name or "secret").upper()
        secrets.add(variable)
        return match[0][: match.start(2) - match.start()] + f"os.environ[{variable!r}]"

    return _TEXT.sub(replaced, source), secrets
