"""The faults and edits of one half: those of all files in its folder."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from benchmarks.places.calls import Catalogue

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType


@dataclasses.dataclass
class FaultSet:
    """What the files of a half have.

    Attributes:
        files: each has `FAULTS`, or the three tables of edits.
    """

    files: list[ModuleType]
    faults: Catalogue = dataclasses.field(default_factory=Catalogue)
    edits: dict[str, Any] = dataclasses.field(default_factory=dict)
    kernel_edits: dict[str, Any] = dataclasses.field(default_factory=dict)
    triton_edits: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, package: str, path: Iterable[str]) -> FaultSet:
        """Of all files of a package."""
        names = [one.name for one in pkgutil.iter_modules(path)]
        found = cls([importlib.import_module(f"{package}.{name}") for name in names])
        for file in found.files:
            if hasattr(file, "FAULTS"):
                found.faults.update(file.FAULTS)
            else:
                found.edits |= file.EDITS
                found.kernel_edits |= file.KERNEL_EDITS
                found.triton_edits |= file.TRITON_EDITS
        return found
