"""What `paritas partition` was asked; without torch, which the command imports when it runs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paritas.core.results.rank_backends import BackendName


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """The options of the command, by their names."""

    args: tuple[str, ...]
    kwargs: tuple[str, ...]
    dtype: str
    options: tuple[str, ...]
    annotation: str | None
    discover: bool
    ranks: int
    without_gradient: tuple[int, ...]
    seed: int
    strict: bool
    device: str | None
    confirm: BackendName | None
    prove: bool
