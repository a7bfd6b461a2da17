"""Dumps on disk: the store, its index, and opening a dump of any layout.

The names below are the public surface; each is imported from its home on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas.core.importing import import_on_use as _import_on_use

__all__ = ["BinFile", "DumpValue", "OpenedDump", "Statistics", "open", "read_bin", "write_bin"]

_HOMES = {
    "BinFile": "paritas.formats.foreign.ge_writing",
    "DumpValue": "paritas.formats.dumps.opening",
    "OpenedDump": "paritas.formats.dumps.opening",
    "Statistics": "paritas.core.numerics.statistics",
    "open": "paritas.formats.dumps.opening",
    "read_bin": "paritas.formats.foreign.ge_writing",
    "write_bin": "paritas.formats.foreign.ge_writing",
}

if TYPE_CHECKING:
    from paritas.core.numerics.statistics import Statistics
    from paritas.formats.dumps.opening import DumpValue, OpenedDump, open  # noqa: A004
    from paritas.formats.foreign.ge_writing import BinFile, read_bin, write_bin
else:
    # Hidden from type checkers, which would accept any misspelt name.
    __getattr__ = _import_on_use(globals(), _HOMES)


def __dir__() -> list[str]:
    return list(__all__)
