"""Finds secrets among a user's values, by their names and their shapes. Pure.

One rule serves all that nbtrain shows or writes into a file: titles, a run's manifest,
`nbtrain.runs()`, exported scripts, the errors of trackers. Python's own parser reads a source, so
that no prefix, type or line break hides a secret.

A secret that is missed is a password in a file. A value that is mistaken for one is a parameter
that is not listed, or a script that takes it from the environment. So a name is enough if it can
mean nothing else; with any other name, the value must look like a secret, too.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from typing import NamedTuple

_CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_SECRET_NAME = re.compile(
    r"(passwor(d|t)|passwd|passphrase|secret|credential|authtoken)s?($|_|\d)"
    r"|(^|_)(pass|pwd|pw|passcode|passkey|creds|auth|authorization|cookies?|dsn|webhook)(_?\d+)?$"
    r"|(^|_)(connection|conn)_(string|str)$|^(pg|ssh)pass(word)?$"
)
"""The names of texts that are secret at any length."""

_TOKEN_NAME = re.compile(
    r"token(_?\d+)?$|(api|access|private|signing|client)_?keys?(_id)?(_?\d+)?$"
)
"""The names of texts that are secret if they are no path, sentence or special token."""

_KEY_NAME = re.compile(r"(^|_)\w*(key(_id)?|(?<![^_])pat)(_?\d+)?$")
"""The names of texts that are secret if they look random. A ``pat`` may be a pattern."""

_SECRET_NUMBER_NAME = re.compile(r"passwor(d|t)|passwd|passphrase|passcode|secret|(^|_)pin($|_)")
"""The names of whole numbers that are secret: ``high_pass`` and ``cookies`` are ordinary ones."""

_TOKENIZER_NAME = re.compile(
    r"(^|_)(pad|bos|eos|unk|sep|cls|class|mask|image|img|special|additional|start|end|prompt)_"
)

_ORDINARY_VALUE = re.compile(
    r"none|null|true|false|off|on|yes|no|auto|default|both|linear|basic", re.I
)

_RANDOM_TEXT = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[A-Za-z0-9+/=_-]{16,}")
"""A text of letters and digits without the words that a name consists of."""

_SECRET_SHAPE = re.compile(
    r"""
      [a-z][a-z0-9+.-]*://[^/\s:@]*:(?!\0@)[^\s"'<>]+@       # a URL with a password
    | [a-z][a-z0-9+.-]*://(?=[^/\s:@]*\d)[^/\s:@]{12,}@     # or with a token
    | (^|[;\s]|--)(?i:[\w-]*(password|passwd|pwd|secret|(api|access)[_-]?key))=   # a connection's
      (?![{$<%])[^\s;&\0]{4,}
    | [?&](?i:[\w-]*(api[_-]?key|token|signature|credential|sig|password))=[^&\s]{6,}
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----([\s\S]*?-----END[A-Z ]*-----|[\s\S]*)
    | (?i:authorization["']?\s*[:=]\s*["']?)\w+\ [^\s"']{4,}
    | \b(?i:Bearer|Basic|Token)\ [\w.+/=-]{12,}
    | (?i:(api|access|secret)[\ _-]?key|token|password)\ ['"][^\s'"]{6,}
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
"""The shapes of keys, tokens and URLs that are secret under any name."""


def is_secret(name: str, value: object) -> bool:
    """Return whether a text, bytes or an int is a secret, by its name or, except an int, its form.

    False for other types, empty texts, and ordinary words such as ``none``. Only the first 10,000
    characters count.
    """
    plain, is_named = _read_name(name)
    if isinstance(value, (bytes, bytearray)):
        value = bytes(value[:10_000]).decode("latin-1")
    if type(value) is int:
        return _SECRET_NUMBER_NAME.search(plain) is not None and abs(value) > 999
    if not isinstance(value, str):
        return False
    text = str.__str__(value)[:10_000]  # a subclass may do anything when it is indexed
    if not text or _ORDINARY_VALUE.fullmatch(text):
        return False
    if is_named or _SECRET_SHAPE.search(text):
        return True
    if _TOKENIZER_NAME.search(plain) or re.search(r"\s|/|\.\w{2,5}$", text):
        return False
    if _TOKEN_NAME.search(plain):
        return not re.fullmatch(r"<.*>|\[.*\]", text)
    words = re.search(r"[A-Za-z]{4,}[._-][A-Za-z]{4,}", text)
    return bool(_KEY_NAME.search(plain) and _RANDOM_TEXT.fullmatch(text) and not words)


@functools.lru_cache(1024)
def _read_name(name: str) -> tuple[str, bool]:
    """Return a name in the spelling of the patterns, and whether it can only name a secret."""
    plain = re.sub(r"\W", "_", _CAMEL_CASE.sub("_", name)).lower()
    return plain, _SECRET_NAME.search(plain) is not None


def has_secret(line: str) -> bool:
    """Return whether a line of a shell or a magic contains a secret: ``%env API_KEY=…``."""
    return mask_text(line) != line or any(map(_RANDOM_TEXT.fullmatch, line.split()))


_NAMED_VALUE = re.compile(
    r"""(?<![\w-])([\w-]+)(["'\]]*\s*[=:]\s*|\s+(?:is\s+)?(?=\S*\d)(?=\S{6}))"""
    r"""(?:(["'])(.+?)(?=\3)|()([^\s"',;&]+))"""
)
"""A value in a text behind its name, and ``=`` or ``:``; these are optional if it has a digit."""

_SHAPE_START = re.compile(
    r"[a-z][a-z0-9+.-]*://|[?&;\s-]*[\w-]+=|(?i:authorization[\"']?\s*[:=]\s*)|[\w _-]+ ['\"]"
)
"""The start of a secret that stays in a text: it shows the kind."""


def mask_text(text: str) -> str:
    """Return a text that is no source, such as an error's, with ``…`` in place of its secrets.

    The start of a secret stays if it shows the kind, such as ``https://…@``.
    """

    def mask_shape(match: re.Match[str]) -> str:
        start = _SHAPE_START.match(match[0])
        return f"{start[0] if start else ''}…{'@' if match[0].endswith('@') else ''}"

    def mask_value(match: re.Match[str]) -> str:
        name, sign, quote, quoted, _, plain = match.groups()
        return f"{name}{sign}{quote or ''}…" if is_secret(name, quoted or plain) else match[0]

    return _NAMED_VALUE.sub(mask_value, _SECRET_SHAPE.sub(mask_shape, text))


Value = str | bytes | int
_Test = Callable[[str, Value], bool]


class _Literal(NamedTuple):
    """A secret in a source: an expression of texts and numbers."""

    node: ast.expr
    name: str
    """The name of the variable, argument or key that gets it."""
    value: Value


_UNNAMED_PARTS = (
    *(ast.Tuple, ast.List, ast.Set, ast.Starred, ast.UnaryOp, ast.BoolOp, ast.IfExp),
    *(ast.Attribute, ast.FormattedValue, ast.Await),
)
"""Expressions whose parts have the name of the whole."""


def _named_children(node: ast.AST, name: str) -> Iterator[tuple[ast.AST | None, str]]:
    """Yield the parts of a node of a source, each with the name of what gets its value.

    `name` is that of the node's own value. "" if a part has no name; a part may be None.
    """
    match node:
        case ast.Assign(targets=targets, value=ast.Tuple(elts=values) | ast.List(elts=values)) if (
            all(
                isinstance(each, (ast.Tuple, ast.List)) and len(each.elts) == len(values)
                for each in targets
            )
        ):
            for target in targets:
                yield from zip(values, map(_name_of, getattr(target, "elts", [])), strict=True)
        case ast.Assign(targets=targets, value=value):
            yield value, next(filter(None, map(_name_of, targets)), "")
            yield from ((target, "") for target in targets)
        case ast.AnnAssign(value=value) | ast.AugAssign(value=value) | ast.NamedExpr(value=value):
            yield value, _name_of(node.target)
        case ast.keyword(arg=arg, value=value):
            is_value = arg in (None, "default", "fallback", "value") and name
            yield value, name if is_value else _choose_name(arg or "", name)
        case ast.For(target=target, iter=values) | ast.comprehension(target=target, iter=values):
            yield values, _name_of(target)
            yield from ((c, "") for c in ast.iter_child_nodes(node) if c is not values)
        case ast.arguments():
            by_position = [*node.posonlyargs, *node.args]
            with_default = by_position[len(by_position) - len(node.defaults) :]
            yield from zip(node.defaults, (a.arg for a in with_default), strict=True)
            yield from zip(node.kw_defaults, (a.arg for a in node.kwonlyargs), strict=True)
        case ast.Dict(keys=keys, values=values):
            yield from ((key, "") for key in keys)
            names = (_choose_name(_name_of(k), name) if k else name for k in keys)
            yield from zip(values, names, strict=True)
        case ast.Call(func=func, args=args, keywords=keywords):
            called = _name_of(func)
            own = name if called[:1].isupper() or called in ("str", "bytes", "dict", "join") else ""
            own = called[3:] if called.startswith("set") else own
            yield func, name
            yield from _pair_with_keys(args, own if called != "print" else None)
            texts = [*map(_text_name, args)]
            named = next((text for text in texts if _read_name(text)[1]), [*texts, own][0])
            yield from ((each, named) for each in keywords)
        case ast.BinOp():
            yield from ((each, name) for each in _split_operands(node))
        case ast.Tuple(elts=[_, _] as both):
            yield from _pair_with_keys(both, name)
        case ast.Subscript(value=value, slice=inside):
            yield from ((value, name), (inside, ""))
        case _:
            own = name if isinstance(node, _UNNAMED_PARTS) else ""
            yield from ((child, own) for child in ast.iter_child_nodes(node))


def _choose_name(name: str, whole: str) -> str:
    """Return a part's name, or that of the whole if only that names secrets: ``passwords``."""
    return whole if _read_name(whole)[1] and not _read_name(name)[1] else name


def _pair_with_keys(nodes: list[ast.expr], name: str | None) -> Iterator[tuple[ast.expr, str]]:
    """Yield each node with its name.

    A text that reads like the name of a secret names the next node: ``setdefault("API_KEY", "…")``.
    The name of other nodes is `name`. With None, no text names a node, and every name is "".
    """
    before, kinds = "", (_SECRET_NAME, _TOKEN_NAME, _KEY_NAME)
    for node in nodes:
        is_naming = any(kind.search(_read_name(before)[0]) for kind in kinds)
        yield node, before if is_naming else name or ""
        before = "" if name is None else _text_name(node)


def _text_name(node: ast.expr) -> str:
    """Return the text of a node if it may be a name: letters, digits, ``_`` and ``-``; else ""."""
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) and re.fullmatch(r"[\w-]+", value) else ""


def _name_of(node: ast.expr) -> str:
    """Return the last name of an expression: ``token`` for ``config["token"]``; or "".

    The text itself for a literal text.
    """
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(slice=inside):
            return _name_of(inside)
        case ast.Constant(value=str(text)):
            return text
    return ""


def _find_secrets(node: ast.AST | None, name: str, test: _Test, until: int) -> list[_Literal]:
    """Return the secrets below a node in the lines of a source up to `until`, tested by `test`.

    A text that is joined of several parts is one secret.
    """
    if node is None or getattr(node, "lineno", 0) > until:
        return []
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, (str, bytes, int)) and test(name, value):
            return [_Literal(node, name, value)]
        return []
    found = [
        each
        for child, its_name in _named_children(node, name)
        for each in _find_secrets(child, its_name, test, until)
    ]
    # The parts of a JoinedStr have no places of their own in Python 3.11.
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.BinOp) and not found):
        text = _join_text(node)
        if re.search("[A-Za-z0-9]", text) and (found or test(name, text)):
            return [_Literal(node, name, text)]
    return found


def _join_text(node: ast.AST) -> str:
    """Return a text that an expression joins of several; a part that is no literal is ``\\0``."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Constant(value=bytes(content)):
            return content.decode("latin-1")
        case ast.JoinedStr(values=parts):
            return "".join(map(_join_text, parts))
        case ast.BinOp():
            return "".join(map(_join_text, _split_operands(node)))
    return "\0"


def _split_operands(node: ast.expr) -> list[ast.expr]:
    """Return the operands of a chain of binary operators, in order.

    Only left operands are split; another expression is returned alone. Not by recursion, because a
    text may be added up from a thousand lines.
    """
    behind: list[ast.expr] = []
    while isinstance(node, ast.BinOp):
        behind.append(node.right)
        node = node.left
    return [node, *reversed(behind)]


def _replace_secrets(
    source: str, test: _Test, replace: Callable[[_Literal, str], str], until: int = sys.maxsize
) -> str:
    """Return a source with its secrets replaced, and with ``…`` for those in comments.

    `replace` gets a secret and its source, and returns new source. Lines after `until` stay. Raises
    `SyntaxError`, `ValueError` or `RecursionError` if Python cannot parse it.
    """
    lines = [line.encode() for line in source.split("\n")]  # ast counts bytes in lines
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    content = source.encode()
    spans: list[tuple[int, int, bytes]] = []
    for literal in _find_secrets(ast.parse(source), "", test, until):
        node = literal.node
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
        spans.append((start, end, replace(literal, content[start:end].decode()).encode()))
    for (row, column), comment in _find_comments(source, until) if "#" in source else ():
        start = starts[row - 1] + len(lines[row - 1].decode()[:column].encode())
        new = " ".join("…" if _RANDOM_TEXT.fullmatch(w) else w for w in comment.split(" "))
        spans.append((start, start + len(comment.encode()), mask_text(new).encode()))
    for start, end, text in sorted(spans, reverse=True):
        content = content[:start] + text + content[end:]
    return content.decode()


def _find_comments(source: str, until: int) -> Iterator[tuple[tuple[int, int], str]]:
    """Yield the comments of a source up to a line, each with its row (from 1) and column.

    Ends early, without an error, where Python cannot read the source.
    """
    with contextlib.suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.start[0] > until:
                return
            if token.type == tokenize.COMMENT:
                yield token.start, token.string


def mask_source(source: str, until: int = sys.maxsize) -> str:
    """Return a source with ``…`` in place of each text that is or may be a secret.

    Its lines keep their numbers; those after `until` are not changed. A source that Python cannot
    parse is masked whole: its texts cannot be found. Never raises for a source.
    """

    def may_be_secret(name: str, value: Value) -> bool:
        is_random = isinstance(value, str) and _RANDOM_TEXT.fullmatch(value)
        return bool(is_random) or is_secret(name, value)

    def mask(literal: _Literal, typed: str) -> str:
        ends = "'", "'"
        if isinstance(literal.node, (ast.Constant, ast.JoinedStr)):
            prefix = re.match(r"[A-Za-z]*", typed)
            ends = f"{prefix[0] if prefix else ''}{typed[-1]}", typed[-1]
        text = "…" if isinstance(literal.value, int) else f"{ends[0]}…{ends[1]}"
        return text + "\n" * typed.count("\n")

    try:
        return _replace_secrets(source, may_be_secret, mask, until)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "…" + "\n" * source.count("\n")


def move_secrets_to_environment(source: str) -> tuple[str, set[str]]:
    """Return a source that reads its secrets from the environment, and the variables' names.

    Does not set the variables, or import ``os``. Equal secrets of one name share a variable; those
    in comments become ``…``. Raises `SyntaxError`, `ValueError` or `RecursionError` if Python
    cannot parse it.
    """
    variables: dict[str, Value] = {}

    def read_variable(literal: _Literal, _: str) -> str:
        own = re.sub(r"\W", "_", literal.name).strip("_").upper() or "SECRET"
        own = "PASSWORD" if own == "PWD" else own  # PWD is the shell's folder
        several = (own if n == 1 else f"{own}_{n}" for n in range(1, len(variables) + 2))
        variable = next(n for n in several if variables.get(n, literal.value) == literal.value)
        variables[variable] = literal.value
        text = f"os.environ[{variable!r}]"
        if isinstance(literal.value, bytes):
            return f"{text}.encode()"
        return f"int({text})" if isinstance(literal.value, int) else text

    return _replace_secrets(source, is_secret, read_variable), set(variables)
