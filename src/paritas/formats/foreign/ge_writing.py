"""Write tensor files of Ascend's graph engine, and the tree of their folders."""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paritas.core.errors import ParitasError, UsageError
from paritas.formats.files.records import whole_file
from paritas.formats.files.tensor_bytes import as_stored, raw_bytes
from paritas.formats.foreign import ge_files, ge_tensors
from paritas.formats.foreign.ge_files import (
    MOST_DIMS,
    MOST_TENSORS,
    decode_header,
    fitting_name,
    spell_name,
)
from paritas.formats.foreign.ge_tensors import code_of_dtype

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from torch import Tensor

    from paritas.formats.foreign.ge_files import GeFile


# --- One file as a whole: `paritas.dumps.read_bin` and `write_bin` --------------------------------


@dataclasses.dataclass(frozen=True)
class BinFile:
    """The inputs and outputs of one call of an operator.

    Attributes:
        op_name: as spelt in the header; empty if it does not say.
        inputs: in the layout and dtype of the program.
    """

    op_name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def read_bin(path: str | os.PathLike[str]) -> BinFile:
    """Read a bin file.

    Device layouts (NC1HWC0, FRACTAL_NZ and so on) are undone and padding is dropped. Buffers and
    scratch space are omitted. Sizes in the header are checked against the file.

    Raises:
        UsageError: the file is missing, truncated or damaged, or has a dtype that torch lacks.
    """
    file = Path(path)
    try:
        header = ge_files.read_ge_header(file)
        size = file.stat().st_size
        if header.end > size:
            raise UsageError(f"{file.name} has {size} bytes, but its header needs {header.end}")
        tensors: dict[str, list[Tensor]] = {"input": [], "output": []}
        for tensor in header.tensors:
            if tensor.kind in tensors:
                tensors[tensor.kind].append(ge_tensors.read_ge_values(file, tensor, size))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    return BinFile(header.op_name, tuple(tensors["input"]), tuple(tensors["output"]))


def write_bin(
    path: str | os.PathLike[str],
    inputs: Sequence[Tensor] = (),
    outputs: Sequence[Tensor] = (),
    *,
    op_name: str = "",
) -> None:
    """Write a bin file; `read_bin` returns the same tensors, bit for bit.

    The file appears only when it is complete; an existing one is replaced. A tree needs names like
    `Add.Add_2.44.6.1706596912161941`: type, operator, task, stream, microseconds.

    Args:
        path: of the file.
        inputs: the operator's inputs, in order.
        outputs: the operator's outputs, in order.
        op_name: the operator, for the header.

    Raises:
        UsageError: a tensor has an unsupported dtype, no values, or over 32 dimensions.
        ParitasError: the file cannot be written.
    """
    try:
        write_tensor_file(path, inputs, outputs, op_name=op_name)
    except OSError as error:
        raise ParitasError(f"cannot write {path}: {error.strerror or error}") from error


# --- Tensor files and folders ---------------------------------------------------------------------

# The format that `ge_files` reads: the length of the header in eight bytes, the header, and the
# bytes of the operator's inputs and outputs. A file appears only when it is complete.

_VERSION = b"2.0"
_ND = 2
_FLOAT4 = torch.float4_e2m1fn_x2
_VARINT, _BYTES = 0, 2
# Field numbers: see `ge_files`.
_OUTPUT, _INPUT = 3, 4


def write_tensor_file(
    path: str | os.PathLike[str],
    inputs: Sequence[Tensor] = (),
    outputs: Sequence[Tensor] = (),
    *,
    op_name: str = "",
    moment: int | None = None,
) -> GeFile:
    """Write one tensor file of Ascend's graph engine ("bin format").

    The file appears only when it is complete; an existing one is replaced. Tensors are written in
    the plain layout (`ND`), bit for bit.

    Args:
        path: its name describes the operator: `{type}.{operator}.{task}.{stream}.{time}`.
        op_name: the operator, for the header.
        moment: microseconds since 1970; default: now.

    Returns:
        The header, as `read_ge_header` returns it.

    Raises:
        UsageError: a tensor has an unsupported dtype, or no values.
        OSError: the file cannot be written.
    """
    if len(inputs) + len(outputs) > MOST_TENSORS:
        raise UsageError(
            f"a file holds at most {MOST_TENSORS} tensors, got {len(inputs) + len(outputs)}"
        )
    taken = [_store_row_major(tensor, f"input {at}") for at, tensor in enumerate(inputs)]
    store_row_majors = [
        _store_row_major(tensor, f"output {at}") for at, tensor in enumerate(outputs)
    ]
    when = time.time_ns() // 1000 if moment is None else moment
    header = _encode_bytes(1, _VERSION) + _encode_number(2, when)
    for at, store_row_major in enumerate(store_row_majors):
        header += _encode_bytes(_OUTPUT, _encode_output(store_row_major, op_name, at))
    header += b"".join(_encode_bytes(_INPUT, _encode_input(operand)) for operand in taken)
    header += _encode_bytes(6, op_name.encode())
    with whole_file(Path(path)) as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in (*taken, *store_row_majors):
            if tensor.numel():
                file.write(raw_bytes(tensor))
    return decode_header(header)


class GeTree:
    """Writes the files of one rank, in the folders of the engine.

    ::

        worldsize{W}_global_rank{r}/{time}/{device}/{model}/{model id}/{step}/
            {operator's type}.{operator}.{task}.{stream}.{time}
    """

    def __init__(
        self,
        root: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        has_ranks: bool = True,
    ) -> None:
        """`has_ranks` is False for the tree of old releases, without the top folder."""
        when = f"{dt.datetime.now(dt.UTC):%Y%m%d%H%M%S}"
        self.top = f"worldsize{world_size}_global_rank{rank}" if has_ranks else when
        self._root = root
        self._run = f"{self.top}/{when}/{rank}" if has_ranks else f"{when}/{rank}"
        self._models: dict[str, int] = {}
        self._tasks: dict[str, int] = {}
        self._last_time = 0

    def write(
        self,
        *,
        step: int,
        model: str,
        op_type: str,
        op_name: str,
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] = (),
    ) -> tuple[str, GeFile]:
        """Write the file of one call; its path inside the dump, and its header.

        Names are spelt as the engine spells them in file names; the header keeps `op_name` as it
        is. Raises like `write_tensor_file`.
        """
        name = spell_name(model) or "graph"
        number = self._models.setdefault(name, len(self._models) + 1)
        folder = f"{self._run}/{name}/{number}/{step}"
        position = self._root / folder
        position.mkdir(parents=True, exist_ok=True)
        # No two files in a folder have the same name: the time always increases.
        self._last_time = max(time.time_ns() // 1000, self._last_time + 1)
        task = self._tasks[folder] = self._tasks.get(folder, 0) + 1
        kind = spell_name(op_type) or "Op"
        # The operator keeps its dots.
        operator = re.sub(r"[/\\ ]", "_", op_name) or "op"
        file_name = f"{kind}.{operator}.{task}.0.{self._last_time}"
        file = f"{folder}/{fitting_name(position, file_name)}"
        written = write_tensor_file(
            self._root / file, inputs, outputs, op_name=op_name, moment=self._last_time
        )
        return file, written


def _store_row_major(tensor: Tensor, which: str) -> Tensor:
    """The values in row-major order on the CPU, with repeated dimensions expanded."""
    try:
        values = as_stored(tensor.detach().cpu()).expand(tensor.shape).contiguous()
        code_of_dtype(values.dtype)
    except UsageError as error:
        raise UsageError(f"{which}: {error}") from error
    if values.dim() > MOST_DIMS:
        raise UsageError(f"{which} has {values.dim()} dimensions, the limit is {MOST_DIMS}")
    return values


def _encode_input(tensor: Tensor) -> bytes:
    size = tensor.numel() * tensor.dtype.itemsize
    return _encode_head(tensor) + _encode_number(5, size) + _encode_bytes(6, _encode_shape(tensor))


def _encode_output(tensor: Tensor, op_name: str, index: int) -> bytes:
    original = _encode_bytes(1, op_name.encode()) + _encode_number(2, index)
    original += _encode_number(3, code_of_dtype(tensor.dtype)) + _encode_number(4, _ND)
    size = tensor.numel() * tensor.dtype.itemsize
    body = _encode_head(tensor) + _encode_bytes(4, original)
    return body + _encode_number(6, size) + _encode_bytes(7, _encode_shape(tensor))


def _encode_head(tensor: Tensor) -> bytes:
    head = _encode_number(1, code_of_dtype(tensor.dtype)) + _encode_number(2, _ND)
    return head + _encode_bytes(3, _encode_shape(tensor))


def _encode_shape(tensor: Tensor) -> bytes:
    dims = list(tensor.shape)
    if tensor.dtype is _FLOAT4:  # torch counts bytes, the engine the two numbers in each
        dims = [*dims[:-1], 2 * dims[-1]] if dims else [2]
    return _encode_bytes(1, b"".join(map(_encode_varint, dims))) if dims else b""


def _encode_number(field: int, value: int) -> bytes:
    """A number field; protobuf omits zeros."""
    return _encode_varint(field << 3 | _VARINT) + _encode_varint(value) if value else b""


def _encode_bytes(field: int, value: bytes) -> bytes:
    return _encode_varint(field << 3 | _BYTES) + _encode_varint(len(value)) + value


def _encode_varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:  # noqa: PLR2004  (seven bits to a byte)
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])
