"""A pair of tensors on a CUDA device, measured in one reading of them, and waited for once.

Torch's own operators read the pair some thirty times over; here one kernel reads it once, at the
speed of the memory, and few small ones finish what it found. They need Triton, which comes with
torch's builds for CUDA, and a device with instructions for packed numbers of 16 bits (Hopper or
later); without them, or for other dtypes and strides, `fits` is false.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paritas.numerics.moments import Tally, Totals

__all__ = ["PendingPair", "begin_pair", "fits"]

_KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_PLAIN = {Tensor, torch.nn.Parameter}
_HOPPER = (9, 0)
# Triton loads wide from addresses that are multiples of this.
_ALIGNED = 16
_PAIR_BYTES = 8
_LANES, _WARPS = 128, 4
# Turns at once, as measured on an H200; of 16-bit numbers they are a group of `device_scans`.
_UNROLL = 4
# Turns of a program: many for large tensors, that few figures are left to add up, and few for
# small ones, that no multiprocessor idles.
_MOST_TURNS, _PROGRAMS = 512, 1024
_SAMPLE = 1024
_PARTS = 128
# Below this ratio of squares a product found by way of a difference has lost digits.
_EVEN = 2.0**-12


@functools.cache
def _runs_triton(device: torch.device) -> bool:
    """Whether the kernels run there; found out once, without compiling any."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < _HOPPER:
        return False
    return importlib.util.find_spec("triton") is not None


def fits(reference: Tensor, candidate: Tensor) -> bool:
    """Whether the pair can be measured here."""
    return (
        reference.is_cuda
        and reference.device == candidate.device
        and reference.dtype is candidate.dtype
        and reference.dtype in _KINDS
        and reference.shape == candidate.shape
        and reference.numel() > 0
        and all(_is_plain(side) for side in (reference, candidate))
        and _runs_triton(reference.device)
    )


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and tensor.data_ptr() % _ALIGNED == 0
    )


@dataclass(frozen=True)
class PendingPair:
    """Figures of a pair, on their way to memory of the host."""

    pair: tuple[Tensor, Tensor]
    figures: Tensor
    ready: torch.Event

    def finish(self) -> Totals | None:
        """Wait for them; None if torch's operators have to do it: hardly a number is finite."""
        self.ready.synchronize()
        *numbers, a, b, shifted, found = self.figures.tolist()
        if not found:
            return None
        from paritas.numerics.device_rows import RESULTS

        named = dict(zip(RESULTS, numbers, strict=True))
        if not shifted and not _is_even(named):
            return _begin(*self.pair, shift=True).finish()
        return _totals(*self.pair, named, (a, b))


def begin_pair(reference: Tensor, candidate: Tensor) -> PendingPair:
    """Queue the measuring of a pair that `fits` on its device's current stream.

    Nothing waits for the device before `finish`; until then the pair must not be changed.
    """
    return _begin(reference, candidate, shift=False)


def _begin(reference: Tensor, candidate: Tensor, *, shift: bool) -> PendingPair:
    """Queue it; with `shift`, about anchors even if those seem to be near enough to zero."""
    from paritas.numerics import device_kernels as kernels
    from paritas.numerics import device_rows as finishing

    device, numel = reference.device, reference.numel()
    kind = _KINDS[reference.dtype]
    r, c = reference.detach().view(-1), candidate.detach().view(-1)
    per_pair = _PAIR_BYTES // r.itemsize
    per_turn = _LANES * per_pair
    most_turns = numel // (per_turn * _UNROLL) * _UNROLL
    turns = most_turns // _PROGRAMS // _UNROLL * _UNROLL
    turns = max(_UNROLL, min(turns, _MOST_TURNS))
    covered, span = most_turns * per_turn, turns * per_turn
    height = -(-most_turns // turns) + (covered < numel)
    rows = torch.empty(kernels.COLUMNS * height, dtype=torch.float64, device=device)
    out = torch.empty(len(finishing.RESULTS) + 4, dtype=torch.float64, device=device)
    anchors = out[-4:]
    with torch.cuda.device(device):
        finishing.anchor[(1,)](
            r, c, anchors, numel, max(1, numel // _SAMPLE), int(shift), num_warps=8
        )
        if covered:
            wide = [side[:covered].view(torch.int64) for side in (r, c)]
            kernels.tally[(height,)](
                *wide, anchors, rows, most_turns, turns,
                KIND=kind, LANES=_LANES, UNROLL=_UNROLL, num_warps=_WARPS,
            )  # fmt: skip
        else:
            rows.fill_(1.0)
        extent = (covered, numel, span)
        finishing.tally_carefully[(height,)](r, c, anchors, rows, *extent, KIND=kind, num_warps=8)
        finishing.finish[(len(kernels.SUMS) + 1,)](
            r, c, rows, out, height, numel, GROUP=_UNROLL * per_turn, num_warps=8
        )
        for programs, parts in ((_PARTS, _PARTS), (height, 1)):
            finishing.refine[(programs,)](r, c, rows, out, height, *extent, PARTS=parts, KIND=kind)
        host = out.to("cpu", non_blocking=True)
        ready = torch.Event(device=device)
        ready.record(torch.cuda.current_stream(device))
    return PendingPair((reference, candidate), host, ready)


def _is_even(named: dict[str, float]) -> bool:
    """Whether the two sides are of like size; two that are all zero are."""
    least, most = sorted((named["rr"], named["cc"]))
    return least >= _EVEN * most


def _totals(
    reference: Tensor, candidate: Tensor, named: dict[str, float], anchors: tuple[float, float]
) -> Totals:
    totals = Totals(reference, candidate)
    unlike = int(named["unlike"])
    named = named | ({"max_ulp": math.inf} if unlike else {})
    counts = {
        name: int(named[name])
        for name in named
        if name.startswith(("nan_", "posinf_", "neginf_")) or name in {"unlike", "dropped"}
    }
    where = int(named["where"])
    place = None if where < 0 else (where, named["reference"], named["candidate"])
    totals.adopt(Tally(**{name: named[name] for name in Tally._fields}), counts, place, anchors)
    return totals
