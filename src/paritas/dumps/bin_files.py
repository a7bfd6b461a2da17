"""One tensor file of Ascend's graph engine ("bin file"), read and written as a whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from paritas.dumps.foreign import ge_headers, ge_tensors, ge_writing
from paritas.errors import ParitasError, UsageError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["BinFile", "read_bin", "write_bin"]


@dataclasses.dataclass(frozen=True)
class BinFile:
    """What a call of an operator took and gave.

    Attributes:
        op_name: the operator, as the header spells it; empty where it does not say.
        inputs: what the operator took, in the layout and dtype of the program.
        outputs: what it gave.
    """

    op_name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def read_bin(path: str | os.PathLike[str]) -> BinFile:
    """Read a bin file.

    Device layouts (NC1HWC0, FRACTAL_NZ and so on) are undone and padding is dropped. Buffers and
    scratch space are left out. Sizes in the header are compared with the file before they are used.

    Raises:
        UsageError: the file is missing, cut off or damaged, or has a dtype that torch lacks.
    """
    file = Path(path)
    try:
        header = ge_headers.read_header(file)
        size = file.stat().st_size
        if header.end > size:
            raise UsageError(f"{file.name} has {size} bytes, and its header needs {header.end}")
        found: dict[str, list[Tensor]] = {"input": [], "output": []}
        for tensor in header.tensors:
            if tensor.kind in found:
                found[tensor.kind].append(ge_tensors.read_values(file, tensor, size))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    return BinFile(header.op_name, tuple(found["input"]), tuple(found["output"]))


def write_bin(
    path: str | os.PathLike[str],
    inputs: Sequence[Tensor] = (),
    outputs: Sequence[Tensor] = (),
    *,
    op_name: str = "",
) -> None:
    """Write a bin file; `read_bin` gives the same tensors back, bit for bit.

    The file appears under its name when all of it is written; one of that name is replaced. A tree
    needs names like `Add.Add_2.44.6.1706596912161941`: type, operator, task, stream, microseconds.

    Args:
        path: where to.
        inputs: what the operator took, in order.
        outputs: what it gave, in order.
        op_name: the operator, for the header.

    Raises:
        UsageError: a tensor has a dtype that the format lacks, no values, or over 32 dimensions.
        ParitasError: the file cannot be written.
    """
    try:
        ge_writing.write_bin(path, inputs, outputs, op_name=op_name)
    except OSError as error:
        raise ParitasError(f"cannot write {path}: {error.strerror or error}") from error
