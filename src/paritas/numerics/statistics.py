"""What a tensor amounts to, in a few numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paritas.numerics.device_statistics import begin_on_device
from paritas.numerics.host_statistics import summarize_on_cpu
from paritas.numerics.rows import Row, fits_row, summarize_rows
from paritas.numerics.sketch import sketch
from paritas.numerics.tallies import Statistics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Pending", "Row", "Statistics", "begin", "summarize", "summarize_all"]

# Fewer small tensors are sooner summarized one by one.
_MANY = 4


class Pending(Protocol):
    """Statistics that may still be on their way from a device."""

    def finish(self) -> Statistics:
        """Wait for them; from any thread."""


@dataclass(frozen=True)
class _Done:
    statistics: Statistics

    def finish(self) -> Statistics:
        return self.statistics


def summarize(tensor: Tensor) -> Statistics:
    """Summarize the values of a tensor of any device, strides and dtype of numbers.

    Memory beyond the tensor's own is bounded. Integers of 64 bits are taken for the nearest
    float64. A complex number with an infinite part is a positive infinity, and so is one whose
    magnitude no float64 holds. A norm that no float64 holds is infinite.

    Raises:
        UsageError: the tensor is sparse or quantized, or of a dtype that torch cannot convert.
    """
    return begin(tensor).finish()


def summarize_all(tensors: Sequence[Tensor], *, sketches: bool) -> list[Row]:
    """Summarize and sketch tensors on the CPU, as `summarize` and `sketch` do with each.

    Of small tensors, those of one size together: many such take a fraction of the time.
    """
    small = [place for place, tensor in enumerate(tensors) if fits_row(tensor)]
    if len(small) < _MANY:
        small = []
    rows = summarize_rows([tensors[place] for place in small], sketches=sketches)
    found = dict(zip(small, rows, strict=True))
    return [
        found.get(place) or _closely(tensor, sketches=sketches)
        for place, tensor in enumerate(tensors)
    ]


def _closely(tensor: Tensor, *, sketches: bool) -> Row:
    return Row(summarize_on_cpu(tensor), sketch(tensor) if sketches else None)


def begin(tensor: Tensor) -> Pending:
    """Start to summarize a tensor: on the CPU it is done at once, elsewhere the work is queued.

    The work goes to the device's current stream; the tensor may change once that stream has come
    to it. Nothing waits for the device before `finish`.

    Raises:
        UsageError: as `summarize` does.
    """
    if tensor.is_cuda:
        return begin_on_device(tensor.detach())
    return _Done(summarize_on_cpu(tensor.detach()))
