"""The statistics of a tensor on a CUDA device: all of the work queued, and waited for once.

Small tensors cost what their launches cost, so few kernels count; large ones what their memory
traffic costs, so that float32 values are not widened but while they are summed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paritas.numerics.floats import as_floats, check_dtype, in_order_of_memory
from paritas.numerics.metrics import blocks
from paritas.numerics.tallies import LARGEST_SCALE, Statistics, Sums, Tally

__all__ = ["PendingOnDevice", "begin_on_device"]

# Elements taken at once: enough to outweigh the launches, at some 40 bytes of memory each.
_BLOCK = 1 << 22
_BIAS, _FRACTION, _FIELD, _MAGNITUDE = 1023, 52, 0x7FF, (1 << 63) - 1
_LEAST = 1 - _BIAS - _FRACTION
_EXPONENTS = _BIAS + 1 - _LEAST
# Where a field of 0 is counted, which means zero in a float64 made of a float32.
_ZERO = -_BIAS - _LEAST
_FIGURES = 8


@dataclass(frozen=True)
class PendingOnDevice:
    """Figures per block, then counts by exponent, on their way to memory of the host."""

    count: int
    figures: Tensor
    ready: torch.Event

    def finish(self) -> Statistics:
        """Wait for them; from any thread."""
        self.ready.synchronize()
        rows, counts = self.figures[:-_EXPONENTS], self.figures[-_EXPONENTS:]
        tally = Tally(self.count)
        for row in rows.reshape(-1, _FIGURES).tolist():
            _take(tally, row)
        tally.add((i + _LEAST, int(counts[i])) for i in counts.nonzero().flatten().tolist())
        infinities = tally.positive_infinities + tally.negative_infinities
        tally.zeros = self.count - tally.nans - infinities - sum(tally.exponents.values())
        return tally.statistics()


def begin_on_device(tensor: Tensor) -> PendingOnDevice:
    """Queue the statistics of a tensor on its device's current stream."""
    check_dtype(tensor.dtype)
    counts = torch.zeros(_EXPONENTS, dtype=torch.float64, device=tensor.device)
    rows: list[Tensor] = []
    for _, (chunk,) in blocks(in_order_of_memory(tensor), block_size=_BLOCK):
        values = as_floats(chunk)
        known = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).double()
        rows += _counts(values), _extremes(values), _sums(known, wide=values.dtype == known.dtype)
        counts += _exponents(known, wide=values.dtype == known.dtype)
    host = torch.cat([*rows, counts]).to("cpu", non_blocking=True)
    ready = torch.Event(device=tensor.device)
    ready.record(torch.accelerator.current_stream(tensor.device))
    return PendingOnDevice(tensor.numel(), host, ready)


def _counts(values: Tensor) -> Tensor:
    """How many are NaN, and either infinity."""
    kinds = (values.isnan(), values == torch.inf, values == -torch.inf)
    return torch.stack([kind.sum() for kind in kinds]).double()


def _extremes(values: Tensor) -> Tensor:
    """Of the finite values; infinities, the wrong way round, if there are none."""
    above = values.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf).amin()
    below = values.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf).amax()
    return torch.stack([above, below]).double()


def _sums(known: Tensor, *, wide: bool) -> Tensor:
    """Sum, norm and the exponent both are scaled by, which only squares of float64 need."""
    exponent = known.new_zeros(())
    if wide:
        power = known.abs().amax().frexp().exponent.clamp(-LARGEST_SCALE, LARGEST_SCALE).long()
        # A power of two made of its bits, because it has to be exact.
        known = known * ((_BIAS - power) << _FRACTION).view(torch.float64)
        exponent = power.double()
    return torch.stack([known.sum(), torch.linalg.vector_norm(known), exponent])


def _take(tally: Tally, row: list[float]) -> None:
    """Add the figures of a block to the tally."""
    nans, positive, negative, least, most, total, norm, exponent = row
    tally.nans += int(nans)
    tally.positive_infinities += int(positive)
    tally.negative_infinities += int(negative)
    tally.minimum = min(tally.minimum, least)
    tally.maximum = max(tally.maximum, most)
    tally.sums.append(Sums(total, norm * norm, int(exponent)))


def _exponents(known: Tensor, *, wide: bool) -> Tensor:
    """How many nonzero values have each exponent, from the least subnormal's on."""
    places = (known.view(torch.int32)[1::2] >> 20 & _FIELD) + _ZERO
    if wide:
        bits = known.view(torch.int64) & _MAGNITUDE
        # A subnormal's fraction, taken for an integer, has an exponent of its own in float64; zero
        # comes out below all places, where nothing is counted.
        subnormal = (bits.double().view(torch.int64) >> _FRACTION) - _BIAS
        places = places.where(bits >> _FRACTION != 0, subnormal.int())
    # Of integers, as a histogram of floats is refused where determinism is asked for.
    found = torch.histc(places, bins=_EXPONENTS, min=0, max=_EXPONENTS)
    if not wide:
        found.narrow(0, _ZERO, 1).zero_()
    return found
