"""The header that small devices of Ascend's write, which have no protobuf.

After a magic number and a version come two lists of tensors, what the operator took and what it
gave, each with a tag and a length. All numbers are little-endian.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from paritas.dumps.foreign.ge_headers import MOST_DIMS, MOST_TENSORS, UNKNOWN, GeTensor

if TYPE_CHECKING:
    from paritas.dumps.foreign.ge_headers import Kind

__all__ = ["decode_nano"]

# dtype, layout, kind of address; address, offset, size; length of what follows. An output has its
# number, dtype and layout in the program besides.
_INPUT = struct.Struct("<iiiQQQI")
_OUTPUT = struct.Struct("<iiiiiiQQQI")
_INPUT_DESCRIPTIONS, _OUTPUT_DESCRIPTIONS = 4, 5
# The devices that write the binary header number some dtypes in their own way.
_DTYPES_OF_BINARY = {
    0: 1,
    1: 2,
    2: 3,
    3: 7,
    4: 4,
    6: 5,
    7: 6,
    8: 9,
    9: 8,
    10: 10,
    11: 12,
    12: 11,
    **{code: code for code in range(13, 28)},
    28: 0,
    29: 28,
    30: 29,
    31: 30,
    32: 31,
}


def decode_nano(header: bytes) -> list[GeTensor]:
    """The tensors of a header, in the order of their bytes.

    Raises:
        ValueError, struct.error: it is damaged.
    """
    found: list[GeTensor] = []
    seen: set[str] = set()
    at = 8
    while at + 12 <= len(header):
        tag, length, count = struct.unpack_from("<III", header, at)
        kind: Kind = "input" if tag == _INPUT_DESCRIPTIONS else "output"
        if tag not in (_INPUT_DESCRIPTIONS, _OUTPUT_DESCRIPTIONS) or kind in seen:
            raise ValueError(f"a list has tag {tag}, where {sorted(seen)} came before")
        seen.add(kind)
        if count > MOST_TENSORS:
            raise ValueError(f"it lists {count} tensors, where {MOST_TENSORS} are the most")
        end, item = at + 8 + length, at + 12
        for index in range(count):
            tensor, item = _binary_tensor(header, item, kind, index)
            found.append(tensor)
        if item != end:
            raise ValueError(f"the list of the {kind}s ends at byte {item}, and not at {end}")
        at = item
    # Their bytes lie in this order, whichever list came first.
    return sorted(found, key=lambda one: one.kind)


def _binary_tensor(header: bytes, at: int, kind: Kind, index: int) -> tuple[GeTensor, int]:
    original_format: int | None = None
    if kind == "input":
        dtype, layout, _, _, _, nbytes, _ = _INPUT.unpack_from(header, at)
        at += _INPUT.size
    else:
        dtype, layout, _, _, _, original_format, _, _, nbytes, _ = _OUTPUT.unpack_from(header, at)
        at += _OUTPUT.size
    # Two shapes, and of an output a name: each with its tag, in this order, or left out.
    parts: dict[int, bytes] = {}
    for wanted in (0, 1) if kind == "input" else (0, 1, 2):
        if at + 8 > len(header):
            break
        tag, length = struct.unpack_from("<II", header, at)
        if tag != wanted:
            continue
        end = at + 8 + length
        if end > len(header):
            raise ValueError(f"a shape ends at byte {end} of {len(header)}")
        parts[tag], at = header[at + 8 : end], end
    tensor = GeTensor(
        kind=kind,
        index=index,
        dtype=_DTYPES_OF_BINARY.get(dtype, -1),
        format=layout,
        shape=_binary_dims(parts.get(0, b"")),
        original_shape=_binary_dims(parts.get(1, b"")),
        original_format=original_format,
        nbytes=nbytes,
    )
    return tensor, at


def _binary_dims(data: bytes) -> tuple[int, ...]:
    if len(data) > 8 * MOST_DIMS or len(data) % 8:
        raise ValueError(f"a shape has {len(data)} bytes")
    dims = struct.unpack(f"<{len(data) // 8}Q", data)
    return () if any(dim >= UNKNOWN for dim in dims) else dims
