"""Small `.npy` files that hold no tensor: numbers of Python's, text, objects, a summary."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

from paritas.dumps.foreign.pickles import Call, follow, plain_text
from paritas.dumps.foreign.raw_values import values_at
from paritas.errors import UsageError
from paritas.numerics.statistics import Statistics

if TYPE_CHECKING:
    from pathlib import Path
    from typing import IO

    from paritas.dumps.foreign.npy_headers import ArrayHeader
    from paritas.dumps.foreign.raw_values import Place

__all__ = ["object_text", "python_text", "summary_of"]

_LARGEST_OBJECT = 1 << 16
# What numpy makes of Python's numbers.
_PYTHON_NUMBERS = {"<i8": "<q", "<f8": "<d", "|b1": "<?", "<c16": "<dd"}


def python_text(file: IO[bytes], header: ArrayHeader) -> str | None:
    """A number of Python's as text; None for what is an array.

    Args:
        file: just behind its header.
    """
    code = _PYTHON_NUMBERS.get(header.descr)
    if code is None or header.shape:
        return None
    parts = struct.unpack(code, file.read(struct.calcsize(code)))
    return repr(complex(*parts) if len(parts) > 1 else parts[0])


def object_text(file: IO[bytes], header: ArrayHeader, size: int) -> str:
    """Text, or an object that is pickled, as Python would write it.

    Args:
        file: just behind its header.
        size: of the file, in bytes.

    Raises:
        UsageError: it is no plain value, or damaged.
    """
    if size - header.begin > _LARGEST_OBJECT:
        raise UsageError(f"it is no tensor, and {size - header.begin} bytes are much for text")
    data = file.read(_LARGEST_OBJECT)
    if header.kind == "O":
        return _unpickled(data, header)
    if header.shape:
        raise UsageError(f"it is an array of text, shape {header.shape}, no tensor")
    code = "utf-32-be" if header.descr[:1] == ">" else "utf-32-le"
    try:
        text = data.decode(code if header.kind == "U" else "latin-1").rstrip("\0")
    except UnicodeDecodeError as error:
        raise UsageError(f"its text is damaged: {error}") from error
    # Some write what is missing as the word for it.
    return text if text == "None" else repr(text)


def _unpickled(data: bytes, header: ArrayHeader) -> str:
    """An array of one object: a pickle, of which the last part is the list of objects."""
    tree, _ = follow(data)
    match tree:
        case Call(state=(_, _, _, _, [item])) if header.shape in ((), (1,)):
            text = plain_text(item)
        case Call(state=(_, _, _, _, [*items])) if len(header.shape) == 1:
            parts = [plain_text(item) for item in items]
            text = f"[{', '.join(part or '?' for part in parts)}]" if all(parts) else None
        case _:
            text = None
    if text is None:
        raise UsageError("it holds objects of Python, pickled: none of them is made")
    return text


def summary_of(path: Path, place: Place) -> Statistics:
    """The statistics that a pair of the least and the greatest value amounts to.

    How many values there were is not in it (the count is 0). Of those that are not finite it shows
    that there is one at least, which is the number given.

    Raises:
        UsageError: it is no such pair.
    """
    if place.shape != (2,):
        raise UsageError(f"shape {place.shape} is not a least and a greatest value")
    values = values_at(path, place)
    if values.is_complex():
        raise UsageError("complex numbers have no least and greatest value")
    low, high = (float(value) for value in values.tolist())
    pair = (low, high)
    return Statistics(
        count=0,
        minimum=low if math.isfinite(low) else None,
        maximum=high if math.isfinite(high) else None,
        nans=int(any(map(math.isnan, pair))),
        positive_infinities=int(math.inf in pair),
        negative_infinities=int(-math.inf in pair),
    )
