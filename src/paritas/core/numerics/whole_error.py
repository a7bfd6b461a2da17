"""The error of a whole tensor: its size, and the factor that all elements share.

An element's noise is known from few runs, so the limits of `criterion.py` are wide. These two
figures are nearly the same in every perturbed run if many elements err independently, so that the
runs show how large they are for this program, and the limits can be close. They are looked at once
every element has passed: a kernel that loses accuracy everywhere, or is biased, is found here.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from paritas.core.numerics.criterion import (
    ERROR_RATE,
    RMS_Z,
    UNIT_F32,
    Jumps,
    chunks,
    most_shown,
    nonzero,
    real_view,
    rms,
)
from paritas.core.numerics.gates import OWN_RMS, ratio_to
from paritas.core.numerics.pooling import populations

if TYPE_CHECKING:
    from torch import Tensor

# The size may be this many times the usual, which is that of the runs or of the reference: twice
# the reference's own error is not a loss that anyone should look into.
WHOLE_SIZE = 2.0
# Beyond that, another program may round its results once more.
ROUNDED_RESULTS = 1.0
# The factor is a single number. It may be as many times that of the runs as the error of a tensor
# of one element may, or `OWN_RMS` times as large as the usual error of one element, which the gate
# `OWN_ERROR` allows as well, whatever the elements share.
SHARED_FACTOR = RMS_Z * 3
# Beyond that, other programs round constants otherwise, which is one factor for all: 1 / n in a
# mean, a scale, the coefficients of a function. Perturbed runs round elements, each by itself.
ROUNDED_CONSTANTS = 2.0
# Tensor cores cut digits off in their sums, which makes all of them too small: in attention in
# float32, which is computed by products in TF32, most of an error of 6 to 10 roundings of float32.
CUT_OFF = 8.0 * UNIT_F32


@dataclasses.dataclass(frozen=True)
class WholeError:
    """The error of a whole tensor in two figures, or these as multiples of their limits.

    Attributes:
        size: its root mean square, as a share of the typical value. A population of large values
            has its own, so that they do not hide the errors of the others.
        factor: how much of it is the truth times one factor: <error, truth> / <truth, truth>.
    """

    size: float
    factor: float

    @property
    def worst(self) -> float:
        """The larger figure, where both are multiples of their limits."""
        return max(self.size, self.factor)


def whole_error(value: Tensor, truth: Tensor) -> WholeError | None:
    """The error of a tensor; None if it is empty, not dense, or not all of it is finite.

    None also if rounding decides the number of elements, so that the two have different shapes.
    """
    if truth.layout is not torch.strided or not truth.numel() or value.shape != truth.shape:
        return None
    value, truth = real_view(value), real_view(truth)
    typical = populations(truth)
    squares = shared = sizes = 0.0
    for _, (true, value_piece) in chunks(truth, value):
        wide = true.double()
        scale = nonzero(typical.scale(wide))
        scaled = (wide / scale).flatten()
        error = (value_piece.double() / scale).flatten().sub_(scaled)
        pairs = (error, error), (error, scaled), (scaled, scaled)
        sums = torch.stack([torch.dot(left, right) for left, right in pairs]).tolist()
        squares, shared, sizes = squares + sums[0], shared + sums[1], sizes + sums[2]
    if not (math.isfinite(squares) and math.isfinite(sizes)):
        return None
    return WholeError(math.sqrt(squares / truth.numel()), shared / sizes if sizes else 0.0)


def whole_jumps(jumps: Jumps, truth: Tensor) -> WholeError:
    """How far decisions can move both figures, if all of them fall one way."""
    size = truth.abs().double()
    scale = nonzero(populations(real_view(truth)).scale(size))
    scaled = size / scale
    sizes = jumps.size.to(truth.device).double() / scale
    factor = ratio_to(float((sizes * scaled).sum()), float(scaled.square().sum()))
    return WholeError(rms(sizes), factor)


@dataclasses.dataclass(frozen=True)
class WholeNoise:
    """What is known about the whole errors of right programs.

    Attributes:
        own: the reference's error.
        rounding: unit roundoff of the coarsest dtype, and that around zero, as a share of the
            typical value.
        numel: the number of elements.
        least: a size of the error that is known without a run.
        runs: the errors of perturbed runs.
        jumps: how far decisions within rounding can move both figures.
        cuts: whether kernels may cut digits off: those of accelerators.
        slack: multiplies the limits.
    """

    own: WholeError
    rounding: float
    numel: int
    least: float = 0.0
    runs: tuple[WholeError, ...] = ()
    jumps: WholeError = WholeError(0.0, 0.0)
    cuts: bool = False
    slack: float = 1.0

    def excess(self, candidate_error: WholeError, *, last: bool) -> WholeError:
        """Both figures of a candidate as multiples of their limits.

        Before the last run, only what passes for certain is within them.
        """
        most_size = math.hypot(self._most_size(last=last), RMS_Z * self.jumps.size)
        most_factor = math.hypot(self._most_factor(last=last), RMS_Z * self.jumps.factor)
        return WholeError(
            ratio_to(candidate_error.size, self.slack * most_size),
            ratio_to(abs(candidate_error.factor), self.slack * most_factor),
        )

    def _usual(self) -> float:
        """The size of a right program's error."""
        return max(self.own.size, self.least, _root_mean_square([run.size for run in self.runs]))

    @property
    def _cut_off(self) -> float:
        return CUT_OFF if self.cuts else 0.0

    def _most_size(self, *, last: bool) -> float:
        independent = self._independent() if last else self.numel
        most = WHOLE_SIZE * self._usual() * (1 + 2 / math.sqrt(independent))
        return most + ROUNDED_RESULTS * self.rounding + self._cut_off

    def _independent(self) -> float:
        """How many errors are independent: as many as make the runs' mean squares vary so much.

        This is half of what the runs show, because few runs may be alike by chance.
        """
        squares = [run.size**2 for run in self.runs]
        mean = sum(squares) / max(1, len(squares))
        if len(squares) < 2 or not mean:  # noqa: PLR2004
            return 1.0
        varies = sum((square / mean - 1) ** 2 for square in squares) / (len(squares) - 1)
        return min(self.numel, max(1.0, 1 / varies)) if varies else self.numel

    def _most_factor(self, *, last: bool) -> float:
        spread = _root_mean_square([run.factor for run in self.runs])
        if self.runs and not last:
            spread /= most_shown(len(self.runs), ERROR_RATE)
        most = SHARED_FACTOR * max(spread, abs(self.own.factor) / 2)
        most = max(most, OWN_RMS * self._usual())
        return most + ROUNDED_CONSTANTS * self.rounding + self._cut_off

    def reason(self, candidate_error: WholeError, excess: WholeError) -> str:
        """Why a value fails that passes element by element."""
        allowed = f"times what {len(self.runs)} perturbed runs of the reference allow"
        if excess.factor > 1:
            factor = f"{candidate_error.factor:+.2g}: {excess.factor:.3g}"
            return f"all of it is off by one factor, {factor} {allowed}"
        return f"its error as a whole is {excess.size:.3g} {allowed}"


def _root_mean_square(numbers: list[float]) -> float:
    return math.hypot(*numbers) / math.sqrt(len(numbers)) if numbers else 0.0
