"""How a recording is kept, and by which process of how many."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal, get_args

import torch

from paritas.dumps.records import Layout
from paritas.errors import UsageError

__all__ = ["QUEUE_BYTES", "SessionOptions", "Stepping", "rank_and_world"]

Stepping = Literal["auto", "manual"]
QUEUE_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """How a recording is kept.

    Attributes:
        data: whole tensors, or statistics of them.
        layout: packed files; `msit`, one `.npy` file a tensor in torchair's tree; `ge`, a file for
            each call in that of Ascend's graph engine, `ge-7.1.0` in that of its old releases.
        last: keep this many of the last steps only; 0 keeps all.
        overwrite: replace an earlier dump in the same place.
        stepping: whether a step ends by itself, when what began it is called again.
        queue_bytes: how much may wait to be written before the program has to; 0 writes at once.
            A quarter as much again is kept for the copies to come.
    """

    data: Literal["tensor", "stats"] = "tensor"
    layout: Layout = "packed"
    last: int = 0
    overwrite: bool = False
    stepping: Stepping = "auto"
    queue_bytes: int = QUEUE_BYTES

    @property
    def forgets(self) -> bool:
        """Whether bytes, or what was found of them, go with their step."""
        return bool(self.last) or self.data == "stats"

    def __post_init__(self) -> None:
        _one_of("data", self.data, ("tensor", "stats"))
        _one_of("layout", self.layout, get_args(Layout))
        _one_of("stepping", self.stepping, get_args(Stepping))
        for name in ("last", "queue_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise UsageError(f"{name}={value!r}: give a whole number, 0 or more")
        if self.data == "stats" and self.layout != "packed":
            raise UsageError(
                f'layout="{self.layout}" holds tensors: take data="tensor", or layout="packed"'
            )


def rank_and_world() -> tuple[int, int]:
    """This process among others, by torch's process group or by what torchrun sets."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise UsageError(f"RANK, WORLD_SIZE in the environment: {error}; unset them") from error


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name}={value!r}: give one of {', '.join(known)}")
