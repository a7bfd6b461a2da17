"""Writing tensor files of Ascend's graph engine, and the tree of folders that they lie in.

What is written here is what `ge_headers` and `ge_names` read: a file is the length of its header in
eight bytes, the header, and the bytes of what the operator took and gave. A file appears under its
name when it is whole, so that a program which looks on meets no half of one.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paritas.dumps.dtypes import as_stored, raw_bytes
from paritas.dumps.folders import whole_file
from paritas.dumps.foreign.ge_headers import MOST_DIMS, MOST_TENSORS, decode_header
from paritas.dumps.foreign.ge_names import fitting_name, spelled
from paritas.dumps.foreign.ge_tensors import code_of_dtype
from paritas.errors import UsageError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from torch import Tensor

    from paritas.dumps.foreign.ge_headers import GeFile

__all__ = ["GeCall", "GeTree", "write_bin"]

_VERSION = b"2.0"
_ND = 2
_FLOAT4 = torch.float4_e2m1fn_x2
_VARINT, _BYTES = 0, 2
# The numbers of the fields: see `ge_headers`.
_OUTPUT, _INPUT = 3, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeCall:
    """One call of an operator: what makes one file.

    Attributes:
        step: which run of the graph, the engine's token.
        model: the graph; the engine puts `_` for dots, slashes and blanks.
        op_type: what kind of operator it is, for example `MatMul`. It has no dots in the tree.
        op_name: the operator, as the graph spells it; the header keeps that spelling.
        inputs: the tensors that it took, in order.
        outputs: the tensors that it gave, in order.
    """

    step: int
    model: str
    op_type: str
    op_name: str
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()


class GeTree:
    """Writes the files of one rank, in the folders that the engine makes.

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
        device: int | None = None,
        began: dt.datetime | None = None,
        has_ranks: bool = True,
    ) -> None:
        """Write nothing yet.

        Args:
            root: the folder of the dump.
            device: the number of the device; None is the rank's own.
            began: when the run began; None is now.
            has_ranks: False for the tree of old releases, without the uppermost folder.
        """
        moment = dt.datetime.now(dt.UTC) if began is None else began
        number = rank if device is None else device
        when = f"{moment:%Y%m%d%H%M%S}"
        self.top = f"worldsize{world_size}_global_rank{rank}" if has_ranks else when
        self._root = root
        self._run = f"{self.top}/{when}/{number}" if has_ranks else f"{when}/{number}"
        self._models: dict[str, int] = {}
        self._tasks: dict[str, int] = {}
        self._last_time = 0

    def folder(self, model: str, step: int) -> str:
        """The folder of a step of a model, inside the dump."""
        name = spelled(model) or "graph"
        number = self._models.setdefault(name, len(self._models) + 1)
        return f"{self._run}/{name}/{number}/{step}"

    def write(self, call: GeCall) -> tuple[str, GeFile]:
        """Write the file of a call.

        Returns:
            Its path inside the dump, and where in it the tensors are.

        Raises:
            UsageError: a tensor has a dtype that the format lacks, or no values.
            OSError: the file cannot be written.
        """
        folder = self.folder(call.model, call.step)
        place = self._root / folder
        place.mkdir(parents=True, exist_ok=True)
        # Two files of a folder never have the same name: the time goes on with each.
        self._last_time = max(time.time_ns() // 1000, self._last_time + 1)
        task = self._tasks[folder] = self._tasks.get(folder, 0) + 1
        kind = spelled(call.op_type) or "Op"
        name = f"{kind}.{_in_file_name(call.op_name)}.{task}.0.{self._last_time}"
        file = f"{folder}/{fitting_name(place, name)}"
        written = write_bin(
            self._root / file,
            call.inputs,
            call.outputs,
            op_name=call.op_name,
            moment=self._last_time,
        )
        return file, written


def write_bin(
    path: str | os.PathLike[str],
    inputs: Sequence[Tensor] = (),
    outputs: Sequence[Tensor] = (),
    *,
    op_name: str = "",
    moment: int | None = None,
) -> GeFile:
    """Write one tensor file of Ascend's graph engine ("bin format").

    The file appears under its name when all of it is written; one of that name is replaced.
    Tensors are written in the plain layout (`ND`), bit for bit.

    Args:
        path: its name says what the operator is: `{type}.{operator}.{task}.{stream}.{time}`.
        inputs: what the operator took, in order.
        outputs: what it gave, in order.
        op_name: the operator, for the header.
        moment: when that was, in microseconds since 1970; None is now.

    Returns:
        What the header says, as `read_header` would give it.

    Raises:
        UsageError: a tensor has a dtype that the format lacks, or no values.
        OSError: the file cannot be written.
    """
    if len(inputs) + len(outputs) > MOST_TENSORS:
        raise UsageError(f"a file holds {MOST_TENSORS} tensors, not {len(inputs) + len(outputs)}")
    taken = [_stored(tensor, f"input {at}") for at, tensor in enumerate(inputs)]
    given = [_stored(tensor, f"output {at}") for at, tensor in enumerate(outputs)]
    when = time.time_ns() // 1000 if moment is None else moment
    header = _bytes(1, _VERSION) + _number(2, when)
    for at, one in enumerate(given):
        header += _bytes(_OUTPUT, _of_output(one, op_name, at))
    header += b"".join(_bytes(_INPUT, _of_input(one)) for one in taken)
    header += _bytes(6, op_name.encode())
    with whole_file(Path(path)) as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in (*taken, *given):
            if tensor.numel():
                file.write(raw_bytes(tensor))
    return decode_header(header)


def _stored(tensor: Tensor, which: str) -> Tensor:
    """The values in row-major order on the CPU, what is repeated written out."""
    try:
        values = as_stored(tensor.detach().cpu()).expand(tensor.shape).contiguous()
        code_of_dtype(values.dtype)
    except UsageError as error:
        raise UsageError(f"{which}: {error}") from error
    if values.dim() > MOST_DIMS:
        raise UsageError(f"{which} has {values.dim()} dimensions: {MOST_DIMS} can be read back")
    return values


def _of_input(tensor: Tensor) -> bytes:
    size = tensor.numel() * tensor.dtype.itemsize
    return _head(tensor) + _number(5, size) + _bytes(6, _shape(tensor))


def _of_output(tensor: Tensor, op_name: str, index: int) -> bytes:
    original = _bytes(1, op_name.encode()) + _number(2, index)
    original += _number(3, code_of_dtype(tensor.dtype)) + _number(4, _ND)
    size = tensor.numel() * tensor.dtype.itemsize
    return _head(tensor) + _bytes(4, original) + _number(6, size) + _bytes(7, _shape(tensor))


def _head(tensor: Tensor) -> bytes:
    return _number(1, code_of_dtype(tensor.dtype)) + _number(2, _ND) + _bytes(3, _shape(tensor))


def _shape(tensor: Tensor) -> bytes:
    dims = list(tensor.shape)
    if tensor.dtype is _FLOAT4:  # torch counts the bytes, the engine the two numbers in each
        dims = [*dims[:-1], 2 * dims[-1]] if dims else [2]
    return _bytes(1, b"".join(map(_varint, dims))) if dims else b""


def _number(field: int, value: int) -> bytes:
    """A field that holds a number; protobuf leaves a zero out."""
    return _varint(field << 3 | _VARINT) + _varint(value) if value else b""


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:  # noqa: PLR2004  (seven bits to a byte)
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _in_file_name(op_name: str) -> str:
    """The operator in the name of its file, which has no folders and no blanks."""
    return op_name.replace("/", "_").replace("\\", "_").replace(" ", "_") or "op"
