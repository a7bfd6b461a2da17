"""Files of Ascend's graph engine, written field by field from the format's description."""

from __future__ import annotations

import itertools
import math
import struct

import numpy as np

TIME = 1706596912161941
STEP = "20240130064152/0/graph_1/11"
# (numbers of the fields) of what an operator takes and gives.
INPUT = {"data": 4, "size": 5, "original": 6, "sub_format": 7, "address": 8}
OUTPUT = {"data": 5, "size": 6, "original": 7, "sub_format": 8, "address": 9}
F32, F16, I8, I32, I64, BOOL, F64, STRING, BF16, INT4, UINT1 = 1, 2, 3, 7, 8, 11, 12, 13, 27, 28, 29
ND = 2


def varint(number):
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def number_field(field, number):
    return varint(field << 3) + varint(number)


def bytes_field(field, data):
    return varint(field << 3 | 2) + varint(len(data)) + data


def shape_field(field, dims, *, packed=True):
    if packed:
        return bytes_field(field, bytes_field(1, b"".join(map(varint, dims))))
    return bytes_field(field, b"".join(number_field(1, dim) for dim in dims))


def tensor_field(field, numbers, one):
    """One tensor of a header; `one` has payload, dtype, format, shape and what else there is."""
    body = number_field(1, one["dtype"]) if one["dtype"] else b""
    layout = one.get("format", ND)
    body += number_field(2, layout) if layout else b""
    body += shape_field(3, one.get("shape", ()), packed=one.get("packed", True))
    if numbers is OUTPUT:
        original = bytes_field(1, b"an_op")
        if "original_format" in one:
            original += number_field(4, one["original_format"])
        body += bytes_field(4, original)
    body += number_field(numbers["size"], one.get("size", len(one["payload"])))
    if "original" in one:
        body += shape_field(numbers["original"], one["original"])
    if "sub_format" in one:
        body += number_field(numbers["sub_format"], one["sub_format"])
    return bytes_field(field, body + number_field(numbers["address"], 0x4AC000000000))


def ge_bytes(inputs=(), outputs=(), *, name="Add_2", buffers=(), space=(), old_space=(), attrs=()):
    """A whole file. The fields are in an order that is not that of the payloads."""
    header = bytes_field(1, b"2.0") + number_field(2, TIME)
    header += b"".join(tensor_field(3, OUTPUT, one) for one in outputs)
    header += b"".join(tensor_field(4, INPUT, one) for one in inputs)
    for data in buffers:
        header += bytes_field(5, number_field(1, 0) + number_field(3, len(data)))
    header += bytes_field(6, name.encode())
    for key, value in attrs:
        header += bytes_field(7, bytes_field(1, key.encode()) + bytes_field(2, value.encode()))
    for data in old_space:
        header += bytes_field(7, number_field(1, 2) + number_field(3, len(data)))
    for data in space:
        header += bytes_field(8, number_field(1, 2) + number_field(3, len(data)))
    payloads = [one["payload"] for one in (*inputs, *outputs)] + [*buffers, *old_space, *space]
    return struct.pack("<Q", len(header)) + header + b"".join(payloads)


def tensor(array, dtype, **more):
    """A tensor in the plain layout."""
    array = np.asarray(array)
    facts = {"payload": array.tobytes(), "dtype": dtype, "shape": array.shape}
    return facts | {"original": array.shape} | more


def nano_bytes(inputs=(), outputs=()):
    """The binary header of small devices. Each tensor is (payload, dtype, shape, original)."""

    def dims(tag, shape):
        return struct.pack(f"<II{len(shape)}Q", tag, 8 * len(shape), *shape)

    def listed(tag, items):
        body = struct.pack("<I", len(items)) + b"".join(items)
        return struct.pack("<II", tag, len(body)) + body

    taken, given = [], []
    for payload, dtype, shape, original in inputs:
        shapes = dims(0, shape) + dims(1, original)
        head = struct.pack("<iiiQQQI", dtype, ND, 0, 0, 0, len(payload), len(shapes))
        taken.append(head + shapes)
    for payload, dtype, shape, original in outputs:
        shapes = dims(0, shape) + dims(1, original) + struct.pack("<II", 2, 4) + b"relu"
        head = struct.pack("<iiiiiiQQQI", dtype, ND, 0, 0, 1, ND, 0, 0, len(payload), len(shapes))
        given.append(head + shapes)
    header = struct.pack("<II", 0x5A5A5A5A, 1) + listed(4, taken) + listed(5, given)
    payloads = b"".join(one[0] for one in (*inputs, *outputs))
    return struct.pack("<Q", len(header)) + header + payloads


def write(root, folder, name, data):
    path = root / folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def file_name(op_type, op_name, time=TIME, task=44, stream=6):
    return f"{op_type}.{op_name}.{task}.{stream}.{time}"


# --- device layouts, element by element -----------------------------------------------------------


def to_blocks(logical, letters, layout, blocks, fill):
    """Put a tensor into a layout of named axes, for example NC1HWC0 with {"C": 16}.

    Args:
        letters: the axes of the tensor, `NCHW`.
        layout: the axes of the device; those with 1 count the blocks, those with 0 lie in them.
        fill: what the padding holds.
    """
    sizes = dict(zip(letters, logical.shape, strict=True))

    def extent(axis):
        if axis.endswith("1"):
            return math.ceil(sizes[axis[0]] / blocks[axis[0]])
        return blocks[axis[0]] if axis.endswith("0") else sizes[axis]

    device = np.full([extent(axis) for axis in layout], fill, dtype=logical.dtype)
    for place in itertools.product(*map(range, logical.shape)):
        at = dict(zip(letters, place, strict=True))
        target = []
        for axis in layout:
            if axis.endswith("1"):
                target.append(at[axis[0]] // blocks[axis[0]])
            else:
                target.append(at[axis[0]] % blocks[axis[0]] if axis.endswith("0") else at[axis])
        device[tuple(target)] = logical[place]
    return device


def to_tiles(logical, rows, columns, fill):
    """FRACTAL_NZ with tiles of that size."""
    *many, height, width = logical.shape
    shape = [*many, math.ceil(width / columns), math.ceil(height / rows), rows, columns]
    device = np.full(shape, fill, dtype=logical.dtype)
    for place in itertools.product(*map(range, logical.shape)):
        *front, row, column = place
        at = (*front, column // columns, row // rows, row % rows, column % columns)
        device[at] = logical[place]
    return device
