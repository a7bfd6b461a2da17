"""Structs as JSON, in which NaN and infinities are words: JSON has no such numbers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from paritas.numerics.findings import spell_nonfinite

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["json_of", "json_of_each"]

# A double in MessagePack whose exponent is all ones: NaN or an infinity. Other bytes may look the
# same, which costs time and no more.
_NONFINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")


def json_of(value: msgspec.Struct) -> bytes:
    """Encode one struct; to look at every number by itself is left to those that need it."""
    try:
        is_plain = _NONFINITE.search(msgspec.msgpack.encode(value)) is None
    except OverflowError:  # a whole number of more than 64 bits, which JSON takes
        is_plain = False
    if is_plain:
        return msgspec.json.encode(value)
    return msgspec.json.encode(spell_nonfinite(msgspec.to_builtins(value)))


def json_of_each(values: Iterable[msgspec.Struct]) -> list[msgspec.Raw]:
    """Encode many, to be put into what is encoded around them."""
    return [msgspec.Raw(json_of(value)) for value in values]
