"""What every result can do, written once: it becomes JSON and HTML, and ends a program by its code.

A result is a frozen struct. JSON has no NaN and no infinity: they are written as words.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

from paritas.errors import MismatchError, UsageError
from paritas.results import callbacks

if TYPE_CHECKING:
    from collections.abc import Iterable


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Data that can be written as JSON, read back, and looked at in a notebook."""

    # What it is called where something else was read in its place.
    _called: ClassVar[str]

    def to_json(self) -> bytes:
        """Encode as JSON; `from_json` gives back an equal result, NaN and infinities included."""
        return json_of(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Decode what `to_json` wrote; an unknown field or status is an error."""
        try:
            # Lax mode reads the spelled-out "nan" and "inf" as floats.
            return msgspec.convert(msgspec.json.decode(data), cls, strict=False)
        except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(
                f"not {cls._called} in JSON: {error}; it starts with {data[:80]!r}"
            ) from None

    def _repr_html_(self) -> str:
        return callbacks.html_of(self)


class Report(Result, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A result that passes or fails. True in a boolean context only if it passed."""

    # A verdict is itself a report: its type is above this module.
    @property
    def verdict(self) -> Any:
        """The roll-up of all that was compared."""
        raise NotImplementedError

    @property
    def exit_code(self) -> int:
        """0 pass, 1 different or degraded (or unstable under strict), 3 unverified."""
        return int(self.verdict.exit_code)

    @property
    def passed(self) -> bool:
        """Whether the candidate computes what the reference computes."""
        return self.exit_code == 0

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return str(self.verdict)

    def raise_if_failed(self) -> None:
        """Raise `MismatchError`, carrying the verdict, unless it passed."""
        if not self.passed:
            raise MismatchError(self._failure_text(), self.verdict)

    def _failure_text(self) -> str:
        return str(self)


# --- Structs as JSON, in which NaN and infinities are words ---------------------------------------

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


def spell_nonfinite(value: Any) -> Any:
    """Replace NaN and infinities by words: JSON has no such numbers and msgspec writes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: spell_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spell_nonfinite(item) for item in value]
    return value
