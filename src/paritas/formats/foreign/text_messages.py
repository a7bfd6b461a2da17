"""Protobuf's text format and its form in JSON, read as events."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_LARGEST_FILE = 1 << 30
_DEEPEST = 100
# Possessive quantifiers: no input causes backtracking.
_TOKEN = re.compile(
    rb"(?P<gap>(?:\s|#[^\n]*+)++)"
    rb"|(?P<string>\"[^\"\\\n]*+(?:\\.[^\"\\\n]*+)*+\"|'[^'\\\n]*+(?:\\.[^'\\\n]*+)*+')"
    rb"|(?P<word>[\w.+\-/]++)"
    rb"|(?P<mark>[{}<>\[\]:,;])"
)
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_LETTERS = bytes.maketrans(b"ntrabfv", b"\n\t\r\a\b\f\v")
_OPENING = {b"{": b"}", b"<": b">"}


class Events(Protocol):
    """Receives the contents of a text."""

    def begin(self, field: bytes) -> None:
        """A message begins."""

    def value(self, field: bytes, text: bytes) -> None:
        """A plain field; a string without its quotes and escapes."""

    def end(self) -> None:
        """The innermost message ends."""


def parse_text(path: Path, events: Events) -> None:
    """Read a file in the text format.

    Raises:
        ValueError: it is not in that format; the message has the byte offset.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size > _LARGEST_FILE:
            raise ValueError(f"it has {size} bytes, the limit is {_LARGEST_FILE}")
        file.seek(0)
        _parse(_split_tokens(file.read(size)), events)


_LARGEST_JSON = 1 << 28


def parse_json(path: Path, events: Events) -> None:
    """Read the same messages from JSON.

    Raises:
        ValueError: it is not JSON, or has no graph.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size > _LARGEST_JSON:
            raise ValueError(f"it has {size} bytes, the limit is {_LARGEST_JSON}")
        file.seek(0)
        try:
            model = json.loads(file.read(size))
            graphs = model.get("graph") if isinstance(model, dict) else None
            if not isinstance(graphs, list) or not graphs:
                raise ValueError("it has no list of graphs")
            for field, value in model.items():
                _tell_json(field, value, events)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


def _tell_json(field: str, value: Any, events: Events) -> None:
    if isinstance(value, dict):
        events.begin(field.encode())
        for name, inner in value.items():
            _tell_json(name, inner, events)
        events.end()
    elif isinstance(value, list):  # a repeated field
        for item in value:
            _tell_json(field, item, events)
    else:
        events.value(field.encode(), str(value).encode("utf-8", "replace"))


class _TextToken(NamedTuple):
    """A word, string or mark, and its byte offset."""

    text: bytes
    at: int
    is_string: bool


def _split_tokens(data: bytes) -> Iterator[_TextToken]:
    at = 0
    for token_match in _TOKEN.finditer(data):
        if token_match.start() != at:
            break
        at = token_match.end()
        kind = token_match.lastgroup
        if kind != "gap":
            yield _TextToken(token_match.group(), token_match.start(), is_string=kind == "string")
    if at != len(data):
        raise ValueError(f"unknown syntax at byte {at}: {data[at : at + 20]!r}")


def _parse(tokens: Iterator[_TextToken], events: Events) -> None:
    closing: list[bytes] = []
    token = next(tokens, None)
    while token is not None:
        if closing and token.text == closing[-1] and not token.is_string:
            closing.pop()
            events.end()
            token = next(tokens, None)
        elif token.text in (b",", b";"):
            token = next(tokens, None)
        else:
            token = _parse_field(token, tokens, events, closing)
    if closing:
        raise ValueError(f"it is truncated: {len(closing)} messages do not end")


def _parse_field(
    name: _TextToken, tokens: Iterator[_TextToken], events: Events, closing: list[bytes]
) -> _TextToken | None:
    """Read a field up to the beginning of its message or the end of its value; the next token."""
    if name.is_string or name.text in b"{}<>[]:":
        raise ValueError(f"expected a field at byte {name.at}, got {name.text[:40]!r}")
    token = _next_token(name, tokens)
    has_colon = token.text == b":" and not token.is_string
    if has_colon:
        token = _next_token(name, tokens)
    if token.text in _OPENING and not token.is_string:
        if len(closing) >= _DEEPEST:
            raise ValueError(f"byte {token.at} is nested deeper than {_DEEPEST} messages")
        closing.append(_OPENING[token.text])
        events.begin(name.text)
        return next(tokens, None)
    if not has_colon:
        raise ValueError(f"byte {token.at} has {token.text[:40]!r} after {name.text[:40]!r}")
    if token.text == b"[" and not token.is_string:
        return _parse_list(name, tokens, events)
    if not token.is_string and token.text in b"}>]:,;":
        raise ValueError(f"expected a value at byte {token.at}, got {token.text!r}")
    return _parse_scalar(token, tokens, lambda text: events.value(name.text, text))


def _parse_list(
    name: _TextToken, tokens: Iterator[_TextToken], events: Events
) -> _TextToken | None:
    token: _TextToken | None = _next_token(name, tokens)
    while token is not None and (token.is_string or token.text != b"]"):
        if not token.is_string and token.text in b"{}<>[:;":
            raise ValueError(f"unexpected {token.text!r} at byte {token.at}, in a list")
        if token.text == b"," and not token.is_string:
            token = next(tokens, None)
        else:
            token = _parse_scalar(token, tokens, lambda text: events.value(name.text, text))
    if token is None:
        raise ValueError("it is truncated within a list")
    return next(tokens, None)


def _parse_scalar(
    token: _TextToken, tokens: Iterator[_TextToken], take: Callable[[bytes], None]
) -> _TextToken | None:
    """A plain value; adjacent strings are one."""
    if not token.is_string:
        take(token.text)
        return next(tokens, None)
    parts: list[bytes] = []
    following: _TextToken | None = token
    while following is not None and following.is_string:
        parts.append(_unquote(following.text))
        following = next(tokens, None)
    take(b"".join(parts))
    return following


def _next_token(name: _TextToken, tokens: Iterator[_TextToken]) -> _TextToken:
    token = next(tokens, None)
    if token is None:
        raise ValueError(f"it is truncated after {name.text[:40]!r}")
    return token


def _unquote(text: bytes) -> bytes:
    body = text[1:-1]
    return _ESCAPE.sub(_unescape, body) if b"\\" in body else body


def _unescape(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, point, letter = match.groups()
    if octal is not None:
        return bytes([int(octal, 8) & 255])
    if hexadecimal is not None:
        return bytes([int(hexadecimal, 16)])
    if point is not None:
        return chr(int(point, 16)).encode("utf-8", "replace")
    return bytes(letter).translate(_LETTERS)
