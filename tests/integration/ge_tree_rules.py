"""The rules of msit's document and of its tools for a dump of Ascend's graph engine, written anew.

Nothing of paritas is used here: this is how a tool that knows only these rules sees a dump. A
tensor file is the length of its header in eight bytes, little endian, the header (protobuf
`DumpData`), and the bytes of all inputs and then of all outputs, back to back.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np

DTYPES = {
    1: "f4", 2: "f2", 3: "i1", 4: "u1", 5: "i2", 6: "u2", 7: "i4", 8: "i8", 9: "u4", 10: "u8",
    11: "?", 12: "f8", 16: "c8", 17: "c16",
}  # fmt: skip
GRAPH = re.compile(r"dynamo_(original|optimized)_(.+)_rank_(\d+)_pid_(\d+)_ts_(\d{20})\.txt")
NEW = re.compile(
    r"worldsize(?P<world>\d+)_global_rank(?P<rank>\d+)/(?P<time>\d{14})/(?P<device>\d+)/"
    r"(?P<model>[^/]+)/(?P<model_id>\d+)/(?P<token>\d+)/(?P<file>[^/]+)"
)
OLD = re.compile(
    r"(?P<time>\d{14})/(?P<device>\d+)/(?P<model>[^/]+)/(?P<model_id>\d+)/(?P<token>\d+)/"
    r"(?P<file>[^/]+)"
)


def tensor_files(root, rule):
    """Every file below the folders of the tree, taken apart as the document has it."""
    found = []
    tops = [path for path in Path(root).iterdir() if path.is_dir() and path.name != "rank0"]
    for path in sorted(file for top in tops for file in top.rglob("*") if file.is_file()):
        named = rule.fullmatch(path.relative_to(root).as_posix())
        assert named, path
        found.append((named, path))
    return found


def operator(name):
    """Type and name of the operator: msit joins all between the first and the last three parts."""
    parts = name.split(".")
    assert len(parts) >= 5, name
    task, stream, time = parts[-3:]
    assert task.isdigit(), name
    assert stream.isdigit(), name
    assert re.fullmatch(r"\d{16}", time), name
    return parts[0], ".".join(parts[1:-3])


def split(op_name, known):
    """The names of which the name of a fused operator is made, the longest first."""
    parts = []
    while op_name:
        longest = next(
            (op_name[:end] for end in range(len(op_name), 0, -1) if op_name[:end] in known), None
        )
        if longest is None:
            return []
        parts.append(longest)
        op_name = op_name[len(longest) :]
    return parts


def read(path):
    """Inputs and outputs of a tensor file as arrays, and the operator that its header names."""
    data = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    fields = list(_fields(data[8 : 8 + length]))
    at = 8 + length
    sides = []
    # The payloads of the inputs come first, though their numbers in the header are higher.
    for number, size_field in ((4, 5), (3, 6)):
        arrays = []
        for _, body in (one for one in fields if one[0] == number):
            tensor = dict(_fields(body))
            shape = _dims(tensor.get(3, b""))
            size = tensor.get(size_field, 0)
            dtype = np.dtype(DTYPES[tensor[1]])
            assert size == dtype.itemsize * int(np.prod(shape, dtype=int))
            arrays.append(np.frombuffer(data[at : at + size], dtype).reshape(shape))
            at += size
        sides.append(arrays)
    assert at == len(data)
    (name,) = (body for number, body in fields if number == 6)
    return *sides, name.decode()


def graph_operators(path):
    """What a text graph says of each operator, read line by line as msit reads it."""
    found, name, key = {}, "", ""
    for line in Path(path).read_text().splitlines():
        field, _, value = line.strip().partition(": ")
        value = value.strip('"')
        if field == "name" and line.startswith("  name"):
            name = value
            found[name] = {}
        elif field == "key":
            key = value
        elif field == "s" and name:
            found[name].setdefault(key, []).append(value)
    return found


def _fields(data):
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 0:
            value, at = _varint(data, at)
        else:
            assert tag & 7 == 2
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        yield tag >> 3, value


def _varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _dims(shape):
    dims = []
    for number, packed in _fields(shape):
        assert number == 1
        at = 0
        while at < len(packed):
            dim, at = _varint(packed, at)
            dims.append(dim)
    return tuple(dims)
