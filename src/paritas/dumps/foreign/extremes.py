"""Files that hold the least and the greatest value of tensors, in the place of these.

A script that is handed around with msit runs beside a dump and puts them there: of `{name}.npy` it
makes `{name}_min_max.npy`, a pair; of a file of Ascend's graph engine `{file}_min_max.npz`, a list
of pairs for what the operator took and one for what it gave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas.dumps.foreign.array_values import summary_of
from paritas.dumps.foreign.ge_stats import read_min_max
from paritas.dumps.foreign.npy_headers import array_place, read_header
from paritas.errors import UsageError

if TYPE_CHECKING:
    from paritas.dumps.records import Payload
    from paritas.dumps.validating import Files
    from paritas.numerics.statistics import Statistics

__all__ = ["read_extremes"]

_PLAIN, _ARCHIVE = "_min_max.npy", "_min_max.npz"


def read_extremes(payload: Payload, files: Files) -> Statistics | None:
    """What the script left of a payload; None where it left nothing that can be read.

    Args:
        payload: of a record, whose file is not there any more.
    """
    try:
        if payload.file.endswith(".npy"):
            name = payload.file.removesuffix(".npy") + _PLAIN
            path = files.find(name, 0)
            with path.open("rb") as file:
                place = array_place(name, read_header(file), path.stat().st_size)
            return summary_of(path, place)
        found = read_min_max(files.find(payload.file + _ARCHIVE, 0))
    except (UsageError, OSError):
        return None
    return next((one.statistics for one in found if f"{one.kind}.{one.index}" == payload.key), None)
