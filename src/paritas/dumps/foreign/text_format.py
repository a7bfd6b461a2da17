"""Protobuf's text format, told as it goes by: whoever listens keeps what it needs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["Events", "parse_text"]

_LARGEST_FILE = 1 << 30
_DEEPEST = 100
# Possessive, so that no input makes it try twice.
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
    """Whoever listens to a text."""

    def begin(self, field: bytes) -> None:
        """A message begins."""

    def value(self, field: bytes, text: bytes) -> None:
        """A plain field; a string without its quotes and escapes."""

    def end(self) -> None:
        """The message ends that began last."""


def parse_text(path: Path, events: Events) -> None:
    """Read a file in the text format.

    Raises:
        ValueError: it is not in that format; the message says where.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size > _LARGEST_FILE:
            raise ValueError(f"it has {size} bytes, where {_LARGEST_FILE} are the most")
        file.seek(0)
        _parse(_tokens(file.read(size)), events)


class _Token:
    """A word, string or mark, and where it stands."""

    __slots__ = ("at", "is_string", "text")

    def __init__(self, text: bytes, at: int, *, is_string: bool) -> None:
        self.text, self.at, self.is_string = text, at, is_string


def _tokens(data: bytes) -> Iterator[_Token]:
    at = 0
    for found in _TOKEN.finditer(data):
        if found.start() != at:
            break
        at = found.end()
        kind = found.lastgroup
        if kind != "gap":
            yield _Token(found.group(), found.start(), is_string=kind == "string")
    if at != len(data):
        raise ValueError(f"byte {at} begins nothing that is known: {data[at : at + 20]!r}")


def _parse(tokens: Iterator[_Token], events: Events) -> None:
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
            token = _field(token, tokens, events, closing)
    if closing:
        raise ValueError(f"it is cut off: {len(closing)} messages do not end")


def _field(
    name: _Token, tokens: Iterator[_Token], events: Events, closing: list[bytes]
) -> _Token | None:
    """Read a field up to where its message begins, or its value ends; gives what follows."""
    if name.is_string or name.text in b"{}<>[]:":
        raise ValueError(f"byte {name.at} has {name.text[:40]!r} where a field belongs")
    token = _after(name, tokens)
    has_colon = token.text == b":" and not token.is_string
    if has_colon:
        token = _after(name, tokens)
    if token.text in _OPENING and not token.is_string:
        if len(closing) >= _DEEPEST:
            raise ValueError(f"byte {token.at} is more than {_DEEPEST} messages deep")
        closing.append(_OPENING[token.text])
        events.begin(name.text)
        return next(tokens, None)
    if not has_colon:
        raise ValueError(f"byte {token.at} has {token.text[:40]!r} after {name.text[:40]!r}")
    if token.text == b"[" and not token.is_string:
        return _list(name, tokens, events)
    if not token.is_string and token.text in b"}>]:,;":
        raise ValueError(f"byte {token.at} has {token.text!r} where a value belongs")
    return _scalar(token, tokens, lambda text: events.value(name.text, text))


def _list(name: _Token, tokens: Iterator[_Token], events: Events) -> _Token | None:
    token: _Token | None = _after(name, tokens)
    while token is not None and (token.is_string or token.text != b"]"):
        if not token.is_string and token.text in b"{}<>[:;":
            raise ValueError(f"byte {token.at} has {token.text!r} in a list")
        if token.text == b"," and not token.is_string:
            token = next(tokens, None)
        else:
            token = _scalar(token, tokens, lambda text: events.value(name.text, text))
    if token is None:
        raise ValueError("it is cut off within a list")
    return next(tokens, None)


def _scalar(
    token: _Token, tokens: Iterator[_Token], take: Callable[[bytes], None]
) -> _Token | None:
    """A plain value; strings that stand side by side are one."""
    if not token.is_string:
        take(token.text)
        return next(tokens, None)
    parts: list[bytes] = []
    following: _Token | None = token
    while following is not None and following.is_string:
        parts.append(_unquoted(following.text))
        following = next(tokens, None)
    take(b"".join(parts))
    return following


def _after(name: _Token, tokens: Iterator[_Token]) -> _Token:
    token = next(tokens, None)
    if token is None:
        raise ValueError(f"it is cut off after {name.text[:40]!r}")
    return token


def _unquoted(text: bytes) -> bytes:
    body = text[1:-1]
    return _ESCAPE.sub(_unescaped, body) if b"\\" in body else body


def _unescaped(found: re.Match[bytes]) -> bytes:
    octal, hexadecimal, point, letter = found.groups()
    if octal is not None:
        return bytes([int(octal, 8) & 255])
    if hexadecimal is not None:
        return bytes([int(hexadecimal, 16)])
    if point is not None:
        return chr(int(point, 16)).encode("utf-8", "replace")
    return bytes(letter).translate(_LETTERS)
