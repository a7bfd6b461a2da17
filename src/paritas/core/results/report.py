"""What all results share: JSON, HTML and exit codes.

A result is a frozen struct. JSON has no NaN or infinity, so they are written as strings.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

from paritas.core.errors import MismatchError, UsageError
from paritas.core.importing import import_named

if TYPE_CHECKING:
    from collections.abc import Iterable


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Data that can be written as JSON and read back."""

    # Its name in the error of `from_json`.
    _called: ClassVar[str]
    # What makes its summary for a cell of a notebook, in an upper layer; else its text is shown.
    _summary: ClassVar[str] = ""

    def to_json(self) -> bytes:
        """Encode as JSON; `from_json` returns an equal result, including NaN and infinities."""
        return json_of(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Decode what `to_json` wrote; an unknown field or status is an error."""
        try:
            # Lax mode reads the spelled-out "nan" and "inf" as floats.
            return msgspec.convert(msgspec.json.decode(data), cls, strict=False)
        except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(
                f"cannot read {cls._called} from JSON: {error}; the data starts with {data[:80]!r}"
            ) from None

    def _repr_html_(self) -> str | None:
        if not self._summary:
            return None
        summary = import_named(self._summary)(self)
        html: str = import_named("paritas.core.reporting.notebook:notebook_html")(summary)
        return html


class Report(Result, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A result that passes or fails. True in a boolean context only if it passed."""

    _summary: ClassVar[str] = "paritas.core.reporting.notebook:report_summary"

    # A verdict is itself a report: its type is above this module.
    @property
    def verdict(self) -> Any:
        """The roll-up of everything that was compared."""
        raise NotImplementedError

    @property
    def headline(self) -> str:
        """The report in one line."""
        from paritas.core.results.wording import headline

        return headline(self.verdict)

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


# --- Structs as JSON, with NaN and infinities as strings ------------------------------------------

# A MessagePack double with an exponent of all ones: NaN or an infinity. Other bytes may match too;
# that only costs time.
_NONFINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")


def json_of(value: msgspec.Struct) -> bytes:
    """Encode one struct; numbers are inspected one by one only if some are not finite."""
    try:
        is_plain = _NONFINITE.search(msgspec.msgpack.encode(value)) is None
    except OverflowError:  # an integer of more than 64 bits, which JSON accepts
        is_plain = False
    if is_plain:
        return msgspec.json.encode(value)
    return msgspec.json.encode(spell_nonfinite(msgspec.to_builtins(value)))


def json_of_each(values: Iterable[msgspec.Struct]) -> list[msgspec.Raw]:
    """Encode many structs, for use inside another JSON object."""
    return [msgspec.Raw(json_of(value)) for value in values]


def spell_nonfinite(value: Any) -> Any:
    """Replace NaN and infinities by strings: JSON lacks them, and msgspec writes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: spell_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spell_nonfinite(item) for item in value]
    return value
