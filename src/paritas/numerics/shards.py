"""Where the elements of a shard are in the whole tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from paritas.errors import UsageError

__all__ = ["Place"]

Integer = TypeVar("Integer", int, Tensor)


class Place:
    """Maps the flat indices of a shard to those of the whole.

    Attributes:
        run: so many elements in a row are neighbours in the whole, too.
    """

    def __init__(self, shape: Sequence[int], whole: Sequence[int], origin: Sequence[int]) -> None:
        """Place a shard.

        Raises:
            UsageError: it does not lie within the whole.
        """
        _check(tuple(shape), tuple(whole), tuple(origin))
        self.run = 1
        self._start = 0
        # Beyond the run, from the last on: extent in the shard, stride in the whole.
        self._axes: list[tuple[int, int]] = []
        stride, joined = 1, True
        for extent, full, begin in zip(shape[::-1], whole[::-1], origin[::-1], strict=True):
            self._start += begin * stride
            if joined:
                self.run *= extent
                joined = extent == full
            else:
                self._axes.append((extent, stride))
            stride *= full

    def indices(self, begin: int, end: int, device: torch.device) -> Tensor:
        """The indices in the whole of a range of the shard."""
        first, last = begin // self.run, -(-end // self.run)
        starts = self._run_start(torch.arange(first, last, device=device))
        rows = starts[:, None] + torch.arange(self.run, device=device)
        return rows.flatten()[begin - first * self.run : end - first * self.run]

    def runs(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Cut a range of the shard into runs: begin and end in it, and index in the whole."""
        while begin < end:
            stop = min(end, begin - begin % self.run + self.run)
            yield begin, stop, self._run_start(begin // self.run) + begin % self.run
            begin = stop

    def _run_start(self, run: Integer) -> Integer:
        start = run * 0 + self._start
        for extent, stride in self._axes:
            start = start + run % extent * stride
            run = run // extent
        return start


def _check(shape: tuple[int, ...], whole: tuple[int, ...], origin: tuple[int, ...]) -> None:
    axes = zip(shape, whole, origin, strict=False)
    inside = all(0 <= begin <= begin + extent <= full for extent, full, begin in axes)
    if not (len(shape) == len(whole) == len(origin) and inside):
        text = f"a part of shape {shape} at {origin} does not lie within a tensor of shape {whole}"
        raise UsageError(f"{text}: give global_shape and global_offset as the placement has them")
